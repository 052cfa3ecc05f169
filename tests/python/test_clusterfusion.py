"""The calls of ClusterFusion's Pythia port: Hugging Face's values, our layer's bits, contexts that are checked."""

import inspect
import subprocess
import sys
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cuda_models import gpu  # noqa: E402
from golden_layer import GoldenLayer, golden_files  # noqa: E402

from cf_ops import clusterfusion, ops  # noqa: E402

LAYER_WEIGHTS = {
    "weight_qkv": "attention.query_key_value.weight",
    "bias_qkv": "attention.query_key_value.bias",
    "weight_o": "attention.dense.weight",
    "bias_o": "attention.dense.bias",
    "ln_weight": "input_layernorm.weight",
    "ln_bias": "input_layernorm.bias",
    "post_ln_weight": "post_attention_layernorm.weight",
    "post_ln_bias": "post_attention_layernorm.bias",
    "mlp_up_weight": "mlp.dense_h_to_4h.weight",
    "mlp_up_bias": "mlp.dense_h_to_4h.bias",
    "mlp_down_weight": "mlp.dense_4h_to_h.weight",
    "mlp_down_bias": "mlp.dense_4h_to_h.bias",
}
STEP_BIASES = {"bias_qkv": "qkv_bias", "bias_o": "o_bias"}
CREATE = ("k_cache", "v_cache", "weight_qkv", "weight_o", "mlp_up_weight", "mlp_down_weight")
SPARE_ROWS = 4
FLOAT16_ROUNDING = 2**-11
needs_gpu = [gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


def port_arguments(layer, device="cpu"):
    """decoder_layer()'s arguments for a golden file of one sequence and one new token."""
    model, length = layer.model, int(layer.inputs["kv_len"][0]) - 1
    given = {name: torch.from_numpy(layer.weights[target].copy()) for name, target in LAYER_WEIGHTS.items()}
    for name in ("k_cache", "v_cache"):
        cache = torch.full((length + 1 + SPARE_ROWS, model.hidden_size), torch.nan, dtype=torch.float16)
        for row in range(length):
            cache[row] = torch.from_numpy(layer.inputs[name][0, :, row].reshape(-1))
        given[name] = cache
    for name, rest in (("cos", 1.0), ("sin", 0.0)):
        half = torch.from_numpy(layer.inputs[name][0])
        given[name] = torch.cat([half, half, torch.full((model.head_dim - model.rotary_dim,), rest)])
    given["input"] = torch.from_numpy(layer.inputs["hidden"].copy())
    return {**{name: tensor.to(device) for name, tensor in given.items()}, "current_seq_len": length}


def activation(device):
    """The dtype in which a device computes a layer of float16."""
    return torch.float16 if torch.device(device).type == "cuda" else torch.float32


def small_layer():
    return GoldenLayer(golden_files("neox-d80-kv17-b1.h5")[0])


def calls_of(layer):
    return clusterfusion.DecoderCalls("small", layer.model.hidden_size, layer.model.num_attention_heads)


def step_arguments(given, id):
    names = inspect.signature(clusterfusion.pythia_2b8_graph_decode_step).parameters
    renamed = {STEP_BIASES.get(name, name): value for name, value in given.items()}
    return {"id": id, **{name: renamed[name] for name in names if name != "id"}}


def create(calls, id, given, **options):
    calls.create_graph_context(id, *(given[name] for name in CREATE), max_seq_len=len(given["k_cache"]), **options)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def context(request):
    """The calls, the arguments, and the id of a context that is destroyed afterwards."""
    layer = small_layer()
    calls, given = calls_of(layer), port_arguments(layer, request.param)
    create(calls, 7, given)
    yield calls, given, 7
    if 7 in clusterfusion._contexts:
        calls.destroy_graph_context(7)


def our_arguments(layer, given, dtype):
    """The port's arguments as those of ops.decode_layer, in this library's layout."""
    heads, length = layer.model.num_attention_heads, given["current_seq_len"]
    caches = [
        given[name][: length + 1].to(dtype).view(1, length + 1, heads, -1).permute(0, 2, 1, 3).contiguous()
        for name in ("k_cache", "v_cache")
    ]
    half, device = layer.model.rotary_dim // 2, given["input"].device
    return (
        {target: given[name] for name, target in LAYER_WEIGHTS.items()},
        layer.config,
        given["input"].to(dtype),
        torch.tensor([0], dtype=torch.int32, device=device),
        torch.tensor([length + 1], dtype=torch.int32, device=device),
        given["cos"][None, :half].contiguous(),
        given["sin"][None, :half].contiguous(),
        *caches,
    )


def error_bound(layer, given):
    """The relative L2 error of a float16 layer, or of a float32 layer whose result is rounded to float16."""
    dtype = activation(given["input"].device)
    measure = ops.budget(ops.decode_layer, output=str(dtype).removeprefix("torch."))
    on_cpu = {name: value.cpu() if torch.is_tensor(value) else value for name, value in given.items()}
    bound = measure(*our_arguments(layer, on_cpu, torch.float64)).rel_l2
    return bound + (FLOAT16_ROUNDING if dtype == torch.float32 else 0)


def check_against_hugging_face(layer, calls, device):
    given = port_arguments(layer, device)
    bound = error_bound(layer, given)
    made = ops.decode_layer(*our_arguments(layer, given, activation(device)))
    output, k_new, v_new = calls.decoder_layer(**given)
    # Bit for bit our layer's.
    assert torch.equal(output, made.output.half())
    assert torch.equal(k_new, made.k.half()) and torch.equal(v_new, made.v.half())
    # Within the bound of Hugging Face's float64.
    for got, tap in ((output, "output"), (k_new, "attention.rotary_emb.k"), (v_new, "attention.rotary_emb.v")):
        exact = layer.taps[tap]
        error = np.linalg.norm(got.double().cpu().numpy() - exact) / np.linalg.norm(exact)
        assert 0 < error < bound, tap
    length = given["current_seq_len"]
    for cache, new in ((given["k_cache"], k_new), (given["v_cache"], v_new)):
        assert torch.equal(cache[length], new.view(-1))
        assert torch.isnan(cache[length + 1 :]).all() and not torch.isnan(cache[: length + 1]).any()
    return given, output


@on_each_device
def test_a_small_layer(device):
    layer = small_layer()
    check_against_hugging_face(layer, calls_of(layer), device)


@on_each_device
def test_a_layer_of_pythia_2b8(device):
    layer = GoldenLayer(golden_files("pythia-2.8b-kv17.h5")[0])
    given, output = check_against_hugging_face(layer, clusterfusion._PYTHIA_2B8, device)
    again, _, _ = clusterfusion.pythia_2b8_decoder_layer_split(**given)
    assert torch.equal(again, output)


@on_each_device
def test_wrong_weights_are_noticed(device):
    layer = small_layer()
    given = port_arguments(layer, device)
    bound = error_bound(layer, given)
    rows = given["weight_qkv"]
    given["weight_qkv"] = rows.view(2, 3, 80, 160).transpose(0, 1).reshape(rows.shape).contiguous()  # not interleaved
    output, _, _ = calls_of(layer).decoder_layer(**given)
    exact = layer.taps["output"]
    assert np.linalg.norm(output.double().cpu().numpy() - exact) / np.linalg.norm(exact) > bound


def test_a_graph_context_equals_the_stateless_call(context):
    calls, given, id = context
    alone = {**given, "k_cache": given["k_cache"].clone(), "v_cache": given["v_cache"].clone()}
    torch.manual_seed(1)
    first = given["current_seq_len"]
    # Steps in a row, a step back, a second prompt of another length, and on from there.
    for length in (first, first + 1, first + 2, first + 1, first + 2, 3, 4):
        for arguments in (given, alone):
            arguments["current_seq_len"] = length
        device = given["k_cache"].device
        given["input"] = alone["input"] = torch.randn(1, 160).half().to(device)
        if length == 3:
            rows = torch.randn(2, 3, 160).half().to(device)
            for arguments in (given, alone):
                arguments["k_cache"][:3], arguments["v_cache"][:3] = rows
        step = calls.graph_decode_step(**step_arguments(given, id))
        whole = calls.decoder_layer(**alone)
        assert all(torch.equal(a, b) for a, b in zip(step, whole)), length
        for name in ("k_cache", "v_cache"):
            assert torch.equal(given[name][: length + 1], alone[name][: length + 1])


def test_contexts_are_validated(context):
    calls, given, id = context
    step = step_arguments(given, id)
    calls.graph_decode_step(**step)
    with pytest.raises(ValueError, match="there is no context 8, expected an id in use: 7"):
        calls.graph_decode_step(**{**step, "id": 8})
    with pytest.raises(ValueError, match="pythia-2.8b destroy_graph_context: context 7 is of small, expected one of"):
        clusterfusion.pythia_2b8_destroy_graph_context(7)
    with pytest.raises(ValueError, match="context 7 is of small, expected one of pythia-6.9b"):
        clusterfusion.pythia_6b9_graph_decode_step(**step)
    with pytest.raises(ValueError, match="id 7 is a context of small, expected an id not in use"):
        create(calls, 7, given)
    for bad in ("7", 7.0, None, True):
        with pytest.raises(TypeError, match="id must be an integer, got"):
            calls.graph_decode_step(**{**step, "id": bad})
    with pytest.raises(ValueError, match="'k_cache' is another tensor, expected the one that context 7 was made with"):
        calls.graph_decode_step(**{**step, "k_cache": given["k_cache"].clone()})
    with pytest.raises(ValueError, match=r"current_seq_len must be 0 to 20, got 21"):
        calls.graph_decode_step(**{**step, "current_seq_len": 21})
    calls.destroy_graph_context(id)
    for use in (lambda: calls.graph_decode_step(**step), lambda: calls.destroy_graph_context(id)):
        with pytest.raises(ValueError, match="there is no context 7, expected an id in use: none"):
            use()


@on_each_device
def test_a_context_owns_its_tensors(device):
    layer = small_layer()
    calls, given = calls_of(layer), port_arguments(layer, device)
    expected = calls.decoder_layer(**given)[0]
    create(calls, 9, given)
    step = step_arguments(given, 9)
    del given
    assert torch.equal(calls.graph_decode_step(**step)[0], expected)
    calls.destroy_graph_context(9)


@on_each_device
def test_two_threads_with_a_context_each(device):
    layer = small_layer()
    calls = calls_of(layer)
    expected = calls.decoder_layer(**port_arguments(layer, device))[0]
    wrong = []

    def work(id):
        for _ in range(20):
            given = port_arguments(layer, device)
            create(calls, id, given)
            # The second step has the same work, and a graph of its own on a GPU.
            outputs = [calls.graph_decode_step(**step_arguments(given, id))[0]]
            clusterfusion._contexts[id].cache.length -= 1
            outputs.append(calls.graph_decode_step(**step_arguments(given, id))[0])
            calls.destroy_graph_context(id)
            wrong.extend([id] * (not all(torch.equal(output, expected) for output in outputs)))

    threads = [threading.Thread(target=work, args=(id,)) for id in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not clusterfusion._contexts


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])
def test_steps_are_captured(device):
    """A CUDA graph of the user's own holds a step of a context. Replays read what the tensors then hold."""
    layer = small_layer()
    calls, given = calls_of(layer), port_arguments(layer, device)
    create(calls, 11, given)
    step = step_arguments(given, 11)
    calls.graph_decode_step(**step)  # turns the valid rows into our layout
    step["current_seq_len"] += 1
    inputs = [torch.randn(1, 160).half().to(device) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = calls.graph_decode_step(**step)
    for other in inputs:
        step["input"].copy_(other)
        graph.replay()
        got = [tensor.clone() for tensor in (*made, given["k_cache"][step["current_seq_len"]])]
        expected = calls.decoder_layer(**{**given, "input": other, "current_seq_len": step["current_seq_len"]})
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
        assert torch.equal(got[3], expected[1].view(-1))
    calls.destroy_graph_context(11)


def drawn(given, seed):
    """The arguments with other values and in other places, but for the caches and the matrices of a context."""
    torch.manual_seed(seed)
    kept = (*CREATE, "current_seq_len")
    made = {name: value.clone() for name, value in given.items() if name not in kept}
    made["input"] = torch.randn(1, 160).half().to(given["input"].device)
    for name in ("ln_bias", "bias_o", "mlp_down_bias"):
        made[name] += 0.1 * torch.randn(made[name].shape).half().to(made[name].device)
    return {**given, **made}


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])
def test_a_context_s_graph_has_the_bits_of_its_launches(monkeypatch, device):
    """Steps on a stream of the caller's, whose tensors lie elsewhere at each and of which none waits for the last; all
    outputs are kept. The lengths are those at which attention is planned anew, and a step back."""
    layer = small_layer()
    calls, made, caches = warm_calls(layer, monkeypatch), {}, {}
    prompt = port_arguments(layer, device)
    rows = torch.randn(2, 300, 160).half().to(device)
    stream = torch.cuda.Stream()
    for id, impl in ((31, "graph"), (32, "unfused")):
        given = {**prompt, "k_cache": rows[0].clone(), "v_cache": rows[1].clone()}
        create(calls, id, given, impl=impl)
        steps = [drawn({**given, "current_seq_len": n}, n) for n in (126, 127, 128, 129, 255, 256, 257, 127, 128)]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1 << 24)
            made[impl] = [calls.graph_decode_step(**step_arguments(step, id)) for step in steps]
        stream.synchronize()
        caches[impl] = given["k_cache"], given["v_cache"]
    assert len({tensor.data_ptr() for step in made["graph"] for tensor in step}) == 3 * len(made["graph"])
    for one, other in zip(made["graph"], made["unfused"]):
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(one, other))
    assert all(torch.equal(a, b) for a, b in zip(caches["graph"], caches["unfused"]))
    assert clusterfusion._contexts[31].steps.graphs == 3 and clusterfusion._contexts[32].steps is None
    for id in (31, 32):
        calls.destroy_graph_context(id)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])
def test_a_step_s_graph_is_captured_when_a_step_first_wants_it(monkeypatch, device):
    """Not by one that turns rows, nor by one that a graph of the caller's captures, nor by one that is refused."""
    layer = small_layer()
    calls, given = warm_calls(layer, monkeypatch), port_arguments(layer, device)
    create(calls, 33, given)
    step, kept = step_arguments(given, 33), clusterfusion._contexts[33].steps
    calls.graph_decode_step(**step)
    assert kept.graphs == 0
    step["current_seq_len"] += 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls.graph_decode_step(**step)
    assert kept.graphs == 0
    graph.replay()
    expected = [tensor.clone() for tensor in captured]
    clusterfusion._contexts[33].cache.length -= 1
    assert all(torch.equal(a, b) for a, b in zip(calls.graph_decode_step(**step), expected))
    assert kept.graphs == 1
    with pytest.raises(ValueError, match="'input' has dtype float32, expected float16"):
        calls.graph_decode_step(**{**step, "input": step["input"].float()})
    step["current_seq_len"] += 1
    made = calls.graph_decode_step(**step)
    assert kept.graphs == 1
    # What the caller captured runs between two steps that are graphs.
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected))
    clusterfusion._contexts[33].cache.length -= 1
    assert all(torch.equal(a, b) for a, b in zip(calls.graph_decode_step(**step), made))
    calls.destroy_graph_context(33)
    with pytest.raises(ValueError, match="there is no context 33"):
        calls.graph_decode_step(**step)


@on_each_device
def test_a_context_s_impl_is_checked(device):
    layer = small_layer()
    calls, given = calls_of(layer), port_arguments(layer, device)
    for bad in ("persistent", "", None, 1):
        with pytest.raises(ValueError, match=f"create_graph_context: impl must be graph or unfused, got {bad!r}"):
            create(calls, 35, given, impl=bad)
    assert 35 not in clusterfusion._contexts
    expected = calls.decoder_layer(**given)[0]
    for impl in ("graph", "unfused"):
        create(calls, 35, given, impl=impl)
        assert torch.equal(calls.graph_decode_step(**step_arguments(given, 35))[0], expected)
        calls.destroy_graph_context(35)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])
def test_tensors_of_a_call_lie_on_one_device(device):
    layer = small_layer()
    given = port_arguments(layer, device)
    for name in ("ln_bias", "weight_o", "cos", "v_cache"):
        with pytest.raises(ValueError, match=f"'{name}' is on cpu, expected cuda:0 as 'input' is"):
            calls_of(layer).decoder_layer(**{**given, name: given[name].cpu()})


class Checked:
    """In place of the compiled layer: leaves every call to the checks."""

    spare_elements = 1

    def run(self, *_):
        return None

    def use_numbers(self, *_):
        pass


def warm_calls(layer, monkeypatch):
    """The calls after a first one, which looked for what the compiled layer needs; from now on the checks fail."""
    if not ops.use_torch():
        pytest.skip("this torch has no table of functions: every call is checked in Python")
    calls = calls_of(layer)
    calls.decoder_layer(**port_arguments(layer, "cuda"))
    monkeypatch.setattr(calls, "_step", pytest.fail)
    return calls


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 20])
def test_a_call_that_looks_right_has_the_bits_of_one_that_is_checked(monkeypatch, device, length):
    layer = small_layer()
    calls, checked = warm_calls(layer, monkeypatch), calls_of(layer)
    checked._port_layer = Checked()
    torch.manual_seed(length)
    given = port_arguments(layer, device)
    for name in ("k_cache", "v_cache"):
        given[name].copy_(torch.randn(given[name].shape).half())
    given["current_seq_len"] = length
    other = {**given, "k_cache": given["k_cache"].clone(), "v_cache": given["v_cache"].clone()}
    made, expected = calls.decoder_layer(**given), checked.decoder_layer(**other)
    for a, b in zip(made, expected):
        assert torch.equal(a, b) and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(given[name], other[name])
    create(calls, 21, given)
    create(checked, 22, other)
    # The first step turns the rows, the second one follows, the third one goes back.
    for step in (length, length + 1, max(length - 1, 0)):
        if step > 20:
            continue
        given["current_seq_len"] = other["current_seq_len"] = step
        made = calls.graph_decode_step(**step_arguments(given, 21))
        expected = checked.graph_decode_step(**step_arguments(other, 22))
        assert all(torch.equal(a, b) for a, b in zip(made, expected)), step
        for name in ("k_cache", "v_cache"):
            assert torch.equal(given[name], other[name])
    for id in (21, 22):
        (calls if id == 21 else checked).destroy_graph_context(id)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])
def test_what_does_not_look_right_is_checked(monkeypatch, device):
    """Calls that the compiled layer leaves alone and that are right: rows at an odd address, tensors of a subclass, a
    number that is no int, and in a step another object for the same cache."""
    layer = small_layer()
    given = port_arguments(layer, device)
    clones = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    warm = warm_calls(layer, monkeypatch)
    expected = warm.decoder_layer(**{**given, **clones})
    calls, count, step = calls_of(layer), [], clusterfusion.DecoderCalls._step
    calls.decoder_layer(**{**given, **{name: clone.clone() for name, clone in clones.items()}})
    monkeypatch.setattr(calls, "_step", lambda *arguments: [count.append(1), step(calls, *arguments)][1])
    odd = {}
    for name in ("k_cache", "v_cache"):
        block = torch.zeros(given[name].numel() + 1, dtype=torch.float16, device=device)
        odd[name] = block[1:].view(given[name].shape)
        odd[name].copy_(given[name])
    changes = (
        odd,
        {"input": given["input"].as_subclass(type("Sub", (torch.Tensor,), {}))},
        {"current_seq_len": np.int64(given["current_seq_len"])},
    )
    for number, change in enumerate(changes, 1):
        made = calls.decoder_layer(**{**given, **change})
        assert all(torch.equal(a, b) for a, b in zip(made, expected)) and len(count) == number
    create(calls, 23, given)
    made = calls.graph_decode_step(**{**step_arguments(given, 23), "k_cache": given["k_cache"][:]})
    assert all(torch.equal(a, b) for a, b in zip(made, expected)) and len(count) == len(changes) + 1
    made = calls.graph_decode_step(**step_arguments(given, 23))
    assert all(torch.equal(a, b) for a, b in zip(made, expected)) and len(count) == len(changes) + 1
    calls.destroy_graph_context(23)


@on_each_device
@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"input": torch.zeros(1, 160)}, ValueError, "'input' has dtype float32, expected float16"),
        ({"input": torch.zeros(2, 160).half()}, ValueError, r"'input' has shape \(2, 160\), expected \(1, 160\)"),
        ({"input": np.zeros((1, 160), np.float16)}, TypeError, "'input' must be a torch tensor, got a numpy array"),
        ({"input": [0.0]}, TypeError, "'input' must be a numpy array or a torch tensor, got builtins.list"),
        (
            {"weight_o": torch.zeros(160, 80).half()},
            ValueError,
            r"'weight_o' has shape \(160, 80\), expected \(160, 160",
        ),
        ({"mlp_up_bias": torch.zeros(160).half()}, ValueError, r"'mlp_up_bias' has shape \(160,\), expected \(640,\)"),
        ({"weight_qkv": torch.zeros(160, 480).half().t()}, ValueError, "'weight_qkv' has strides .* contiguous"),
        ({"cos": torch.zeros(20)}, ValueError, r"'cos' has shape \(20,\), expected 80 elements"),
        ({"sin": torch.zeros(80).half()}, ValueError, "'sin' has dtype float16, expected float32"),
        (
            {"k_cache": torch.zeros(1, 2, 21, 80).half()},
            ValueError,
            r"'k_cache' has shape .* expected \(max_seq, 160\)",
        ),
        (
            {"v_cache": torch.zeros(20, 160).half()},
            ValueError,
            r"'v_cache' has shape \(20, 160\), expected \(21, 160\)",
        ),
        ({"current_seq_len": -1}, ValueError, "current_seq_len must be 0 to 20, got -1"),
        ({"current_seq_len": 21}, ValueError, "current_seq_len must be 0 to 20, got 21"),
        ({"current_seq_len": 1.0}, TypeError, "current_seq_len must be an integer, got 1.0"),
        ({"current_seq_len": None}, TypeError, "current_seq_len must be an integer, got None"),
        (
            {"ln_bias": torch.zeros(160, device="meta").half()},
            NotImplementedError,
            "'ln_bias' is on meta, expected cpu",
        ),
    ],
)
def test_refusals_are_one_line_and_write_nothing(change, error, message, device):
    layer = small_layer()
    calls, given = calls_of(layer), port_arguments(layer, device)
    change = {n: v.to(device) if torch.is_tensor(v) and v.device.type == "cpu" else v for n, v in change.items()}
    calls.decoder_layer(**given)  # after which calls that look right are not checked in Python
    before = given["k_cache"].clone()
    with pytest.raises(error, match="small decoder_layer: " + message) as caught:
        calls.decoder_layer(**{**given, **change})
    assert "\n" not in str(caught.value)
    assert torch.equal(before.nan_to_num(), given["k_cache"].nan_to_num())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])
def test_a_steps_refusals_on_a_gpu(device):
    layer = small_layer()
    calls, given = calls_of(layer), port_arguments(layer, device)
    create(calls, 25, given)
    step = step_arguments(given, 25)
    calls.graph_decode_step(**step)
    expected = calls.graph_decode_step(**step)
    for change, message in (
        ({"input": step["input"].float()}, "'input' has dtype float32, expected float16"),
        ({"ln_bias": step["ln_bias"].cpu()}, "'ln_bias' is on cpu, expected cuda:0 as 'k_cache' is"),
        ({"cos": step["cos"][:8]}, r"'cos' has shape \(8,\), expected 80 elements"),
        ({"mlp_up_bias": step["o_bias"]}, r"'mlp_up_bias' has shape \(160,\), expected \(640,\)"),
        ({"k_cache": step["k_cache"].clone()}, "'k_cache' is another tensor, expected the one"),
        ({"v_cache": step["k_cache"]}, "'v_cache' is another tensor, expected the one"),
        ({"current_seq_len": 21}, "current_seq_len must be 0 to 20, got 21"),
        ({"current_seq_len": -1}, "current_seq_len must be 0 to 20, got -1"),
        ({"current_seq_len": 2**70}, "current_seq_len must be 0 to 20, got 1180591620717411303424"),
    ):
        with pytest.raises(ValueError, match="small graph_decode_step: " + message):
            calls.graph_decode_step(**{**step, **change})
        assert all(torch.equal(a, b) for a, b in zip(calls.graph_decode_step(**step), expected))
    for bad in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match="current_seq_len must be an integer, got"):
            calls.graph_decode_step(**{**step, "current_seq_len": bad})
    step["k_cache"].requires_grad_()
    with pytest.raises(ValueError, match="'k_cache' requires a gradient, expected a tensor that can be written"):
        calls.graph_decode_step(**step)
    calls.destroy_graph_context(25)


def test_the_models_sizes_are_checked():
    given = port_arguments(small_layer())
    with pytest.raises(
        ValueError, match=r"pythia-2.8b .* 'weight_qkv' has shape \(480, 160\), expected \(7680, 2560\)"
    ):
        clusterfusion.pythia_2b8_decoder_layer(**given)
    with pytest.raises(ValueError, match=r"pythia-6.9b .* expected \(12288, 4096\)"):
        clusterfusion.pythia_6b9_decoder_layer(**given)
    for name in clusterfusion.__all__:
        assert (getattr(clusterfusion, name).__doc__ or "").strip()


def gptq_arguments(device="cpu"):
    torch.manual_seed(1)
    hidden, heads, kv_heads, head, group = 64, 4, 2, 16, 32
    columns = (heads + 2 * kv_heads) * head

    def words(*shape):
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)

    given = {
        "input": torch.randn(2, 3, hidden).half(),
        "qweight": words(hidden // 8, columns),
        "qzeros": words(hidden // group, columns // 8),
        "scales": (0.01 * torch.rand(hidden // group, columns) + 0.01).half(),
        "ln_weight": torch.randn(hidden).half(),
        "ln_bias": torch.randn(hidden).half(),
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "head_size": head,
        "groupsize": group,
        "eps": 1e-5,
    }
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in given.items()}


@on_each_device
@pytest.mark.parametrize("zero_offset", [0, 1])
def test_fused_ln_qkv_gptq(zero_offset, device):
    given = gptq_arguments()
    x = given["input"].double()
    z = torch.nn.functional.layer_norm(x, (64,), given["ln_weight"].double(), given["ln_bias"].double(), 1e-5)
    shifts = torch.arange(0, 32, 4)
    codes = ((given["qweight"].long()[:, None] >> shifts[None, :, None]) & 15).reshape(64, 128)
    zeros = ((given["qzeros"].long()[:, :, None] >> shifts) & 15).reshape(2, 128) + zero_offset
    group = torch.arange(64) // 32
    weight = given["scales"].double()[group] * (codes - zeros[group])
    parts = (z @ weight).view(2, 3, 8, 16).transpose(1, 2).split([4, 2, 2], 1)
    there = gptq_arguments(device)
    made = clusterfusion.fused_ln_qkv_gptq(**there, **({} if zero_offset else {"zero_offset": 0}))
    stored = {name: given[name] for name in ("qweight", "qzeros", "scales")}
    quantised = ops.GptqWeight(**stored, g_idx=group.int(), group_size=32, zero_offset=zero_offset)
    measure = ops.budget(ops.ln_qkv_heads, output=str(activation(device)).removeprefix("torch."))
    bound = measure(x, given["ln_weight"], given["ln_bias"], quantised, heads=4, kv_heads=2).rel_l2
    bound += FLOAT16_ROUNDING if device == "cpu" else 0
    for got, exact in zip(made, parts):
        assert got.dtype == torch.float16 and got.shape == exact.shape and got.device.type == device
        assert 0 < (got.double().cpu() - exact).norm() <= bound * exact.norm()
    again = clusterfusion.fused_ln_qkv_gptq(**there, **({} if zero_offset else {"zero_offset": 0}))
    assert all(torch.equal(a, b) for a, b in zip(made, again))


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"input": torch.zeros(3, 64).half()},
            ValueError,
            r"'input' has shape \(3, 64\), expected \(batch, seq, hidden",
        ),
        ({"num_heads": 5}, ValueError, r"'qweight' has shape \(8, 128\), expected \(8, 144\)"),
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
        ({"groupsize": 0}, ValueError, "groupsize must be at least 1, got 0"),
        ({"groupsize": 16}, ValueError, r"'qzeros' has shape \(2, 16\), expected \(4, 16\)"),
        ({"eps": -1.0}, ValueError, "eps must be positive, got -1"),
        ({"scales": torch.ones(2, 128)}, ValueError, "'scales' has dtype float32, expected float16"),
        ({"zero_offset": "v2"}, ValueError, "'zero_offset' must be an integer, got 'v2'"),
    ],
)
def test_fused_ln_qkv_gptq_refuses_by_name(change, error, message):
    with pytest.raises(error, match=message):
        clusterfusion.fused_ln_qkv_gptq(**{**gptq_arguments(), **change})


def test_without_torch_the_import_says_what_is_missing():
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "try:\n    import cf_ops.clusterfusion\n"
        "except ImportError as error:\n    print(error)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out == "cf_ops.clusterfusion needs torch, which is not installed: pip install torch\n"
