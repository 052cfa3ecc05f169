"""The configs of Llama, Mistral and Qwen2, and what their layers compute otherwise than GPT-NeoX's."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from console import Refusal
from families import LLAMA, Names

MODEL_TYPES = ("llama", "mistral", "qwen2")
SCALING_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Model:
    """The network's shape and arithmetic, from config.json."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: tuple = ()  # of Llama 3, in the order of SCALING_FIELDS
    layer_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    names: ClassVar[Names] = LLAMA
    use_parallel_residual: ClassVar[bool] = False

    @property
    def rotary_dim(self):
        return self.head_dim

    @property
    def kv_heads(self):
        return self.num_key_value_heads

    def hf_fields(self):
        """The fields under the names that transformers 4.x writes and 5.x still takes."""
        fields = {name: getattr(self, name) for name in SIZES}
        fields |= {
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.layer_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
        }
        if self.rope_scaling:
            fields["rope_scaling"] = {"rope_type": "llama3", **dict(zip(SCALING_FIELDS, self.rope_scaling))}
        if self.model_type == "llama":
            fields |= {"attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias}
        if self.model_type == "mistral":
            fields["sliding_window"] = None
        return fields

    def layer_shapes(self):
        h, i, d, names = self.hidden_size, self.intermediate_size, self.head_dim, self.names
        attention = self.num_attention_heads * d
        shapes = {f"{norm}.weight": (h,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for part, rows in zip(names.qkv_parts, (attention, self.kv_heads * d, self.kv_heads * d)):
            shapes[f"{part}.weight"] = (rows, h)
            if self.attention_bias or self.model_type == "qwen2":
                shapes[f"{part}.bias"] = (rows,)
        shapes[f"{names.dense}.weight"] = (h, attention)
        if self.attention_bias:
            shapes[f"{names.dense}.bias"] = (h,)
        for part, shape in [*((part, (i, h)) for part in names.mlp_parts), (names.down, (h, i))]:
            shapes[f"{part}.weight"] = shape
            if self.mlp_bias:
                shapes[f"{part}.bias"] = shape[:1]
        return shapes

    def heads_of(self, products):
        """q, k and v, (tokens, heads, head_dim) each, and the product's tap, from the products of qkv_parts."""
        q, k, v = (p.reshape(len(p), -1, self.head_dim) for p in products)
        return q, k, v, np.concatenate([q, k, v], 1)[:, :, None]

    def norm(self, x, gamma):
        """RMSNorm."""
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.layer_norm_eps) * gamma

    def activate(self, gate, up):
        """SwiGLU."""
        return gate / (1 + np.exp(-gate)) * up

    def inverse_frequencies(self):
        """Those of RoPE in float64, (head_dim / 2)."""
        frequencies = self.rope_theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        if not self.rope_scaling:
            return frequencies
        factor, low, high, positions = self.rope_scaling
        wavelengths = 2 * math.pi / frequencies
        share = np.clip((positions / wavelengths - low) / (high - low), 0, 1)
        return (1 - share) * frequencies / factor + share * frequencies


SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def parse(config, source):
    """The Model of a config.json's object, of transformers 4.x or 5.x."""

    def value(name, expected, otherwise=None):
        found = config.get(name)
        found = otherwise if found is None else found
        kinds = {int: (int,), float: (int, float), bool: (bool,)}[expected]
        if type(found) not in kinds or (expected is not bool and not 0 < found < math.inf):
            what = {int: "a positive integer", float: "a positive number", bool: "true or false"}[expected]
            raise Refusal(f"{source}: {name} must be {what}, got {found!r}")
        return found

    kind = config["model_type"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise Refusal(f"{source}: rope_type must be default or llama3, got {rope_type!r}")
    if config.get("hidden_act", "silu") != "silu":
        raise Refusal(f"{source}: hidden_act must be silu, got {config['hidden_act']!r}")
    window = config.get("sliding_window") if kind == "mistral" or config.get("use_sliding_window") else None
    if window and window < config.get("max_position_embeddings", 0):
        raise Refusal(f"{source}: sliding_window must be null or max_position_embeddings, got {window}")
    heads = value("num_attention_heads", int)
    defaults = {"num_key_value_heads": heads, "max_position_embeddings": 2048}
    sizes = {name: value(name, int, defaults.get(name)) for name in SIZES}
    if "head_dim" not in config and sizes["hidden_size"] % heads:
        raise Refusal(f"{source}: num_attention_heads must divide hidden_size {sizes['hidden_size']}, got {heads}")
    if heads % sizes["num_key_value_heads"]:
        raise Refusal(f"{source}: num_key_value_heads must divide {heads}, got {sizes['num_key_value_heads']}")
    return Model(
        model_type=kind,
        head_dim=value("head_dim", int, sizes["hidden_size"] // heads),
        rope_theta=rope.get("rope_theta", value("rope_theta", float, 10000.0)),
        rope_scaling=tuple(rope[name] for name in SCALING_FIELDS) if rope_type == "llama3" else (),
        layer_norm_eps=value("rms_norm_eps", float, 1e-6),
        attention_bias=value("attention_bias", bool, False) and kind == "llama",
        mlp_bias=value("mlp_bias", bool, False),
        tie_word_embeddings=value("tie_word_embeddings", bool, False),
        **sizes,
    )
