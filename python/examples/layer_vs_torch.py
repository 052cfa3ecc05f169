#!/usr/bin/env python3
"""One decode step of a layer against torch: random data, 100 runs, the mean absolute error.

The reference is the layer's formula in torch's float64, of the same float16 weights. Each run draws new activations and
a new cache of another length. Exits with 1 where a run is outside the error bound that the layer's contract derives for
float32. Needs torch.
"""

import argparse
import math
import sys

import torch
import torch.nn.functional as F

from cf_ops import ops

SIZES = {"pythia-70m": (512, 8), "pythia-410m": (1024, 16), "pythia-2.8b": (2560, 32)}
EPS = 1e-5


def draw_weights(hidden, generator):
    """A layer's weights by Hugging Face's names below gpt_neox.layers.N."""

    def normal(*shape, mean=0.0, deviation=0.02):
        return (mean + deviation * torch.randn(*shape, generator=generator)).half()

    weights = {}
    for name, (out, size) in {
        "attention.query_key_value": (3 * hidden, hidden),
        "attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (4 * hidden, hidden),
        "mlp.dense_4h_to_h": (hidden, 4 * hidden),
    }.items():
        weights |= {f"{name}.weight": normal(out, size), f"{name}.bias": normal(out)}
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights |= {f"{name}.weight": normal(hidden, mean=1.0), f"{name}.bias": normal(hidden)}
    return weights


def reference_layer(weights, x, cos, sin, k_cache, v_cache, heads, position):
    """out = x + attention(norm1(x)) + mlp(norm2(x)) in float64. The caches hold `position` entries."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    tokens, hidden = x.shape
    head_dim = hidden // heads

    def norm(name):
        return F.layer_norm(x, (hidden,), w[f"{name}.weight"], w[f"{name}.bias"], EPS)

    def linear(name, y):
        return F.linear(y, w[f"{name}.weight"], w[f"{name}.bias"])

    def turned(y):
        half = cos.shape[-1]
        first, second, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    qkv = linear("attention.query_key_value", norm("input_layernorm")).view(tokens, heads, 3, head_dim)
    q, k, v = turned(qkv[:, :, 0]), turned(qkv[:, :, 1]), qkv[:, :, 2]
    keys = torch.cat((k_cache[0, :, :position], k.transpose(0, 1)), 1)
    values = torch.cat((v_cache[0, :, :position], v.transpose(0, 1)), 1)
    scores = torch.softmax(q.transpose(0, 1) @ keys.transpose(1, 2) / math.sqrt(head_dim), -1)
    context = (scores @ values).transpose(0, 1).reshape(tokens, hidden)
    act = F.gelu(linear("mlp.dense_h_to_4h", norm("post_attention_layernorm")))
    return x + linear("attention.dense", context) + linear("mlp.dense_4h_to_h", act)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="pythia-70m")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--capacity", type=int, default=256, help="cache entries; each run uses 1 to this many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inject-fault", action="store_true", help="turn the other way in RoPE: the check must fail")
    args = parser.parse_args()
    hidden, heads = SIZES[args.size]
    head_dim = hidden // heads
    config = {
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": 1,
        "rotary_pct": 0.25,
        "layer_norm_eps": EPS,
    }
    generator = torch.Generator().manual_seed(args.seed)
    weights = draw_weights(hidden, generator)
    cos, sin = map(torch.from_numpy, ops.rope_table(args.capacity, head_dim // 4))

    errors, worst = [], 0.0
    for _ in range(args.runs):
        position = int(torch.randint(args.capacity, (1,), generator=generator))
        x = torch.randn(1, hidden, generator=generator)
        k_cache, v_cache = (torch.randn(1, heads, args.capacity, head_dim, generator=generator) for _ in range(2))
        step = [torch.tensor([position], dtype=torch.int32), torch.tensor([position + 1], dtype=torch.int32), cos, sin]
        if args.inject_fault:
            step[3] = -sin
        double = [x.double(), *step, k_cache.double(), v_cache.double()]
        budget = ops.budget(ops.decode_layer)(weights, config, *double)
        made = ops.decode_layer(weights, config, x, *step, k_cache.clone(), v_cache.clone()).output
        row = cos[position].double(), sin[position].double()
        expected = reference_layer(weights, x.double(), *row, k_cache.double(), v_cache.double(), heads, position)
        error = made.double() - expected
        errors.append(float(error.abs().mean()))
        worst = max(worst, float(error.norm() / expected.norm()) / budget.rel_l2)
    print(f"{args.size} layer, {args.runs} runs, kv_len 1 to {args.capacity}")
    print(f"mean absolute error {sum(errors) / len(errors):.3e}, in the worst run {max(errors):.3e}")
    print(f"relative L2 error: at most {worst:.3f} of its bound: {'ok' if worst <= 1 else 'FAIL'}")
    return 0 if worst <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
