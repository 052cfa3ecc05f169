"""speed_up of models whose Linears are quantised by GPTQ, beside their dequantised values in float64."""

import copy
import logging

import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")

import cf_ops.hf
from cf_ops import _core
from hf_gptq import CHECKPOINTS, PARTS, AutoGptqLinear, QuantLinear, load_gptq, load_reference
from hf_models import JOINED, ErrorBound, check_tokens, padded
from made_gptq import checkpoint

BATCHES = {1: [7], 3: [5, 1, 9], 8: [3, 12, 1, 7, 7, 2, 10, 5]}
NAME = "neox-gptq-desc-act"
IDS = padded([6, 6])["input_ids"]


def greedy(model, inputs, new=24):
    return model.generate(**inputs, max_new_tokens=new, do_sample=False)


def theirs(model):
    """What Hugging Face's own path computes."""
    with torch.no_grad():
        return model(IDS, output_hidden_states=True).logits


def linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def bits_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(model, state):
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("batch", BATCHES)
def test_greedy_ids_are_those_of_float64(name, batch):
    inputs = padded(BATCHES[batch])
    model = cf_ops.hf.speed_up(load_gptq(name))
    generated = greedy(model, inputs)
    assert generated.shape == (batch, inputs["input_ids"].shape[1] + 24)
    share = check_tokens(load_reference(name), model.dtype, inputs, generated)
    assert share > 0.5, f"only {share:.0%} of float64's margins exceed the bound"
    report = cf_ops.hf.report(model)
    assert report.hugging_face == {} and report.share == 1
    assert report.cf_ops == {"greedy prefill": 1, "greedy loop": 23}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_as_near_to_float64_as_derived(name):
    """They are those of the checkpoint's own loader, too."""
    ids = padded([40])["input_ids"]
    model, reference = cf_ops.hf.speed_up(load_gptq(name)), load_reference(name)
    with torch.no_grad():
        exact = reference(ids).logits
    logits, _ = cf_ops.hf.run(model, ids)
    bound = ErrorBound(reference, ids[0]).relative
    assert (logits - exact).abs().max() <= bound * exact.abs().max()
    runner = _core.Runner(_core.Weights.open(str(checkpoint(name))), capacity=40)
    stored = torch.from_numpy(runner.forward(0, 0, ids[0].tolist(), 40))
    assert (logits[0] - stored).abs().max() <= 2 * bound * exact.abs().max()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_restore_gives_back_outputs_methods_and_memory(name):
    """Hugging Face's path runs on the modules' own tensors, which stay as they are; what is copied is reported."""
    model = load_gptq(name)
    methods, before, state = dict(model.__dict__), theirs(model), bits_of(model)
    buffers = {name: (b.data_ptr(), b._version) for name, b in model.named_buffers() if "bias" not in name}
    cf_ops.hf.speed_up(model)
    ids = greedy(model, padded([6, 3]))
    assert torch.equal(theirs(model), before)
    report = cf_ops.hf.report(model)
    assert report.hugging_face == {"output_hidden_states": 1}
    found = linears(model)
    joined = [m for n, m in found.items() if n.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))]
    copied = sum(getattr(module, part).nbytes for module in joined for part in PARTS[:3])
    assert report.copied_bytes == copied and report.in_place == (copied == 0) == name.startswith(("neox", "gpt2"))
    stored = _core.Weights.open(str(checkpoint(name))).bytes
    assert report.weight_bytes == stored
    assert {n: (b.data_ptr(), b._version) for n, b in model.named_buffers() if "bias" not in n} == buffers
    assert_same_bits(model, state)
    cf_ops.hf.restore(model)
    assert model.__dict__ == methods and torch.equal(theirs(model), before)
    assert_same_bits(model, state)
    assert all(b.nbytes == b.untyped_storage().nbytes() for b in model.buffers())
    assert torch.equal(greedy(cf_ops.hf.speed_up(model), padded([6, 3])), ids)


@pytest.mark.parametrize("name", ["neox-gptq-sym", "llama-gptq-desc-act"] if JOINED else ["neox-gptq-sym"])
def test_the_format_of_zeros_is_the_modules(name):
    """GPTQModel converts v1 to v2 in memory, whatever the config says; AutoGPTQ's classes have v1."""
    model, converted = load_gptq(name), load_gptq(name)
    of_auto_gptq = load_gptq(name, AutoGptqLinear)
    for one in (model, converted, of_auto_gptq):
        one.config.quantization_config = {"quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4}
        assert all(module._form == 1 for module in linears(one).values())
    before = theirs(converted)
    for module in linears(converted).values():
        module.convert_to_v2()
    is_wrapped = not torch.equal(theirs(converted), before)  # a zero of 16 has no code in v2
    expected = greedy(cf_ops.hf.speed_up(model), padded([6, 3]))
    assert torch.equal(greedy(cf_ops.hf.speed_up(of_auto_gptq), padded([6, 3])), expected)
    if not is_wrapped:
        assert torch.equal(greedy(cf_ops.hf.speed_up(converted), padded([6, 3])), expected)
    assert not is_wrapped or name != "neox-gptq-sym"
    # With zeros of the other format the same bits are other weights.
    for module in linears(model).values():
        module._form = 2
    other = cf_ops.hf.speed_up(cf_ops.hf.restore(model))
    with torch.no_grad():
        logits = other(IDS).logits
    assert not torch.equal(greedy(other, padded([6, 3])), expected)
    assert (logits - theirs(other)).abs().max() < 0.05 * logits.abs().max()


def test_changed_codes_are_read_again():
    model, reference = cf_ops.hf.speed_up(load_gptq(NAME)), load_reference(NAME)
    bound = max(ErrorBound(reference, ids).relative for ids in IDS) * theirs(reference).abs().max()
    changed = next(name for name in linears(model) if name.endswith("dense_4h_to_h"))
    with torch.no_grad():
        before = cf_ops.hf.run(model, IDS)[0]
        model.get_submodule(changed).scales.mul_(2)
        reference.get_submodule(changed).weight.mul_(2)
        after, exact = cf_ops.hf.run(model, IDS)[0], reference(IDS).logits
        bound = max(ErrorBound(reference, ids).relative for ids in IDS) * exact.abs().max()
        assert (after - exact).abs().max() <= bound < (before - exact).abs().max()
        model.get_submodule(changed).g_idx[3] = 1000
        with pytest.raises(IndexError):
            model(IDS)
    (reason,) = cf_ops.hf.report(model).hugging_face
    assert "g_idx': element 3: expected 0 to" in reason and reason.endswith("got 1000")


def test_copies_and_hooks(caplog):
    model = cf_ops.hf.speed_up(load_gptq(NAME))
    expected = greedy(model, padded([6, 3]))
    copied = copy.deepcopy(model)
    assert torch.equal(greedy(copied, padded([6, 3])), expected) and cf_ops.hf.report(copied).share == 1
    seen = []
    module = linears(model)["gpt_neox.layers.0.attention.dense"]
    hook = module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, theirs(copied)) and len(seen) == 1
    hook.remove()
    assert torch.equal(greedy(model, padded([6, 3])), expected)
    assert set(cf_ops.hf.report(model).hugging_face) == {"a hook on a module"}


def test_weights_of_the_host_are_not_packed(root):
    weights = _core.Weights.open(str(root / "data" / "checkpoints" / NAME))
    with pytest.raises(ValueError, match="weights: expected them on a device, got others"):
        weights.pack(0, 0, torch.empty, [])


class Repacking(QuantLinear):
    QUANT_TYPE = "marlin"


class Unnamed(QuantLinear):
    QUANT_TYPE = None


class Silent(QuantLinear):
    qzero_format = None


def first(model):
    return next(iter(linears(model).values()))


def adapted(model):
    first(model).adapter = torch.nn.Linear(2, 2)


def rotated(model):
    first(model).online_full_had = True


def of_another_format(model):
    first(model).convert_to_v2()


def of_other_groups(model):
    first(model).group_size = 16


def of_three_bits(model):
    for module in linears(model).values():
        module.bits = 3


def of_wide_scales(model):
    first(model).scales = first(model).scales.float()


def transposed(model):
    first(model).qweight = first(model).qweight.t().contiguous().t()


def dequantised(model):
    module = model.gpt_neox.layers[1].attention
    dense = torch.nn.Linear(64, 64, dtype=torch.float16).eval()
    module.dense = dense


def with_quantised_head(model):
    model.set_output_embeddings(copy.deepcopy(first(model)))


REFUSED = {
    "module 'gpt_neox.layers.0.attention.query_key_value': expected a GPTQ kernel .* cuda, .*, got 'marlin'": Repacking,
    "expected a GPTQ kernel that leaves its weights as they are stored, .*, got none": Unnamed,
    r"expected qzero_format\(\) to say 1 or 2, or a class of auto_gptq, .*got None of test_hf_gptq.Silent": Silent,
    "query_key_value': expected no adapter, got Linear": adapted,
    "query_key_value': expected no online_full_had, got True": rotated,
    "zeros: expected one value in all modules, got gptq in '.*dense' beside gptq_v2": of_another_format,
    "group_size: expected one value in all modules, got 32 in '.*dense' beside 16": of_other_groups,
    "'bits' is 3, expected 4 or 8": of_three_bits,
    "query_key_value.scales': expected dtype F16, got F32": of_wide_scales,
    "buffer 'gpt_neox.*qweight': expected a plain contiguous tensor, got strides": transposed,
    "expected the same quantised Linears in all layers, got .* in layer 1": dequantised,
    "expected quantised Linears in the layers alone": with_quantised_head,
}


@pytest.mark.parametrize("message", REFUSED)
def test_models_that_are_refused(message):
    kind = REFUSED[message]
    is_class = isinstance(kind, type)
    model = load_gptq(NAME, kind if is_class else QuantLinear)
    if not is_class:
        kind(model)
    before, state = dict(model.__dict__), bits_of(model)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        cf_ops.hf.speed_up(model)
    assert model.__dict__ == before
    assert_same_bits(model, state)


def test_a_model_that_changes_into_one_that_is_refused(caplog):
    """A kernel that repacks takes the place of another: Hugging Face's path, and one line that says why."""
    model, other = cf_ops.hf.speed_up(load_gptq(NAME)), load_gptq(NAME)
    assert cf_ops.hf.report(model).share == 1
    repacking = load_gptq(NAME, Repacking).gpt_neox.layers[1].mlp.dense_h_to_4h
    model.gpt_neox.layers[1].mlp.dense_h_to_4h = repacking
    with caplog.at_level(logging.WARNING, logger="cf_ops.hf"), torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(IDS).logits, other(IDS).logits)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "cf_ops.hf"]
    reason = "module 'gpt_neox.layers.1.mlp.dense_h_to_4h': expected a GPTQ kernel that leaves its weights as they are"
    assert message.startswith(f"cf_ops: a call runs on Hugging Face's path: {reason}")
    assert cf_ops.hf.report(model).cf_ops == {}
