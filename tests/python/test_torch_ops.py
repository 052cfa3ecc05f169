"""The ops that torch knows: registered rightly, kept in one graph, equal to the functions of cf_ops.ops."""

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cf_ops import ops, selfcheck, torch_ops  # noqa: E402

APPENDS = ["ln_qkv", "kv_append", "rope_append"]
OPS = ["layernorm", "layernorm_residual", "linear", "linear_gptq", "attention", "rope", *APPENDS]


def to_torch(value):
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def given(op, dtype="float32"):
    """The positional and the keyword arguments of a registered op."""
    if op == "linear_gptq":
        arguments = selfcheck.arguments("linear", dtype, bits=4)
        arguments.update(vars(arguments.pop("weight")))
    else:
        arguments = selfcheck.arguments(op, dtype)
    schema = getattr(torch.ops.cf_ops, op).default._schema
    tensors = [to_torch(arguments.get(a.name)) for a in schema.arguments if not a.kwarg_only]
    scalars = {a.name: arguments[a.name] for a in schema.arguments if a.kwarg_only and a.name in arguments}
    return tensors, scalars


def written(op, run, tensors, scalars):
    """What a call returns and the caches that it writes."""
    result = run(*tensors, **scalars)
    outputs = result if isinstance(result, tuple) else () if result is None else (result,)
    return [*outputs, *(tensors[-2:] if op in APPENDS else ())]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_opcheck(op, dtype):
    tensors, scalars = given(op, dtype)
    torch.library.opcheck(getattr(torch.ops.cf_ops, op).default, tuple(tensors), scalars)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_keeps_the_graph_and_the_bits(op, backend, dynamic):
    run = getattr(torch_ops, op)
    expected = written(op, run, *given(op))
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=dynamic)
    got = written(op, compiled, *given(op))
    assert len(got) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("op", OPS)
def test_a_registered_op_is_the_function(op):
    tensors, scalars = given(op)
    got = written(op, getattr(torch_ops, op), tensors, scalars)
    if op == "linear_gptq":
        arguments = selfcheck.arguments("linear", "float32", bits=4)
        expected = [ops.linear(**arguments)]
    else:
        arguments = selfcheck.arguments(op, "float32")
        result = getattr(ops, op)(**arguments)
        outputs = result if isinstance(result, tuple) else () if result is None else (result,)
        expected = [*outputs, *(arguments[n] for n in ("k_cache", "v_cache") if op in APPENDS)]
    assert len(got) == len(expected)
    assert all((a.numpy() == b).all() for a, b in zip(got, expected))


def test_a_decode_step_compiles_in_one_graph():
    layer = selfcheck.arguments("decode_layer", "float32")
    weights = {name: to_torch(value) for name, value in layer["weights"].items()}
    activations = {name: to_torch(layer[name]) for name in ("hidden", "positions", "kv_len", "cos", "sin")}
    scale = (96 // 4) ** -0.5

    def attention_block(hidden, k_cache, v_cache):
        q, _, _ = torch_ops.ln_qkv(
            hidden,
            weights["input_layernorm.weight"],
            weights["input_layernorm.bias"],
            weights["attention.query_key_value.weight"],
            weights["attention.query_key_value.bias"],
            activations["cos"],
            activations["sin"],
            activations["positions"],
            activations["kv_len"],
            k_cache,
            v_cache,
        )
        context = torch_ops.attention(q, k_cache, v_cache, activations["kv_len"], scale=scale)
        weight, bias = weights["attention.dense.weight"], weights["attention.dense.bias"]
        return torch_ops.linear(context.flatten(1), weight, bias, hidden, epilogue="residual")

    def caches():
        return to_torch(layer["k_cache"]), to_torch(layer["v_cache"])

    expected = ops.decode_layer(
        weights, layer["config"], **activations, **dict(zip(("k_cache", "v_cache"), caches()))
    ).attn_residual
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(attention_block, fullgraph=True, backend=backend)
        k_cache, v_cache = caches()
        before = k_cache.clone()
        assert torch.equal(compiled(activations["hidden"], k_cache, v_cache), expected)
        assert not torch.equal(before, k_cache)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_runs_pages_and_windows_are_those_of_the_functions(backend):
    heads, head_dim, page = 2, 16, 4
    runs = [(2, 0, 1), (0, 1, 5), (1, 6, 2)]
    kv_len = torch.tensor([9, 4, 7], dtype=torch.int32)
    table = torch.tensor([[7, 2, 4], [0, -1, -1], [5, 1, -1]], dtype=torch.int32)
    torch.manual_seed(1)
    qkv, q_sinks = torch.randn(8, 3 * heads, 1, head_dim), torch.randn(8, heads, head_dim)
    cos, sin = map(torch.from_numpy, ops.rope_table(12, head_dim))
    positions = torch.tensor([6, 4, 5, 6, 7, 8, 2, 3], dtype=torch.int32)
    pools = torch.randn(2, 9, heads, page, head_dim)

    def step(made, qkv, k_cache, v_cache, runs, page_table, window, q_sinks):
        step = {"runs": runs, "page_table": page_table}
        q = made.rope_append(qkv, cos, sin, positions, kv_len, k_cache, v_cache, layout="separate", **step)
        return made.attention(
            q, k_cache, v_cache, kv_len, scale=0.25, max_kv_len=12, **step, window=window, q_sinks=q_sinks
        )

    for page_table, window, sinks in ((table, None, None), (None, (3, 0), None), (table, (3, 2), q_sinks)):
        expected_caches, caches = pools.clone(), pools.clone()
        if page_table is None:
            expected_caches, caches = (c[:, :3].repeat(1, 1, 1, 3, 1).contiguous() for c in (expected_caches, caches))
        expected = step(ops, qkv, *expected_caches, runs, page_table, window, sinks)
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda qkv, k, v, runs: step(torch_ops, qkv, k, v, runs, page_table, window, sinks),
            fullgraph=True,
            backend=backend,
        )
        assert torch.equal(compiled(qkv, *caches, runs), expected)
        assert torch.equal(caches, expected_caches)
        # Other runs compile another graph.
        others = [(0, 0, 1), (1, 1, 3), (2, 4, 4)]
        caches = expected_caches.clone()
        expected = step(ops, qkv, *expected_caches, others, page_table, window, sinks)
        assert torch.equal(compiled(qkv, *caches, others), expected)
    k, v = torch.randn(2, 8, heads, head_dim)
    torch.library.opcheck(
        torch.ops.cf_ops.kv_append.default,
        (k, v, kv_len, *pools),
        {"runs": [list(run) for run in runs], "page_table": table},
    )
    with pytest.raises(ValueError, match=r"kv_append: runs: expected 8 rows in all, got 1"):
        torch_ops.kv_append(k, v, kv_len, *pools, runs=[(0, 0, 1)], page_table=table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fused_layernorm_residual(dtype, weight_dtype):
    torch.manual_seed(1)
    x, residual = (torch.randn(2, 3, 40).to(dtype) for _ in range(2))
    weight, bias = (1 + 0.1 * torch.randn(40)).to(weight_dtype), (0.1 * torch.randn(40)).to(weight_dtype)
    got = torch_ops.fused_layernorm_residual(x, residual, weight, bias, 1e-5)
    exact = torch.nn.functional.layer_norm(x.double(), (40,), weight.double(), bias.double(), 1e-5) + residual.double()
    flat = [tensor.double().reshape(6, 40) for tensor in (x, residual)]
    bound = ops.budget(ops.layernorm_residual)(*flat, weight, bias)
    rounding = 2**-11 if dtype == torch.float16 else 0  # of the float32 result
    assert got.dtype == dtype and got.shape == x.shape
    error = got.double() - exact
    assert error.norm() <= (bound.rel_l2 + rounding) * exact.norm()
    assert error.abs().max() <= (bound.rel_max + rounding) * exact.abs().max()
    wrong = torch_ops.fused_layernorm_residual(x, residual, weight, bias, 1e-1).double() - exact
    assert wrong.norm() > (bound.rel_l2 + rounding) * exact.norm()

    torch._dynamo.reset()
    compiled = torch.compile(torch_ops.fused_layernorm_residual, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, residual, weight, bias, 1e-5), got)


def test_fused_layernorm_residual_refuses_by_name():
    x, weight = torch.zeros(2, 3, 8), torch.ones(8)
    for bad, message in (
        ((x[0], x[0]), r"x has shape \(3, 8\), expected \(batch, seq, hidden\)"),
        ((x, x[:1]), r"residual has shape \(1, 3, 8\), expected \(2, 3, 8\) as x has"),
        ((x.double(), x), "x has dtype torch.float64, expected float32 or float16"),
        ((x, x.half()), "residual has dtype torch.float16, expected torch.float32 as x has"),
        ((x.transpose(0, 1), x.transpose(0, 1)), r"x has strides \(8, 24, 1\), expected a contiguous tensor"),
    ):
        with pytest.raises(ValueError, match="fused_layernorm_residual: " + message):
            torch_ops.fused_layernorm_residual(*bad, weight, weight)


def test_refusals_pass_through_torch():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"layernorm: 'gamma' has shape \(7\), expected \(8\)"):
        torch_ops.layernorm(x, torch.ones(7), torch.ones(8))
    with pytest.raises(ValueError, match=r"layernorm: 'x' has strides \(1, 2\), expected a contiguous tensor"):
        torch_ops.layernorm(torch.zeros(8, 2).t(), torch.ones(8), torch.ones(8))
    with pytest.raises(NotImplementedError, match="float32 or float64 activations, got float16"):
        torch_ops.layernorm(x.half(), torch.ones(8), torch.ones(8))


def test_without_torch_the_import_says_what_is_missing():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import cf_ops.ops\n"
        "try:\n    import cf_ops.torch_ops\n"
        "except ImportError as error:\n    print(error)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out == "cf_ops.torch_ops needs torch, which is not installed: pip install torch\n"
