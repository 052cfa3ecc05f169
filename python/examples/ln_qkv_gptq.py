#!/usr/bin/env python3
"""LayerNorm and a QKV product with GPTQ weights, against the same formula in numpy's float64.

quick: one case. full: every group size, zero format, number of key heads, batch and length of a list. integration: a
layer of a GPTQ checkpoint, against the dequantised weights and against the whole model. performance: the op beside the
two ops that it is made of, and beside dense float16 weights, in one run. Needs numpy alone; on a GPU torch too, and
activations are float16 there.
"""

from __future__ import annotations

import importlib.util
import itertools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np

import cf_ops
import common
from cf_ops import ops
from checkpoints import DIRECTORY, Array, Checkpoint, dequantised
from common import Checks, error_of, print_table

EPS = 1e-5


def device_of(wanted: str | None) -> str:
    """The device that was asked for, or the best one."""
    if wanted == "cpu" or wanted is None and not importlib.util.find_spec("torch"):
        return "cpu"
    if not importlib.util.find_spec("torch"):
        raise ValueError("--device cuda: needs torch, which this Python does not have: pip install torch")
    return common.device_of(wanted)


def stored_dtype(device: str) -> str:
    return "float32" if device == "cpu" else "float16"


def given_on(value: Any, device: str) -> Any:
    """An argument of an op for a device: the same number; on a GPU a tensor, of float16 where it is an activation."""
    if device == "cpu":
        return value
    import torch

    if isinstance(value, ops.GptqWeight):
        return ops.GptqWeight(**{name: given_on(part, device) for name, part in vars(value).items()})
    return torch.from_numpy(value.copy()).to(device) if isinstance(value, np.ndarray) else value


def activation_on(array: Array, device: str) -> Any:
    return given_on(array if device == "cpu" else array.astype(np.float16), device)


def arrays_of(tensors: Any, device: str) -> list[Array]:
    return [tensor if device == "cpu" else tensor.cpu().numpy() for tensor in tensors]


def case_on(case: dict[str, Any], device: str) -> dict[str, Any]:
    moved = {name: given_on(value, device) for name, value in case.items()}
    return moved | {"x": activation_on(case["x"], device)}


def random_case(
    hidden: int, heads: int, kv_heads: int, group: int, is_v2: bool, batch: int, seq: int
) -> dict[str, Any]:
    """Arguments of ln_qkv_heads: random numbers that float16 holds, and random 4-bit codes."""
    rng = np.random.default_rng(1)
    out = hidden // heads * (heads + 2 * kv_heads)
    groups = -(-hidden // group)

    def words(*shape: int) -> Array:
        return rng.integers(-(2**31), 2**31, shape, np.int32)

    weight = ops.GptqWeight(
        qweight=words(hidden // 8, out),
        qzeros=words(groups, out // 8),
        scales=rng.normal(0.01, 0.001, (groups, out)).astype(np.float16),
        g_idx=np.arange(hidden, dtype=np.int32) // np.int32(group),
        group_size=group,
        zero_offset=0 if is_v2 else 1,
    )
    x = rng.normal(size=(batch, seq, hidden)).astype(np.float16).astype(np.float32)
    gamma, beta = (rng.normal(mean, 0.1, hidden).astype(np.float16) for mean in (1, 0))
    return {"x": x, "gamma": gamma, "beta": beta, "weight": weight, "heads": heads, "kv_heads": kv_heads, "eps": EPS}


def reference(x: Array, gamma: Array, beta: Array, weight: Any, heads: int, kv_heads: int, eps: float) -> list[Array]:
    """q, k and v of (batch, seq, hidden) in float64, from the dequantised matrix."""
    x = x.astype(np.float64)
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * gamma.astype(np.float64) + beta
    rows = normed @ dequantised(weight).astype(np.float64).T
    parts = rows.reshape(*x.shape[:2], heads + 2 * kv_heads, -1).transpose(0, 2, 1, 3)
    return np.split(parts, [heads, heads + kv_heads], axis=1)


def with_fault(weight: Any) -> Any:
    """The same weight read as the other zero format, so that every zero is off by one."""
    fields = {name: getattr(weight, name) for name in ("qweight", "qzeros", "scales", "g_idx", "bits", "group_size")}
    return ops.GptqWeight(**fields, zero_offset=1 - weight.zero_offset)


def check_cases(args: Namespace, checks: Checks, cases: list[tuple[Any, ...]]) -> None:
    rows: list[tuple[object, ...]] = []
    far = changed = 0
    for hidden, heads, kv_heads, group, is_v2, batch, seq in cases:
        case = random_case(hidden, heads, kv_heads, group, is_v2, batch, seq)
        exact = reference(**case)
        measured = ops.budget(ops.ln_qkv_heads, output=stored_dtype(args.device))
        bound = measured(**{**case, "x": case["x"].astype(np.float64)})
        given = {**case, "weight": with_fault(case["weight"])} if args.inject_fault else case
        given = case_on(given, args.device)
        got, again = (arrays_of(ops.ln_qkv_heads(**given), args.device) for _ in range(2))
        errors = [error_of(mine, theirs) for mine, theirs in zip(got, exact)]
        worst = max(errors, key=lambda error: error.rel_l2)
        label = f"{hidden} / {heads} / {kv_heads}", group, "v2" if is_v2 else "v1", f"{batch} x {seq}"
        rows.append((*label, worst.mae, worst.max, worst.rel_l2, bound.rel_l2))
        far += not all(error.within(bound) for error in errors)
        changed += not all((a == b).all() for a, b in zip(got, again))
    print_table(["hidden / heads / key heads", "group", "zeros", "batch x seq", "MAE", "max", "rel L2", "budget"], rows)
    checks.expect(far == 0, f"q, k, v of {len(cases)} cases: {far} beyond the budget")
    checks.expect(changed == 0, f"q, k, v of {len(cases)} cases: {changed} with other bits in a second run")


def integration(args: Namespace, checks: Checks) -> None:
    checkpoint, model = Checkpoint(args.model), cf_ops.load(args.model)
    weights, n, heads, head_dim = checkpoint.layer(args.layer), args.seq_len, checkpoint.heads, checkpoint.head_dim
    weight, bias = weights["attention.query_key_value.weight"], weights.get("attention.query_key_value.bias")
    if not isinstance(weight, ops.GptqWeight):
        raise ValueError(f"{args.model}: layer {args.layer}: expected a quantised query_key_value, got a dense one")
    prefix = f"layers.{args.layer}"
    before = f"layers.{args.layer - 1}.output" if args.layer else "embed_in"
    names = [f"{prefix}.attention.rotary_emb.q", f"{prefix}.attention.rotary_emb.k", f"{prefix}.attention.rotary_emb.v"]
    _, taps = model.run(common.random_ids(n, model.config["vocab_size"], 1), [before, *names])

    stored = stored_dtype(args.device)
    x = taps[before].astype(stored)  # numbers that the op's dtype holds
    # What the whole model has read was not rounded to it.
    rounding = 0.0 if stored == "float32" else float(np.finfo(stored).eps) / 2

    def call(weight: Any, bias: Array | None, dtype: str) -> list[Any]:
        norm = weights["input_layernorm.weight"], weights["input_layernorm.bias"]
        if not isinstance(weight, ops.GptqWeight):
            norm = norm[0].astype(weight.dtype), norm[1].astype(weight.dtype)  # dense weights share a dtype
        caches = (np.zeros((1, heads, n, head_dim), dtype) for _ in range(2))
        step = np.arange(n, dtype=np.int32), np.array([n], np.int32)
        return [x.astype(dtype), *norm, weight, bias, *checkpoint.rope_table(n), *step, *caches]

    eps = model.config["layer_norm_eps"]
    bound = ops.budget(ops.ln_qkv, output=stored)(*call(weight, bias, "float64"), eps=eps)
    wide_bias = None if bias is None else bias.astype(np.float32)
    exact = ops.ln_qkv(*call(dequantised(weight), wide_bias, "float64"), eps=eps)
    given = call(with_fault(weight) if args.inject_fault else weight, bias, stored)
    got = arrays_of(ops.ln_qkv(*(given_on(value, args.device) for value in given), eps=eps), args.device)
    rows = []
    for name, mine, dense in zip(names, got, exact):
        for against, theirs in (("dequantised", dense), ("whole model", taps[name].reshape(mine.shape))):
            error = error_of(mine, theirs)
            rows.append((name, against, error.mae, error.max, error.rel_l2, bound.rel_l2))
            # Two computations may be a budget away from the exact one each, and the op passes on its input's rounding.
            both = ops.Budget(2 * bound.rel_l2 + rounding, 2 * bound.rel_max + rounding)
            allowed = bound if against == "dequantised" else both
            checks.expect(error.within(allowed), f"{name} against the {against}: within the budget")
    print_table([f"tap of {checkpoint.directory.name}", "against", "MAE", "max", "rel L2", "budget"], rows)


def performance(args: Namespace, checks: Checks) -> None:
    hidden, heads = args.hidden, args.heads
    case = random_case(hidden, heads, heads, args.group, False, 1, 1)
    dense = {**case, "weight": dequantised(case["weight"]).astype(np.float16)}
    given = {**case, "weight": with_fault(case["weight"])} if args.inject_fault else case
    case_there, dense, given = (case_on(one, args.device) for one in (case, dense, given))
    x, norm = case_there["x"].reshape(1, hidden), (case_there["gamma"], case_there["beta"])

    def separate() -> Any:
        return ops.linear(ops.layernorm(x, *norm, eps=EPS), case_there["weight"])

    calls: dict[str, Callable[[], object]] = {
        "ln_qkv_heads, GPTQ": lambda: ops.ln_qkv_heads(**given),
        "layernorm, then linear, GPTQ": separate,
        "ln_qkv_heads, dense float16": lambda: ops.ln_qkv_heads(**dense),
    }
    if args.device != "cpu":
        calls = {name: common.synchronised(call, args.device) for name, call in calls.items()}
    times = common.medians_ms(calls, args.runs)
    first = times["ln_qkv_heads, GPTQ"]
    rows = [(name, hidden, heads, time, time / first) for name, time in times.items()]
    print_table(["call", "hidden", "heads", f"median ms of {args.runs}", "time / first"], rows)
    measured = ops.budget(ops.ln_qkv_heads, output=stored_dtype(args.device))
    bound = measured(**{**case, "x": case["x"].astype(np.float64)})
    fused = np.concatenate([part.ravel() for part in arrays_of(ops.ln_qkv_heads(**given), args.device)])
    (parts,) = arrays_of([separate()], args.device)
    allowed = ops.Budget(2 * bound.rel_l2, 2 * bound.rel_max)  # neither side is exact
    checks.expect(error_of(fused, parts.ravel()).within(allowed), "the op equals the two ops within the budget")


def main() -> int:
    parser = common.Parser(__doc__)
    parser.add_argument("mode", nargs="?", choices=["quick", "full", "integration", "performance"], default="quick")
    parser.add_argument("--model", default=DIRECTORY / "neox-gptq-sym", metavar="DIR", help="of integration")
    parser.add_argument("--layer", type=common.integer(0), default=0, help="of integration")
    parser.add_argument("--seq-len", type=common.integer(1), default=17, help="of integration")
    parser.add_argument("--hidden", type=common.integer(1), default=2560, help="of performance")
    parser.add_argument("--heads", type=common.integer(1), default=32, help="of performance")
    parser.add_argument("--group", type=common.integer(1), default=128, help="of performance")
    parser.add_argument("--runs", type=common.integer(1), default=20, help="of performance")
    args = parser.parse_args()
    if args.hidden % args.heads:
        raise ValueError(f"--heads: expected a divisor of --hidden {args.hidden}, got {args.heads}")
    args.device = device_of(args.device)

    checks = Checks()
    if args.mode == "quick":
        check_cases(args, checks, [(256, 4, 4, 128, False, 2, 3)])
    elif args.mode == "full":
        sizes = [(256, 4, 4), (320, 4, 4), (512, 8, 2)]
        cases = itertools.product(sizes, (32, 64, 128), (False, True), ((1, 1), (3, 5)))
        check_cases(args, checks, [(*size, group, is_v2, *rows) for size, group, is_v2, rows in cases])
    else:
        {"integration": integration, "performance": performance}[args.mode](args, checks)
    return checks.end()


common.run(main)
