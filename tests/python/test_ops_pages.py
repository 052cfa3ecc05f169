"""Caches in pages, windows and streams' rings, by the op functions: the formulas written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from cf_ops import ops
from small_layer import small_layer

SEQUENCES, HEADS, KV_HEADS, HEAD_DIM, CAPACITY, PAGE = 3, 4, 2, 16, 12, 4
KV_LEN = np.array([9, 4, 7], np.int32)
RUNS = [(2, 0, 1), (0, 1, 5), (1, 6, 2)]  # out of order
TOKENS = 8
POSITIONS = np.concatenate([np.arange(KV_LEN[s] - count, KV_LEN[s]) for s, _, count in RUNS]).astype(np.int32)


def numbers(shape, seed=0, dtype=np.float64):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def pages_of(cache, seed=0):
    """A cache's entries in pages in random order, among pages of NaN, and the table. What no sequence has reached has
    no page."""
    used = [(b, i) for b in range(SEQUENCES) for i in range(-(-int(KV_LEN[b]) // PAGE))]
    order = np.random.default_rng(seed).permutation(2 * len(used))
    pool = np.full((len(order), cache.shape[1], PAGE, HEAD_DIM), np.nan, cache.dtype)
    table = np.full((SEQUENCES, CAPACITY // PAGE), -1, np.int32)
    for (b, i), page in zip(used, order):
        table[b, i] = page
        pool[page] = cache[b, :, i * PAGE : (i + 1) * PAGE]
    return pool, table


def in_pages(pools, table):
    """The entries of the pages of a table, as a contiguous cache has them; those without a page are 0."""
    made = []
    for pool in pools:
        cache = np.zeros((SEQUENCES, pool.shape[1], CAPACITY, HEAD_DIM), pool.dtype)
        for b, i in np.argwhere(table >= 0):
            cache[b, :, i * PAGE : (i + 1) * PAGE] = pool[table[b, i]]
        made.append(cache)
    return made


def caches(heads=KV_HEADS):
    """Keys and values; 0 where pages_of() has no page."""
    made = [numbers((SEQUENCES, heads, CAPACITY, HEAD_DIM), seed) for seed in (1, 2)]
    for cache in made:
        for b, length in enumerate(KV_LEN):
            cache[b, :, -(-int(length) // PAGE) * PAGE :] = 0
    return made


def paged(contiguous):
    (k, table), (v, _) = (pages_of(cache) for cache in contiguous)
    return (k, v), table


def same(a, b):
    assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_pages_have_the_bits_of_a_contiguous_cache():
    cos, sin = ops.rope_table(CAPACITY, HEAD_DIM)
    qkv = numbers((TOKENS, HEADS + 2 * KV_HEADS, 1, HEAD_DIM))
    contiguous, by_parts = caches(), caches()
    pools, table = paged(contiguous)
    parts_pools, _ = paged(by_parts)
    usual = dict(layout="separate", runs=RUNS)
    q = ops.rope_append(qkv, cos, sin, POSITIONS, KV_LEN, *contiguous, **usual)
    same(ops.rope_append(qkv, cos, sin, POSITIONS, KV_LEN, *pools, **usual, page_table=table), q)
    for got, expected in zip(in_pages(pools, table), contiguous):
        same(got, expected)
    _, k, v = ops.rope(qkv, cos, sin, POSITIONS, layout="separate", kv_heads=KV_HEADS)
    ops.kv_append(k, v, KV_LEN, *parts_pools, runs=RUNS, page_table=table)
    for got, expected in zip(in_pages(parts_pools, table), contiguous):
        same(got, expected)
    y = ops.attention(q, *contiguous, KV_LEN, scale=0.25, runs=RUNS)
    same(ops.attention(q, *pools, KV_LEN, scale=0.25, runs=RUNS, page_table=table), y)
    assert np.isnan(pools[0]).any()  # foreign pages are as they were


def test_products_append_to_pages():
    hidden = 24
    cos, sin = ops.rope_table(CAPACITY, HEAD_DIM)
    x, gamma, beta = numbers((TOKENS, hidden)), numbers((hidden,), 3), numbers((hidden,), 4)
    weight, bias = numbers((3 * KV_HEADS * HEAD_DIM, hidden), 5), numbers((3 * KV_HEADS * HEAD_DIM,), 6)
    contiguous = caches()
    pools, table = paged(contiguous)
    given = x, gamma, beta, weight, bias, cos, sin, POSITIONS, KV_LEN
    expected = ops.ln_qkv(*given, *contiguous, runs=RUNS)
    for a, b in zip(ops.ln_qkv(*given, *pools, runs=RUNS, page_table=table), expected):
        same(a, b)
    for got, cache in zip(in_pages(pools, table), contiguous):
        same(got, cache)


def attention_by_formula(q, k, v, sees, q_sinks=None, sinks=0):
    """Row by row: `sees(position, j)` says which keys a row sees."""
    y = np.zeros_like(q)
    for sequence, first, count in RUNS:
        for i in range(count):
            position = KV_LEN[sequence] - count + i
            for h in range(HEADS):
                kv = h // (HEADS // KV_HEADS)
                seen = [j for j in range(position + 1) if sees(position, j)]
                queries = [(q_sinks if j < sinks else q)[first + i, h] for j in seen]
                scores = np.exp([0.25 * query @ k[sequence, kv, j] for query, j in zip(queries, seen)])
                y[first + i, h] = scores @ v[sequence, kv, seen] / scores.sum()
    return y


@pytest.mark.parametrize("keys, sinks", [(3, 0), (1, 0), (100, 0), (3, 2), (4, 1)])
def test_a_window_has_the_newest_keys_and_the_sinks(keys, sinks):
    q, q_sinks = numbers((TOKENS, HEADS, HEAD_DIM), 7), numbers((TOKENS, HEADS, HEAD_DIM), 8)
    k, v = caches()
    (k_pages, v_pages), table = paged((k, v))
    options = dict(scale=0.25, runs=RUNS, window=(keys, sinks), q_sinks=q_sinks if sinks else None)
    got = ops.attention(q, k, v, KV_LEN, **options)
    expected = attention_by_formula(q, k, v, lambda at, j: j > at - keys or j < sinks, q_sinks, sinks)
    assert np.abs(got - expected).max() < 1e-13
    same(ops.attention(q, k_pages, v_pages, KV_LEN, **options, page_table=table), got)


def test_a_streams_new_entries_take_the_oldest_ones_places():
    keys, sinks, length = 6, 2, 41
    k, v = numbers((length, KV_HEADS, HEAD_DIM), 1), numbers((length, KV_HEADS, HEAD_DIM), 2)
    cache = [np.zeros((1, KV_HEADS, CAPACITY, HEAD_DIM)) for _ in range(2)]
    for t in range(length):
        kv_len = np.array([t + 1], np.int32)
        ops.kv_append(k[t : t + 1], v[t : t + 1], kv_len, *cache, window=(keys, sinks))
    places = [t if t < CAPACITY else sinks + (t - sinks) % (CAPACITY - sinks) for t in range(length)]
    for place in range(CAPACITY):
        newest = max(t for t in range(length) if places[t] == place)
        assert (cache[0][0, :, place] == k[newest]).all() and (cache[1][0, :, place] == v[newest]).all()


def test_a_layer_takes_pages():
    weights, config = small_layer(HEADS, HEAD_DIM, CAPACITY, np.float64)
    cos, sin = ops.rope_table(CAPACITY, HEAD_DIM // 2)
    contiguous = caches(HEADS)
    pools, table = paged(contiguous)
    given = weights, config, numbers((TOKENS, HEADS * HEAD_DIM)), POSITIONS, KV_LEN, cos, sin
    expected = ops.decode_layer(*given, *contiguous, runs=RUNS)
    got = ops.decode_layer(*given, *pools, runs=RUNS, page_table=table)
    for a, b in zip(got, expected):
        same(a, b)
    for a, b in zip(in_pages(pools, table), contiguous):
        same(a, b)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(page_table=np.zeros((3, 3), np.int64)), ValueError, "kv_append: 'page_table' has dtype int64, expected"),
        (dict(page_table=np.zeros(3, np.int32)), ValueError, r"kv_append: 'page_table' has shape \(3\), expected 2"),
        (
            dict(page_table=np.zeros((2, 3), np.int32)),
            ValueError,
            r"'page_table' has shape \(2, 3\), expected \(3, 3\)",
        ),
        (dict(page_table=np.zeros((3, 3), np.int32)), ValueError, "'page_table'.*for sequence .* and for sequence"),
        (dict(page_table=np.full((3, 3), 99, np.int32)), ValueError, "'page_table'.* must be 0 to 11, got 99"),
        (dict(window=3), TypeError, r"kv_append: window must be \(keys, sinks\), got 3"),
        (dict(window=(3,)), TypeError, r"kv_append: window must be \(keys, sinks\), got \(3,\)"),
        (dict(window=(1 << 70, 0)), ValueError, r"kv_append: 'window' must be \(keys, sinks\), got"),
        (dict(window=(-1, 0)), ValueError, "kv_append: window must be 0 or more keys"),
        (dict(window=(12, 4)), ValueError, "kv_append: capacity must be at least"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(change, error, message):
    contiguous = caches()
    pools, table = paged(contiguous)
    assert len(pools[0]) == 12
    given = numbers((TOKENS, KV_HEADS, HEAD_DIM), 1), numbers((TOKENS, KV_HEADS, HEAD_DIM), 2), KV_LEN
    before = [pool.copy() for pool in pools]
    with pytest.raises(error, match=message):
        ops.kv_append(*given, *pools, **{"runs": RUNS, "page_table": table, **change})
    for a, b in zip(pools, before):
        same(a, b)
