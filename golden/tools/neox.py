"""The config of GPT-NeoX, and what its layers compute otherwise than those of the other families."""

import math
from dataclasses import MISSING, asdict, dataclass, fields
from typing import ClassVar

import numpy as np

import procedural
from console import Refusal
from families import NEOX, Names


@dataclass(frozen=True)
class Model:
    """A GPT-NeoX network's shape and arithmetic, from config.json. The fields are those of core/model/config.hpp."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int = 2048
    rotary_pct: float = 0.25
    rope_theta: float = 10000.0
    layer_norm_eps: float = 1e-5
    use_parallel_residual: bool = True
    attention_bias: bool = True
    tie_word_embeddings: bool = False
    hidden_act: str = "gelu"

    names: ClassVar[Names] = NEOX

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self):
        return int(self.head_dim * self.rotary_pct)

    @property
    def kv_heads(self):
        return self.num_attention_heads

    def hf_fields(self):
        """The fields under the names that transformers 4.x writes and 5.x still takes."""
        fields = asdict(self)
        fields["rotary_emb_base"] = fields.pop("rope_theta")
        return fields

    @property
    def model_type(self):
        return "gpt_neox"

    def layer_shapes(self):
        return procedural.weight_shapes(self.hidden_size, self.intermediate_size, self.attention_bias)

    def heads_of(self, products):
        """q, k and v, (tokens, heads, head_dim) each, and the product's tap, from the one product."""
        (qkv,) = products
        qkv = qkv.reshape(len(qkv), self.num_attention_heads, 3, self.head_dim)
        return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], qkv

    def norm(self, x, gamma, beta):
        return layernorm(x, gamma, beta, self.layer_norm_eps)

    def activate(self, x):
        return ACTIVATIONS[self.hidden_act](x)

    def inverse_frequencies(self):
        """Those of RoPE in float64, (rotary_dim / 2)."""
        return self.rope_theta ** -(np.arange(0, self.rotary_dim, 2) / self.rotary_dim)


def layernorm(x, gamma, beta, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * gamma + beta


ERF = np.frompyfunc(math.erf, 1, 1)


def gelu_erf(x):
    return x / 2 * (1 + ERF(x * math.sqrt(0.5)).astype(np.float64))


def gelu_tanh(x):
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {"gelu": gelu_erf, "gelu_new": gelu_tanh, "gelu_fast": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh}


def parse(config, source):
    """The Model of a config.json's object, of transformers 4.x or 5.x."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise Refusal(f"{source}: rope_type must be default, got {rope_type!r}")
    given = config | {
        "rotary_pct": rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25)),
        "rope_theta": rope.get("rope_theta", config.get("rotary_emb_base", 10000.0)),
    }
    values = {}
    for field in fields(Model):
        value = given.get(field.name, field.default)
        if value is MISSING:
            raise Refusal(f"{source}: {field.name} is missing")
        fits = type(value) in ((int, float) if field.type is float else (field.type,))
        if not fits or (field.type in (int, float) and not 0 < value < math.inf):
            expected = {int: "a positive integer", float: "a positive number", bool: "true or false", str: "a string"}
            raise Refusal(f"{source}: {field.name} must be {expected[field.type]}, got {value!r}")
        values[field.name] = value
    model = Model(**values)
    if model.hidden_size % model.num_attention_heads:
        raise Refusal(
            f"{source}: num_attention_heads must divide hidden_size {model.hidden_size}, "
            f"got {model.num_attention_heads}"
        )
    if model.rotary_dim < 2 or model.rotary_dim > model.head_dim or model.rotary_dim % 2:
        raise Refusal(f"{source}: rotary_dim must be even, 2 to head_dim {model.head_dim}, got {model.rotary_dim}")
    if model.hidden_act not in ACTIVATIONS:
        raise Refusal(f"{source}: hidden_act must be one of {', '.join(ACTIVATIONS)}, got {model.hidden_act!r}")
    return model
