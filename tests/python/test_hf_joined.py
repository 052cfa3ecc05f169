"""speed_up of models whose q, k and v, and whose gate and up, the library reads as one: whose memory they are."""

import copy
import gc
import logging
import os
import pathlib
import re

import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")

import cf_ops.hf
from cf_ops import _core
from cf_ops.hf import _runner
from cf_ops.hf._families import config_text
from hf_models import JOINED, VERSION, ErrorBound, check_tokens, load, padded

NAME = "llama-gqa3-scaled"  # two layers, llama3's scaling of RoPE, tied embeddings
BIASED = "llama-gqa1-biases"
INPUTS = padded([6, 3, 9])
IDS = padded([6, 6])["input_ids"]
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj")


def greedy(model, new=12, **options):
    return model.generate(**INPUTS, max_new_tokens=new, do_sample=False, **options)


def storages(model):
    """The bytes of all memory that parameters have, by address."""
    return {s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in model.parameters())}


def theirs(model):
    """What Hugging Face's own path computes."""
    with torch.no_grad():
        output = model(IDS, output_hidden_states=True)
    return [output.logits, *output.hidden_states]


def assert_equal(a, b):
    assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def parts(model, names):
    for layer in model.model.layers:
        for kind in ("weight", "bias"):
            found = [getattr(layer.get_submodule(name), kind) for name in names]
            if found[0] is not None:
                yield found


@pytest.mark.parametrize("name", JOINED)
def test_parameters_become_views_of_joined_matrices(root, name):
    """The same objects, the same values, as many bytes; on Hugging Face's path the same bits."""
    model = load(root, name)
    before, state = theirs(model), {key: value.clone() for key, value in model.state_dict().items()}
    parameters, taken = list(model.parameters()), sum(storages(model).values())
    own = {id(p): p.untyped_storage().data_ptr() for p in parameters}
    cf_ops.hf.speed_up(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert_equal(list(model.state_dict().values()), list(state.values()))
    assert sum(storages(model).values()) == taken
    for q, k, v in parts(model, QKV):
        assert len({p.untyped_storage().data_ptr() for p in (q, k, v)}) == 1
        assert all(p.is_contiguous() for p in (q, k, v)) and k.data_ptr() == q.data_ptr() + q.nbytes
    for gate, up in parts(model, MLP):
        if gate.dim() == 1:
            assert own[id(gate)] == gate.data_ptr() and own[id(up)] == up.data_ptr()
            continue
        assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
        assert gate.stride()[0] == up.stride()[0] == 2 * gate[0].numel() and gate.stride()[1:] == gate[0].stride()
        assert up.data_ptr() == gate.data_ptr() + gate[0].numel() * gate.element_size()
    joined = {id(p) for names in (QKV, MLP) for found in parts(model, names) for p in found}
    assert all(p.untyped_storage().data_ptr() == own[id(p)] for p in parameters if id(p) not in joined)
    assert_equal(theirs(model), before)
    report = cf_ops.hf.report(model)
    assert report.copied_bytes == (2 * 2 * 96 if name == BIASED else 0) and report.weight_bytes == taken
    greedy(model)
    assert cf_ops.hf.report(model).hugging_face == {"output_hidden_states": 1}


@pytest.mark.parametrize("name", JOINED)
def test_restore_gives_back_outputs_methods_and_memory(root, name):
    model = load(root, name)
    methods, before, ids = dict(model.__dict__), theirs(model), greedy(model)
    taken = storages(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for _ in range(2):
        assert cf_ops.hf.speed_up(model) is model
        greedy(model)
        assert cf_ops.hf.restore(model) is model
        assert model.__dict__ == methods and sorted(storages(model).values()) == sorted(taken.values())
        assert all(p.is_contiguous() and p.nbytes == p.untyped_storage().nbytes() for p in model.parameters())
        assert_equal(list(model.state_dict().values()), list(state.values()))
        assert_equal(theirs(model), before)
        assert torch.equal(greedy(model), ids)


STATM = pathlib.Path("/proc/self/statm")


@pytest.mark.skipif(not STATM.exists(), reason="memory is read from /proc/self/statm, which is missing")
def test_a_hundred_models_leave_memory_where_it_was():
    """Each time the joined matrices take more bytes than memory may grow by in all."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8
    )
    model = transformers.LlamaForCausalLM(config).half().eval()
    joined = sum(p.nbytes for names in (QKV, MLP) for found in parts(model, names) for p in found)

    def once():
        cf_ops.hf.speed_up(model)
        cf_ops.hf.restore(model)

    def resident_bytes():
        gc.collect()
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for _ in range(10):
        once()
    before = resident_bytes()
    for _ in range(100):
        once()
    assert joined > 10e6 and resident_bytes() - before < joined


def halve_in_place(model):
    layer = model.model.layers[0]
    layer.mlp.up_proj.weight.mul_(0.5)
    layer.self_attn.k_proj.weight.mul_(0.5)


def halve_a_bias_in_place(model):
    model.model.layers[0].mlp.gate_proj.bias.mul_(0.5)
    model.model.layers[0].self_attn.q_proj.bias.mul_(0.5)


def set_data(model):
    weight = model.model.layers[-1].mlp.gate_proj.weight
    weight.data = 3 * weight.data


def set_parameter(model):
    attention = model.model.layers[-1].self_attn
    attention.v_proj.weight = torch.nn.Parameter(0.25 * attention.v_proj.weight)


def set_module(model):
    old = model.model.layers[0].mlp.gate_proj
    new = torch.nn.Linear(old.in_features, old.out_features, bias=False, dtype=old.weight.dtype).eval()
    new.weight.copy_(2 * old.weight)
    model.model.layers[0].mlp.gate_proj = new


def load_state(model):
    state = {key: 0.5 * value if "proj" in key else value for key, value in model.state_dict().items()}
    model.load_state_dict(state)


@pytest.mark.parametrize(
    "change", [halve_in_place, halve_a_bias_in_place, set_data, set_parameter, set_module, load_state]
)
def test_changed_parameters_are_read_again(root, change):
    name = BIASED if change is halve_a_bias_in_place else NAME
    ours, reference = cf_ops.hf.speed_up(load(root, name, torch.float32)), load(root, name, torch.float64)
    plain, bytes_before = load(root, name, torch.float32), sum(storages(ours).values())
    with torch.no_grad():
        before = ours(IDS).logits
        for model in (ours, reference, plain):
            change(model)
        after, exact = ours(IDS).logits, reference(IDS).logits
    bound = max(ErrorBound(reference, ids).relative for ids in IDS)
    assert (after - exact).abs().max() <= bound * exact.abs().max() < (before - exact).abs().max()
    assert cf_ops.hf.report(ours).share == 1 and sum(storages(ours).values()) == bytes_before
    cf_ops.hf.restore(ours)
    assert_equal(theirs(ours), theirs(plain))
    assert all(p.nbytes == p.untyped_storage().nbytes() for p in ours.parameters())


def test_a_model_that_is_converted_is_joined_again(root):
    name = BIASED
    model = cf_ops.hf.speed_up(load(root, name))
    model.float()
    assert all(p.dtype == torch.float32 and p.is_contiguous() for p in model.parameters())
    reference = load(root, name, torch.float64)
    reference.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.double()
    out = greedy(model)
    assert check_tokens(reference, torch.float32, INPUTS, out) > 0.5 and cf_ops.hf.report(model).share == 1
    assert not next(parts(model, MLP))[0].is_contiguous()


def test_copies_of_a_model_are_models_of_their_own(root):
    model = cf_ops.hf.speed_up(load(root, NAME, torch.float32))
    expected = greedy(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(greedy(copied), expected) and cf_ops.hf.report(copied).share == 1
        assert not storages(model).keys() & storages(copied).keys()
        for parameter in copied.parameters():
            parameter.zero_()
        assert torch.equal(greedy(model), expected)
        assert copied(IDS).logits.abs().max() == 0
    cf_ops.hf.restore(copied)
    assert torch.equal(greedy(model), expected)


@pytest.mark.parametrize("name", [NAME, BIASED])
def test_save_pretrained_writes_the_same_files(root, tmp_path, name):
    model = load(root, name)
    model.save_pretrained(tmp_path / "before")
    cf_ops.hf.speed_up(model).save_pretrained(tmp_path / "after")
    cf_ops.hf.speed_up(model).save_pretrained(tmp_path / "given", state_dict=model.state_dict())
    files = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert "model.safetensors" in files
    for folder in ("after", "given"):
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == files
        for file in files:
            assert (tmp_path / "before" / file).read_bytes() == (tmp_path / folder / file).read_bytes()
    before = theirs(model)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = load(root, name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    cf_ops.hf.speed_up(other).load_state_dict(torch.load(tmp_path / "state.pt"))
    assert_equal(theirs(other), before)
    assert torch.equal(greedy(other), greedy(model))
    assert cf_ops.hf.restore(model).save_pretrained.__func__ is type(model).save_pretrained


def test_training_goes_on_behind_joined_parameters(root):
    plain, ours = load(root, NAME, torch.float32), cf_ops.hf.speed_up(load(root, NAME, torch.float32))
    for model in (plain, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            model.train()(IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
    assert_equal(list(ours.state_dict().values()), list(plain.state_dict().values()))
    with torch.no_grad():
        assert (ours(IDS).logits - plain(IDS).logits).abs().max() < 1e-4 * plain(IDS).logits.abs().max()
    assert sum(cf_ops.hf.report(ours).cf_ops.values()) == 1


def test_memory_that_is_joined_already_is_the_callers(root):
    """Parameters that lie as the library reads them stay where they are, with restore() too."""
    model = load(root, NAME)
    with torch.no_grad():
        for q, k, v in parts(model, QKV):
            for part, view in zip((q, k, v), torch.cat([q, k, v]).split([len(q), len(k), len(v)])):
                part.data = view
    places = [p.data_ptr() for found in parts(model, QKV) for p in found]
    before = theirs(model)
    cf_ops.hf.speed_up(model)
    assert [p.data_ptr() for found in parts(model, QKV) for p in found] == places
    assert cf_ops.hf.report(model).share == 1
    cf_ops.hf.restore(model)
    assert [p.data_ptr() for found in parts(model, QKV) for p in found] == places
    assert_equal(theirs(model), before)


def test_parameters_of_inference_mode(root):
    with torch.inference_mode():
        model = load(root, NAME)
        expected = greedy(cf_ops.hf.speed_up(load(root, NAME)))
    cf_ops.hf.speed_up(model)
    assert torch.equal(greedy(model), expected)
    cf_ops.hf.restore(model)
    assert all(p.nbytes == p.untyped_storage().nbytes() for p in model.parameters())


def layered(model):
    model.config.use_sliding_window = True
    model.config.layer_types = ["sliding_attention"] * model.config.num_hidden_layers


def asking_for(**fields):
    return lambda model: [setattr(model.config, name, value) for name, value in fields.items()]


def scaled(model):
    model.model.rotary_emb.rope_type = "yarn"


def strengthened(model):
    model.model.rotary_emb.attention_scaling = 1.5


def spoiled(model):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 4] = float("nan")


def shared(model):
    first, second = model.model.layers
    second.mlp.gate_proj.weight = first.mlp.gate_proj.weight


def tempered(model):
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.5


class Lora(torch.nn.Linear):
    pass


def adapted(model):
    model.model.layers[1].self_attn.q_proj = Lora(48, 384, bias=False, dtype=torch.float16).eval()


def transposed(model):
    weight = model.model.layers[1].self_attn.o_proj.weight
    weight.data = weight.data.t().contiguous().t()


REFUSED = {
    "'sliding_window' is null, expected at least 1 with layers": ("qwen2-gqa7", layered),
    "'use_qk_norm' is true, expected nothing": (NAME, asking_for(use_qk_norm=True)),
    "'num_local_experts' is 8, expected nothing": (NAME, asking_for(num_local_experts=8)),
    "'rope_type' is 'yarn', expected 'default' or 'llama3'": (NAME, scaled),
    "rotary_emb: expected the default rope_type": (NAME, strengthened),
    "self_attn.scaling: expected 0.125, got 0.5": (NAME, tempered),
    r"gate_up_proj.weight': element \(7, 4\): expected a finite number": (NAME, spoiled),
    "'model.layers.1.mlp.gate_proj.weight': expected one of its own, got that of 'model.layers.0.mlp": (NAME, shared),
    "module 'model.layers.1.self_attn.q_proj': expected one that transformers builds, got .*Lora": (NAME, adapted),
    "o_proj.weight': expected a contiguous tensor": (NAME, transposed),
}


def test_a_window_is_hugging_faces_window(root):
    """Within the window every key is seen; behind it the oldest ones are left out."""
    name = "mistral-gqa4-sharded"
    if name not in JOINED:
        pytest.skip(f"this transformers does not load {name}")
    plain, ours = load(root, name), load(root, name)
    for model in (plain, ours):
        model.config.sliding_window = 8
    cf_ops.hf.speed_up(ours)
    ids = padded([11])["input_ids"]
    with torch.no_grad():
        for length in (8, 9):
            expected, got = (model(ids[:, :length]).logits for model in (plain, ours))
            assert not torch.equal(got, expected)
            assert torch.allclose(got.float(), expected.float(), atol=0.05)
    assert not cf_ops.hf.report(ours).hugging_face


@pytest.mark.parametrize("message", REFUSED)
def test_models_that_are_refused(root, message):
    """By name, and as they are."""
    name, change = REFUSED[message]
    model = load(root, name)
    change(model)
    before, places = dict(model.__dict__), [p.data_ptr() for p in model.parameters()]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        cf_ops.hf.speed_up(model)
    assert model.__dict__ == before
    assert change is spoiled or [p.data_ptr() for p in model.parameters()] == places
    assert all(p.nbytes == p.untyped_storage().nbytes() for p in model.parameters())


@pytest.mark.parametrize("change", [adapted, shared, transposed])
def test_models_that_change_into_one_that_is_refused(root, change, caplog):
    """Hugging Face's path, its memory, its output, and one line."""
    plain, ours = load(root, NAME), cf_ops.hf.speed_up(load(root, NAME))
    with caplog.at_level(logging.WARNING, logger="cf_ops.hf"), torch.no_grad():
        for model in (plain, ours):
            torch.manual_seed(0)
            change(model)
        for _ in range(2):
            assert torch.equal(plain(IDS).logits, ours(IDS).logits)
    (reason,) = cf_ops.hf.report(ours).hugging_face
    assert any(re.search(message, reason) for message, (_, refused) in REFUSED.items() if refused is change)
    (message,) = (record.message for record in caplog.records if record.name == "cf_ops.hf")
    assert message.startswith(f"cf_ops: a call runs on Hugging Face's path: {reason} (")
    assert cf_ops.hf.report(ours).cf_ops == {}
    assert all(p.nbytes == p.untyped_storage().nbytes() for p in ours.parameters())


@pytest.mark.parametrize("name", JOINED)
def test_a_gpu_is_given_joined_matrices_alone(root, name, monkeypatch):
    """Weights on a device are never joined by the library, which would read them."""
    model = load(root, name)
    tensors = {key: (p.data_ptr(), str(p.dtype)[6:], tuple(p.shape)) for key, p in model.named_parameters()}
    with pytest.raises(ValueError, match="qkv_proj.weight' is missing, expected it whole: its parts are not joined"):
        _core.Weights.from_tensors(config_text(model), tensors, model, on_device=True)
    given = []
    make = _runner._CpuBackend.__init__
    watched = lambda self, source: given.append(source) or make(self, source)
    monkeypatch.setattr(_runner._CpuBackend, "__init__", watched)
    cf_ops.hf.speed_up(model)
    (source,) = given
    weights = _core.Weights.from_tensors(
        source.config, _runner._described(source.tensors), list(source.tensors.values()), on_device=True
    )
    mapped = _core.Weights.open(str(root / "data" / "checkpoints" / name))
    assert weights.bytes == mapped.bytes == cf_ops.hf.report(model).weight_bytes
    other = {"_name_or_path"} if VERSION >= (5, 0) else {"_name_or_path", "rope_theta"}  # 4.x reads no rope_parameters
    assert {key: value for key, value in weights.config.items() if key not in other} == {
        key: value for key, value in mapped.config.items() if key not in other
    }
    tables = weights.rope_table(600), source.rope_table(600)
    for ours, theirs_ in zip(*tables):
        assert abs(ours - theirs_.numpy()).max() < 1e-4
