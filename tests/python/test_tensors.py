"""What the ops take as tensors: numpy arrays and torch tensors, where they lie."""

import gc
import sys
import threading

import numpy as np
import pytest

from cf_ops import _core, _tensors, ops, selfcheck

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")


def to_torch(value):
    """The same with torch tensors, inside GptqWeights and dicts too."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, dict):
        return {name: to_torch(part) for name, part in value.items()}
    if isinstance(value, ops.GptqWeight):
        return ops.GptqWeight(**to_torch(vars(value)))
    return value


def written(op, arguments):
    result = getattr(ops, op)(**arguments)
    outputs = result if isinstance(result, tuple) else () if result is None else (result,)
    return [*outputs, *(arguments[name] for name in ("k_cache", "v_cache") if name in arguments)]


@needs_torch
@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("op", _core.ops())
def test_torch_tensors_give_the_bits_of_numpy_arrays(op, bits):
    for dtype in ("float32", "float64"):
        arguments = selfcheck.arguments(op, dtype, bits)
        ours = written(op, to_torch(arguments))
        theirs = written(op, arguments)
        assert len(ours) == len(theirs) > 0
        for a, b in zip(ours, theirs):
            assert type(a) is torch.Tensor and a.dtype == getattr(torch, dtype) and not a.requires_grad
            assert np.array_equal(a.numpy(), b)


@needs_torch
def test_parameters_in_bfloat16():
    x = torch.randn(3, 8)
    gamma, beta = (torch.nn.Parameter(torch.randn(8, dtype=torch.bfloat16)) for _ in range(2))
    y = ops.layernorm(x, gamma, beta)
    assert torch.equal(y, ops.layernorm(x, gamma.detach().float(), beta.detach().float()))
    assert not y.requires_grad


def test_bfloat16_arrays():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    gamma, beta = np.arange(8).astype(ml_dtypes.bfloat16), np.ones(8).astype(ml_dtypes.bfloat16)
    assert (ops.layernorm(x, gamma, beta) == ops.layernorm(x, gamma.astype("f4"), beta.astype("f4"))).all()


@needs_torch
def test_libraries_are_not_mixed():
    x, gamma = np.zeros((2, 8), np.float32), np.ones(8, np.float32)
    with pytest.raises(ValueError, match="layernorm: 'beta' is a torch tensor, expected numpy as 'x' is"):
        ops.layernorm(x, gamma, torch.ones(8))
    with pytest.raises(ValueError, match="layernorm: 'gamma' is a numpy tensor, expected torch as 'x' is"):
        ops.layernorm(torch.zeros(2, 8), gamma, torch.ones(8))


@needs_torch
def test_torch_tensors_that_do_not_lie_in_this_memory():
    weight = torch.ones(8)
    with pytest.raises(NotImplementedError, match="layernorm: 'x' is on meta, expected cpu or cuda, which"):
        ops.layernorm(torch.zeros(2, 8, device="meta"), weight, weight)
    with pytest.raises(ValueError, match="layernorm: 'x' has layout torch.sparse_coo, expected torch.strided"):
        ops.layernorm(torch.zeros(2, 8).to_sparse(), weight, weight)
    with pytest.raises(ValueError, match=r"layernorm: 'x' has strides \(1, 2\), expected a contiguous tensor"):
        ops.layernorm(torch.zeros(8, 2).t(), weight, weight)
    with pytest.raises(ValueError, match=r"layernorm: 'gamma' has strides \(0,\), expected a contiguous tensor"):
        ops.layernorm(torch.zeros(2, 8), torch.ones(1).expand(8), weight)


@needs_torch
def test_tensors_without_elements_are_refused():
    x, weight = torch.zeros(2, 8), torch.ones(3, 8)
    with pytest.raises(ValueError, match=r"linear: 'bias' has shape \(0\), expected sizes of at least 1"):
        ops.linear(x, weight, torch.zeros(0))
    with pytest.raises(ValueError, match=r"linear: 'x' has shape \(0, 8\), expected sizes of at least 1"):
        ops.linear(x[:0], weight)


@needs_torch
def test_a_cache_that_requires_a_gradient_is_refused():
    arguments = to_torch(selfcheck.arguments("kv_append", "float32"))
    arguments["k_cache"].requires_grad_()
    with pytest.raises(ValueError, match="kv_append: 'k_cache' requires a gradient, expected"):
        ops.kv_append(**arguments)
    with torch.no_grad():
        ops.kv_append(**arguments)
    with torch.inference_mode():
        ops.kv_append(**to_torch(selfcheck.arguments("kv_append", "float32")))


def test_a_read_only_array_may_be_read_but_not_written(tmp_path):
    arguments = selfcheck.arguments("kv_append", "float32")
    for name in ("k", "v", "kv_len"):
        arguments[name].flags.writeable = False
    ops.kv_append(**arguments)
    arguments["v_cache"].flags.writeable = False
    before = arguments["k_cache"].copy()
    arguments["k"] = arguments["k"] + 1
    with pytest.raises(ValueError, match="kv_append: 'v_cache' is read-only, expected an array that can be written"):
        ops.kv_append(**arguments)
    assert (arguments["k_cache"] == before).all()


def test_a_mapped_file_is_an_array(tmp_path):
    arguments = selfcheck.arguments("linear", "float32")
    expected = ops.linear(**arguments)
    mapped = np.memmap(tmp_path / "weight", np.float16, "w+", shape=arguments["weight"].shape)
    mapped[:] = arguments["weight"]
    assert (ops.linear(**{**arguments, "weight": mapped}) == expected).all()


@pytest.mark.parametrize("value", [np.ma.masked_array(np.zeros((2, 8), np.float32)), 1.0, "x", None, [[0.0] * 8]])
def test_what_is_no_tensor(value):
    ones = np.ones(8, np.float32)
    with pytest.raises(TypeError, match="layernorm: 'x' must be a numpy array or a torch tensor, got "):
        ops.layernorm(value, ones, ones)


def test_views_into_an_array_are_used_where_they_lie():
    block = np.zeros((2, 3, 5, 8), np.float32)
    keys = np.ones((2, 3, 8), np.float32)
    k_cache, v_cache = block[:1], block[1:]
    ops.kv_append(keys[:1], keys[1:] * 2, np.array([4], np.int32), k_cache, v_cache)
    assert (block[0, :, 3] == 1).all() and (block[1, :, 3] == 2).all() and block.sum() == 3 * 8 * 3


def test_outputs_do_not_alias_and_arguments_are_not_kept():
    arguments = selfcheck.arguments("rope", "float32")
    before = {name: sys.getrefcount(value) for name, value in arguments.items()}
    q, k, v = ops.rope(**arguments)
    assert not any(np.shares_memory(a, b) for a, b in ((q, k), (k, v), (q, v), (q, arguments["qkv"])))
    del q, k, v
    gc.collect()
    assert {name: sys.getrefcount(value) for name, value in arguments.items()} == before
    with pytest.raises(ValueError):
        ops.rope(**{**arguments, "positions": arguments["positions"] - 1})
    gc.collect()
    assert {name: sys.getrefcount(value) for name, value in arguments.items()} == before


def test_threads_run_ops_at_once():
    wrong = []

    def work(op):
        expected = written(op, selfcheck.arguments(op, "float32"))
        for _ in range(20):
            got = written(op, selfcheck.arguments(op, "float32"))
            wrong.extend(op for a, b in zip(got, expected) if not np.array_equal(a, b))

    threads = [threading.Thread(target=work, args=(op,)) for op in ("linear", "attention", "ln_qkv")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_budget_belongs_to_its_thread():
    """A budget that one thread asks for is not that of another thread's call."""
    x = np.ones((2, 8), np.float64)
    x[:, ::2] = 3
    ones = np.ones(8, np.float16)
    expected = ops.budget(ops.layernorm)(x, ones, ones)
    seen = []
    inside, outside = threading.Event(), threading.Event()

    def measured(*arguments):
        result = ops.layernorm(*arguments)
        inside.set()
        outside.wait(10)
        return result

    thread = threading.Thread(target=lambda: seen.append(ops.budget(measured)(x, ones, ones)))
    thread.start()
    inside.wait(10)
    ops.layernorm(x * 1e6 + 1e9, ones, ones)
    outside.set()
    thread.join()
    assert seen == [expected]


def test_empty_takes_after_its_like():
    like = np.zeros(3, np.float32)
    made = _tensors.empty((2, 4), like, "float64")
    assert made.shape == (2, 4) and made.dtype == np.float64
    if torch is not None:
        made = _tensors.empty((2, 4), torch.zeros(3, dtype=torch.float64))
        assert tuple(made.shape) == (2, 4) and made.dtype == torch.float64


def changes(array):
    """Other arrays in an array's place: shapes, dtypes and values that its op does not expect."""
    yield array[:0].copy()
    yield array[:1].copy()
    yield array[None].copy()
    yield array[0].copy() if array.ndim > 1 else np.array(array[0])
    yield np.concatenate([array, array])
    yield np.concatenate([array, array], axis=-1)
    yield array[..., :-1].copy()
    for dtype in (np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.bool_, np.complex64, "<U1", "O"):
        with np.errstate(over="ignore"):
            yield array.astype(dtype)
    if array.dtype == np.int32:
        for value in (-(2**31), -1, 2**31 - 1):
            yield np.full_like(array, value)


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("op", _core.ops())
def test_any_change_of_an_argument_is_run_or_refused(op, bits):
    refused = 0

    def run(arguments):
        try:
            getattr(ops, op)(**arguments)
        except (ValueError, TypeError, NotImplementedError) as error:
            # A layer's site may be the op that refuses.
            assert "\n" not in str(error) and any(f"{name}: " in str(error) for name in _core.ops()), error
            return 1
        return 0

    def others(value):
        """What may come in an argument's place."""
        if isinstance(value, np.ndarray):
            yield from changes(value)
        elif isinstance(value, ops.GptqWeight):
            for field, part in vars(value).items():
                yield from (ops.GptqWeight(**{**vars(value), field: other}) for other in others(part))
        elif isinstance(value, dict):
            yield from ({**value, name: other} for name, part in value.items() for other in others(part))
        else:
            yield from (-1, 0, 3, 2**31, 2**63, None, "4", [], 0.5, float("nan"))

    assert not run(selfcheck.arguments(op, "float64", bits))
    for name, value in selfcheck.arguments(op, "float64", bits).items():
        refused += sum(run({**selfcheck.arguments(op, "float64", bits), name: other}) for other in others(value))
    assert refused > 0
