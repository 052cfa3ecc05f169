"""GPTQ's Linears, as AutoGPTQ and GPTQModel put them into a model: told by what they hold, not by their packages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]

from cf_ops._gptq import GPTQ_PARTS

Module = Any

# Kernels, by their class's QUANT_TYPE, that leave the stored tensors as they are. Others, such as exllama, exllamav2 and
# marlin, repack them in place.
_KEEPING = ("cuda", "cuda-old", "torch", "triton", "tritonv2")
_WORD_BITS = 32


def is_quantised(module: Module) -> bool:
    """Whether a module is a quantised Linear of any kernel."""
    return hasattr(module, "QUANT_TYPE") or "qweight" in module._buffers or "qweight" in module._parameters


def quantised_modules(model: Module) -> Iterator[tuple[str, Module]]:
    return ((name, module) for name, module in model.named_modules() if is_quantised(module))


def quantised_tensors(model: Module) -> Iterator[tuple[str, Any]]:
    """The tensors that a model's quantised Linears are made of, beside their biases."""
    for name, module in quantised_modules(model):
        yield from ((f"{name}.{part}", getattr(module, part)) for part in GPTQ_PARTS)


def gptq_text(model: Module, layers: str, count: int) -> str | None:
    """quantize_config.json's text, of what the modules hold; None for a model without quantised ones. `layers` is what
    the names of its layers begin with. Refuses what the library cannot read, or cannot tell."""
    found = dict(quantised_modules(model))
    if not found:
        return None
    for name, module in found.items():
        _check(name, module)
    inside: dict[int, list[str]] = {index: [] for index in range(count)}
    for name in found:
        index, _, below = name.removeprefix(layers).partition(".")
        if not name.startswith(layers) or not below:
            raise NotImplementedError(f"module '{name}': expected quantised Linears in the layers alone")
        inside[int(index)].append(below)
    for layer, names in inside.items():
        if names != inside[0]:
            raise NotImplementedError(
                f"modules: expected the same quantised Linears in all layers, got {names} in layer {layer} "
                f"beside {inside[0]} in layer 0"
            )
    text: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": _same("bits", {name: module.bits for name, module in found.items()}),
        "group_size": _group_size(found),
        "checkpoint_format": _same("zeros", {name: _zeros(name, module) for name, module in found.items()}),
        # g_idx says the order, and the modules how zeros are stored, whatever a config says.
        "desc_act": True,
        "sym": False,
        "modules_in_block_to_quantize": inside[0],
    }
    return json.dumps(text)


def _check(name: str, module: Module) -> None:
    kernel = getattr(module, "QUANT_TYPE", None)
    if kernel not in _KEEPING:
        raise NotImplementedError(
            f"module '{name}': expected a GPTQ kernel that leaves its weights as they are stored, with QUANT_TYPE "
            f"{', '.join(_KEEPING)}, got {'none' if kernel is None else repr(kernel)}"
        )
    for what in ("adapter", "online_full_had", "online_partial_had"):  # LoRA, and rotations of the input
        value = getattr(module, what, None)
        if value is not None and value is not False:
            raise NotImplementedError(f"module '{name}': expected no {what}, got {value!r}")
    for part in GPTQ_PARTS:
        tensor = module._buffers.get(part)
        if type(tensor) is not torch.Tensor or not tensor.is_contiguous():
            got = type(tensor).__name__ if type(tensor) is not torch.Tensor else f"strides {tensor.stride()}"
            raise NotImplementedError(f"buffer '{name}.{part}': expected a plain contiguous tensor, got {got}")
    if type(getattr(module, "bits", None)) is not int:
        raise NotImplementedError(f"module '{name}': expected its bits, got {getattr(module, 'bits', None)!r}")


def _zeros(name: str, module: Module) -> str:
    """How a module's qzeros are stored: "gptq" (v1, minus one) or "gptq_v2". GPTQModel converts them when it loads a
    checkpoint and records the format; AutoGPTQ's kernels compute with v1 alone."""
    asked = getattr(module, "qzero_format", None)
    known = asked() if callable(asked) else 1 if type(module).__module__.startswith("auto_gptq.") else None
    if known not in (1, 2):
        raise NotImplementedError(
            f"module '{name}': expected qzero_format() to say 1 or 2, or a class of auto_gptq, whose zeros are of "
            f"format 1, got {known!r} of {type(module).__module__}.{type(module).__qualname__}"
        )
    return "gptq" if known == 1 else "gptq_v2"


def _group_size(found: dict[str, Module]) -> int:
    """The inputs of a group; -1 where each module has one group of all its inputs."""
    inputs = {name: module.qweight.shape[0] * _WORD_BITS // module.bits for name, module in found.items()}
    sizes = {name: int(getattr(module, "group_size", 0) or 0) for name, module in found.items()}
    if all(sizes[name] in (-1, inputs[name]) for name in found):
        return -1
    return int(_same("group_size", sizes))


def _same(what: str, values: dict[str, Any]) -> Any:
    """The one value of all modules."""
    first = next(iter(values))
    for name, value in values.items():
        if value != values[first]:
            raise NotImplementedError(
                f"{what}: expected one value in all modules, got {value} in '{name}' "
                f"beside {values[first]} in '{first}'"
            )
    return values[first]
