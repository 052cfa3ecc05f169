"""A GPT-NeoX layer's two halves in plain torch, the reference of the example programs. Needs torch.

One sequence: x (tokens, hidden) holds its newest tokens, cos and sin (tokens, rotary_dim / 2) are at their positions,
and the caches (1, heads, capacity, head_dim) have `kv_len` valid entries once the new ones are written. Weights have
Hugging Face's names below gpt_neox.layers.N and x's dtype. A half adds its result to what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from checkpoints import dequantised
from cf_ops import ops

Config = Mapping[str, Any]
Tensors = dict[str, Any]


def tensors(weights: Mapping[str, Any], device: str, dtype: torch.dtype | None = None) -> Tensors:
    """Arrays as tensors, of a dtype or of their own. With a dtype, quantised weights are dequantised."""
    made: Tensors = {}
    for name, weight in weights.items():
        if isinstance(weight, ops.GptqWeight):
            if dtype is None:
                parts = {
                    part: torch.from_numpy(getattr(weight, part)) for part in ("qweight", "qzeros", "scales", "g_idx")
                }
                fields = {field: getattr(weight, field) for field in ("bits", "group_size", "zero_offset")}
                made[name] = ops.GptqWeight(**{part: t.to(device) for part, t in parts.items()}, **fields)
                continue
            weight = dequantised(weight)
        made[name] = torch.from_numpy(weight).to(device, dtype)
    return made


def attention_half(
    weights: Tensors, config: Config, x: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, kv_len: int
) -> Tensor:
    """x + dense(attention(rope(query_key_value(norm1(x))))); writes the new keys and values into the caches."""
    tokens, heads = len(x), config["num_attention_heads"]
    qkv = _linear(weights, "attention.query_key_value", _norm(weights, "input_layernorm", config, x))
    q, k, v = qkv.view(tokens, heads, 3, -1).unbind(2)
    k_cache[0, :, kv_len - tokens : kv_len] = _rotated(k, cos, sin).transpose(0, 1)
    v_cache[0, :, kv_len - tokens : kv_len] = v.transpose(0, 1)
    seen = torch.ones(tokens, kv_len, dtype=torch.bool, device=x.device).tril(kv_len - tokens)
    context = functional.scaled_dot_product_attention(
        _rotated(q, cos, sin).transpose(0, 1), k_cache[0, :, :kv_len], v_cache[0, :, :kv_len], attn_mask=seen
    )
    return x + _linear(weights, "attention.dense", context.transpose(0, 1).reshape(tokens, -1))


def mlp_half(weights: Tensors, config: Config, x: Tensor, residual: Tensor) -> Tensor:
    """residual + down(gelu(up(norm2(x))))."""
    up = _linear(weights, "mlp.dense_h_to_4h", _norm(weights, "post_attention_layernorm", config, x))
    act = functional.gelu(up, approximate="none" if config["hidden_act"] == "gelu" else "tanh")
    return residual + _linear(weights, "mlp.dense_4h_to_h", act)


def layer(weights: Tensors, config: Config, x: Tensor, *step: Any) -> Tensor:
    """Both halves. `step` is what attention_half() takes behind x."""
    h = attention_half(weights, config, x, *step)
    return mlp_half(weights, config, x if config["use_parallel_residual"] else h, h)


def _linear(weights: Tensors, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _norm(weights: Tensors, name: str, config: Config, x: Tensor) -> Tensor:
    return functional.layer_norm(
        x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], config["layer_norm_eps"]
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x (tokens, heads, head_dim): its first halves turn, the rest passes through."""
    half = cos.shape[1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
