"""What a backend reads of a Hugging Face model, and whether the model is still what was read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
import transformers.pytorch_utils  # type: ignore[import-not-found, unused-ignore]
from torch.nn.modules import module as torch_module  # type: ignore[import-not-found, unused-ignore]

from cf_ops import _core
from cf_ops.hf._families import config_text, gptq_config_text, library_name, library_of, rope_table
from cf_ops.hf._joined import Joined, parts_of
from cf_ops.hf._quantised import is_quantised, quantised_modules, quantised_tensors
from cf_ops.hf._runner import Backend, Source, Stream, Tensor, backend_for, check_device

Module = Any

_STOCK_TYPES = (
    torch.nn.Dropout,
    torch.nn.Embedding,
    torch.nn.LayerNorm,
    torch.nn.Linear,
    torch.nn.ModuleList,
    transformers.pytorch_utils.Conv1D,
    torch.nn.SiLU,  # in transformers before 4.57
)
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


class Loaded:
    """A model as it was at one moment: the backend that reads its weights, or the error why there is none. Where there
    is a backend, the parameters that it reads as one are `joined`."""

    def __init__(self, model: Module, joined: Joined, stream: Stream | None = None) -> None:
        self.error: Exception | None = None
        self.backend: Backend | None = None
        self.device: Any = None  # where the parameters lie; None without a backend
        self.dtype: Any = None
        try:
            self.backend = _backend(model, joined, stream)
            head = model.get_output_embeddings().weight
            self.device, self.dtype = head.device, head.dtype
        except (MemoryError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            self.error = error
            joined.part()
        self._modules = [
            (parent._modules, name, child) for parent in model.modules() for name, child in parent._modules.items()
        ]
        # Tied parameters have two places.
        places = [(holder, name) for m in model.modules() for holder in (m._parameters, m._buffers) for name in holder]
        self._tensors = [
            (holder, name, tensor, tensor.data_ptr(), tensor.dtype)
            for holder, name in places
            if (tensor := holder[name]) is not None
        ]
        self._versions = self._copied_versions()

    def is_current(self) -> bool:
        """Whether the model has the same modules and its parameters lie where they did."""
        for modules, name, child in self._modules:
            if modules.get(name) is not child:
                return False
        for holder, name, tensor, address, dtype in self._tensors:
            if holder.get(name) is not tensor or tensor.data_ptr() != address or tensor.dtype is not dtype:
                return False
        return self._versions == self._copied_versions()

    def obstacle(self) -> str | None:
        """Why the modules cannot be bypassed now: a hook, training, a forward of the caller's."""
        for name in _GLOBAL_HOOKS:
            if getattr(torch_module, name):
                return "a global hook"
        for _, _, child in self._modules:
            if child is None:
                continue
            if child.training:
                return "training"
            if child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
                return "a hook on a module"
            if child._forward_hooks and not all(map(_is_idle, child._forward_hooks.values())):
                return "a hook on a module"
            if "forward" in child.__dict__ and not _is_own_forward(child):
                return "a module's forward was replaced"
        return None

    def as_theirs(self, logits: Tensor) -> Tensor:
        """A runner's logits as Hugging Face returns them."""
        return logits.to(device=self.device, dtype=self.dtype)

    def is_trainable(self) -> bool:
        return any(tensor.requires_grad for _, _, tensor, _, _ in self._tensors)

    def value_versions(self) -> tuple[int, ...]:
        """Torch's counters of changes in place. Tensors of inference mode have none."""
        return tuple(0 if t.is_inference() else t._version for _, _, t, _, _ in self._tensors)

    def _copied_versions(self) -> tuple[int, ...]:
        """The counters of the tensors that must be read again after a change in place."""
        return self.value_versions() if self.backend is not None and self.backend.is_checked_again else ()


def _backend(model: Module, joined: Joined, stream: Stream | None) -> Backend:
    for name, module in model.named_modules():
        if name and not _is_stock(module, model) and not is_quantised(module):
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            raise NotImplementedError(f"module '{name}': expected one that transformers builds, got {kind}")
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in _ATTENTION:
        raise NotImplementedError(f"attention: expected an implementation of transformers, got '{attention}'")
    gptq = gptq_config_text(model)
    _check_parameters(model)
    config = config_text(model)
    _core.check_config(config)
    device = model.get_output_embeddings().weight.device
    check_device(device)
    # These aliases keep the memory alive: if a caller sets a parameter's data to another tensor, a runner may still be
    # reading the old memory.
    tensors = joined.join(model)
    parts = parts_of(model)
    for name, tensor in (*_dense_tensors(model), *quantised_tensors(model)):
        if id(tensor) not in parts:
            tensors[library_name(name, model)] = tensor.detach()

    def table(positions: int) -> tuple[Tensor, Tensor]:
        return rope_table(model, positions)

    return backend_for(device, Source(config, tensors, table, joined.copied_bytes, gptq, stream))


def _is_idle(hook: Any) -> bool:
    """Whether a hook is one that transformers (5.2 and newer) leaves on the layers once a call has asked for hidden
    states. It does nothing but while such a call runs."""
    return str(getattr(hook, "__module__", "")) == "transformers.utils.output_capturing"


def _is_own_forward(module: Module) -> bool:
    """Whether the forward in a module's own dictionary is its class's. transformers 4.5x leaves it there where it has
    undone a replacement of forward."""
    forward = module.__dict__["forward"]
    return bool(forward == type(module).forward.__get__(module))


def _is_stock(module: Module, model: Module) -> bool:
    return type(module) in _STOCK_TYPES or type(module).__module__ in (library_of(model), "transformers.activations")


def _dense_tensors(model: Module, is_each_place: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The parameters, and the biases of quantised Linears, which are buffers. What has several places comes once, or
    for each place."""
    yield from model.named_parameters(remove_duplicate=not is_each_place)
    for name, module in quantised_modules(model):
        if module._buffers.get("bias") is not None:
            yield f"{name}.bias", module._buffers["bias"]


def _check_parameters(model: Module) -> None:
    """Refuses parameters that are not plain tensors of one device, or that modules share. Those that will be joined may
    lie as they do."""
    head, parts = model.get_output_embeddings().weight, parts_of(model)
    device, names = head.device, dict[int, str]()
    for name, parameter in _dense_tensors(model, is_each_place=True):
        first = names.setdefault(id(parameter), name)
        if first != name and parameter is not head:
            raise NotImplementedError(f"parameter '{name}': expected one of its own, got that of '{first}'")
        if type(parameter) not in (torch.nn.Parameter, torch.Tensor):
            raise NotImplementedError(f"parameter '{name}': expected a plain tensor, got {type(parameter).__name__}")
        if parameter.device != device:
            raise NotImplementedError(
                f"parameter '{name}': expected all parameters on one device, got '{parameter.device}' beside '{device}'"
            )
        if parameter.layout is not torch.strided or not (parameter.is_contiguous() or id(parameter) in parts):
            raise ValueError(
                f"parameter '{name}': expected a contiguous tensor, got the shape {tuple(parameter.shape)} with "
                f"strides {parameter.stride() if parameter.layout is torch.strided else parameter.layout}"
            )
