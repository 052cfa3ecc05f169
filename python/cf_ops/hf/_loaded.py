"""What a backend reads of a Hugging Face model, and whether the model is still what was read."""

from __future__ import annotations

import json
import math
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from torch.nn.modules import module as torch_module  # type: ignore[import-not-found, unused-ignore]
from transformers.activations import ACT2FN  # type: ignore[import-not-found, unused-ignore]

from cf_ops.hf._runner import Backend, Described, Tensor, backend_for

Module = Any

_STOCK_TYPES = (
    torch.nn.Dropout,
    torch.nn.Embedding,
    torch.nn.LayerNorm,
    torch.nn.Linear,
    torch.nn.ModuleList,
)
_STOCK_LIBRARIES = ("transformers.models.gpt_neox.modeling_gpt_neox", "transformers.activations")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


class Loaded:
    """A model as it was at one moment: the backend that reads its weights, or the error why there is none."""

    def __init__(self, model: Module) -> None:
        self.error: Exception | None = None
        self.backend: Backend | None = None
        self.device: Any = None  # of the parameters, where there is a backend
        self.dtype: Any = None
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
        try:
            self.backend = _backend(model)
            head = model.get_output_embeddings().weight
            self.device, self.dtype = head.device, head.dtype
        except (MemoryError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            self.error = error
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

    def is_trainable(self) -> bool:
        return any(tensor.requires_grad for _, _, tensor, _, _ in self._tensors)

    def value_versions(self) -> tuple[int, ...]:
        """Torch's counters of changes in place. Tensors of inference mode have none."""
        return tuple(0 if t.is_inference() else t._version for _, _, t, _, _ in self._tensors)

    def _copied_versions(self) -> tuple[int, ...]:
        """The counters where runners read a copy, which a change does not reach."""
        return () if self.backend is None or self.backend.copied_bytes == 0 else self.value_versions()


def _backend(model: Module) -> Backend:
    for name, module in model.named_modules():
        if name and not _is_stock(module):
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            raise NotImplementedError(f"module '{name}': expected one that transformers builds, got {kind}")
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in _ATTENTION:
        raise NotImplementedError(f"attention: expected an implementation of transformers, got '{attention}'")
    tensors = _tensors(model)
    config = _config(model)
    rotary_dim = 2 * _inverse_frequencies(model).numel()

    def rope_table(positions: int) -> tuple[Tensor, Tensor]:
        return _rope_table(model, positions, rotary_dim)

    device = model.get_output_embeddings().weight.device
    # Aliases: a parameter whose data is set to another tensor would free the memory that a runner may be reading.
    owner = [parameter.detach() for parameter in model.parameters()]
    return backend_for(device, config, tensors, owner, rope_table)


def _is_idle(hook: Any) -> bool:
    """Whether a hook is one that transformers (5.2 and newer) leaves on the layers once a call has asked for hidden
    states. It does nothing but while such a call runs."""
    return str(getattr(hook, "__module__", "")) == "transformers.utils.output_capturing"


def _is_own_forward(module: Module) -> bool:
    """Whether the forward in a module's own dictionary is its class's: transformers 4.5x puts it back that way."""
    forward = module.__dict__["forward"]
    return bool(forward == type(module).forward.__get__(module))


def _is_stock(module: Module) -> bool:
    return type(module) in _STOCK_TYPES or type(module).__module__ in _STOCK_LIBRARIES


def _tensors(model: Module) -> dict[str, Described]:
    """The parameters by the names of transformers 4.x. Tied embeddings are one tensor."""
    described: dict[str, Described] = {}
    for name, parameter in model.named_parameters():
        if type(parameter) not in (torch.nn.Parameter, torch.Tensor):
            raise NotImplementedError(f"parameter '{name}': expected a plain tensor, got {type(parameter).__name__}")
        if parameter.device != model.get_output_embeddings().weight.device:
            raise NotImplementedError(
                f"parameter '{name}': expected all parameters on one device, got '{parameter.device}' "
                f"beside '{model.get_output_embeddings().weight.device}'"
            )
        if parameter.layout is not torch.strided or not parameter.is_contiguous():
            raise ValueError(
                f"parameter '{name}': expected a contiguous tensor, got the shape {tuple(parameter.shape)} with "
                f"strides {parameter.stride() if parameter.layout is torch.strided else parameter.layout}"
            )
        address = parameter.data_ptr() if parameter.device.type != "meta" else 0
        known = name.replace("lm_head.", "embed_out.") if name.startswith("lm_head.") else name
        described[known] = (address, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape))
    return described


def _config(model: Module) -> str:
    """config.json's text, of what the modules hold: it says what the model computes even where its config was changed
    after loading."""
    config, neox = model.config, model.gpt_neox
    if type(neox.layers[0].mlp.act) is not type(ACT2FN[config.hidden_act]):
        raise NotImplementedError(
            f"mlp.act: expected the config's '{config.hidden_act}', got {type(neox.layers[0].mlp.act).__name__}"
        )
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    head_dim = config.hidden_size // config.num_attention_heads
    rotary_dim = 2 * _inverse_frequencies(model).numel()
    # Readers round head_dim * rotary_pct down.
    rotary_pct = rotary_dim / head_dim
    if int(head_dim * rotary_pct) < rotary_dim:
        rotary_pct = math.nextafter(rotary_pct, 2.0)
    embeddings = model.get_output_embeddings().weight
    text: dict[str, Any] = {
        "model_type": "gpt_neox",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": len(neox.layers),
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": neox.layers[0].mlp.dense_h_to_4h.out_features,
        "vocab_size": neox.embed_in.num_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "rotary_pct": rotary_pct,
        "layer_norm_eps": _same("LayerNorm.eps", {m.eps for m in norms}),
        "use_parallel_residual": _same("use_parallel_residual", {m.use_parallel_residual for m in neox.layers}),
        "attention_bias": neox.layers[0].attention.query_key_value.bias is not None,
        "hidden_act": config.hidden_act,
        "rotary_emb_base": _rope_theta(config),
        "tie_word_embeddings": embeddings is neox.embed_in.weight,
        "torch_dtype": str(embeddings.dtype).removeprefix("torch."),
    }
    return json.dumps(text)


def _rope_theta(config: Any) -> float:
    """The base of RoPE's frequencies by the config; transformers has named it in three ways."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for theta in (parameters.get("rope_theta"), getattr(config, "rope_theta", None)):
        if theta is not None:
            return float(theta)
    return float(getattr(config, "rotary_emb_base", 10000))


def _same(name: str, values: set[Any]) -> Any:
    if len(values) != 1:
        raise NotImplementedError(f"{name}: expected one value in all layers, got {sorted(values)}")
    return values.pop()


def _rotary(model: Module) -> Module:
    """The module that makes angles: the model's own, and before transformers 4.45 each layer's."""
    rotary = getattr(model.gpt_neox, "rotary_emb", None)
    rotary = model.gpt_neox.layers[0].attention.rotary_emb if rotary is None else rotary
    if type(rotary).__name__ != "GPTNeoXRotaryEmbedding":
        raise NotImplementedError(f"rotary_emb: expected GPTNeoXRotaryEmbedding, got {type(rotary).__name__}")
    if getattr(rotary, "rope_type", "default") != "default" or getattr(rotary, "attention_scaling", 1.0) != 1.0:
        raise NotImplementedError(f"rotary_emb: expected the default rope_type, got '{rotary.rope_type}'")
    return rotary


def _inverse_frequencies(model: Module) -> Tensor:
    return _rotary(model).inv_freq


def _rope_table(model: Module, positions: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """The model's own table in float32, so that rounded frequencies (``model.half()`` rounds them) stay as they are."""
    rotary = _rotary(model)
    cached = getattr(rotary, "cos_cached", None)
    if cached is not None and cached.shape[0] >= positions:
        halves = [t[:positions, : rotary_dim // 2] for t in (rotary.cos_cached, rotary.sin_cached)]
    else:
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * rotary.inv_freq.detach().cpu().float()
        halves = [angles.cos(), angles.sin()]
    cos, sin = (half.detach().cpu().float().contiguous() for half in halves)
    return cos, sin
