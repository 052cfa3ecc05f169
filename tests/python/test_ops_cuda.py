"""Ops on torch tensors of a GPU, beside the oracle. What needs no GPU, such as refusals, runs everywhere."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cuda_models import gpu  # noqa: E402
from test_torch_ops import OPS as REGISTERED  # noqa: E402
from test_torch_ops import given as registered_arguments  # noqa: E402
from test_torch_ops import written as registered_written  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import cf_ops  # noqa: E402
from cf_ops import _core, _device, _gptq, ops, selfcheck, torch_ops  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
DTYPES = ["float16", "bfloat16", "float32"]
QUANTISED = [op for op in _core.ops() if any(role == "gptq" for _, role, *_ in _core.op_example(op, 4)[0])]
CASES = [(op, dtype, 0) for op in _core.ops() for dtype in DTYPES] + [
    (op, dtype, bits) for op in QUANTISED for dtype in ("float16", "bfloat16") for bits in (4, 8)
]


def for_oracle(value, dtype):
    """An argument of a GPU for the oracle: the same numbers on the CPU, activations in float64."""
    if isinstance(value, dict):
        return {name: for_oracle(part, dtype) for name, part in value.items()}
    if isinstance(value, ops.GptqWeight):
        return ops.GptqWeight(**{n: p.cpu() if torch.is_tensor(p) else p for n, p in vars(value).items()})
    return value.cpu() if torch.is_tensor(value) else value


class Call:
    """A call of an op on a GPU."""

    def __init__(self, op, dtype, bits=0):
        self.op, self.function, self.dtype = op, getattr(ops, op), dtype
        example = selfcheck.arguments(op, "float64", bits)
        self.arguments = selfcheck.on_gpu(example, dtype)
        self.activations = [n for n, v in example.items() if getattr(v, "dtype", None) == np.float64]
        self.states = [name for name, role, *_ in _core.op_example(op)[0] if role == "state"]

    def run(self, **changed):
        """What the call writes. Caches are copies."""
        arguments = {**self.arguments, **changed}
        arguments |= {name: arguments[name].clone() for name in self.states}
        result = self.function(**arguments)
        outputs = result if isinstance(result, tuple) else () if result is None else (result,)
        return [*outputs, *(arguments[name] for name in self.states)]

    def exact(self):
        """The oracle's arguments, what it writes for them, and the contract's bound."""
        arguments = for_oracle(self.arguments, self.dtype)
        arguments |= {name: arguments[name].double() for name in self.activations}
        if self.op == "embedding":
            arguments["dtype"] = "float64"
        bound = ops.budget(self.function, output=self.dtype)(**copy.deepcopy(arguments))
        result = self.function(**arguments)
        outputs = result if isinstance(result, tuple) else () if result is None else (result,)
        return [*outputs, *(arguments[name] for name in self.states)], bound

    def check(self, got):
        exact, bound = self.exact()
        assert len(got) == len(exact) > 0
        for a, b in zip(got, exact):
            assert a.is_cuda and str(a.dtype) == f"torch.{self.dtype}" and a.shape == b.shape and not a.requires_grad
            error = a.double().cpu() - b
            assert error.norm() <= bound.rel_l2 * b.norm(), (self.op, error.norm() / b.norm(), bound)
            assert error.abs().max() <= bound.rel_max * b.abs().max(), (self.op, bound)


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def delay(milliseconds=200):
    """Keeps the current stream busy."""
    torch.cuda._sleep(int(milliseconds * 2e6))


# --- without a GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fake():
    """Makes tensors that say that they are on a GPU, and have no memory."""
    mode = FakeTensorMode()

    def make(*shape, dtype=torch.float16, device="cuda:0"):
        with mode:
            return torch.empty(shape, dtype=dtype, device=device)

    return make


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"gamma": lambda fake: torch.ones(8).half()}, ValueError, "'gamma' is on cpu, expected cuda:0 as 'x' is"),
        ({"beta": lambda fake: fake(8, device="cuda:1")}, ValueError, "'beta' is on cuda:1, expected cuda:0 as 'x' is"),
        ({"x": lambda fake: torch.zeros(2, 8)}, ValueError, "'gamma' is on cuda:0, expected cpu as 'x' is"),
        ({"x": lambda fake: np.zeros((2, 8), np.float32)}, ValueError, "'gamma' is a torch tensor, expected numpy"),
        ({"beta": lambda fake: np.zeros(8, np.float16)}, ValueError, "'beta' is a numpy tensor, expected torch as 'x'"),
        ({"beta": lambda fake: [0.0]}, TypeError, "'beta' must be a numpy array or a torch tensor, got builtins.list"),
        ({"x": lambda fake: fake(8, 2).t()}, ValueError, r"'x' has strides \(1, 2\), expected a contiguous tensor"),
        ({"x": lambda fake: fake(2, 16)[:, ::2]}, ValueError, r"'x' has strides \(16, 2\), expected a contiguous"),
        ({"gamma": lambda fake: fake(1).expand(8)}, ValueError, r"'gamma' has strides \(0,\), expected a contiguous"),
        ({"x": lambda fake: fake(8)}, ValueError, r"'x' has shape \(8\), expected 2 dimensions"),
        ({"x": lambda fake: fake(2, 8, dtype=torch.complex64)}, ValueError, "'x' has dtype complex64, expected float"),
        ({"beta": lambda fake: torch.ones(8, device="meta")}, NotImplementedError, "'beta' is on meta, expected cpu"),
    ],
)
def test_refusals_are_one_line(fake, change, error, message):
    if "cuda:1" in message and torch.cuda.device_count() == 1:
        pytest.skip("torch makes no tensor of cuda:1, not even a fake one, beside one GPU")
    arguments = {"x": fake(2, 8), "gamma": fake(8), "beta": fake(8)}
    arguments |= {name: make(fake) for name, make in change.items()}
    with pytest.raises(error, match="layernorm: " + message) as caught:
        ops.layernorm(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(cf_ops.cuda_available(), reason="there is a GPU")
def test_without_a_gpu_the_first_call_says_what_is_missing(fake):
    expected = cf_ops.CfError if _core.has_cuda() else NotImplementedError
    message = "no CUDA device" if _core.has_cuda() else "no CUDA backend.*put nvcc on PATH, then pip install ."
    with pytest.raises(expected, match=message):
        ops.layernorm(fake(2, 8), fake(8), fake(8))
    shapes = {"x": (0, "float16", (2, 8)), "gamma": (0, "float16", (8,)), "beta": (0, "float16", (8,))}
    bound = _core.bind_op("layernorm", {**shapes, "y": shapes["x"]}, {})
    with pytest.raises(expected, match="CUDA|cuda"):
        bound.run(0, 0, [16, 16, 16, 16], {"eps": 1e-5}, [], pytest.fail)


def test_a_cache_that_requires_a_gradient_is_refused(fake):
    arguments = {"k": fake(2, 3, 8), "v": fake(2, 3, 8), "kv_len": fake(2, dtype=torch.int32)}
    arguments |= {"k_cache": fake(2, 3, 5, 8).requires_grad_(), "v_cache": fake(2, 3, 5, 8)}
    with pytest.raises(ValueError, match="kv_append: 'k_cache' requires a gradient, expected"):
        ops.kv_append(**arguments)


def test_a_budget_is_measured_on_the_cpu(fake):
    with pytest.raises(NotImplementedError, match="layernorm: a budget is measured on the CPU, got tensors on cuda:0"):
        ops.budget(ops.layernorm)(fake(2, 8), fake(8), fake(8))


@pytest.mark.parametrize("field", ["bits", "group_size", "zero_offset"])
@pytest.mark.parametrize("bad", [[], "4", 2**70, None])
def test_a_weights_numbers_are_checked(fake, field, bad):
    parts = {"qweight": fake(8, 64, dtype=torch.int32), "qzeros": fake(2, 8, dtype=torch.int32)}
    parts |= {"scales": fake(2, 64), "g_idx": fake(64, dtype=torch.int32)}
    weight = ops.GptqWeight(**parts, **{"bits": 4, "group_size": 32, "zero_offset": 1, field: bad})
    with pytest.raises(ValueError, match=f"linear: '{field}' must be an integer, got"):
        ops.linear(fake(2, 64), weight)


def test_a_checked_op_makes_what_is_wanted(monkeypatch):
    """What is not wanted shares a tensor; the compiled op runs on the CPU in place of a GPU."""
    arguments = selfcheck.arguments("decode_layer", "float32")
    layer = {n: torch.from_numpy(v.copy()) for n, v in arguments.items() if isinstance(v, np.ndarray)}
    weights = {n: torch.from_numpy(v.copy()) for n, v in arguments["weights"].items()}
    config, most = arguments["config"], arguments["max_kv_len"]
    expected = ops.decode_layer(weights, config, **{n: t.clone() for n, t in layer.items()}, max_kv_len=most)
    tensors = {"hidden": layer["hidden"], **layer, **weights}
    names = [*tensors, *expected._fields]

    class Bound:
        def run(self, device, stream, addresses, scalars, packed, allocate):
            assert (device, stream, allocate, len(addresses)) == (3, 7, pytest.fail, len(names))
            shapes = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
            shapes |= {n: ("float32", tuple(getattr(expected, n).shape)) for n in expected._fields}
            described = {name: (address, *shapes[name]) for name, address in zip(names, addresses)}
            _core.run_op("decode_layer", described, {"config": config, **scalars})

    monkeypatch.setattr(_device, "prepare_ops", lambda index: pytest.fail)
    monkeypatch.setattr(_device, "current_stream", lambda index: 7)
    checked = ops.CheckedOp("decode_layer", tensors, (("config", config),), ("k", "output"))
    checked._bound = Bound()
    caches = {name: tensors[name].clone() for name in ("k_cache", "v_cache")}
    k, output = checked(3, {**tensors, **caches}, {"max_kv_len": most})
    assert torch.equal(k, expected.k) and torch.equal(output, expected.output)
    assert not torch.equal(caches["k_cache"], tensors["k_cache"])


def test_a_bound_op_is_checked():
    shapes = {"x": (0, "float16", (2, 8)), "gamma": (0, "float16", (8,)), "beta": (0, "float16", (8,))}
    for tensors, scalars, message in (
        ({**shapes, "z": shapes["x"]}, {}, "layernorm: 'z' is none of its tensors, expected x, gamma, beta, y"),
        ({**shapes, "y": (0, "float16", (8,))}, {}, r"layernorm: 'y' has shape \(8\), expected 2 dimensions"),
        (shapes, {"scale": 1.0}, "layernorm: 'scale' is none of its scalars, expected eps"),
    ):
        with pytest.raises(ValueError, match=message):
            _core.bind_op("layernorm", tensors, scalars)
    with pytest.raises(ValueError, match="'softmax' is no op, expected one of"):
        _core.bind_op("softmax", {}, {})
    bound = _core.bind_op("layernorm", {**shapes, "y": shapes["x"]}, {})
    assert bound.gptq == [] and bound.row_order == (0, 0)
    with pytest.raises(ValueError, match="layernorm: expected 4 addresses, got 3"):
        bound.run(0, 0, [16, 16, 16], {}, [], pytest.fail)
    with pytest.raises(ValueError, match="layernorm: 'eps' must be a number, got 'small'"):
        bound.run(0, 0, [16] * 4, {"eps": "small"}, [], pytest.fail)


def test_known_calls_and_a_ports_layer_leave_other_calls_alone(fake):
    ops.use_torch()
    known = _core.KnownCalls([("eps", False), ("most", True)], [0])
    assert known.numbers == ["eps", "most"] and len(known) == 0
    for given in (
        (),
        (None,),
        ([],),
        (np.zeros(2),),
        (torch.zeros(2),),
        (fake(2),),
        ({"x": torch.zeros(2)},),
        ({}, {}),
    ):
        for fixed, numbers in ((None, (1e-5, 3)), (object(), (None, None)), ([], ()), ("", ("a", 2**70))):
            assert known.run(given, fixed, numbers) is None
    config = selfcheck.arguments("decode_layer", "float32")["config"]
    layer = _core.PortLayer(config)
    for given in ((), (torch.zeros(1, 96).half(),) * 17, (fake(1, 96),) * 17, (None,) * 17):
        for length in (0, -1, 2**70, True, "1", None):
            assert layer.run(given, length, None, 0, None) is None
    with pytest.raises(ValueError, match="PortLayer"):
        _core.PortLayer("{")


@pytest.mark.parametrize("op", QUANTISED)
def test_a_bound_op_names_its_quantised_weights(op):
    tensors, scalars = _core.op_example(op, 4)
    shapes = {name: (0, dtype or "float16", tuple(shape)) for name, _, dtype, shape, _ in tensors}
    scalars = {name: value for name, value in scalars.items() if "bits" in name or name == "config"}
    bound = _core.bind_op(op, shapes, scalars)
    assert bound.gptq == [name.removesuffix("qweight") for name in shapes if name.endswith("qweight")]
    head_dim = shapes["q"][2][-1] if op == "ln_qkv" else 0
    assert bound.row_order == (head_dim, 2 * shapes["cos"][2][1] if head_dim else 0)
    with pytest.raises(ValueError, match=f"{op}: expected {len(bound.gptq)} packed weights, got 0"):
        bound.run(0, 0, [16] * len(shapes), {}, [], pytest.fail)


class Part:
    """In place of a tensor of a GPU."""

    is_cuda, shape, _version = True, (8, 64), 0

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address

    def is_inference(self):
        return False

    def detach(self):
        return Part(self.address)


class Packer:
    """In place of a bound op: counts what it packs."""

    row_order = (0, 0)

    def __init__(self):
        self.packs = 0

    def pack(self, *_):
        self.packs += 1
        return self.packs


def quantised(**changed):
    parts = {name: Part(number) for number, name in enumerate(("qweight", "qzeros", "scales", "g_idx"), 1)}
    return ops.GptqWeight(**{**parts, "zero_offset": 1, **changed})


def test_a_weight_is_packed_once():
    weight, packer = quantised(), Packer()

    def pack(device=0, stream=5):
        return weight.packed(packer, 0, device, stream, [], pytest.fail)

    assert pack() == pack() == 1
    assert pack(device=1) == 2 and pack() == 1
    packer.row_order = (16, 4)
    assert pack() == 3
    packer.row_order = (0, 0)
    weight.scales._version = 1
    assert pack() == pack() == 4
    # An equal object is another weight.
    for other in (copy.copy(weight), ops.GptqWeight(**vars(weight))):
        assert vars(other) == vars(weight)
        assert other.packed(packer, 0, 0, 5, [], pytest.fail) == packer.packs
    assert packer.packs == 6 and pack() == 4
    on_host = ops.GptqWeight(qweight=1, qzeros=2, scales=3, g_idx=4, zero_offset=0)
    assert pickle.loads(pickle.dumps(on_host)) == copy.deepcopy(on_host) == on_host


def test_parts_that_come_one_by_one_are_kept_as_long_as_they_live():
    before = dict(_gptq._kept)
    qweight, qzeros, scales, g_idx = (Part(number) for number in range(4))

    def kept(g_idx=g_idx, **scalars):
        return _gptq.kept(ops.GptqWeight, qweight, qzeros, scales, g_idx, **{"zero_offset": 1, **scalars})

    weight = kept()
    assert kept() is weight and weight.qweight is not qweight and weight.qweight.address == qweight.address
    assert kept(zero_offset=0) is not weight and kept(g_idx=Part(9)) is not weight
    made = kept(g_idx=lambda: "made")
    assert made.g_idx == "made" and kept(g_idx=lambda: "again") is made
    assert kept() is weight
    del weight, made
    assert len(_gptq._kept) == len(before) + 1
    del qweight
    gc.collect()
    assert _gptq._kept == before


def test_the_current_stream(monkeypatch):
    class Torch:
        class cuda:
            @staticmethod
            def current_stream(device):
                return type("Stream", (), {"cuda_stream": 70 + device})

        class _C:
            pass

    monkeypatch.setitem(sys.modules, "torch", Torch)
    assert _device.current_stream(1) == 71
    Torch._C._cuda_getCurrentRawStream = staticmethod(lambda device: 80 + device)
    assert _device.current_stream(1) == 81


def test_every_registered_op_runs_on_gpus():
    for op in REGISTERED:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"cf_ops::{op}", "CUDA")


# --- values -----------------------------------------------------------------------------------------------------------


@gpu
@needs_gpu
@pytest.mark.parametrize("op, dtype, bits", CASES)
def test_ops_are_within_the_contracts_budget(op, dtype, bits):
    call = Call(op, dtype, bits)
    got = call.run()
    call.check(got)
    assert all(same(call.run(), got) for _ in range(20))


def within(got, exact, bound):
    """Whether a result of a GPU has NaN where the oracle's has it, and is within a bound of its other elements."""
    got, unknown = got.double().cpu(), exact.isnan()
    error, known = (got - exact)[~unknown], exact[~unknown]
    is_close = error.norm() <= bound.rel_l2 * known.norm() and error.abs().max() <= bound.rel_max * known.abs().max()
    return torch.equal(got.isnan(), unknown) and bool(is_close)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("made", [ops, torch_ops])
def test_runs_pages_and_windows_are_within_the_contracts_budget(made, dtype):
    torch.manual_seed(1)
    kind, heads, kv_heads, head_dim, page = getattr(torch, dtype), 4, 2, 64, 64
    runs, lengths = [(2, 0, 1), (0, 1, 5), (1, 6, 2)], [130, 64, 65]  # out of order
    positions = torch.tensor([p for s, _, n in runs for p in range(lengths[s] - n, lengths[s])], dtype=torch.int32)
    table = torch.tensor([[7, 2, 4], [0, -1, -1], [5, 1, -1]], dtype=torch.int32)
    pools = torch.randn(2, 9, kv_heads, page, head_dim).to(kind)
    pools[:, [3, 6, 8]] = float("nan")  # no sequence's
    cos, sin = map(torch.from_numpy, ops.rope_table(192, head_dim))
    qkv, q_sinks = torch.randn(8, heads + 2 * kv_heads, 1, head_dim).to(kind), torch.randn(8, heads, head_dim).to(kind)
    given = qkv, cos, sin, positions, torch.tensor(lengths, dtype=torch.int32), *pools
    on_gpu = [tensor.cuda() for tensor in given]
    step = {"runs": runs, "page_table": table}
    step_on_gpu = {"runs": runs, "page_table": table.cuda()}

    q = made.rope_append(*on_gpu, layout="separate", **step_on_gpu)
    exact = [qkv.double(), *given[1:5], *(pool.double() for pool in pools)]
    bound = ops.budget(ops.rope_append, output=dtype)(*[t.clone() for t in exact], layout="separate", **step)
    exact_q = ops.rope_append(*exact, layout="separate", **step)
    assert within(q, exact_q, bound)
    for got, expected in zip(on_gpu[-2:], exact[-2:]):
        assert within(got, expected, bound)

    kv_len, caches = given[4], on_gpu[-2:]
    for window, sinks in ((None, None), ((50, 0), None), ((50, 4), q_sinks)):
        options = {"scale": 0.125, "max_kv_len": 192, "window": window}
        y = made.attention(
            q, *caches, kv_len.cuda(), **options, **step_on_gpu, q_sinks=None if sinks is None else sinks.cuda()
        )
        exact_given = q.double().cpu(), *(cache.double().cpu() for cache in caches), kv_len
        exact_options = {**options, **step, "q_sinks": None if sinks is None else sinks.double()}
        bound = ops.budget(ops.attention, output=dtype)(*exact_given, **exact_options)
        assert within(y, ops.attention(*exact_given, **exact_options), bound)


@gpu
@needs_gpu
@pytest.mark.parametrize("made", [ops, torch_ops])
def test_a_streams_new_entries_take_the_oldest_ones_places(made):
    k, v = torch.randn(2, 3, 2, 64)
    caches = torch.randn(2, 3, 2, 72, 64)
    kv_len, runs = torch.tensor([1000, 0, 73], dtype=torch.int32), [(2, 0, 1), (0, 1, 2)]
    on_gpu = [tensor.cuda() for tensor in (k, v, kv_len, *caches)]
    made.kv_append(*on_gpu, runs=runs, window=(60, 4))
    ops.kv_append(k, v, kv_len, *caches, runs=runs, window=(60, 4))
    assert same([tensor.cpu() for tensor in on_gpu[-2:]], [*caches])


@gpu
@needs_gpu
@pytest.mark.parametrize("op", ["linear", "decode_layer"])
def test_the_check_can_fail(op):
    call = Call(op, "float16")
    got = call.run()
    got[0][0, 0] += 0.05 * got[0].abs().max()
    with pytest.raises(AssertionError):
        call.check(got)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tokens, bits", [(8, 0), (9, 0), (40, 0), (64, 4), (65, 4), (100, 8)])
@pytest.mark.parametrize("epilogue", ["none", "gelu_erf", "residual"])
def test_products_of_many_tokens(dtype, tokens, bits, epilogue):
    """Those that take scratch memory, which is used again at once."""
    torch.manual_seed(1)
    call = Call("linear", dtype, bits)
    weight = call.arguments["weight"]
    out = weight.qweight.shape[1] if bits else weight.shape[0]
    hidden = call.arguments["x"].shape[1]
    kind = getattr(torch, dtype)
    call.arguments |= {"x": torch.randn(tokens, hidden, device="cuda").to(kind), "epilogue": epilogue}
    call.arguments["residual"] = torch.randn(tokens, out, device="cuda").to(kind) if epilogue == "residual" else None
    call.activations = ["x", "residual"] if epilogue == "residual" else ["x"]
    delay()
    got = call.run()
    poison = [torch.full((1 << 22,), 255, dtype=torch.uint8, device="cuda") for _ in range(24)]
    call.check(got)
    assert same(call.run(), got) and len(poison) == 24


@gpu
@needs_gpu
def test_ops_chain_to_a_layer():
    """Attention's block op by op gives the bits of the layer's sites."""
    layer = Call("decode_layer", "float16").arguments
    weights, caches = layer["weights"], [layer["k_cache"].clone(), layer["v_cache"].clone()]
    made = ops.decode_layer(**layer)
    norm = (weights["input_layernorm.weight"], weights["input_layernorm.bias"])
    table = (layer["cos"], layer["sin"], layer["positions"])
    z = ops.layernorm(layer["hidden"], *norm)
    qkv = ops.linear(z, weights["attention.query_key_value.weight"], weights["attention.query_key_value.bias"])
    q, k, v = ops.rope(qkv.view(made.qkv.shape), *table)
    ops.kv_append(k, v, layer["kv_len"], *caches)
    scale, most = q.shape[2] ** -0.5, layer["max_kv_len"]  # a GPU's plan follows from it
    y = ops.attention(q, *caches, layer["kv_len"], scale=scale, max_kv_len=most)
    assert same([z, q, k, v, y], [made.attn_in, made.q, made.k, made.v, made.context])
    assert same(caches, [layer["k_cache"], layer["v_cache"]])


# --- streams, graphs, memory ------------------------------------------------------------------------------------------


@gpu
@needs_gpu
@pytest.mark.parametrize("op", _core.ops())
def test_a_side_stream_is_used_and_not_waited_for(op):
    call = Call(op, "float16")
    expected = call.run()
    name = "table" if op == "embedding" else call.activations[0]
    right = call.arguments[name]
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.full_like(right, torch.nan)
        delay()
        late.copy_(right)  # what runs on another stream, or before its turn, reads NaN
        got = call.run(**{name: late})
        done.record()
        assert not done.query()  # the host is ahead of the device
    stream.synchronize()
    assert same(got, expected)


@gpu
@needs_gpu
@pytest.mark.parametrize("op", ["linear", "ln_qkv", "decode_layer"])
def test_weights_that_the_stream_still_writes_are_waited_for(op):
    """An op's later kernels may begin early, and read weights then."""
    call = Call(op, "float16")
    expected = call.run()
    right = call.arguments["weights"] if op == "decode_layer" else {"weight": call.arguments["weight"]}
    for _ in range(5):
        late = {name: torch.full_like(weight, torch.nan) for name, weight in right.items()}
        delay(20)
        for name, weight in right.items():
            late[name].copy_(weight)
        assert same(call.run(**({"weights": late} if op == "decode_layer" else late)), expected)


@gpu
@needs_gpu
@pytest.mark.parametrize("op, dtype, bits", [case for case in CASES if case[1] == "float16"])
def test_graphs_of_the_users_own(op, dtype, bits):
    call = Call(op, dtype, bits)
    call.run()  # packs the weights
    name = "table" if op == "embedding" else call.activations[0]
    source = call.arguments[name]
    values = [source.clone(), source.flip(0).contiguous(), source * 0.5]
    expected = [call.run(**{name: value}) for value in values]
    input = source.clone()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = call.run(**{name: input})
    for value, right in zip(values, expected):
        input.copy_(value)
        graph.replay()
        assert same(got, right)


FIRST_CALL = """
import torch
from cf_ops import ops
x = torch.randn(40, 64, device="cuda").half()
weight, ones = torch.randn(48, 64, device="cuda").half(), torch.ones(64, device="cuda").half()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    z = ops.layernorm(x, ones, ones)
    y = ops.linear(z, weight, epilogue="gelu_erf")
    few = ops.linear(z[:8], weight)
graph.replay()
assert torch.equal(y, ops.linear(ops.layernorm(x, ones, ones), weight, epilogue="gelu_erf"))
assert torch.equal(few, ops.linear(z[:8], weight))
assert torch.isfinite(y).all() and y.abs().max() > 0
"""


@gpu
@needs_gpu
def test_a_first_call_may_be_captured():
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], env=os.environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


@gpu
@needs_gpu
def test_packing_is_not_captured():
    call, norm = Call("linear", "float16", 4), Call("layernorm", "float16")
    expected = norm.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(cf_ops.CfError, match="linear: 'weight': the weight is not packed yet.*before the capture"):
            call.run()
        got = norm.run()
    graph.replay()
    assert same(got, expected)
    call.check(call.run())


@gpu
@needs_gpu
@pytest.mark.parametrize("op", ["layernorm", "linear", "attention", "ln_qkv", "decode_layer"])
def test_inputs_may_die_early(op):
    call = Call(op, "float16")
    expected = call.run()
    delay()
    copies = {name: call.arguments[name].clone() for name in call.activations}
    got = call.run(**copies)
    shapes = [value.shape for value in copies.values()]
    del copies
    # The allocator hands the memory out again while the op still waits for its turn.
    poison = [torch.full(shape, torch.nan, dtype=torch.float16, device="cuda") for shape in shapes for _ in range(4)]
    assert same(got, expected) and poison


@gpu
@needs_gpu
def test_a_packed_weight_may_be_used_and_dropped_on_another_stream():
    call = Call("linear", "float16", 4)
    expected = call.run()
    torch.cuda.synchronize()
    words = next(iter(call.arguments["weight"]._forms.values()))[2].memory.numel()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        delay()
        got = call.run()
    del call.arguments["weight"]
    gc.collect()
    poison = [torch.full((words,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    assert same(got, expected) and poison


@gpu
@needs_gpu
def test_a_weight_that_was_changed_is_packed_again():
    call = Call("linear", "float16", 4)
    first = call.run()
    call.arguments["weight"].scales.mul_(2)
    second = call.run()
    assert not same(first, second)
    call.check(second)
    fresh = Call("linear", "float16", 4)
    fresh.arguments["weight"].scales.mul_(2)
    assert same(second, fresh.run())


@gpu
@needs_gpu
def test_threads_have_streams_of_their_own():
    calls = [Call("linear", "float16"), Call("ln_qkv", "bfloat16"), Call("linear", "float16", 4)]
    expected = [call.run() for call in calls]
    torch.cuda.synchronize()
    wrong = []

    def work(call, right):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                wrong.extend([call.op] * (not same(call.run(), right)))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@gpu
@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_another_gpu_than_the_current_one():
    call = Call("linear", "float16")
    expected = call.run()
    moved = {name: value.to("cuda:1") for name, value in call.arguments.items() if torch.is_tensor(value)}
    assert torch.cuda.current_device() == 0
    (got,) = call.run(**moved)
    assert torch.cuda.current_device() == 0 and got.device == torch.device("cuda:1")
    assert torch.equal(got.cpu(), expected[0].cpu())
    with pytest.raises(ValueError, match="linear: 'weight' is on cuda:0, expected cuda:1 as 'x' is"):
        call.run(x=moved["x"])


# --- what torch does around them --------------------------------------------------------------------------------------


@gpu
@needs_gpu
@pytest.mark.parametrize("op", _core.ops())
def test_modes_of_torch_change_nothing(op):
    call = Call(op, "float32")
    expected = call.run()
    with torch.autocast("cuda", dtype=torch.float16):
        assert same(call.run(), expected)
    with torch.inference_mode():
        assert same(call.run(), expected)
        assert same(Call(op, "float32").run(), expected)
    with torch.no_grad():
        assert same(call.run(), expected)


@gpu
@needs_gpu
def test_views_of_a_gpus_memory():
    call = Call("layernorm", "float16")
    expected = call.run()[0]
    x = call.arguments["x"]
    tokens, hidden = x.shape
    block = torch.full((tokens + 4, hidden), torch.nan, dtype=x.dtype, device="cuda")
    block[2 : tokens + 2] = x
    assert torch.equal(call.run(x=block[2 : tokens + 2])[0], expected)
    odd = torch.zeros(tokens * hidden + 1, dtype=x.dtype, device="cuda")[1:].view(tokens, hidden)
    with pytest.raises(ValueError, match="layernorm: 'x' is misaligned, expected a multiple of 16 bytes"):
        call.run(x=odd)
    with pytest.raises(ValueError, match="layernorm: 'x' has strides .*, expected a contiguous tensor"):
        call.run(x=torch.zeros(hidden, tokens, dtype=x.dtype, device="cuda").t())


@gpu
@needs_gpu
@pytest.mark.parametrize("op", [op for op in _core.ops() if op not in ("layernorm", "linear")])
def test_tables_lengths_and_ids_may_lie_at_any_element(op):
    call = Call(op, "float16")
    expected = call.run()
    moved = {}
    for name, role, *_ in _core.op_example(op)[0]:
        if role in ("cosine", "sine", "length", "position", "token_id"):
            value = call.arguments[name]
            block = torch.full((value.numel() + 1,), 7, dtype=value.dtype, device="cuda")
            moved[name] = block[1:].view(value.shape)
            moved[name].copy_(value)
    assert same(call.run(**moved), expected)
    assert bool(moved) == (not op.endswith(("norm", "residual", "heads")))


@gpu
@needs_gpu
@pytest.mark.parametrize(
    "op, change, error, message",
    [
        ("layernorm", lambda a: {"gamma": a["gamma"][:8]}, ValueError, r"'gamma' has shape \(8\), expected \(96\)"),
        ("layernorm", lambda a: {"beta": None}, ValueError, "'beta' is null, expected a tensor"),
        ("layernorm", lambda a: {"x": a["x"].int()}, ValueError, "'x' has dtype int32, expected a floating-point"),
        ("layernorm", lambda a: {"eps": 0.0}, ValueError, "eps must be positive, got 0"),
        ("layernorm", lambda a: {"x": a["x"].double()}, NotImplementedError, "cuda takes float16, bfloat16 or float32"),
        ("layernorm", lambda a: {"x": a["x"][:0]}, ValueError, r"'x' has shape \(0, 96\), expected sizes of at"),
        ("linear", lambda a: {"weight": a["weight"].float(), "bias": None}, NotImplementedError, "weights of the same"),
        ("linear", lambda a: {"epilogue": "residual"}, ValueError, "'residual' is null"),
        ("attention", lambda a: {"max_kv_len": 99}, ValueError, "max_kv_len must be q_len 2 to capacity 13, got 99"),
        ("kv_append", lambda a: {"kv_len": a["kv_len"].long()}, ValueError, "'kv_len' has dtype int64, expected int32"),
        ("decode_layer", lambda a: {"config": "{"}, ValueError, "decode_layer: config"),
        ("decode_layer", lambda a: {"hidden": a["hidden"].cpu()}, ValueError, "cuda:0, expected cpu as 'hidden' is"),
    ],
)
def test_refusals_of_a_call(op, change, error, message):
    call = Call(op, "float16")
    expected = call.run()
    with pytest.raises(error, match=message) as caught:
        call.run(**change(call.arguments))
    assert "\n" not in str(caught.value)
    assert same(call.run(), expected)


# --- calls that are known ---------------------------------------------------------------------------------------------


def known(op):
    return getattr(ops, f"_{op.upper()}")


class Checks:
    """Counts the calls that are checked in Python."""

    def __init__(self, monkeypatch):
        self.count, self.check = 0, ops._call
        monkeypatch.setattr(ops, "_call", self)

    def __call__(self, *arguments, **scalars):
        self.count += 1
        return self.check(*arguments, **scalars)


@pytest.fixture
def checks(monkeypatch):
    if not ops.use_torch():
        pytest.skip("this torch has no table of functions: every call is checked in Python")
    return Checks(monkeypatch)


@gpu
@needs_gpu
@pytest.mark.parametrize("op, dtype, bits", CASES)
def test_a_call_like_one_that_was_checked_is_known(checks, op, dtype, bits):
    call = Call(op, dtype, bits)
    call.run()
    checks.count = 0
    first, second = call.run(), call.run()
    assert checks.count == 0 and same(first, second)
    others = [tensor.clone() for tensor in second]
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(first, second)) and same(first, others)
    # Other tensors and the same numbers in them: only dtypes and shapes are known, and no address.
    moved = {n: v.clone() for n, v in call.arguments.items() if torch.is_tensor(v)}
    assert same(call.run(**moved), second) and checks.count == 0
    call.check(second)


@gpu
@needs_gpu
@pytest.mark.parametrize("op", _core.ops())
def test_a_known_call_equals_one_that_is_checked(checks, monkeypatch, op):
    call = Call(op, "float16")
    call.run()
    got = call.run()

    class Unknown:
        numbers = known(op).numbers

        def run(self, *_):
            return None

        def remember(self, *_):
            pass

    monkeypatch.setattr(ops, f"_{op.upper()}", Unknown())
    checks.count = 0
    expected = call.run()
    assert checks.count == 1 and same(got, expected)
    for a, b in zip(got, expected):
        assert (a.shape, a.dtype, a.stride(), a.requires_grad) == (b.shape, b.dtype, b.stride(), b.requires_grad)


@gpu
@needs_gpu
@pytest.mark.parametrize("op", _core.ops())
def test_any_change_of_a_known_call_is_checked(checks, op):
    """Each tensor in turn becomes what is checked: a tensor that is refused is refused by a known op too."""
    call = Call(op, "float16")
    call.run()
    for name, value in call.arguments.items():
        if not torch.is_tensor(value):
            continue
        changes = {
            "on the CPU": value.cpu(),
            "one dimension more": value[None],
            "another dtype": value.to(torch.int16),
            "no elements": value[:0],
            "strided": torch.stack([value, value], -1)[..., 0],
            "a subclass": value.as_subclass(type("Sub", (torch.Tensor,), {})),
            "an array": value.cpu().numpy(),
            "no tensor": [0.0],
            "a dict": {},
            "none": None,
        }
        for what, changed in changes.items():
            checks.count = 0
            try:
                call.function(**{**call.arguments, name: changed})
            except (TypeError, ValueError, NotImplementedError, AttributeError):
                assert what not in ("a subclass",), (name, what)
            else:
                assert what in ("a subclass", "none"), (name, what)
            assert checks.count == 1, (name, what)
    for name in call.states:
        checks.count = 0
        with pytest.raises(ValueError, match=f"{op}: '{name}' requires a gradient, expected"):
            call.function(**{**call.arguments, name: call.arguments[name].clone().requires_grad_()})
        assert checks.count == 1


@gpu
@needs_gpu
def test_scalars_of_a_known_call(checks):
    norm, attention, linear = Call("layernorm", "float16"), Call("attention", "float16"), Call("linear", "float16")
    for call in (norm, attention, linear):
        call.run()
    checks.count = 0
    assert not same(norm.run(eps=0.5), norm.run()) and checks.count == 0  # numbers are read by every call
    assert not same(attention.run(scale=0.5), attention.run()) and checks.count == 0
    with pytest.raises(ValueError, match="layernorm: eps must be positive, got 0"):
        norm.run(eps=0.0)
    with pytest.raises(ValueError, match="max_kv_len must be q_len 2 to capacity 13, got 99"):
        attention.run(max_kv_len=99)
    assert checks.count == 0  # the contract itself refuses these
    assert same(norm.run(eps=np.float64(1e-5)), norm.run(eps=1e-5)) and checks.count == 1
    with pytest.raises(ValueError, match="layernorm: 'eps' must be a number, got 'small'"):
        norm.run(eps="small")
    with pytest.raises(ValueError, match="linear: 'epilogue' must be one of none, .*, got 'gelu'"):
        linear.run(epilogue="gelu")
    epilogue = linear.arguments["epilogue"]
    made = {other: linear.run(epilogue=other, residual=None) for other in ("none", "gelu_erf", "gelu_tanh")}
    assert not same(made["none"], made["gelu_erf"])
    again = {other: linear.run(epilogue="".join(other), residual=None) for other in made}
    assert all(same(made[other], again[other]) for other in made) and epilogue in (*made, "residual")
    # Left out, max_kv_len is the capacity of these caches, and not that of a known call's.
    capacity = attention.arguments["k_cache"].shape[2]
    longer = {n: torch.cat([attention.arguments[n]] * 2, 2) for n in ("k_cache", "v_cache")}
    assert same(attention.run(max_kv_len=None), attention.run(max_kv_len=capacity))
    assert same(attention.run(max_kv_len=None, **longer), attention.run(max_kv_len=2 * capacity, **longer))


@gpu
@needs_gpu
def test_a_known_call_keeps_no_tensor(checks):
    call = Call("linear", "float16", 4)
    outputs = call.run() + call.run()
    given = [weakref.ref(v) for v in call.arguments.values() if torch.is_tensor(v)]
    given += [weakref.ref(call.arguments["weight"].qweight)] + [weakref.ref(output) for output in outputs]
    del call, outputs
    gc.collect()
    assert [reference() for reference in given] == [None] * len(given)


@gpu
@needs_gpu
def test_a_budget_is_refused_where_the_call_is_known(checks):
    call = Call("layernorm", "float16")
    call.run()
    with pytest.raises(NotImplementedError, match="layernorm: a budget is measured on the CPU, got tensors on cuda:0"):
        ops.budget(ops.layernorm)(**call.arguments)
    checks.count = 0
    call.run()
    assert checks.count == 0


@gpu
@needs_gpu
def test_many_calls_are_known(checks):
    gamma, beta = torch.ones(8, device="cuda").half(), torch.zeros(8, device="cuda").half()
    for _ in range(2):
        for tokens in range(1, 300):  # more than are kept
            x = torch.randn(tokens, 8, device="cuda").half()
            assert ops.layernorm(x, gamma, beta).shape == (tokens, 8)
    assert len(known("layernorm")) <= 256


@gpu
@needs_gpu
def test_known_rows_of_a_fused_layernorm(monkeypatch, checks):
    torch.manual_seed(1)
    x, residual = (torch.randn(2, 3, 40, device="cuda").half() for _ in range(2))
    weight, bias = torch.randn(40, device="cuda").half(), torch.randn(40, device="cuda").half()
    expected = torch_ops.fused_layernorm_residual(x, residual, weight, bias)
    monkeypatch.setattr(torch_ops, "layernorm_residual", pytest.fail)
    got = torch_ops.fused_layernorm_residual(x, residual, weight, bias)
    assert torch.equal(got, expected) and got.shape == x.shape and got.stride() == expected.stride()
    for bad, message in (
        ((x.mT.contiguous().mT, residual, weight, bias), "x has strides"),
        ((x, residual[:1], weight, bias), "residual has shape"),
        ((x.float(), residual, weight, bias), "residual has dtype"),
        ((x[0], residual, weight, bias), "x has shape"),
    ):
        with pytest.raises(ValueError, match=f"fused_layernorm_residual: {message}"):
            torch_ops.fused_layernorm_residual(*bad)


@gpu
@needs_gpu
def test_lengths_out_of_bounds_write_nothing_and_give_nan():
    call = Call("kv_append", "float16")
    caches = {name: call.arguments[name].clone() for name in call.states}
    ops.kv_append(**{**call.arguments, **caches, "kv_len": torch.full_like(call.arguments["kv_len"], 99)})
    assert same(list(caches.values()), [call.arguments[name] for name in call.states])
    attention = Call("attention", "float16")
    (y,) = attention.run(kv_len=torch.full_like(attention.arguments["kv_len"], 99))
    assert torch.isnan(y).all()


def registered(op, dtype=torch.float16):
    """A registered op's arguments on a GPU."""

    def convert(name, value):
        if not torch.is_tensor(value):
            return value
        return value.cuda().to(dtype) if value.dtype == torch.float32 and name not in ("cos", "sin") else value.cuda()

    tensors, scalars = registered_arguments(op)
    schema = getattr(torch.ops.cf_ops, op).default._schema
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    return [convert(name, value) for name, value in zip(names, tensors)], scalars


@gpu
@needs_gpu
@pytest.mark.parametrize("op", REGISTERED)
def test_opcheck(op):
    tensors, scalars = registered(op)
    torch.library.opcheck(getattr(torch.ops.cf_ops, op).default, tuple(tensors), scalars)


@gpu
@needs_gpu
@pytest.mark.parametrize("op", REGISTERED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_keeps_the_graph_and_the_bits(op, dynamic):
    run = getattr(torch_ops, op)
    tensors, scalars = registered(op)
    expected = registered_written(op, run, *copy.deepcopy((tensors, scalars)))
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert same(registered_written(op, compiled, tensors, scalars), expected)


@gpu
@needs_gpu
def test_a_registered_weight_is_packed_once():
    tensors, scalars = registered("linear_gptq")
    expected = torch_ops.linear_gptq(*tensors, **scalars)
    forms = packed_forms()
    assert torch.equal(torch_ops.linear_gptq(*tensors, **scalars), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # would be refused where the weight had to be packed
        got = torch_ops.linear_gptq(*tensors, **scalars)
    graph.replay()
    assert torch.equal(got, expected)
    assert len(forms) > 0 and [id(form) for form in packed_forms()] == [id(form) for form in forms]


def packed_forms():
    """The packed forms of the weights whose parts came one by one."""
    weights = [weight for _, made in _gptq._kept.values() for weight in made.values()]
    return [form for weight in weights for _, _, form in weight._forms.values()]


@gpu
@needs_gpu
def test_fused_layernorm_residual_rounds_once():
    torch.manual_seed(1)
    x, residual = (torch.randn(2, 3, 40, device="cuda").half() for _ in range(2))
    weight, bias = torch.randn(40, device="cuda").half(), torch.randn(40, device="cuda").half()
    got = torch_ops.fused_layernorm_residual(x, residual, weight, bias)
    flat = [tensor.double().cpu().view(6, 40) for tensor in (x, residual)]
    exact = ops.layernorm_residual(*flat, weight.cpu(), bias.cpu())
    bound = ops.budget(ops.layernorm_residual, output="float16")(*flat, weight.cpu(), bias.cpu())
    assert got.is_cuda and got.dtype == torch.float16 and got.shape == x.shape
    assert (got.double().cpu().view(6, 40) - exact).norm() <= bound.rel_l2 * exact.norm()
