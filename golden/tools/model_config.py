"""Models of every family: their sizes and arithmetic, the presets, config.json, and the shapes of the weights."""

import json
import math
from dataclasses import dataclass, fields

import numpy as np

from console import Refusal
from families import FAMILIES, NAMES, join_shapes

SCALING_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
READ = ("required", "read", "read_or_null")


@dataclass(frozen=True)
class Model:
    """A network's shape and arithmetic, under the names of ModelConfig (core/model/config.hpp). None is the family's
    default."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int = None
    model_type: str = next(iter(FAMILIES))
    num_key_value_heads: int = None
    head_dim: int = None
    rotary_fraction: float = None
    rope_theta: float = None
    rope_scaling: tuple = ()  # of Llama 3, in the order of SCALING_FIELDS
    layer_norm_eps: float = None
    use_parallel_residual: bool = None
    attention_bias: bool = None
    mlp_bias: bool = None
    tie_word_embeddings: bool = None
    hidden_act: str = None

    def __post_init__(self):
        read = {field["key"] for field in self.family["fields"] if field["use"] in READ}
        for field in fields(self):
            follows = field.name in ("head_dim", "num_key_value_heads") and field.name not in read
            if follows or getattr(self, field.name) is None:
                object.__setattr__(self, field.name, self._default(field.name))

    def _default(self, key):
        if key == "head_dim":
            return self.hidden_size // self.num_attention_heads
        for field in self.family["fields"]:
            if field["key"] == key and "otherwise" in field:
                return field["otherwise"]
            if field["key"] == key and "size_of" in field:
                return field["size_of"]["factor"] * getattr(self, field["size_of"]["key"])
        return self.num_attention_heads if key == "num_key_value_heads" else 0

    @property
    def family(self):
        return FAMILIES[self.model_type]

    @property
    def names(self):
        return NAMES[self.model_type]

    @property
    def rotary_dim(self):
        return int(self.head_dim * self.rotary_fraction) if self.family["positions"] == "rope" else 0

    @property
    def kv_heads(self):
        return self.num_key_value_heads

    @property
    def dense_bias(self):
        return self.attention_bias and self.family["dense_bias_as_qkv"]

    def hf_fields(self):
        """The fields under the names that transformers 4.x writes and 5.x still takes."""
        found = {}
        reads_use = any(field["key"] == "use_sliding_window" for field in self.family["fields"])
        for field in self.family["fields"]:
            if field["use"] in READ and hasattr(self, field["key"]):
                found[field["name"]] = getattr(self, field["key"])
            if field["key"] == "sliding_window" and field["use"] in READ and not reads_use:
                found[field["name"]] = None
        if self.rope_scaling:
            found["rope_scaling"] = {"rope_type": "llama3", **dict(zip(SCALING_FIELDS, self.rope_scaling))}
        return found

    def layer_shapes(self):
        """Name below the layer -> shape of a layer's weights as checkpoints store them, in the order of
        weights_checksum()."""
        h, i, d, names = self.hidden_size, self.intermediate_size, self.head_dim, self.names
        attention, kv = self.num_attention_heads * d, self.kv_heads * d
        shapes = {f"{norm}.{part}": (h,) for norm in names.norms for part in names.norm_parts}
        shapes |= {f"{norm}.weight": (d,) for norm in names.head_norms}
        qkv = (attention, kv, kv) if len(names.qkv_parts) == 3 else (attention + 2 * kv,)
        linears = [(part, (rows, h), self.attention_bias) for part, rows in zip(names.qkv_parts, qkv)]
        linears += [(names.dense, (h, attention), self.dense_bias)]
        linears += [(part, (i, h), self.mlp_bias) for part in names.mlp_parts] + [(names.down, (h, i), self.mlp_bias)]
        for name, shape, has_bias in linears:
            shapes[f"{name}.weight"] = shape[::-1] if name in names.transposed else shape
            if has_bias:
                shapes[f"{name}.bias"] = shape[:1]
        return shapes

    def heads_of(self, products):
        """q, k and v, (tokens, heads, head_dim) each, and the product's tap, from the products of qkv_parts."""
        whole = np.concatenate(products, 1)
        if self.family["interleaved_by_head"]:
            qkv = whole.reshape(len(whole), self.num_attention_heads, 3, self.head_dim)
            return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], qkv
        heads = whole.reshape(len(whole), -1, self.head_dim)
        ends = self.num_attention_heads, self.num_attention_heads + self.kv_heads
        return *np.split(heads, ends, 1), heads[:, :, None]

    def norm(self, x, gamma, beta=None):
        eps = self.layer_norm_eps
        return rmsnorm(x, gamma, eps) if beta is None else layernorm(x, gamma, beta, eps)

    def activate(self, x, up=None):
        return ACTIVATIONS[self.hidden_act](x) * (1 if up is None else up)

    def inverse_frequencies(self):
        """Those of RoPE in float64, (rotary_dim / 2)."""
        frequencies = self.rope_theta ** (-np.arange(0, self.rotary_dim, 2) / self.rotary_dim)
        if not self.rope_scaling:
            return frequencies
        factor, low, high, positions = self.rope_scaling
        wavelengths = 2 * math.pi / frequencies
        share = np.clip((positions / wavelengths - low) / (high - low), 0, 1)
        return (1 - share) * frequencies / factor + share * frequencies


def layernorm(x, gamma, beta, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * gamma + beta


def rmsnorm(x, gamma, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gamma


ERF = np.frompyfunc(math.erf, 1, 1)


def gelu_erf(x):
    return x / 2 * (1 + ERF(x * math.sqrt(0.5)).astype(np.float64))


def gelu_tanh(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


# What a hidden_act computes. In a gated MLP it takes the gate alone, and the up product multiplies the result.
FUNCTIONS = {"gelu": gelu_erf, "gelu_pytorch_tanh": gelu_tanh, "silu": silu}
ACTIVATIONS = {name: FUNCTIONS[meant] for family in FAMILIES.values() for name, meant in family["activations"].items()}


def _preset(model_type, preset):
    values = {name: value for name, value in preset.items() if name not in ("name", "dtype", "rope_scaling")}
    values = {name: value for name, value in values.items() if name in Model.__annotations__}
    scaling = preset.get("rope_scaling")
    scaling = tuple(scaling[name] for name in SCALING_FIELDS) if scaling else ()
    return Model(model_type=model_type, rope_scaling=scaling, **values)


# Name -> model, and name -> dtype of the weights.
PRESETS = {p["name"]: _preset(kind, p) for kind, family in FAMILIES.items() for p in family["presets"]}
PRESET_DTYPES = {p["name"]: p["dtype"] for family in FAMILIES.values() for p in family["presets"]}
PYTHIA_PRESETS = {name: model for name, model in PRESETS.items() if name.startswith("pythia-")}

KINDS = {int: "a positive integer", float: "a positive number", bool: "true or false", str: "a string"}


def _value(source, name, kind, found):
    """A field's value. Refuses one of another type, and numbers that are not positive."""
    fits = type(found) in ((int, float) if kind is float else (kind,))
    if not fits or (kind in (int, float) and not 0 < found < math.inf):
        raise Refusal(f"{source}: {name} must be {KINDS[kind]}, got {found!r}")
    return found


def parse_config(text, source):
    """The Model of a config.json's text, of transformers 4.x or 5.x."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise Refusal(f"{source}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise Refusal(f"{source}: expected a JSON object, got {type(config).__name__}")
    family = FAMILIES.get(config.get("model_type"))
    if not family:
        raise Refusal(f"{source}: model_type must be one of {', '.join(FAMILIES)}, got {config.get('model_type')!r}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if family["positions"] == "rope" and rope_type not in family["rope_types"]:
        raise Refusal(f"{source}: rope_type must be {' or '.join(family['rope_types'])}, got {rope_type!r}")
    inside = {"rope_theta": "rope_theta", "rotary_fraction": "partial_rotary_factor"}
    values = {"model_type": config["model_type"]}
    for field in family["fields"]:
        name, key = field["name"], field["key"]
        if field["use"] == "asserted" and "otherwise" in field:
            found, built = rope.get(inside.get(key), config.get(name)), field["otherwise"]
            if found not in (None, built):
                raise Refusal(f"{source}: {name} must be {built!r}, got {found!r}")
        kind = Model.__annotations__.get(key)
        if field["use"] not in READ or not kind:
            continue
        found = rope.get(inside.get(key), config.get(name))
        if found is None and field["use"] == "required":
            raise Refusal(f"{source}: {name} is missing")
        if found is not None:
            values[key] = _value(source, name, kind, found)
    if rope_type == "llama3":
        values["rope_scaling"] = tuple(rope[name] for name in SCALING_FIELDS)
    window = config.get("sliding_window")
    asked = {field["name"]: field for field in family["fields"] if field["use"] in READ}
    if "sliding_window" not in asked or ("use_sliding_window" in asked and not config.get("use_sliding_window")):
        window = None
    if window and window < config.get("max_position_embeddings", 0):
        raise Refusal(f"{source}: sliding_window must be null or max_position_embeddings, got {window}")
    if config.get("num_key_value_heads", 0) is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if "head_dim" not in values and hidden % heads:
        raise Refusal(f"{source}: num_attention_heads must divide hidden_size {hidden}, got {heads}")
    model = Model(**values)
    if heads % model.kv_heads:
        raise Refusal(f"{source}: num_key_value_heads must divide {heads}, got {model.kv_heads}")
    if family["positions"] == "rope" and not (2 <= model.rotary_dim <= model.head_dim and model.rotary_dim % 2 == 0):
        raise Refusal(f"{source}: rotary_dim must be even, 2 to head_dim {model.head_dim}, got {model.rotary_dim}")
    if model.hidden_act not in family["activations"]:
        known = ", ".join(family["activations"])
        raise Refusal(f"{source}: hidden_act must be one of {known}, got {model.hidden_act!r}")
    return model


def hf_config(model):
    """The content of a config.json."""
    return {"model_type": model.model_type, **model.hf_fields()}


def config_json(model):
    return json.dumps(hf_config(model), indent=2)


def layer_shapes(model):
    return model.layer_shapes()


def joined_layer_shapes(model):
    """The same of a layer's weights as the walk has them."""
    return join_shapes(model.names, layer_shapes(model))


def model_shapes(model, of_layer=None):
    """Name -> shape of all weights as stored; of_layer is that of a layer's, where they are not all dense."""
    names, embedding = model.names, (model.vocab_size, model.hidden_size)
    shapes = {f"{names.embedding}.weight": embedding}
    if names.positions:
        shapes[f"{names.positions}.weight"] = (model.max_position_embeddings, model.hidden_size)
    for layer in range(model.num_hidden_layers):
        shapes |= {names.layer(layer) + name: shape for name, shape in (of_layer or layer_shapes(model)).items()}
    shapes |= {f"{names.final_norm}.{part}": (model.hidden_size,) for part in names.norm_parts}
    return shapes if model.tie_word_embeddings else shapes | {f"{names.head}.weight": embedding}
