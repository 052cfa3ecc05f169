"""``python -m cf_ops.lm_eval ARGUMENTS``: lm-evaluation-harness with the model ``cf_ops`` among its own.

``--model cf_ops`` takes what ``--model hf`` takes, and runs the model with `cf_ops.hf.speed_up`::

    python -m cf_ops.lm_eval run --model cf_ops --model_args pretrained=DIR --tasks lambada_openai

Everything else is theirs. What ran on cf_ops, and what did not and why, is printed on stderr at the end. From Python,
``HFLM(pretrained=cf_ops.hf.speed_up(model))`` does the same.
"""

from __future__ import annotations

import sys
from typing import Any

import cf_ops.hf

__all__ = ["main", "register"]


def register() -> Any:
    """Adds the model ``cf_ops`` to lm-evaluation-harness and returns its class, a subclass of ``HFLM``.

    Raises ImportError where lm_eval (0.4 or newer) is missing.
    """
    try:
        from lm_eval.api.registry import register_model  # type: ignore[import-not-found, unused-ignore]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError(f"cf_ops.lm_eval needs lm-evaluation-harness ({error}): pip install 'lm-eval[hf]'") from error

    class CfOpsLM(HFLM):  # type: ignore[misc, unused-ignore]
        """Hugging Face's model with `cf_ops.hf.speed_up`."""

        made: list[Any] = []  # the models, for their reports

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.made.append(cf_ops.hf.speed_up(self.model))

    return register_model("cf_ops")(CfOpsLM)


def main() -> int:
    """lm-evaluation-harness's own command line; 1 where it cannot be imported."""
    try:
        model_class = register()
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-not-found, unused-ignore]

    cli_evaluate()
    for model in model_class.made:
        print(cf_ops.hf.report(model), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
