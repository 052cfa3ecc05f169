#!/usr/bin/env python3
"""Runs one decode step of a random GPT-NeoX layer n times, against the same layer in torch's float64.

The errors must be within the bound that the layer's contract derives for these numbers, and all runs must give the same
bits. The two sizes that ClusterFusion's port has calls for run through cf_ops.clusterfusion too, whose float16 output
must be the layer's, rounded. Needs torch.
"""

from __future__ import annotations

from typing import Any

import common
from cf_ops import ops
from common import error_of

SIZES = {"small": (256, 4), "pythia-2.8b": (2560, 32), "pythia-6.9b": (4096, 32)}  # hidden, heads
MATRICES = {  # (out, in) in units of hidden
    "attention.query_key_value": (3, 1),
    "attention.dense": (1, 1),
    "mlp.dense_h_to_4h": (4, 1),
    "mlp.dense_4h_to_h": (1, 4),
}
NORMS = "input_layernorm", "post_attention_layernorm"


def random_weights(hidden: int, seed: int) -> dict[str, Any]:
    """Weights that keep the size of what they multiply, in float16."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, (out, size) in MATRICES.items():
        rows, columns = out * hidden, size * hidden
        weights[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) / columns**0.5
        weights[f"{name}.bias"] = torch.randn(rows, generator=generator) / 10
    for name in NORMS:
        weights[f"{name}.weight"] = 1 + torch.randn(hidden, generator=generator) / 10
        weights[f"{name}.bias"] = torch.randn(hidden, generator=generator) / 10
    return {name: weight.half() for name, weight in weights.items()}


def port_call(
    size: str, weights: dict[str, Any], x: Any, k_cache: Any, v_cache: Any, cos: Any, sin: Any
) -> tuple[Any, Any, Any]:
    """(output, k_new, v_new) of the port's call: caches by token, cosines and sines padded to head_dim."""
    import torch
    from cf_ops import clusterfusion

    calls: dict[str, Any] = {
        "pythia-2.8b": clusterfusion.pythia_2b8_decoder_layer,
        "pythia-6.9b": clusterfusion.pythia_6b9_decoder_layer,
    }
    _, _, n, head_dim = k_cache.shape
    rows = [cache[0].transpose(0, 1).reshape(n, -1).contiguous() for cache in (k_cache, v_cache)]
    turn = []
    for half, rest in ((cos, 1.0), (sin, 0.0)):
        padded = torch.full((1, head_dim), rest, dtype=torch.float32, device=x.device)
        padded[:, : 2 * half.shape[1]] = torch.cat([half, half], 1)
        turn.append(padded)
    product = {name: (weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in MATRICES}
    norms = [(weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in NORMS]
    qkv, dense, up, down = product.values()
    made: tuple[Any, Any, Any] = calls[size](x, *qkv, *dense, *rows, *norms[0], *turn, *norms[1], *up, *down, n - 1)
    return made


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="small", help="hidden size and heads")
    parser.add_argument("--seq-len", type=common.integer(1), default=128, help="cache entries, the new one included")
    parser.add_argument("--runs", type=common.integer(2), default=100, help="of the same step")
    parser.add_argument("--seed", type=int, default=1, help="of weights and activations")
    parser.add_argument("--sequential", action="store_true", help="the MLP reads the attention's sum")
    args = parser.parse_args()
    args.device = common.device_of(args.device)
    import torch
    import torch_layer

    hidden, heads = SIZES[args.size]
    head_dim, n = hidden // heads, args.seq_len
    config = {
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": 1,
        "rotary_pct": 0.25,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "use_parallel_residual": not args.sequential,
    }
    weights = {name: weight.to(args.device) for name, weight in random_weights(hidden, args.seed).items()}
    generator = torch.Generator().manual_seed(args.seed + 1)
    shapes = (1, hidden), (1, heads, n, head_dim), (1, heads, n, head_dim)
    # Numbers that float16 holds, so that all dtypes get the same ones.
    x, k_cache, v_cache = (torch.randn(shape, generator=generator).half().to(args.device) for shape in shapes)
    table = [torch.from_numpy(half).to(args.device) for half in ops.rope_table(n + 1, head_dim // 4)]
    cos, sin = (half[n - 1 : n] for half in table)

    wide = [t.double() for t in (x, k_cache, v_cache)]
    reference = torch_layer.layer(
        {name: weight.double() for name, weight in weights.items()}, config, wide[0], cos, sin, *wide[1:], n
    )
    exact = {"output": reference, "k": wide[1][:, :, n - 1], "v": wide[2][:, :, n - 1]}

    kv_len = torch.tensor([n], dtype=torch.int32, device=args.device)
    position = torch.zeros(1, dtype=torch.int32, device=args.device)  # the row of cos and sin
    if args.inject_fault:
        cos, sin = (half[n : n + 1] for half in table)  # of the position behind the token's
    dtype = common.activation_dtype(args.device)
    outputs, made = set(), None
    for _ in range(args.runs):
        given = [t.to(dtype) for t in (x, k_cache, v_cache)]
        made = ops.decode_layer(weights, config, given[0], position, kv_len, cos, sin, *given[1:])
        outputs.add(b"".join(t.cpu().numpy().tobytes() for t in (made.output, made.k, made.v)))

    wide = [t.double().cpu() for t in (x, k_cache, v_cache)]
    step = [t.cpu() for t in (position, kv_len, table[0][n - 1 : n], table[1][n - 1 : n])]
    on_cpu = {name: weight.cpu() for name, weight in weights.items()}
    bound = ops.budget(ops.decode_layer, output=str(dtype).removeprefix("torch."))(
        on_cpu, config, wide[0], step[0], step[1], step[2], step[3], *wide[1:]
    )
    checks, rows = common.Checks(), []
    for name, theirs in exact.items():
        error = error_of(getattr(made, name).cpu().numpy(), theirs.cpu().numpy())
        rows.append((name, args.runs, error.mae, error.max, error.rel_l2, bound.rel_l2, len(outputs)))
        checks.expect(error.within(bound), f"{name}: within the budget")
    print(f"{args.size}: hidden {hidden}, {heads} heads, {n} cache entries, seed {args.seed}, {dtype}, {args.device}")
    common.print_table(["tensor", "runs", "MAE", "max", "rel L2", "budget", "distinct outputs"], rows)
    if args.size != "small" and not args.sequential:
        ported = port_call(args.size, weights, x, k_cache, v_cache, cos, sin)
        same = all(torch.equal(a, getattr(made, b).half()) for a, b in zip(ported, ("output", "k", "v")))
        checks.expect(same, "the port's call gives the layer's output, k and v, rounded to float16")
    checks.expect(len(outputs) == 1, f"{args.runs} runs give one output")
    return checks.end()


common.run(main, "torch")
