"""The models that `speed_up` takes: their classes in transformers, the names of their modules, what they compute."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
import transformers  # type: ignore[import-not-found, unused-ignore]
from transformers.activations import ACT2FN  # type: ignore[import-not-found, unused-ignore]

from cf_ops.hf._quantised import gptq_text, is_quantised
from cf_ops.hf._runner import Tensor

Module = Any


@dataclass(frozen=True)
class Join:
    """Linears of a layer that the library reads as one: one below the other, or row by row in turn."""

    whole: str  # the library's name, which has no module
    parts: tuple[str, ...]
    interleaved: bool = False


@dataclass(frozen=True)
class Family:
    """The names of a family's modules."""

    base: str  # the model's attribute that has the layers, the embedding and the final norm
    embedding: str
    attention: str
    projection: str  # below the attention: its Linear whose bias says whether the model has biases there
    act: str
    mlp: str  # the Linear that has intermediate_size rows
    eps: str  # of a norm
    joins: tuple[Join, ...] = ()


_GPT_NEOX = Family(
    base="gpt_neox",
    embedding="embed_in",
    attention="attention",
    projection="query_key_value",
    act="mlp.act",
    mlp="mlp.dense_h_to_4h",
    eps="eps",
)
_LLAMA = Family(
    base="model",
    embedding="embed_tokens",
    attention="self_attn",
    projection="q_proj",
    act="mlp.act_fn",
    mlp="mlp.gate_proj",
    eps="variance_epsilon",
    joins=(
        Join("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        Join("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), interleaved=True),
    ),
)
FAMILIES: dict[Any, Family] = {  # by the class of transformers
    transformers.GPTNeoXForCausalLM: _GPT_NEOX,
    transformers.LlamaForCausalLM: _LLAMA,
    transformers.MistralForCausalLM: _LLAMA,
    transformers.Qwen2ForCausalLM: _LLAMA,
}
_HAS_ROPE_PARAMETERS = int(transformers.__version__.partition(".")[0]) >= 5
# What config.json's text has of the modules, by other names of the same fields.
_HELD_BY_MODULES = (
    ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rotary_pct")
    + ("dtype", "torch_dtype", "quantization_config")
)  # fmt: skip


def class_of(kind: type) -> Any:
    """The class of transformers whose forward a model's class has, None where there is none."""
    return next((one for one in FAMILIES if issubclass(kind, one) and getattr(kind, "forward") is one.forward), None)


def family_of(model: Module) -> Family:
    return FAMILIES[class_of(type(model))]


def layers_of(model: Module) -> Any:
    return getattr(model, family_of(model).base).layers


def library_of(model: Module) -> str:
    """The module of transformers that builds a model's modules."""
    return str(class_of(type(model)).__module__)


def library_name(name: str, model: Module) -> str:
    """The library's name of a parameter: that of transformers 4.x."""
    is_renamed = name.startswith("lm_head.") and family_of(model) is _GPT_NEOX
    return name.replace("lm_head.", "embed_out.") if is_renamed else name


def inverse_frequencies(model: Module) -> Tensor:
    return _rotary(model).inv_freq


def rope_table(model: Module, positions: int) -> tuple[Tensor, Tensor]:
    """The model's own table in float32, so that rounded frequencies (``model.half()`` rounds them) stay as they are."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(model).detach().cpu().float()
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    return cos, sin


def config_text(model: Module) -> str:
    """config.json's text, of what the modules hold: it says what the model computes even where its config was changed
    after loading."""
    config, family = model.config, family_of(model)
    base, layer = getattr(model, family.base), layers_of(model)[0]
    act = layer.get_submodule(family.act)
    if type(act) is not type(ACT2FN[config.hidden_act]):
        got = type(act).__name__
        raise NotImplementedError(f"{family.act}: expected the config's '{config.hidden_act}', got {got}")
    norms = {getattr(m, family.eps) for m in model.modules() if hasattr(m, family.eps)}
    eps = _same(f"{type(layer.input_layernorm).__name__}.{family.eps}", norms)
    embedding, head = getattr(base, family.embedding), model.get_output_embeddings().weight
    projection = layer.get_submodule(f"{family.attention}.{family.projection}")
    text: dict[str, Any] = {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": len(base.layers),
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": _out_features(layer.get_submodule(family.mlp)),
        "vocab_size": embedding.num_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": projection.bias is not None,
        "hidden_act": config.hidden_act,
        "tie_word_embeddings": head is embedding.weight,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    rotary_dim, head_dim = 2 * inverse_frequencies(model).numel(), _head_dim(model)
    if family is _GPT_NEOX:
        # Readers round head_dim * rotary_pct down.
        rotary_pct = rotary_dim / head_dim
        if int(head_dim * rotary_pct) < rotary_dim:
            rotary_pct = math.nextafter(rotary_pct, 2.0)
        text |= {
            "rotary_pct": rotary_pct,
            "rotary_emb_base": _rope_theta(config),
            "layer_norm_eps": eps,
            "use_parallel_residual": _same("use_parallel_residual", {m.use_parallel_residual for m in base.layers}),
        }
        return json.dumps(text)
    scale = _same("self_attn.scaling", {m.self_attn.scaling for m in base.layers})
    if scale != head_dim**-0.5:
        raise NotImplementedError(f"self_attn.scaling: expected {head_dim**-0.5}, got {scale}")
    text |= {
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "rms_norm_eps": eps,
        "mlp_bias": layer.get_submodule(family.mlp).bias is not None,
        "rope_theta": _rope_theta(config),
        "rope_scaling": _rope_scaling(model),
        "partial_rotary_factor": rotary_dim / head_dim,
    }
    # The rest of the config says what else a model is asked for, such as a window. The library's reader checks it.
    rest = {name: value for name, value in config.to_dict().items() if name not in _HELD_BY_MODULES}
    return json.dumps({**rest, **text}, default=str)


def gptq_config_text(model: Module) -> str | None:
    """quantize_config.json's text, where Linears are quantised."""
    return gptq_text(model, f"{family_of(model).base}.layers.", len(layers_of(model)))


def _out_features(linear: Module) -> int:
    return int(linear.qweight.shape[1] if is_quantised(linear) else linear.out_features)


def _head_dim(model: Module) -> int:
    config = model.config
    own = getattr(getattr(layers_of(model)[0], family_of(model).attention), "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def _rope_parameters(config: Any) -> dict[str, Any]:
    """What transformers 5 reads of RoPE in a config; before, a field of that name means nothing."""
    return (getattr(config, "rope_parameters", None) or {}) if _HAS_ROPE_PARAMETERS else {}


def _rope_theta(config: Any) -> float:
    """The base of RoPE's frequencies by the config; transformers has named it in three ways."""
    for theta in (_rope_parameters(config).get("rope_theta"), getattr(config, "rope_theta", None)):
        if theta is not None:
            return float(theta)
    return float(getattr(config, "rotary_emb_base", 10000))


def _rope_scaling(model: Module) -> dict[str, Any]:
    """How RoPE's frequencies are scaled, by the name that the module has."""
    kind = getattr(_rotary(model), "rope_type", "default")
    config = model.config
    given = _rope_parameters(config) or getattr(config, "rope_scaling", None) or {}
    rest = {name: value for name, value in given.items() if name not in ("rope_theta", "partial_rotary_factor", "type")}
    return {**rest, "rope_type": kind} if kind != "default" else {"rope_type": kind}


def _same(name: str, values: set[Any]) -> Any:
    if len(values) != 1:
        raise NotImplementedError(f"{name}: expected one value in all layers, got {sorted(values)}")
    return values.pop()


def _rotary(model: Module) -> Module:
    """The module that makes angles."""
    family = family_of(model)
    rotary = getattr(model, family.base).rotary_emb
    expected = class_of(type(model)).__name__.replace("ForCausalLM", "RotaryEmbedding")
    if type(rotary).__name__ != expected:
        raise NotImplementedError(f"rotary_emb: expected {expected}, got {type(rotary).__name__}")
    kind, scaling = getattr(rotary, "rope_type", "default"), getattr(rotary, "attention_scaling", 1.0)
    if scaling != 1.0 or (kind != "default" and family is _GPT_NEOX):
        raise NotImplementedError(f"rotary_emb: expected the default rope_type, got '{kind}'")
    return rotary
