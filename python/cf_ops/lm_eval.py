"""``python -m cf_ops.lm_eval ARGUMENTS``: lm-evaluation-harness with the models ``cf_ops`` and ``cf_ops_native`` among
its own. Everything else is theirs.

``cf_ops_native`` is `cf_ops.Model`, without torch and transformers. Beginnings that requests share are read once, and
no logits are kept::

    python -m cf_ops.lm_eval run --model cf_ops_native --model_args pretrained=DIR --tasks lambada_openai

``cf_ops`` takes what ``hf`` takes, and runs Hugging Face's model with `cf_ops.hf.speed_up`: for peft, other tokenizers,
and whatever else only transformers has. What ran on cf_ops, and what did not and why, is printed on stderr at the end.
From Python, ``HFLM(pretrained=cf_ops.hf.speed_up(model))`` does the same.

`task` makes a metric of `cf_ops.sweep` of a task or a group of tasks.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import cf_ops.hf
from cf_ops import _score
from cf_ops._arguments import integer
from cf_ops._chat import ChatTemplate
from cf_ops._device import cuda_available, cuda_index
from cf_ops._text import TextStream
from cf_ops.model import Model, load

__all__ = ["main", "register", "register_native", "task"]

_LOGGER = logging.getLogger("cf_ops")
_AT_ONCE = 64  # requests between two updates of the progress and of lm_eval's cache
_SLOTS = 16  # texts at once with batch_size=auto
_MOST = 2**31 - 1
_GPU_LENGTH = 2048  # ids of a context on a GPU where max_length is left out


def register() -> Any:
    """Adds the model ``cf_ops`` to lm-evaluation-harness and returns its class, a subclass of ``HFLM``.

    Raises ImportError where lm_eval (0.4 or newer), torch or transformers is missing.
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


@functools.cache
def register_native() -> Any:
    """Adds the model ``cf_ops_native`` to lm-evaluation-harness and returns its class, a subclass of ``TemplateLM``.

    Raises ImportError where lm_eval (0.4.9 or newer) is missing.
    """
    try:
        from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found, unused-ignore]
        from lm_eval.api.registry import register_model  # type: ignore[import-not-found, unused-ignore]
        from lm_eval.models import utils as models_utils  # type: ignore[import-not-found, unused-ignore]
        from lm_eval.utils import (  # type: ignore[import-not-found, unused-ignore]
            get_rolling_token_windows,
            make_disjoint_window,
        )
        from tqdm import tqdm  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError(f"cf_ops.lm_eval needs lm-evaluation-harness ({error}): pip install lm-eval") from error

    class CfOpsNativeLM(TemplateLM):  # type: ignore[misc, unused-ignore]
        """`cf_ops.Model` for lm-evaluation-harness.

        pretrained: what `cf_ops.load` takes, or an open `cf_ops.Model`, which stays open. device: a GPU's name; the CPU
        where it is None or there is no GPU. batch_size: texts at once, "auto" for 16; where it is None 1, of an open
        model what it takes. Scores do not depend on it, on a GPU but for rounding. max_length: ids that the model reads
        of a request at most; where it is None the model's positions, on a GPU no more than 2048, of an open model no
        more than its capacity. add_bos_token: whether the tokenizer adds its special tokens; where it is None as its
        tokenizer.json says. prefix_token_id: the id before a text that has none before it; where it is None the
        tokenizer's bos, or else its eos. Further arguments are those of `cf_ops.load`; of an open model there are none.
        """

        backend = "causal"

        def __init__(
            self,
            pretrained: str | Model,
            device: str | None = None,
            batch_size: int | str | None = None,
            max_batch_size: int | None = None,
            max_length: int | None = None,
            max_gen_toks: int = 256,
            add_bos_token: bool | None = None,
            prefix_token_id: int | None = None,
            **options: Any,
        ) -> None:
            super().__init__()
            is_auto = str(batch_size).startswith("auto")
            self.slots = (
                _SLOTS if is_auto else integer("batch_size", 1 if batch_size is None else int(batch_size), 1, _MOST)
            )
            given = None if max_length is None else integer("max_length", max_length, 2, _MOST)
            self.model = self._opened(pretrained, device, given, options)
            if isinstance(pretrained, Model) and batch_size is None:
                self.slots = self.model.slots_for(_SLOTS)
            config = self.model.config
            most = config["n_positions" if "n_positions" in config else "max_position_embeddings"]
            self._max_length: int = min(given or most, most, self.model.capacity or most)
            self._max_gen_toks: int = integer("max_gen_toks", max_gen_toks, 1, _MOST)
            self.add_bos_token = add_bos_token
            ids = _special_ids(self.model)
            self._eos = ids.get("eos_token", next(iter(self.model.eos_token_ids), None))
            self._prefix = ids.get("bos_token", self._eos) if prefix_token_id is None else prefix_token_id
            if self._eos is None or self._prefix is None:
                raise ValueError(
                    f"{self.model.directory}: expected an eos_token in tokenizer_config.json or an eos_token_id, "
                    "got neither"
                )

        def _opened(
            self, pretrained: str | Model, device: str | None, length: int | None, options: dict[str, Any]
        ) -> Model:
            if isinstance(pretrained, Model):
                if options or device is not None:
                    first = next(iter(options), "device")
                    raise ValueError(f"pretrained: expected no {first} beside an open model, which has its own")
                return pretrained
            on_gpu = cuda_index(device or "cpu") is not None
            if on_gpu and not cuda_available():  # lm_eval asks for cuda:0 where no one says
                _LOGGER.warning("cf_ops: no GPU that it runs on, the CPU in place of %s", device)
                on_gpu = False
            if on_gpu:
                options = options | {"slots": self.slots, "capacity": length or _GPU_LENGTH}
            return load(pretrained, device=device if on_gpu else "cpu", **options)

        @property
        def eot_token_id(self) -> int:
            return int(self._eos)  # type: ignore[arg-type]

        @property
        def prefix_token_id(self) -> int:
            return int(self._prefix)  # type: ignore[arg-type]

        @property
        def max_length(self) -> int:
            return self._max_length

        @property
        def max_gen_toks(self) -> int:
            return self._max_gen_toks

        @property
        def tokenizer_name(self) -> str:
            return self.model.directory.replace("/", "__")

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            if not add_generation_prompt:
                raise ValueError("gen_prefix: expected none with a chat template, whose answers begin anew")
            return ChatTemplate.open(self.model.directory).render(chat_history, True, {})

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            tokenizer = self.model.tokenizer
            adds = self.add_bos_token if add_special_tokens is None else add_special_tokens
            prefix = tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            if add_special_tokens is None and models_utils.has_bos_prefix(string, prefix):
                adds = False
            ids: list[int] = tokenizer.encode(string, add_special_tokens=True if adds is None else adds).ids
            return ids

        def _loglikelihood_tokens(
            self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any
        ) -> list[tuple[float, bool]]:
            answers: list[tuple[float, bool]] = []
            with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as progress:
                for begin in range(0, len(requests), _AT_ONCE):
                    some = requests[begin : begin + _AT_ONCE]
                    for (strings, _, _), answer in zip(some, self._score(some)):
                        answers.append(answer)
                        if strings is not None:
                            self.cache_hook.add_partial("loglikelihood", strings, answer)
                        progress.update(1)
            return answers

        def _score(self, requests: list[Any]) -> list[tuple[float, bool]]:
            prompts, firsts = [], []
            for _, context, continuation in requests:
                if not 0 < len(continuation) <= self.max_length:
                    raise ValueError(f"continuation: expected 1 to {self.max_length} ids, got {len(continuation)}")
                prompt = (context + continuation)[-(self.max_length + 1) :]
                prompts.append(prompt)
                firsts.append(len(prompt) - len(continuation))
            scores = _score.score(self.model, prompts, firsts, top=0, slots=None, quiet=True)
            for scored in scores:
                if scored.error is not None:
                    raise cf_ops.CfError(scored.error)
            return [(scored.sum, scored.is_greedy) for scored in scores]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            sums = []
            for (string,) in tqdm([request.args for request in requests], disable=disable_tqdm):
                windows = get_rolling_token_windows(
                    token_list=self.tok_encode(string),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
                parts = [(None, *make_disjoint_window(window)) for window in windows]
                total = sum(answer[0] for answer in self._loglikelihood_tokens(parts, disable_tqdm=True))
                sums.append(total)
                self.cache_hook.add_partial("loglikelihood_rolling", (string,), total)
            return sums

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            answers = [""] * len(requests)
            by_settings: dict[str, list[int]] = {}
            for index, request in enumerate(requests):
                by_settings.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
            with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as progress:
                for indices in by_settings.values():
                    settings = requests[indices[0]].args[1]
                    for place, text in self._generate([requests[i].args[0] for i in indices], settings):
                        index = indices[place]
                        answers[index] = text
                        self.cache_hook.add_partial("generate_until", (requests[index].args[0], settings), text)
                        progress.update(1)
            return answers

        def _generate(self, contexts: list[str], settings: dict[str, Any]) -> Any:
            """Yields (place, answer) of each context as it ends. Settings are lm_eval's generation_kwargs."""
            sampling = models_utils.normalize_gen_kwargs(settings, self.max_gen_toks)
            tokenizer = self.model.tokenizer
            eos = tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
            until = [s for s in models_utils.handle_stop_sequences(sampling.pop("until", None), eos=eos) if s]
            new = sampling.pop("max_gen_toks")
            if new >= self.max_length:
                raise ValueError(f"max_gen_toks: expected at most {self.max_length - 1}, below max_length, got {new}")
            if not sampling.pop("do_sample", False):
                sampling = {"repetition_penalty": sampling.get("repetition_penalty", 1.0)} | {
                    name: value for name, value in sampling.items() if name not in _OF_SAMPLING
                }
            unknown = sorted(set(sampling) - {*_OF_SAMPLING, "repetition_penalty", "seed"})
            if unknown:
                raise ValueError(f"generation_kwargs: expected settings of cf_ops, got {unknown[0]!r}")
            prompts = [
                (self.tok_encode(context) or [self.prefix_token_id])[-(self.max_length - new) :] for context in contexts
            ]
            slots = min(self.slots, len(prompts))
            decoder = self.model.decoder(slots, max(map(len, prompts)) + new - 1)
            try:
                running: dict[int, tuple[int, TextStream]] = {}  # by the decoder's number of a sequence
                texts = [""] * len(prompts)
                for place, prompt in enumerate(prompts):
                    added = decoder.add(prompt, id=place, stop=[self.eot_token_id], max_new_tokens=new, **sampling)
                    running[added] = place, TextStream(tokenizer, until)
                while running:
                    for sequence, id in decoder.decode(1):
                        place, stream = running[sequence]
                        texts[place] += stream.put(id)
                        if stream.stopped and decoder.finish(sequence) == "running":
                            decoder.drop(sequence)
                            yield running.pop(sequence)[0], texts[place]
                    for sequence in decoder.ended():
                        place, stream = running.pop(sequence)
                        if (error := decoder.status(sequence)) is not None:
                            raise cf_ops.CfError(error)
                        decoder.drop(sequence)
                        yield place, texts[place] + stream.finish()
            finally:
                decoder.close()

    return register_model("cf_ops_native")(CfOpsNativeLM)


def task(name: str, **options: Any) -> Callable[[Model], dict[str, float]]:
    """A metric of `cf_ops.sweep`: a task of lm-evaluation-harness, or a group of tasks, on the model that it is given::

        cf_ops.sweep(revisions, {"blimp": cf_ops.lm_eval.task("blimp", limit=100)})

    The metric's results are named as lm_eval names them, without the filter "none": "acc", with its standard error as
    "acc.error"; those of a group's tasks have the task's name before them: "blimp_adjunct_island.acc". options: those of
    ``lm_eval.simple_evaluate`` such as limit, num_fewshot and task_manager. Raises ImportError where lm_eval is missing,
    ValueError where it knows no such task.
    """
    native = register_native()
    from lm_eval import simple_evaluate  # type: ignore[import-not-found, unused-ignore]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, unused-ignore]

    manager = options.pop("task_manager", None) or TaskManager()
    if name not in manager.all_tasks:
        raise ValueError(f"task: expected a task or a group of lm_eval (lm_eval ls tasks), got {name!r}")

    def measure(model: Model) -> dict[str, float]:
        found = simple_evaluate(native(model), tasks=[name], task_manager=manager, **options)["results"]
        return {
            (key if of == name else f"{of}.{key}"): value
            for of, results in found.items()
            for key, value in _numbers(results).items()
        }

    return measure


def _numbers(results: dict[str, Any]) -> dict[str, float]:
    """The numbers of a task's results. lm_eval's names are "acc,none" and "acc_stderr,none"."""
    numbers = {}
    for key, value in results.items():
        metric, comma, kind = key.partition(",")
        if not comma or isinstance(value, str):  # the task's title; an error that was not estimated
            continue
        made = metric.removesuffix("_stderr") + ("" if kind == "none" else f".{kind}")
        numbers[made + (".error" if metric.endswith("_stderr") else "")] = float(value)
    return numbers


_OF_SAMPLING = {"temperature", "top_k", "top_p", "min_p"}


def _special_ids(model: Model) -> dict[str, int]:
    """The ids of bos_token and eos_token, where tokenizer_config.json names them."""
    try:
        with open(os.path.join(model.directory, "tokenizer_config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except FileNotFoundError:
        return {}
    found = {}
    for name in ("bos_token", "eos_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and (id := model.tokenizer.token_to_id(token)) is not None:
            found[name] = id
    return found


def main() -> int:
    """lm-evaluation-harness's own command line; 1 where it cannot be imported."""
    model_class = None
    try:
        register_native()
        if "cf_ops" in sys.argv[1:]:
            model_class = register()
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    from lm_eval.__main__ import cli_evaluate  # type: ignore[import-not-found, unused-ignore]

    cli_evaluate()
    for model in [] if model_class is None else model_class.made:
        print(cf_ops.hf.report(model), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
