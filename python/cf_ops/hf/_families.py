"""The models that `speed_up` takes: their classes in transformers, the names of their modules, what they compute."""

from __future__ import annotations

import importlib.resources
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
    """Linears of a layer that the library reads as one: one below the other, or row by row in turn. A Conv1D, whose
    weight is (in, out), is one by itself, transposed."""

    whole: str  # the library's name, which has no module
    parts: tuple[str, ...]
    interleaved: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class Family:
    """What the library knows of a family (core/families), as its modules in transformers need it."""

    model_type: str
    class_name: str
    base: str  # the model's attribute that has the layers, the embedding and the final norm
    layers: str  # the module that has the layers
    embedding: str
    head: str  # the library's name of the head
    other_head: str  # the module's, where it is another one
    attention: str
    projection: str  # the Linear whose bias says whether the model has biases of q, k and v
    norm: str  # the first norm
    act: str
    mlp: str  # the Linear that has intermediate_size rows
    eps: str  # of a norm
    has_rope: bool  # positions are RoPE's, otherwise learned
    rope_types: tuple[str, ...]
    fields: dict[str, str]  # the library's key -> its name in config.json
    joins: tuple[Join, ...] = ()


def _family(data: dict[str, Any]) -> Family:
    names = {site["id"]: site["name"] for site in (*data["sites"], *data["outside"])}

    def first_part(step: str) -> str:
        return str((data["stored"].get(step, {}).get("parts") or [names[step]])[0])

    def join(step: str) -> Join:
        stored = data["stored"][step]
        parts = tuple(stored["parts"] or [names[step]])
        return Join(names[step], parts, stored["interleaved"], stored["transposed"])

    return Family(
        model_type=data["model_type"],
        class_name=data["class_name"],
        base=data["layers"].partition(".")[0],
        layers=data["layers"].removesuffix("."),
        embedding=names["embed_in"],
        head=names["embed_out"],
        other_head=data["other_head"],
        attention=names["query_key_value"].rpartition(".")[0],
        projection=first_part("query_key_value"),
        norm=names["input_layernorm"],
        act=data["activation_module"],
        mlp=first_part("dense_h_to_4h"),
        eps="eps" if data["norm"] == "layernorm" else "variance_epsilon",
        has_rope=data["positions"] == "rope",
        rope_types=tuple(data["rope_types"]),
        fields={field["key"]: field["name"] for field in data["fields"] if field["use"] not in ("noted", "refused")},
        joins=tuple(
            join(step) for step, stored in data["stored"].items() if len(stored["parts"]) > 1 or stored["transposed"]
        ),
    )


def _read_families() -> dict[Any, Family]:
    """The families whose class this version of transformers has."""
    text = importlib.resources.files("cf_ops").joinpath("_families.json").read_text(encoding="utf-8")
    families = [_family(data) for data in json.loads(text)]
    return {getattr(transformers, f.class_name): f for f in families if hasattr(transformers, f.class_name)}


FAMILIES: dict[Any, Family] = _read_families()  # by the class of transformers
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
    return model.get_submodule(family_of(model).layers)


def library_of(model: Module) -> str:
    """The module of transformers that builds a model's modules."""
    return str(class_of(type(model)).__module__)


def library_name(name: str, model: Module) -> str:
    """The library's name of a parameter: that of transformers 4.x."""
    family = family_of(model)
    is_renamed = family.other_head and name.startswith(family.other_head + ".")
    return name.replace(family.other_head, family.head, 1) if is_renamed else name


def inverse_frequencies(model: Module) -> Tensor:
    """Those of RoPE; none where positions are learned."""
    return _rotary(model).inv_freq if family_of(model).has_rope else torch.empty(0)


def rope_table(model: Module, positions: int) -> tuple[Tensor, Tensor]:
    """The model's own table in float32, so that rounded frequencies (``model.half()`` rounds them) stay as they are."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(model).detach().cpu().float()
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    return cos, sin


def config_text(model: Module) -> str:
    """config.json's text, of what the modules hold: it says what the model computes even where its config was changed
    after loading."""
    config, family, layers = model.config, family_of(model), layers_of(model)
    act, hidden_act = layers[0].get_submodule(family.act), getattr(config, family.fields["hidden_act"])
    if type(act) is not type(ACT2FN[hidden_act]):
        got = type(act).__name__
        raise NotImplementedError(f"{family.act}: expected the config's '{hidden_act}', got {got}")
    norms = {getattr(m, family.eps) for m in model.modules() if hasattr(m, family.eps)}
    norm = type(layers[0].get_submodule(family.norm)).__name__
    embedding, head = model.get_submodule(family.embedding), model.get_output_embeddings().weight
    rotary_dim, head_dim = 2 * inverse_frequencies(model).numel(), _head_dim(model)
    values: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": len(layers),
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None),
        "head_dim": head_dim,
        "intermediate_size": _out_features(layers[0].get_submodule(family.mlp)),
        "vocab_size": embedding.num_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "rotary_fraction": _rotary_fraction(rotary_dim, head_dim),
        "rope_theta": _rope_theta(config),
        "layer_norm_eps": _same(f"{norm}.{family.eps}", norms),
        "attention_bias": layers[0].get_submodule(family.projection).bias is not None,
        "mlp_bias": layers[0].get_submodule(family.mlp).bias is not None,
        "tie_word_embeddings": head is embedding.weight,
        "hidden_act": hidden_act,
    }
    if "use_parallel_residual" in family.fields:
        parallel = {layer.use_parallel_residual for layer in layers}
        values["use_parallel_residual"] = _same("use_parallel_residual", parallel)
    text = {name: values[key] for key, name in family.fields.items() if key in values}
    text |= {"model_type": config.model_type, "torch_dtype": str(head.dtype).removeprefix("torch.")}
    # Biases that transformers does not read of a family are said as well, for the reader's note.
    for key in ("attention_bias", "mlp_bias"):
        text.setdefault(key, values[key])
    scaling = {getattr(layer.get_submodule(family.attention), "scaling", None) for layer in layers} - {None}
    if scaling and (scale := _same(f"{family.attention}.scaling", scaling)) != head_dim**-0.5:
        raise NotImplementedError(f"{family.attention}.scaling: expected {head_dim**-0.5}, got {scale}")
    if family.has_rope:
        text["rope_scaling"] = _rope_scaling(model)
    # The rest of the config says what else a model is asked for, such as a window: the library's reader looks at it.
    rest = {name: value for name, value in config.to_dict().items() if name not in _HELD_BY_MODULES}
    return json.dumps({**rest, **text}, default=str)


def gptq_config_text(model: Module) -> str | None:
    """quantize_config.json's text, where Linears are quantised."""
    return gptq_text(model, f"{family_of(model).layers}.", len(layers_of(model)))


def _out_features(linear: Module) -> int:
    if is_quantised(linear):
        return int(linear.qweight.shape[1])
    return int(linear.nf if hasattr(linear, "nf") else linear.out_features)  # nf: of a Conv1D


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


def _rotary_fraction(rotary_dim: int, head_dim: int) -> float:
    """The share of a head that RoPE turns. Readers round its product with head_dim down."""
    fraction = rotary_dim / head_dim
    return math.nextafter(fraction, 2.0) if int(head_dim * fraction) < rotary_dim else fraction


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
    if scaling != 1.0 or (kind != "default" and family.rope_types == ("default",)):
        raise NotImplementedError(f"rotary_emb: expected the default rope_type, got '{kind}'")
    return rotary
