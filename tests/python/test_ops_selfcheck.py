"""The self-check covers every op on every device, passes, and can fail."""

import ctypes
import time

import numpy as np
import pytest
from cuda_models import gpu

from cf_ops import _core, ops, selfcheck

EXACT = ("embedding", "kv_append")  # they copy their inputs
CASES = [
    (op, bits)
    for op in _core.ops()
    for bits in ((0, 4, 8) if any(role == "gptq" for _, role, *_ in _core.op_example(op, 4)[0]) else (0,))
]


def check_rows(rows, most):
    assert [row.op for row in rows if "(" not in row.op and "pythia" not in row.op] == _core.ops()
    assert {"linear (4 bits)", "decode_layer (8 bits)"} <= {row.op for row in rows}
    for row in rows:
        assert row.ok and row.relative_l2 <= row.budget < most, row
    # Every other op rounds, so an error of 0 would mean that the op was compared with itself.
    assert all(row.relative_l2 > 0 for row in rows if row.op not in EXACT)


def test_every_op_passes_in_seconds():
    start = time.monotonic()
    rows = selfcheck.rows()
    assert time.monotonic() - start < 30
    check_rows([row for row in rows if row.device == "cpu"], 1e-3)


@gpu
def test_every_op_passes_on_a_gpu():
    rows = [row for row in selfcheck.rows() if row.device == "cuda"]
    assert {row.op for row in rows if "pythia" in row.op} == {"pythia-14m, float16", "pythia-14m, bfloat16"}
    check_rows([row for row in rows if "pythia" not in row.op], 1e-2)


@gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("op", _core.ops())
def test_a_gpu_without_torch_makes_the_same_bits_twice(op, dtype):
    first, second = (selfcheck.written_on_gpu(op, 0, dtype) for _ in range(2))
    assert len(first) == len(second) > 0 and all(map(np.array_equal, first, second))


@gpu
def test_a_block_of_a_gpus_memory():
    there, back = np.arange(1000, dtype=np.int32), np.zeros(1000, np.int32)
    block = _core.DeviceBlock(0, there.nbytes)
    assert block.bytes == there.nbytes and block.data_ptr() % 256 == 0
    block.write(there.ctypes.data)
    block.read(back.ctypes.data)
    assert np.array_equal(there, back)
    with pytest.raises(MemoryError, match="a block: needs .* GB of device memory, .* are free"):
        _core.DeviceBlock(0, 1 << 45)


@pytest.mark.skipif(_core.has_cuda(), reason="this build has the CUDA backend")
def test_a_block_needs_the_cuda_backend():
    with pytest.raises(NotImplementedError, match="this build of cf_ops has no CUDA backend"):
        _core.DeviceBlock(0, 16)


class Block:
    """In place of a block of a GPU's memory."""

    def __init__(self, device, bytes):
        assert device == 0 and bytes > 0
        self.memory = np.full(bytes, 255, np.uint8)

    def data_ptr(self):
        return self.memory.ctypes.data

    def write(self, address):
        ctypes.memmove(self.data_ptr(), address, self.memory.nbytes)

    def read(self, address):
        ctypes.memmove(address, self.data_ptr(), self.memory.nbytes)


def stand_in(monkeypatch, fault=1.0):
    """Lets the CPU run what the check asks a GPU for."""

    class Bound:
        def __init__(self, op, tensors, scalars):
            self.call, self.gptq = (op, tensors, scalars), bind_op(op, tensors, scalars).gptq

        def pack(self, number, device, stream, addresses, allocate):
            assert (device, stream) == (0, 0) and len(addresses) == len(self.call[1])
            return allocate(16)

        def run(self, device, stream, addresses, scalars, packed, allocate):
            op, tensors, bound = self.call
            assert (device, stream, len(packed)) == (0, 0, len(self.gptq))
            described = {n: (at, *about[1:]) for (n, about), at in zip(tensors.items(), addresses, strict=True)}
            _core.run_op(op, described, {**bound, **scalars})
            if fault != 1:
                name = "k_cache" if op == "kv_append" else next(n for n in ("y", "h", "y1", "q", "attn_in") if n in tensors)
                address, _, shape = described[name]
                values = np.ctypeslib.as_array((ctypes.c_float * int(np.prod(shape))).from_address(address))
                values *= np.float32(fault)

    bind_op = _core.bind_op
    monkeypatch.setattr(_core, "bind_op", Bound)
    monkeypatch.setattr(_core, "DeviceBlock", Block)


@pytest.mark.parametrize("op, bits", CASES)
def test_what_a_gpu_is_asked_for(monkeypatch, op, bits):
    stand_in(monkeypatch)
    given = selfcheck.arguments(op, "float32", bits)
    result = getattr(ops, op)(**given)
    outputs = result if isinstance(result, tuple) else () if result is None else (result,)
    expected = [*outputs, *(given[name] for name, role, *_ in _core.op_example(op)[0] if role == "state")]
    made = selfcheck.written_on_gpu(op, bits, "float32")
    assert len(made) == len(expected) > 0 and all(map(np.array_equal, made, expected))


@pytest.mark.parametrize("fault", [1.0, 1 + 1e-3, np.nan])
def test_a_gpus_wrong_value_is_reported(monkeypatch, fault):
    """The bounds are those of float32 here: the CPU computes in place of a GPU."""
    stand_in(monkeypatch, fault)
    written = selfcheck.written_on_gpu
    monkeypatch.setattr(selfcheck, "written_on_gpu", lambda op, bits, dtype: written(op, bits, "float32"))
    monkeypatch.setattr(selfcheck, "cuda_available", lambda: True)
    monkeypatch.setattr(selfcheck, "_check_model", lambda dtype: selfcheck.Row(dtype, "cuda", 0.0, 1.0, True))
    budget = ops.budget
    monkeypatch.setattr(ops, "budget", lambda op, output: budget(op))
    rows = [row for row in selfcheck.rows() if row.device == "cuda"]
    assert len(rows) == len(CASES) + 2
    assert [row.op for row in rows if row.ok != (fault == 1)] == ([] if fault == 1 else ["float16", "bfloat16"])


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
    (row,) = [row for row in selfcheck.rows() if (row.op, row.device) == (op, "cpu")]
    assert not row.ok
