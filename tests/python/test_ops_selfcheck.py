"""The self-check covers every op, passes, and can fail."""

import time

import numpy as np
import pytest

from cf_ops import _core, ops, selfcheck


def test_every_op_passes_in_seconds():
    start = time.monotonic()
    rows = selfcheck.rows()
    assert time.monotonic() - start < 30
    assert [row.op for row in rows if "(" not in row.op] == _core.ops()
    assert {"linear (4 bits)", "decode_layer (8 bits)"} <= {row.op for row in rows}
    for row in rows:
        assert row.ok and row.relative_l2 <= row.budget < 1e-3, row
    # embedding and kv_append copy their inputs, so their error is 0. Every other op rounds, so an error of 0 would mean
    # that the op was compared with itself.
    assert all(row.relative_l2 > 0 for row in rows if row.op not in ("embedding", "kv_append"))


@pytest.mark.parametrize("op", [op for op in _core.ops() if op != "embedding"])
@pytest.mark.parametrize("fault", [1 + 1e-3, np.nan])
def test_a_wrong_value_is_reported(monkeypatch, op, fault):
    right = getattr(ops, op)

    def wrong(**given):
        result = right(**given)
        first = given["k_cache"] if result is None else result[0] if isinstance(result, tuple) else result
        if first.dtype == np.float32:
            first[...] *= np.float32(fault)
        return result

    monkeypatch.setattr(ops, op, wrong)
    (row,) = [row for row in selfcheck.rows() if row.op == op]
    assert not row.ok
