"""Hugging Face's models on the kernels of cf_ops: the same object, the same calls, the same tokens.

::

    model = cf_ops.hf.speed_up(AutoModelForCausalLM.from_pretrained(directory))
    model.generate(**inputs, max_new_tokens=64)
    print(cf_ops.hf.report(model))
    cf_ops.hf.restore(model)

torch and transformers (4.56 or newer) are imported at the first call.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any, TypeVar

from cf_ops._arguments import integer
from cf_ops.hf._report import Report

__all__ = ["Report", "report", "restore", "run", "speed_up"]

Model = TypeVar("Model")


def speed_up(model: Model, *, window: int = 0, sinks: int = 0) -> Model:
    """Lets a loaded model with a head, such as ``GPTNeoXForCausalLM`` or ``GPT2LMHeadModel``, run on cf_ops, and returns
    the same object. The package's page lists the families.

    Prefill and decode steps of ``model(...)`` and ``model.generate(...)`` run on cf_ops: greedy or sampled, one
    sequence or a batch with left padding. Weights are read where torch keeps them, so there is no second copy, and a
    parameter that is changed in place is seen by the next call; what a cache holds was made with the values before.
    Sums are made in float32 whatever the weights' dtype; logits come back in the dtype that Hugging Face returns, on the
    model's device.

    What the library reads as one matrix, q, k and v, and gate and up row by row in turn, becomes one: the parameters
    stay the same objects, as views of it, those of gate and up with strides. So do GPT-2's matrices, which the library
    reads transposed. `restore` gives them memory of their own.
    ``save_pretrained`` writes the same files; other writers of safetensors may ask for contiguous tensors.

    Linears that are quantised by GPTQ, of GPTQModel or AutoGPTQ, run where their kernel leaves the stored tensors as
    they are (QUANT_TYPE torch, triton, tritonv2, cuda, cuda-old). The modules keep their tensors. On a CPU these are
    read in place, but for those that are joined, which have a copy; on a GPU all have a packed form. `report` counts
    the bytes of both.

    On a GPU a call comes after all that torch's current stream has to do, and before all that is put there later: what
    other streams write into a parameter is yours to order. Logits are tensors of the GPU, which no call waits for. A
    parameter that does not begin at a multiple of 256 bytes, such as a slice of a larger tensor, has a copy, which is
    made again after a parameter was changed in place; `report` counts its bytes. One cache of keys and values is
    shared: where several of its users live and its slots do not suffice, they make their entries again from their ids.
    RoPE's table is the library's own; a model whose table differs, such as after ``model.half()``, stays on Hugging
    Face's path.

    The tokens of a greedy or sampled ``generate()`` come from a loop of cf_ops, which transformers calls as
    ``custom_generate``. Greedy ids are chosen by the runner, which a GPU runs ahead of. Where anything else has a part
    in them, such as sampling, a processor, a stopping criterion or an output of each step, torch chooses them from each
    step's logits. With a hook on the model, or a method of its own, transformers' loop calls ``forward`` step by step.
    `report` has the reasons; the ids are the same. So they are with ``prompt_lookup_num_tokens``: on a CPU a step verifies
    up to 7 ids of a draft, and where that is not exact, as on a GPU, ids come one by one. ``stop_strings`` with a ``tokenizer`` are a stopping criterion.
    ``generate_batch()`` is answered by ``generate()``, with eight prompts at a time.

    A call that cf_ops cannot do exactly runs on Hugging Face's own path: beams, assistants, static caches, attentions.
    The logger ``cf_ops.hf`` names each reason once, with what helps, and `report` counts the calls of each. It also
    says once where transformers is newer than the newest that was tested.

    A cache has room for the sequences that a call brings, and for the tokens that ``generate()`` may add (at most 1024
    at first). It is made again, twice as large, when that room ends. Its memory is freed with the cache object.

    With a `window` each sequence is a stream without end (StreamingLLM): a token sees the newest `window` tokens, its own
    among them, and the first `sinks` ones; positions are those inside the cache, so that neither a cache's memory nor the
    time of a token grows, however long ``generate()`` goes on. Hugging Face's path has no such cache: what cf_ops cannot
    do raises NotImplementedError with the reason then. The options of :func:`cf_ops.load` have the source.

    Raises
    ------
    ImportError: torch or transformers is missing, or transformers is older than 4.56.
    TypeError: the model is of another class.
    ValueError: a parameter is not contiguous, not finite, or of another shape or dtype than the model's config says;
        the config asks for what the library does not build, such as a window of keys shorter than the context.
    NotImplementedError: a module is not the one that transformers builds (LoRA, other quantisations), or the parameters
        are on a device for which this installation has no runner.
    CfError: the parameters are on a GPU that this build has no kernels for.
    """
    implementation = _implementation()
    window = integer("window", window, 0, 2**31 - 1)
    sinks = integer("sinks", sinks, 0, 2**31 - 1)
    if sinks and not window:
        raise ValueError(f"sinks: expected them beside a window, got {sinks}")
    implementation.speed_up(model, implementation.Stream(window, sinks) if window else None)
    return model


def restore(model: Model) -> Model:
    """Gives a model its own methods back and frees all memory of cf_ops, that of living caches included.

    Caches that cf_ops returned cannot be continued afterwards. Raises ValueError for a model without `speed_up`.
    """
    _implementation().restore(model)
    return model


def report(model: object) -> Report:
    """How many calls of a model ran on cf_ops and how many on Hugging Face's path, and why.

    Raises ValueError for a model without `speed_up`.
    """
    result: Report = _implementation().report(model)
    return result


def run(model: object, ids: Any, taps: Iterable[str] = ()) -> tuple[Any, dict[str, Any]]:
    """Logits and hidden states of all positions, for logit lenses and probes.

    Parameters
    ----------
    model: a model that `speed_up` took.
    ids: token ids (tokens), or (batch, tokens) without padding: a list, an array or a tensor.
    taps: what to return besides, by the names of golden files: ``"layers.3.output"`` is the hidden state behind layer
        3, ``"layers.3.input_layernorm"`` what its attention reads. An unknown name raises a ValueError that lists all.

    Returns
    -------
    logits: (tokens, vocab) or (batch, tokens, vocab), float32.
    taps: by name, (tokens, ...) or (batch, tokens, ...), float32.

    Raises
    ------
    ValueError: the model has no `speed_up`, a tap is unknown, or ids are empty or outside the vocabulary.
    NotImplementedError: the model was changed since into one that cf_ops does not run.
    """
    result: tuple[Any, dict[str, Any]] = _implementation().run(model, ids, list(taps))
    return result


def is_new_enough(version: str) -> bool:
    """Whether a version of transformers has what cf_ops.hf needs: a generate() that takes a function as its loop."""
    return tuple(map(int, version.split(".")[:2])) >= (4, 56)


def _implementation() -> ModuleType:
    try:
        import torch  # type: ignore[import-not-found, unused-ignore] # noqa: F401
        import transformers  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError(
            f"cf_ops.hf needs torch and transformers ({error}): pip install torch transformers"
        ) from error
    if not is_new_enough(transformers.__version__):
        raise ImportError(
            f"cf_ops.hf needs transformers 4.56 or newer, got {transformers.__version__}: "
            "pip install --upgrade transformers"
        )
    from cf_ops.hf import _patch as patch

    return patch
