"""Steps whose sequences have different numbers of tokens: what a run is given does not depend on the other runs."""

from __future__ import annotations

import numpy as np
import pytest

from cf_ops import ops
from small_layer import small_layer

HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 4, 2, 16, 12
# Of four sequences; the second has none, and the order is not theirs.
RUNS = [(3, 0, 1), (0, 1, 5), (2, 6, 2)]
KV_LEN = np.array([9, 0, 2, 7], np.int32)
TOKENS = 8
# The position of each row.
POSITIONS = np.concatenate([np.arange(KV_LEN[s] - count, KV_LEN[s]) for s, _, count in RUNS]).astype(np.int32)


def numbers(shape, dtype, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def caches(dtype, heads=KV_HEADS):
    return [numbers((4, heads, CAPACITY, HEAD_DIM), dtype, seed) for seed in (1, 2)]


def of_run(run, rows=(), sequences=()):
    """The part of tensors that is a run's: its rows, and its sequence."""
    sequence, first, count = run
    return [t[first : first + count] for t in rows], [t[sequence : sequence + 1] for t in sequences]


def same(a, b):
    assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_mixed_step_has_the_bits_of_a_call_for_each_run(dtype):
    cos, sin = ops.rope_table(CAPACITY, HEAD_DIM)
    qkv = numbers((TOKENS, HEADS + 2 * KV_HEADS, 1, HEAD_DIM), dtype)
    together, apart, by_parts = caches(dtype), caches(dtype), caches(dtype)
    q = ops.rope_append(qkv, cos, sin, POSITIONS, KV_LEN, *together, layout="separate", runs=RUNS)
    y = ops.attention(q, *together, KV_LEN, scale=0.25, runs=RUNS)
    assert q.shape == y.shape == (TOKENS, HEADS, HEAD_DIM)
    for run in RUNS:
        (own_qkv, own_positions, own_y), (length, *own) = of_run(run, (qkv, POSITIONS, y), (KV_LEN, *apart))
        own_q = ops.rope_append(own_qkv, cos, sin, own_positions, length, *own, layout="separate")
        same(ops.attention(own_q, *own, length, scale=0.25), own_y)
    _, k, v = ops.rope(qkv, cos, sin, POSITIONS, layout="separate", kv_heads=KV_HEADS)
    ops.kv_append(k, v, KV_LEN, *by_parts, runs=RUNS)
    for a, b, c in zip(together, apart, by_parts):
        same(a, b)
        same(a, c)
    assert all((new[1] == old[1]).all() for new, old in zip(together, caches(dtype)))  # no run, no change
    budget = ops.budget(ops.attention)(q, *together, KV_LEN, scale=0.25, runs=RUNS)
    assert 0 < budget.rel_l2 < 1e-4


def test_products_in_a_mixed_step_are_those_of_a_call_for_each_run():
    dtype, hidden = np.float64, 24
    cos, sin = ops.rope_table(CAPACITY, HEAD_DIM)
    x = numbers((TOKENS, hidden), dtype)
    gamma, beta = numbers((hidden,), np.float32, 3), numbers((hidden,), np.float32, 4)
    weight, bias = numbers((3 * KV_HEADS * HEAD_DIM, hidden), np.float32, 5), numbers(
        (3 * KV_HEADS * HEAD_DIM,), np.float32
    )
    together, apart = caches(dtype), caches(dtype)
    made = ops.ln_qkv(x, gamma, beta, weight, bias, cos, sin, POSITIONS, KV_LEN, *together, runs=RUNS)
    by_head = ops.ln_qkv_heads(x[None], gamma, beta, weight, bias, heads=2, kv_heads=2, runs=RUNS)
    for run in RUNS:
        (own_x, own_positions, *own_made), (length, *own) = of_run(run, (x, POSITIONS, *made), (KV_LEN, *apart))
        parts = ops.ln_qkv(own_x, gamma, beta, weight, bias, cos, sin, own_positions, length, *own)
        for part, mine in zip(parts, own_made):
            assert np.abs(part - mine).max() < 1e-12
        # A run's results lie as those of a call of its own: (heads, count, head_dim).
        _, first, count = run
        for part, whole in zip(ops.ln_qkv_heads(own_x[None], gamma, beta, weight, bias, heads=2, kv_heads=2), by_head):
            assert whole.shape == (1, 2, TOKENS, HEAD_DIM)
            rows = whole.reshape(-1)[first * 2 * HEAD_DIM : (first + count) * 2 * HEAD_DIM]
            assert np.abs(rows.reshape(part.shape) - part).max() < 1e-12
    for a, b in zip(together, apart):
        assert np.abs(a - b).max() < 1e-12


def test_a_layer_takes_runs():
    weights, config = small_layer(HEADS, HEAD_DIM, CAPACITY, np.float32)
    x = numbers((TOKENS, HEADS * HEAD_DIM), np.float64)
    cos, sin = ops.rope_table(CAPACITY, HEAD_DIM // 2)
    together, apart = caches(np.float64, HEADS), caches(np.float64, HEADS)
    made = ops.decode_layer(weights, config, x, POSITIONS, KV_LEN, cos, sin, *together, runs=RUNS)
    for run in RUNS:
        (own_x, own_positions, output), (length, *own) = of_run(run, (x, POSITIONS, made.output), (KV_LEN, *apart))
        alone = ops.decode_layer(weights, config, own_x, own_positions, length, cos, sin, *own)
        assert np.abs(alone.output - output).max() < 1e-11
    for a, b in zip(together, apart):
        assert np.abs(a - b).max() < 1e-11


@pytest.mark.parametrize(
    "runs, error, message",
    [
        ([], ValueError, r"kv_append: runs: expected at least one, got none"),
        ([(0, 0)], ValueError, r"kv_append: runs\[0\] must be \(sequence, first_row, count\), got \(0, 0\)"),
        ([(0, 0, 1.5)], TypeError, r"kv_append: runs must be a list of \(sequence, first_row, count\), got"),
        (3, TypeError, r"kv_append: runs must be a list of \(sequence, first_row, count\), got 3"),
        ([(0, 0, 1 << 70)], ValueError, r"kv_append: 'runs' must be a list of \(sequence, first_row, count\)"),
        ([(4, 0, 8)], ValueError, r"kv_append: runs\[0\]: expected a sequence of 0 to 3, got 4"),
        ([(0, 0, 5), (0, 5, 3)], ValueError, r"kv_append: runs\[1\]: expected one run a sequence, got 0"),
        ([(0, 0, 5), (2, 6, 2)], ValueError, r"kv_append: runs\[1\]: expected the first row 5, got 6"),
        ([(0, 0, 5)], ValueError, r"kv_append: runs: expected 8 rows in all, got 5"),
        ([(1, 0, 8)], None, None),  # idle, since its length is 0
    ],
)
def test_runs_that_do_not_fit_are_refused_and_nothing_is_written(runs, error, message):
    k, v = (numbers((TOKENS, KV_HEADS, HEAD_DIM), np.float32, seed) for seed in (1, 2))
    written = caches(np.float32)
    if error:
        with pytest.raises(error, match=message):
            ops.kv_append(k, v, KV_LEN, *written, runs=runs)
    else:
        ops.kv_append(k, v, KV_LEN, *written, runs=runs)
    for a, b in zip(written, caches(np.float32)):
        same(a, b)


def test_ops_without_sequences_take_no_runs():
    with pytest.raises(TypeError, match="runs"):
        ops.layernorm(numbers((2, 8), np.float32), np.ones(8, np.float32), np.ones(8, np.float32), runs=[(0, 0, 2)])
    for op in (ops.attention, ops.kv_append, ops.rope_append, ops.ln_qkv, ops.ln_qkv_heads, ops.decode_layer):
        assert "``runs`` is a list of (sequence, first_row, count)" in op.__doc__
