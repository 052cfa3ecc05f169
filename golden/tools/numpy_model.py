"""The inputs of one step, and layers and models of every family in numpy, against which dumps are checked."""

import math
from dataclasses import dataclass

import numpy as np

import procedural
from console import Refusal
from model_config import layer_shapes


@dataclass
class Step:
    """The inputs of one step, as stored. A sequence has q_len new tokens, and kv_len cache entries after the append."""

    dtype: str
    q_len: int
    kv_len: list
    hidden: np.ndarray  # (tokens, hidden)
    cache: str  # its origin, as in the file
    k_cache: np.ndarray = None  # (batch, kv_heads, max(kv_len) - q_len, head_dim)
    v_cache: np.ndarray = None

    def past(self, b):
        """Sequence b's old keys and values, (kv_heads, kv_len - q_len, head_dim) each."""
        return tuple(cache[b, :, : self.kv_len[b] - self.q_len] for cache in (self.k_cache, self.v_cache))

    def positions(self, b):
        return np.arange(self.kv_len[b] - self.q_len, self.kv_len[b])

    def all_positions(self):
        return np.concatenate([self.positions(b) for b in range(len(self.kv_len))])


def made_step(model, dtype, q_len, kv_len, cache, seed):
    """A step whose hidden state is procedural and whose cache is procedural or normally distributed."""
    hidden = procedural.values(dtype, (len(kv_len) * q_len, model.hidden_size), "activation", seed, "hidden")
    step = Step(dtype, q_len, kv_len, hidden, cache)
    shape = (len(kv_len), model.kv_heads, max(kv_len) - q_len, model.head_dim)
    if cache == "random":
        rng = np.random.default_rng(seed)
        step.k_cache, step.v_cache = (
            procedural.round_to(rng.standard_normal(shape, np.float32), dtype) for _ in range(2)
        )
        for b, n in enumerate(kv_len):
            step.k_cache[b, :, n - q_len :] = step.v_cache[b, :, n - q_len :] = 0
    else:
        step.k_cache, step.v_cache = (
            procedural.values(dtype, shape, "activation", seed, name) for name in ("k_cache", "v_cache")
        )
    return step


def rotate(x, cos, sin):
    """RoPE of x (tokens, heads, head_dim) over its first 2 * cos.shape[1] elements."""
    half = cos.shape[1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def head_norm_taps(names, q, k, v):
    """The taps of the norms of q's and k's heads, (tokens, heads, head_dim) each; v has none."""
    taps = {names.tap("qk_norm"): np.concatenate([q, k, v], 1)[:, :, None]}
    return taps | {f"hf.{name}": heads for name, heads in zip(names.head_norms, (q, k))}


def reference_layer(model, weights, step, cos=None, sin=None):
    """Every tap of the layer in float64, from the stored bits and the given cos and sin (tokens, rotary_dim / 2)."""
    names, ratio = model.names, model.num_attention_heads // model.kv_heads
    x = procedural.widen(step.hidden, step.dtype)
    tokens = len(x)

    def linear(name, y):
        weight = procedural.widen(weights[name + ".weight"], step.dtype)
        product = y @ (weight if name in names.transposed else weight.T)
        bias = weights.get(name + ".bias")
        return product if bias is None else product + procedural.widen(bias, step.dtype)

    def norm(name, y):
        return model.norm(y, *(procedural.widen(weights[f"{name}.{part}"], step.dtype) for part in names.norm_parts))

    attn_in = norm(names.norms[0], x)
    q, k, v, qkv = model.heads_of([linear(name, attn_in) for name in names.qkv_parts])
    normed = {}
    if names.head_norms:
        q, k = (model.norm(heads, procedural.widen(weights[f"{name}.weight"], step.dtype))
                for name, heads in zip(names.head_norms, (q, k)))
        normed = head_norm_taps(names, q, k, v)
    if model.rotary_dim:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    context = np.empty_like(q)
    for b in range(len(step.kv_len)):
        rows = slice(b * step.q_len, (b + 1) * step.q_len)
        keys, values = (
            np.concatenate([procedural.widen(old, step.dtype), new[rows].transpose(1, 0, 2)], 1).repeat(ratio, 0)
            for old, new in zip(step.past(b), (k, v))
        )
        scores = np.einsum("qhd,hkd->hqk", q[rows], keys) / math.sqrt(model.head_dim)
        unseen = np.arange(step.kv_len[b]) > step.positions(b)[:, None]
        scores[:, unseen] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        context[rows] = np.einsum("hqk,hkd->qhd", p / p.sum(-1, keepdims=True), values)

    def appended(x):
        return x.reshape(-1, step.q_len, *x.shape[1:]).transpose(0, 2, 1, 3)

    dense = linear(names.dense, context.reshape(tokens, -1))
    residual = x + dense
    mlp_in = norm(names.norms[1], x if model.use_parallel_residual else residual)
    products = [linear(name, mlp_in) for name in names.mlp_parts]
    act = model.activate(*products)
    down = linear(names.down, act)
    return {
        names.tap("input_layernorm"): attn_in,
        names.tap("query_key_value"): qkv,
        **normed,
        **{f"{names.tap('rotary_emb')}.{name}": made for name, made in (("q", q), ("k", k), ("v", v))},
        **{f"{names.tap('kv_append')}.{name}_cache": appended(made) for name, made in (("k", k), ("v", v))},
        names.tap("context"): context,
        names.tap("dense"): residual,
        names.tap("post_attention_layernorm"): mlp_in,
        names.tap("dense_h_to_4h"): act,
        names.tap("dense_4h_to_h"): residual + down,
        f"hf.{names.dense}": dense,
        **{f"hf.{name}": product for name, product in zip(names.mlp_parts, products)},
        f"hf.{names.down}": down,
    }


def reference_model(model, weights, ids, cos, sin, dtype):
    """The taps of one pass over `ids` in float64, and the logits (tokens, vocab), from weights of stored dtype `dtype`
    and the given cos and sin (tokens, rotary_dim / 2)."""
    names = model.names
    no_entries = np.zeros((1, model.kv_heads, 0, model.head_dim), np.float64)
    x = procedural.widen(weights[f"{names.embedding}.weight"][ids], dtype)
    if names.positions:
        x = x + procedural.widen(weights[f"{names.positions}.weight"][: len(ids)], dtype)
    taps = {names.embedding_tap: x}
    for n in range(model.num_hidden_layers):
        layer = {name: weights[names.layer(n) + name] for name in layer_shapes(model)}
        step = Step(dtype, len(ids), [len(ids)], x, "none", no_entries, no_entries)
        x = taps[f"layers.{n}.output"] = reference_layer(model, layer, step, cos, sin)["output"]
    final = (procedural.widen(weights[f"{names.final_norm}.{part}"], dtype) for part in names.norm_parts)
    x = taps[names.final_norm_tap] = model.norm(x, *final)
    head = weights[f"{names.embedding if model.tie_word_embeddings else names.head}.weight"]
    # Some rows at a time: a whole head of a large model in float64 would be the largest array of all.
    return taps, np.concatenate([x @ procedural.widen(rows, dtype).T for rows in np.array_split(head, 16)], 1)


def relative_l2(got, reference):
    """||got - reference|| / ||reference||; infinite where got has a non-finite element."""
    error = np.linalg.norm(got - reference)
    if not math.isfinite(error):
        return math.inf
    return error / (np.linalg.norm(reference) or 1)


MAX_ERROR = 1e-10  # relative L2 between Hugging Face's float64 taps and numpy's
MAX_ERROR_FLOAT32_NORMS = 1e-6  # the same with Hugging Face's own RMSNorm, which computes in float32


def rough_error(dtype):
    """A relative L2 of a layer computed in `dtype`: rounding alone stays far below it; a wrong formula does not."""
    return 64 * {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[dtype]


def check_taps(variant, taps, reference, limit):
    """Refuses taps that are further than `limit` from the reference, in relative L2."""
    if taps.keys() != reference.keys():
        raise Refusal(f"{variant}: expected the taps {sorted(reference)}, got {sorted(taps)}")
    for name, tap in taps.items():
        if tap.shape != reference[name].shape:
            raise Refusal(f"{variant}: tap {name} must have shape {reference[name].shape}, got {tap.shape}")
        error = relative_l2(tap, reference[name])
        if not error <= limit:
            raise Refusal(
                f"{variant}: tap {name} must be within {limit:g} of its reference in relative L2, got {error:.3g}"
            )


def check_rope(model, step, cos=None, sin=None):
    """Refuses cos and sin that do not come from float32 angles. Those of a 16-bit inv_freq are far beyond the bound."""
    if not model.rotary_dim:
        return
    position = step.all_positions()[:, None].astype(np.float64)
    angle = position * model.inverse_frequencies()
    for name, got, expected in (("cos", cos, np.cos(angle)), ("sin", sin, np.sin(angle))):
        if got.shape != expected.shape:
            raise Refusal(f"float64: {name} must have shape {expected.shape}, got {got.shape}")
        if not np.array_equal(got.astype(np.float32), got):
            raise Refusal(f"float64: {name} must hold float32 values, got wider ones")
        worst = float((np.abs(got - expected) - position * 4e-7).max())
        if not worst <= 1e-6:
            raise Refusal(f"float64: {name} must be that of float32 angles, got values {worst:.3g} off")
