"""Every op through Python: against golden files, float32 against float64, names, docstrings and refusals."""

import inspect
import json

import numpy as np
import pytest
from golden_layer import GoldenLayer, golden_files

from cf_ops import _core, ops

# The oracle's bound of the golden tests: relative L2 against Hugging Face in float64.
ORACLE_BOUND = 1e-11
FILES = golden_files("*.h5")
# One of each kind: the budget measures every sum in float64, which takes longer than the op.
LEFT_OUT = "-kv1-b1", "-kv2-b1", "-kv2-b3", "-kv128-b1", "-kv300-b1", "-kv2048"
SOME_FILES = [path for path in FILES if not path.stem.endswith(LEFT_OUT)]


class Outcome:
    """A call of an op: the function, its arguments, and for each thing that it makes a name, how to find it in the
    result and the arguments, and the tap that it must equal."""

    def __init__(self, function, arguments, *makes):
        self.function, self.arguments, self.makes = function, arguments, makes

    def run(self, dtype):
        """Name -> what the call makes, with activations of a dtype. Arguments that are written are copies."""
        arguments = self.cast(dtype)
        result = self.function(**arguments)
        return {name: find(result, arguments) for name, find, _ in self.makes}

    def cast(self, dtype):
        def convert(value):
            return value.astype(dtype) if getattr(value, "dtype", None) == np.float64 else value

        return {name: convert(value) for name, value in self.arguments.items()}


def made(result, _):
    return result


def nth(index):
    return lambda result, _: result[index]


def relative_l2(got, expected):
    return np.linalg.norm((got - expected).ravel()) / max(np.linalg.norm(np.ravel(expected)), 1e-300)


def relative_max(got, expected):
    return np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-300)


def heads_first(weight, heads):
    """GPT-NeoX's rows, interleaved by head, as the query, key and value projections one below the other."""
    parts = weight.reshape(heads, 3, -1, *weight.shape[1:])
    return np.ascontiguousarray(np.moveaxis(parts, 1, 0).reshape(weight.shape))


def outcomes(g):
    """Every op that has a tap in a golden file, in float64."""
    w, m, eps, batch = g.weights, g.model, g.model.layer_norm_eps, g.batch
    tap = g.taps
    hidden = g.inputs["hidden"].astype(np.float64)
    positions, kv_len = g.inputs["positions"], g.inputs["kv_len"]
    cos, sin = g.table()
    tokens, heads, names = len(hidden), m.num_attention_heads, m.names
    is_neox, is_gated = m.model_type == "gpt_neox", len(names.mlp_parts) > 1
    first_norm, second_norm = names.norms
    epilogue = "swiglu" if is_gated else "gelu_erf" if m.hidden_act == "gelu" else "gelu_tanh"
    bias = f"{names.qkv}.bias"
    norm_op = ops.rmsnorm if is_gated else ops.layernorm
    layout = {} if is_neox else {"layout": "separate"}

    def norm(site, x, **more):
        parameters = dict(zip(("gamma", "beta"), (w[f"{site}.{part}"] for part in names.norm_parts)))
        return {"x": x, **parameters, "eps": eps, **more}

    def product(site, x, **more):
        return {"x": x, "weight": w[f"{site}.weight"], "bias": w.get(f"{site}.bias"), **more}

    def cache_rows(name):
        tap_name = f"{names.tap('kv_append')}.{name}"
        return tap_name, lambda _, arguments: g.appended(arguments[name]), tap[tap_name]

    def caches():
        k_cache, v_cache = g.caches(np.float64)
        return {"k_cache": k_cache, "v_cache": v_cache}

    def filled():
        both = caches()
        for cache, name in zip(both.values(), "kv"):
            for b, n in enumerate(kv_len):
                cache[b, :, n - g.q_len : n] = tap[f"{names.tap('kv_append')}.{name}_cache"][b]
        return both

    qkv = tap[names.qkv]
    rotated = [(f"rotary_emb.{n}", nth(i), tap[f"{names.tap('rotary_emb')}.{n}"]) for i, n in enumerate("qkv")]
    attn_in, residual = tap[first_norm], tap[names.tap("dense")]
    context = tap[names.tap("context")]
    parallel = m.use_parallel_residual
    mlp_source = hidden if parallel else residual
    q, k, v = (tap[f"{names.tap('rotary_emb')}.{n}"] for n in "qkv")
    table = {"cos": cos, "sin": sin, "positions": positions}

    def fused_outcomes():
        """Those of ops that GPT-NeoX alone has."""
        yield Outcome(
            ops.ln_qkv,
            {
                **norm("input_layernorm", hidden),
                **product("attention.query_key_value", hidden),
                **table,
                "kv_len": kv_len,
                **caches(),
            },
            *rotated,
            cache_rows("k_cache"),
            cache_rows("v_cache"),
        )
        weight = w["attention.query_key_value.weight"]
        if not isinstance(weight, ops.GptqWeight):
            # (3, batch, heads, q_len, d)
            by_head = np.moveaxis(qkv.reshape(batch, g.q_len, heads, 3, -1), (3, 2), (0, 2))
            yield Outcome(
                ops.ln_qkv_heads,
                {
                    **norm("input_layernorm", hidden.reshape(batch, g.q_len, -1)),
                    "weight": heads_first(weight, heads),
                    "bias": heads_first(w[bias], heads) if bias in w else None,
                    "heads": heads,
                    "kv_heads": heads,
                },
                *((name, nth(i), by_head[i]) for i, name in enumerate("qkv")),
            )
        yield Outcome(
            ops.layernorm_residual,
            norm("input_layernorm", hidden, residual=hidden),
            ("input_layernorm + hidden", made, attn_in + hidden),
        )
        # h = x + a + b in either form of the residual, and y of a value that is known: x + a is attention.residual.
        zero = np.zeros_like(hidden)
        yield Outcome(
            ops.residual_layernorm,
            norm("post_attention_layernorm", mlp_source, a=zero, b=zero),
            ("hidden", nth(0), mlp_source),
            ("post_attention_layernorm", nth(1), tap["post_attention_layernorm"]),
        )
        yield Outcome(
            ops.residual_layernorm,
            norm("input_layernorm", hidden, a=tap["hf.attention.dense"], b=tap["hf.mlp.dense_4h_to_h"]),
            ("output", nth(0), tap["output"]),
        )

    yield Outcome(norm_op, norm(first_norm, hidden), (first_norm, made, attn_in))
    yield Outcome(
        ops.linear,
        product(names.qkv, attn_in),
        (names.qkv, made, qkv.reshape(tokens, -1)),
    )
    own_heads = {} if is_neox else {"kv_heads": m.kv_heads}
    turned = qkv
    if names.head_norms:
        turned = tap[names.tap("qk_norm")]
        gains = dict(zip(("q_gamma", "k_gamma"), (w[f"{name}.weight"] for name in names.head_norms)))
        yield Outcome(
            ops.qk_norm,
            {"qkv": qkv, **gains, "kv_heads": m.kv_heads, "eps": eps},
            ("qk_norm", made, turned),
        )
    yield Outcome(ops.rope, {"qkv": turned, **table, **layout, **own_heads}, *rotated)
    yield Outcome(
        ops.kv_append, {"k": k, "v": v, "kv_len": kv_len, **caches()}, cache_rows("k_cache"), cache_rows("v_cache")
    )
    yield Outcome(
        ops.rope_append,
        {"qkv": turned, **table, "kv_len": kv_len, **caches(), **layout},
        ("rotary_emb.q", made, q),
        cache_rows("k_cache"),
        cache_rows("v_cache"),
    )
    yield Outcome(
        ops.attention,
        {"q": q, "kv_len": kv_len, "scale": m.head_dim**-0.5, **filled()},
        ("context", made, context),
    )
    yield Outcome(
        ops.linear,
        product(names.dense, context.reshape(tokens, -1), residual=hidden, epilogue="residual"),
        ("residual", made, residual),
    )
    yield Outcome(
        norm_op,
        norm(second_norm, mlp_source),
        (second_norm, made, tap[second_norm]),
    )
    yield Outcome(
        ops.linear,
        product(names.mlp, tap[second_norm], epilogue=epilogue),
        ("mlp.act", made, tap["mlp.act"]),
    )
    yield Outcome(
        ops.linear,
        product(names.down, tap["mlp.act"], residual=residual, epilogue="residual"),
        ("output", made, tap["output"]),
    )
    if is_neox:
        yield from fused_outcomes()
    taps = {
        "attn_in": attn_in,
        "qkv": qkv,
        "q": q,
        "k": k,
        "v": v,
        "context": context,
        "attn_residual": residual,
        "mlp_in": tap[second_norm],
        "mlp_act": tap["mlp.act"],
        "output": tap["output"],
    }
    if names.head_norms:
        taps["qkv_normed"] = turned
    yield Outcome(
        ops.decode_layer,
        {"weights": w, "config": g.config, "hidden": hidden, "kv_len": kv_len, **table, **caches()},
        *((name, lambda result, _, name=name: getattr(result, name), expected) for name, expected in taps.items()),
        cache_rows("k_cache"),
        cache_rows("v_cache"),
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_float64_equals_hugging_face(path):
    layer = GoldenLayer(path)
    for outcome in outcomes(layer):
        results = outcome.run(np.float64)
        for name, _, expected in outcome.makes:
            assert relative_l2(results[name], expected) < ORACLE_BOUND, (outcome.function.__name__, name)


@pytest.mark.parametrize("path", SOME_FILES, ids=lambda path: path.stem)
def test_float32_is_within_the_contracts_budget(path):
    layer = GoldenLayer(path)
    for outcome in outcomes(layer):
        # The same numbers for both: what a float32 holds.
        outcome.arguments = {**outcome.arguments, **outcome.cast(np.float32)}
        results = outcome.run(np.float32)
        outcome.arguments = {
            name: value.astype(np.float64) if is_activation(name, value) else value
            for name, value in outcome.arguments.items()
        }
        bound = ops.budget(outcome.function)(**outcome.arguments)
        exact = outcome.run(np.float64)
        for name, _, _ in outcome.makes:
            label = outcome.function.__name__, name
            assert results[name].dtype == np.float32, label
            assert relative_l2(results[name], exact[name]) <= bound.rel_l2, label
            assert relative_max(results[name], exact[name]) <= bound.rel_max, label


def is_activation(name, value):
    """Whether an argument of an Outcome in float32 was float64: tables and weights keep their dtype."""
    weights = (
        "gamma",
        "beta",
        "q_gamma",
        "k_gamma",
        "weight",
        "bias",
        "cos",
        "sin",
        "gamma1",
        "beta1",
        "gamma2",
        "beta2",
    )
    return getattr(value, "dtype", None) == np.float32 and name not in weights


def test_every_op_has_golden_taps():
    called = {
        outcome.function.__name__
        for name in ("neox-d80-kv17-b3", "neox-gptq-sym-q7-kv23", "llama-gqa8-kv17-b2", "qwen3-gqa2-q3-kv9")
        for outcome in outcomes(GoldenLayer(golden_files(f"{name}.h5")[0]))
    }
    assert called | {"embedding", "qk_norm"} == set(_core.ops())
    weights = GoldenLayer(golden_files("neox-gptq-sym-q7-kv23.h5")[0]).weights
    assert isinstance(weights["attention.dense.weight"], ops.GptqWeight)


@pytest.mark.parametrize("fault", ["eps", "position", "cache", "zero_offset"])
def test_the_golden_test_can_fail(fault):
    name = "neox-gptq-sym-q7-kv23" if fault == "zero_offset" else "neox-d80-kv17-b3"
    layer = GoldenLayer(golden_files(f"{name}.h5")[0])
    if fault == "zero_offset":
        good = layer.weights["attention.dense.weight"]
        layer.weights["attention.dense.weight"] = ops.GptqWeight(**{**vars(good), "zero_offset": 1 - good.zero_offset})
    whole = list(outcomes(layer))[-1]
    if fault == "eps":
        whole.arguments["config"] = json.dumps({**json.loads(layer.config), "layer_norm_eps": 1.1e-5})
    if fault == "position":
        whole.arguments["cos"] = np.roll(whole.arguments["cos"], 1, axis=1)
    if fault == "cache":
        whole.arguments["k_cache"][..., 0, 0] += 1e-3
    output = whole.run(np.float64)["output"]
    assert relative_l2(output, layer.taps["output"]) > ORACLE_BOUND


def test_embedding_takes_rows():
    table = np.random.default_rng(1).standard_normal((50, 24)).astype(np.float16)
    ids = np.array([3, 0, 49, 3], np.int32)
    for dtype in ("float32", "float64"):
        y = ops.embedding(ids, table, dtype=dtype)
        assert y.dtype == dtype
        assert (y == table[ids].astype(dtype)).all()
    for bad in (-1, 50):
        with pytest.raises(ValueError, match=rf"embedding: 'ids'\[1\] must be 0 to 49, got {bad}"):
            ops.embedding(np.array([0, bad], np.int32), table)
    with pytest.raises(ValueError, match="embedding: dtype must be float16, .* got 'int8'"):
        ops.embedding(ids, table, dtype="int8")


def test_rope_table_is_hugging_faces():
    layer = GoldenLayer(golden_files("neox-d80-q7-kv23.h5")[0])
    positions = layer.inputs["positions"]
    cos, sin = ops.rope_table(int(positions.max()) + 1, layer.model.rotary_dim, layer.model.rope_theta)
    # Float32's cosine and sine differ between libraries by a few units in the last place of an angle.
    bound = positions.max() * np.finfo(np.float32).eps
    assert cos.dtype == sin.dtype == np.float32
    assert np.abs(cos[positions] - layer.inputs["cos"]).max() <= bound
    assert np.abs(sin[positions] - layer.inputs["sin"]).max() <= bound
    for bad in ({"rows": 0}, {"rotary_dim": 3}, {"rotary_dim": 0}, {"theta": 0.0}, {"theta": float("nan")}):
        (name,) = bad
        with pytest.raises(ValueError, match=f"rope_table: {name} must be"):
            ops.rope_table(**{"rows": 4, "rotary_dim": 8, "theta": 1e4, **bad})


# What a step may have: an op's options that its example has not.
STEP_OPTIONS = dict.fromkeys(("rope_append", "ln_qkv", "decode_layer"), {"runs", "page_table"})
STEP_OPTIONS["ln_qkv_heads"] = {"runs"}
STEP_OPTIONS["kv_append"] = {"runs", "page_table", "window"}
STEP_OPTIONS["attention"] = {"runs", "page_table", "window", "q_sinks"}


@pytest.mark.parametrize("op", _core.ops())
def test_a_function_has_the_contracts_names_and_text(op):
    function = getattr(ops, op)
    parameters = list(inspect.signature(function).parameters)
    tensors, scalars = _core.op_example(op)
    inputs = [name for name, role, *_ in tensors if role != "output"]
    if op == "decode_layer":
        inputs = ["weights", *(name for name in inputs if "." not in name)]
    assert not set(inputs) - set(parameters)
    assert not set(scalars) - set(parameters)
    positions = {"position_table", "positions"}
    extra = {"embedding": {"dtype", *positions}, "linear": {"residual"}, "ln_qkv_heads": {"heads", "kv_heads"}}
    extra["rope"] = {"kv_heads"}
    assert set(parameters) - set(inputs) - set(scalars) == extra.get(op, set()) | STEP_OPTIONS.get(op, set())
    in_order = [name for name in parameters if name in inputs]
    assert in_order == inputs
    text = inspect.getdoc(function)
    contract = ops._contracts()[op]
    assert contract.comment in text
    assert "Returns" in text
    shapes = dict(contract.arguments)
    assert shapes and all(names in text and shape in text for names, shape in shapes.items())


@pytest.mark.parametrize(
    "op, formula",
    [
        ("layernorm", "y[t,h] = (x[t,h] - mean[t]) / sqrt(var[t] + eps) * gamma[h] + beta[h]"),
        ("linear", "y[t,o] = f(sum_k x[t,k] * W[o,k] + bias[o])"),
        ("attention", "s[j] = scale * q[r + i, h, :] . k_cache[b, g, j, :]"),
        ("decode_layer", "(tokens, intermediate)"),
    ],
)
def test_help_shows_the_formula(op, formula):
    assert formula in inspect.getdoc(getattr(ops, op))


def norm_arguments():
    rng = np.random.default_rng(1)
    return {
        "x": rng.standard_normal((3, 8)).astype(np.float32),
        "gamma": np.ones(8, np.float16),
        "beta": np.zeros(8, np.float16),
    }


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": np.zeros((3, 8), np.int32)}, ValueError, "layernorm: 'x' has dtype int32, expected a floating-point"),
        ({"x": np.zeros((3, 8), np.complex64)}, ValueError, "'x' has dtype complex64, expected float16, bfloat16,"),
        ({"x": np.zeros((3, 8), np.float16)}, NotImplementedError, "takes float32 or float64 activations, got float16"),
        ({"x": np.zeros(8, np.float32)}, ValueError, r"layernorm: 'x' has shape \(8\), expected 2 dimensions"),
        ({"x": np.zeros((0, 8), np.float32)}, ValueError, r"'x' has shape \(0, 8\), expected sizes of at least 1"),
        ({"x": None}, TypeError, "layernorm: 'x' must be a numpy array or a torch tensor, got builtins.NoneType"),
        ({"x": [[1.0]]}, TypeError, "layernorm: 'x' must be a numpy array or a torch tensor, got builtins.list"),
        ({"gamma": np.ones(7, np.float16)}, ValueError, r"'gamma' has shape \(7\), expected \(8\)"),
        ({"beta": np.ones(8, np.float32)}, ValueError, "'beta' has dtype float32, expected float16 as 'gamma' has"),
        ({"eps": 0}, ValueError, "layernorm: eps must be positive, got 0"),
        ({"eps": float("nan")}, ValueError, "layernorm: eps must be positive, got nan"),
        ({"eps": "small"}, ValueError, "layernorm: 'eps' must be a number, got 'small'"),
        (
            {"x": np.zeros((3, 16), np.float32)[:, ::2]},
            ValueError,
            r"strides \(64, 8\) in bytes, expected a contiguous",
        ),
        ({"x": np.zeros((3, 8), ">f4")}, ValueError, "'x' has dtype >f4, expected this machine's byte order"),
    ],
)
def test_refusals_are_one_line(change, error, message):
    ops.layernorm(**norm_arguments())
    with pytest.raises(error, match=message) as caught:
        ops.layernorm(**{**norm_arguments(), **change})
    assert "\n" not in str(caught.value)


def test_misaligned_tensors_are_refused():
    block = np.zeros(4 * 25, np.uint8)
    offset = 1 - block.ctypes.data % 4 % 2
    x = block[offset : offset + 96].view(np.float32).reshape(3, 8)
    with pytest.raises(ValueError, match="layernorm: 'x' is misaligned, expected a multiple of 4 bytes"):
        ops.layernorm(**{**norm_arguments(), "x": x})


def test_linear_refuses_what_its_epilogue_does_not_take():
    x, weight = np.zeros((2, 8), np.float32), np.zeros((3, 8), np.float16)
    with pytest.raises(ValueError, match="linear: 'residual' is given, expected Epilogue::residual with it"):
        ops.linear(x, weight, residual=np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="linear: 'residual' is null"):
        ops.linear(x, weight, epilogue="residual")
    names = "none, gelu_erf, gelu_tanh, residual, swiglu"
    with pytest.raises(ValueError, match=f"'epilogue' must be one of {names}, got 'relu'"):
        ops.linear(x, weight, epilogue="relu")
    with pytest.raises(ValueError, match="'weight' has 3 rows, expected an even number with epilogue 'swiglu'"):
        ops.linear(x, weight, epilogue="swiglu")


def test_rope_refuses_heads_that_its_layout_does_not_take():
    table = {"cos": np.ones((1, 2), np.float32), "sin": np.ones((1, 2), np.float32)}
    given = {"qkv": np.zeros((1, 4, 1, 4), np.float32), **table, "positions": np.zeros(1, np.int32)}
    with pytest.raises(ValueError, match="kv_heads must be given with layout 'separate' alone, got None"):
        ops.rope(**given, layout="separate")
    with pytest.raises(ValueError, match="'qkv' has 4 heads, expected more than 2 \\* kv_heads = 4"):
        ops.rope(**given, layout="separate", kv_heads=2)
    q, k, v = ops.rope(**given, layout="separate", kv_heads=1)
    assert (q.shape, k.shape, v.shape) == ((1, 2, 4), (1, 1, 4), (1, 1, 4))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"bits": 0}, "GPTQ bits must be 4 or 8, got 0"),
        ({"bits": 3}, "GPTQ bits must be 4 or 8, got 3"),
        ({"bits": 2**40}, "'attention.dense.bits' must be an integer, got 1099511627776"),
        ({"group_size": 0}, "GPTQ group_size must be at least 1, got 0"),
        ({"group_size": 7}, "has shape"),
        ({"g_idx": np.full(64, 99, np.int32)}, r"'attention.dense.g_idx'\[0\] must be 0 to \d+, got 99"),
        ({"scales": np.ones((2, 64), np.float32)}, "'attention.dense.scales' has dtype float32, expected float16"),
        ({"qweight": np.zeros((8, 64), np.int64)}, "'attention.dense.qweight' has dtype int64, expected int32"),
    ],
)
def test_quantised_weights_are_checked(change, message):
    layer = GoldenLayer(golden_files("neox-gptq-sym-q7-kv23.h5")[0])
    good = layer.weights["attention.dense.weight"]
    layer.weights["attention.dense.weight"] = ops.GptqWeight(**{**vars(good), **change})
    whole = list(outcomes(layer))[-1]
    with pytest.raises(ValueError, match=message):
        whole.run(np.float64)


def whole_layer():
    return list(outcomes(GoldenLayer(golden_files("neox-d80-kv17-b3.h5")[0])))[-1]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a["weights"].pop("attention.dense.bias"), "'attention.dense.bias' is null, expected a tensor of"),
        (lambda a: a["weights"].update({"attention.out": a["hidden"]}), "'attention.out' is none of its tensors"),
        (lambda a: a["weights"].update(hidden=a["hidden"]), "weights has 'hidden', expected Hugging Face's names of"),
        (lambda a: a.update(config="{"), "decode_layer: config"),
        (lambda a: a.update(config={"model_type": "gemma"}), "model_type"),
        (lambda a: a.update(hidden=a["hidden"][:, :80].copy()), r"'hidden' has shape \(3, 80\), expected \(3, 160\)"),
        (lambda a: a.update(kv_len=np.array([17, 16, 99], np.int32)), r"'kv_len'\[2\] must be 1 to 17, got 99"),
        (lambda a: a.update(kv_len=a["kv_len"].astype(np.int64)), "'kv_len' has dtype int64, expected int32"),
        (lambda a: a.update(positions=np.array([0, 0, 99], np.int32)), r"'positions'\[2\] must be 0 to 16, got 99"),
        (lambda a: a.update(max_kv_len=16), r"'kv_len'\[0\] must be 1 to 16, got 17"),
        (lambda a: a.update(max_kv_len=18), "max_kv_len must be q_len 1 to capacity 17, got 18"),
        (lambda a: a.update(cos=a["cos"].astype(np.float64)), "'cos' has dtype float64, expected float32"),
        (lambda a: a["k_cache"].flags.__setattr__("writeable", False), "'k_cache' is read-only, expected"),
    ],
)
def test_decode_layer_refuses_by_name(change, message):
    whole = whole_layer()
    whole.run(np.float64)
    change(whole.arguments)
    before = whole.arguments["k_cache"].copy()
    with pytest.raises(ValueError, match=message) as caught:
        ops.decode_layer(**whole.arguments)
    assert "\n" not in str(caught.value)
    assert np.array_equal(whole.arguments["k_cache"], before, equal_nan=True)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'softmax' is no op, expected one of embedding, layernorm, "):
        _core.run_op("softmax", {}, {})
    with pytest.raises(ValueError, match="layernorm: 'z' is none of its tensors, expected x, gamma, beta, y"):
        _core.run_op("layernorm", {"z": (0, "float32", (1, 1))}, {})
    with pytest.raises(ValueError, match="layernorm: 'scale' is none of its scalars, expected eps"):
        _core.run_op("layernorm", {}, {"scale": 1.0})


def test_a_refused_append_writes_nothing():
    k, v = (np.ones((2, 3, 8), np.float32) for _ in range(2))
    caches = [np.zeros((2, 3, 5, 8), np.float32) for _ in range(2)]
    with pytest.raises(ValueError, match=r"kv_append: 'kv_len'\[1\] must be 1 to 5, got 6"):
        ops.kv_append(k, v, np.array([1, 6], np.int32), *caches)
    assert not any(cache.any() for cache in caches)
    ops.kv_append(k, v, np.array([1, 5], np.int32), *caches)
    assert all(cache.sum() == 2 * 3 * 8 for cache in caches)


def test_a_budget_follows_the_precision():
    arguments = norm_arguments()
    float32, float16 = ops.budget(ops.layernorm), ops.budget(ops.layernorm, output="float16")
    assert 0 < float32(**arguments).rel_l2 < float16(**arguments).rel_l2
    assert ops.budget(ops.kv_append)(
        np.ones((1, 1, 4), np.float32),
        np.ones((1, 1, 4), np.float32),
        np.array([1], np.int32),
        *(np.zeros((1, 1, 1, 4), np.float32) for _ in range(2)),
    ) == (0, 0)
    with pytest.raises(ValueError, match="dtype must be .* got 'float8'"):
        ops.budget(ops.layernorm, compute="float8")(**arguments)
    with pytest.raises(ValueError, match="budget: expected a function that runs an op, got <built-in function abs>"):
        ops.budget(abs)(-1)
