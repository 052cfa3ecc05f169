#!/usr/bin/env python3
"""Runs a decode step of one layer of a checkpoint, against the same layer in torch's float64.

The hidden state and the cache are those of a text that ran through the whole model up to the layer. --benchmark times
the layer beside torch's, in float32 and in the checkpoint's dtype; runs take turns, on weights that are read again and
again. Quantised layers are dequantised for torch. Needs torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cf_ops
import common
from cf_ops import ops
from checkpoints import DIRECTORY, Checkpoint
from common import error_of


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_argument("--model", default=DIRECTORY / "neox-d80", metavar="DIR", help="checkpoint directory")
    parser.add_argument("--layer", type=common.integer(0), default=1)
    parser.add_argument("--seq-len", type=common.integer(2), default=128, help="tokens of the text")
    parser.add_argument("--seed", type=int, default=1, help="of the text's ids")
    parser.add_argument("--benchmark", action="store_true", help="time the layer too")
    parser.add_argument("--runs", type=common.integer(1), default=50, help="of --benchmark")
    args = parser.parse_args()
    args.device = common.device_of(args.device)
    import torch
    import torch_layer

    checkpoint, n = Checkpoint(args.model), args.seq_len
    config = checkpoint.config
    weights = checkpoint.layer(args.layer)

    # What the layer reads when the text's last token comes: its hidden state, and the keys and values before it.
    before = f"layers.{args.layer - 1}.output" if args.layer else "embed_in"
    prefix = f"layers.{args.layer}"
    names = {
        "k": f"{prefix}.attention.rotary_emb.k",
        "v": f"{prefix}.attention.rotary_emb.v",
        "output": f"{prefix}.output",
    }
    ids = common.random_ids(n, config["vocab_size"], args.seed)
    _, taps = cf_ops.load(args.model).run(ids, [before, *names.values()], rows=1)
    dtype = common.activation_dtype(args.device)
    state = [torch.from_numpy(taps[before][-1:])]
    for name in ("k", "v"):
        rows = torch.from_numpy(taps[names[name]].reshape(n, checkpoint.heads, -1)).clone()
        rows[n - 1] = float("nan")  # the step writes this entry
        state.append(rows.transpose(0, 1)[None].contiguous())

    state = [t.to(dtype).float() for t in state]  # numbers that the layer's dtype holds
    rounding = 0.0 if dtype == torch.float32 else float(torch.finfo(dtype).eps) / 2  # of what the whole model has read
    cos, sin = (torch.from_numpy(half) for half in checkpoint.rope_table(n + 1))
    row = slice(n, n + 1) if args.inject_fault else slice(n - 1, n)  # the fault: the position behind the token's
    position, kv_len = torch.zeros(1, dtype=torch.int32), torch.tensor([n], dtype=torch.int32)

    def torchs(dtype: torch.dtype, device: str = args.device) -> tuple[dict[str, Any], list[Any]]:
        step = [t.to(device, dtype) for t in state]
        turn = cos[n - 1 : n].to(device), sin[n - 1 : n].to(device)
        return torch_layer.tensors(weights, device, dtype), [step[0], *turn, *step[1:], n]

    exact_weights, step = torchs(torch.float64)
    output = torch_layer.layer(exact_weights, config, *step)
    exact = {"k": step[3][0, :, n - 1], "v": step[4][0, :, n - 1], "output": output}

    ours = torch_layer.tensors(weights, args.device)
    given = [t.to(args.device, dtype) for t in state]
    tail = [t.to(args.device) for t in (position, kv_len, cos[row], sin[row])]

    def layer() -> ops.LayerOutputs | ops.HeadNormLayerOutputs:
        return ops.decode_layer(ours, config, given[0], *tail, *given[1:])

    made = layer()
    wide, turn = [t.double() for t in state], (cos[n - 1 : n], sin[n - 1 : n])
    bound = ops.budget(ops.decode_layer, output=str(dtype).removeprefix("torch."))(
        torch_layer.tensors(weights, "cpu"), config, wide[0], position, kv_len, *turn, *wide[1:]
    )
    checks, rows = common.Checks(), []
    for name, tap in names.items():
        mine = getattr(made, name).cpu().numpy().ravel()
        error = error_of(mine, exact[name].cpu().numpy().ravel())
        rows.append((tap, error.mae, error.max, error.rel_l2, bound.rel_l2))
        checks.expect(error.within(bound), f"{name}: within the budget of torch's float64")
        # The whole model computed in float32: both may be a budget away from the exact value, and the layer passes on
        # the rounding of what it has read.
        both = ops.Budget(2 * bound.rel_l2 + rounding, 2 * bound.rel_max + rounding)
        whole = error_of(mine, taps[tap][-1].ravel())
        checks.expect(whole.within(both), f"{name}: within two budgets of the whole model's")
    print(f"{checkpoint.directory.name}: layer {args.layer}, {n} cache entries, {dtype}, {args.device}")
    common.print_table(["tap", "MAE", "max", "rel L2", "budget"], rows)

    if args.benchmark:
        stored = ours["input_layernorm.weight"].dtype
        calls: dict[str, Callable[[], object]] = {f"cf_ops, {dtype}, weights in {stored}": layer}
        for compute in dict.fromkeys((torch.float32, stored)):
            converted, step = torchs(compute)
            calls[f"torch, {compute}"] = functools.partial(torch_layer.layer, converted, config, *step)
        with torch.inference_mode():
            times = common.medians_ms(
                {name: common.synchronised(call, args.device) for name, call in calls.items()}, args.runs
            )
        first = next(iter(times.values()))
        print()
        common.print_table(
            ["layer", f"median ms of {args.runs}", "time / cf_ops"], [(name, t, t / first) for name, t in times.items()]
        )
    return checks.end()


common.run(main, "torch")
