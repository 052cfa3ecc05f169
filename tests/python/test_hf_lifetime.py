"""What speed_up takes and gives back: memory, methods, copies, threads."""

import copy
import ctypes
import gc
import os
import pathlib
import pickle
import threading
import types
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")

import cf_ops.hf
import hf_gptq
from cf_ops import _core
from cf_ops.hf import _runner
from hf_models import JOINED, ErrorBound, load, padded

NAME = "neox-d80"
STATM = pathlib.Path("/proc/self/statm")
INPUTS = padded([6, 3, 9])


def greedy(model, new=12, **options):
    return model.generate(**INPUTS, max_new_tokens=new, do_sample=False, **options)


def resident_bytes():
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_restore_gives_back_outputs_methods_and_memory(root):
    model = load(root, NAME)
    methods, addresses = dict(model.__dict__), [p.data_ptr() for p in model.parameters()]
    with torch.no_grad():
        ids, logits = greedy(model), model(INPUTS["input_ids"]).logits
        assert cf_ops.hf.speed_up(model) is model and cf_ops.hf.speed_up(model) is model
        assert [p.data_ptr() for p in model.parameters()] == addresses
        cache = model(INPUTS["input_ids"]).past_key_values
        greedy(model)
        assert cf_ops.hf.report(model).cache_bytes == cache.cache_bytes > 0
        patch = weakref.ref(model._cf_ops)
        assert cf_ops.hf.restore(model) is model
        gc.collect()
        assert patch() is None and cache.cache_bytes == 0
        assert model.__dict__ == methods and model.forward.__func__ is transformers.GPTNeoXForCausalLM.forward
        assert torch.equal(greedy(model), ids) and torch.equal(model(INPUTS["input_ids"]).logits, logits)
        with pytest.raises(ValueError, match="a cache of cf_ops holds no keys"):
            model(INPUTS["input_ids"][:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="expected a living one"):
            copy.deepcopy(cache)
        cf_ops.hf.speed_up(model)
        with pytest.raises(ValueError, match="a cache that this model made since"):
            model(INPUTS["input_ids"][:, :1], past_key_values=cache)


def test_a_caches_memory_ends_with_the_cache(root):
    model = cf_ops.hf.speed_up(load(root, NAME))
    with torch.no_grad():
        output = model(INPUTS["input_ids"])
    assert cf_ops.hf.report(model).cache_bytes > 0
    del output
    assert cf_ops.hf.report(model).cache_bytes == 0


@pytest.mark.skipif(not STATM.exists(), reason="memory is read from /proc/self/statm, which is missing")
def test_a_hundred_calls_leave_memory_where_it_was(root):
    """Each cache takes more bytes than memory may grow by in all."""
    model = cf_ops.hf.speed_up(load(root, NAME))
    inputs = {name: rows.repeat(8, 1) for name, rows in INPUTS.items()}

    cache_bytes = []

    class StopAtOnce(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            cache_bytes.append(cf_ops.hf.report(model).cache_bytes)
            return torch.ones(len(input_ids), dtype=torch.bool)

    def once():
        criteria = transformers.StoppingCriteriaList([StopAtOnce()])
        model.generate(**inputs, max_new_tokens=300, do_sample=False, stopping_criteria=criteria)

    for _ in range(10):
        once()
    before = resident_bytes()
    for _ in range(100):
        once()
    assert len(cache_bytes) == 110 and min(cache_bytes) > 10e6 and resident_bytes() - before < min(cache_bytes)
    assert cf_ops.hf.report(model).cache_bytes == 0


@pytest.mark.skipif(not STATM.exists(), reason="memory is read from /proc/self/statm, which is missing")
def test_a_hundred_models_leave_memory_where_it_was(root):
    model = load(root, NAME)
    greedy(model)

    def once():
        cf_ops.hf.speed_up(model)
        greedy(model, new=2)
        cf_ops.hf.restore(model)

    for _ in range(10):
        once()
    before = resident_bytes()
    for _ in range(100):
        once()
    assert resident_bytes() - before < 10 * sum(p.numel() * p.element_size() for p in model.parameters())


def test_two_models_at_once(root):
    names = ("neox-d80", "neox-d128")
    expected = [greedy(cf_ops.hf.speed_up(load(root, name))).tolist() for name in names]
    first, second = (cf_ops.hf.speed_up(load(root, name)) for name in names)
    # The second generates in the midst of the first.
    inner = []
    criteria = transformers.StoppingCriteriaList(
        [lambda ids, scores, **_: (inner.append(greedy(second).tolist()), torch.zeros(3, dtype=torch.bool))[1]]
    )
    assert greedy(first, stopping_criteria=criteria).tolist() == expected[0]
    assert len(inner) == 12 and all(ids == expected[1] for ids in inner)
    for model in (first, second):
        assert cf_ops.hf.report(model).share == 1


def test_a_generation_in_the_midst_of_a_generation_of_the_same_model(root):
    model = cf_ops.hf.speed_up(load(root, NAME))
    expected = greedy(model).tolist()
    criteria = transformers.StoppingCriteriaList(
        [lambda ids, scores, **_: torch.full((3,), greedy(model).tolist() != expected)]
    )
    assert greedy(model, stopping_criteria=criteria).tolist() == expected
    assert cf_ops.hf.report(model).share == 1


def test_two_threads(root):
    model = cf_ops.hf.speed_up(load(root, NAME))
    expected = {seed: model.generate(**padded([4, 9], seed), max_new_tokens=16, do_sample=False) for seed in range(4)}
    got, errors = {}, []

    def work(seed):
        try:
            for _ in range(5):
                got[seed] = model.generate(**padded([4, 9], seed), max_new_tokens=16, do_sample=False)
                assert torch.equal(got[seed], expected[seed])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(got) == 4
    assert cf_ops.hf.report(model).share == 1 and sum(cf_ops.hf.report(model).cf_ops.values()) == 4 * 6 * 16


def test_copies_of_a_model_are_models_of_their_own(root):
    model = cf_ops.hf.speed_up(load(root, NAME, torch.float32))
    expected = greedy(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        assert torch.equal(greedy(model), expected)
        assert not torch.equal(greedy(copied), expected)
        assert copied(INPUTS["input_ids"]).logits.abs().max() == 0
    assert cf_ops.hf.report(copied).share == 1
    cf_ops.hf.restore(model)
    assert cf_ops.hf.report(copied)
    with pytest.raises(TypeError, match="expected restore"):
        pickle.dumps(copied)
    assert pickle.dumps(model)


def test_save_pretrained_writes_the_same_files(root, tmp_path):
    model = load(root, NAME)
    model.save_pretrained(tmp_path / "before")
    cf_ops.hf.speed_up(model).save_pretrained(tmp_path / "after")
    files = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert "model.safetensors" in files and files == sorted(path.name for path in (tmp_path / "after").iterdir())
    for name in files:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()


STREAM, PACKED_BYTES = 7, 12345


class StandInModel:
    """What a backend asks of a model on a GPU, on the CPU."""

    def __init__(self, backend, slots, capacity):
        self.weights, self.rope_table = backend.weights, backend._rope_table
        self.slots, self.capacity, self.activation = slots, capacity, self.weights.dtype
        self.runners, self.is_open = weakref.WeakSet(), True
        self.left, self.stops, self.released = [], [], []

    @property
    def free_slots(self):
        return self.slots - sum(runner.slots for runner in self.runners)

    def close(self):
        self.is_open = False


class StandInRunner:
    """A runner on the CPU that writes logits to the memory of the caller, as one on a GPU does."""

    def __init__(self, model, slots):
        self.model, self.slots, self.activation = model, slots, getattr(torch, model.activation)
        self.runner = _core.Runner(model.weights, slots=slots, capacity=model.capacity, chunk=model.capacity)
        self.runner.set_rope_table(*(table.numpy() for table in model.rope_table(model.capacity)))
        self.cache_bytes = self.runner.cache_bytes
        model.runners.add(self)

    @property
    def is_open(self):
        return self.model.is_open

    def write(self, rows, logits):
        address, dtype, shape = logits
        assert dtype == self.model.activation and shape == tuple(rows.shape)
        rows = rows.to(self.activation).contiguous()
        ctypes.memmove(address, rows.data_ptr(), rows.numel() * rows.element_size())

    def forward_on_device(self, slot, first, ids, logits, stream, taps=()):
        assert stream == STREAM
        made, tapped = self.runner.run(slot, first, ids, logits[2][0], list(taps))
        self.write(torch.from_numpy(made), logits)
        return tapped

    def step_on_device(self, tokens, logits, stream):
        assert stream == STREAM
        self.runner.step(tokens)
        self.write(torch.stack([torch.from_numpy(self.runner.logits(slot)) for slot, _, _ in tokens]), logits)

    def step(self, tokens):
        self.runner.step(tokens)

    def choose(self, draws, stop):
        assert all(position == self.runner.length(slot) for slot, position, _ in draws)
        self.model.left.append([left for _, _, left in draws])
        self.model.stops.append(stop)
        logits = torch.stack([torch.from_numpy(self.runner.logits(slot)) for slot, _, _ in draws])
        return logits.to(self.activation).float().argmax(-1).tolist()

    def release(self, slot):
        self.model.released.append(slot)
        self.runner.release(slot)

    def close(self):
        self.model.runners.discard(self)


@pytest.fixture
def stand_in(monkeypatch):
    """Lets speed_up take models of the CPU as it takes those of a GPU. Has the described weights of each backend."""
    taken = []

    def from_tensors(config, tensors, owner, gptq, on_device):
        assert on_device
        taken.append(tensors)
        return _core.Weights.from_tensors(config, tensors, owner, gptq=gptq)

    class Backend(_runner._CudaBackend):
        def _pack(self, dense):
            self.packed = [tensor.data_ptr() for tensor in dense]
            return PACKED_BYTES

        def _make(self, slots, capacity):
            return StandInModel(self, slots, capacity)

    core = types.SimpleNamespace(
        check_cuda_device=lambda index: None,
        WEIGHT_ALIGNMENT=1,
        Weights=types.SimpleNamespace(from_tensors=from_tensors),
        Runner=StandInRunner,
    )
    monkeypatch.setattr(_runner, "_core", core)
    monkeypatch.setattr(_runner, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(_runner, "_CpuBackend", lambda *args: Backend(torch.device("cpu"), *args))
    return types.SimpleNamespace(taken=taken, core=core)


def all_outputs(model):
    """Greedy ids, and the logits of a batch, of its last places, of one place without a cache, and of run()."""
    ids = padded([5, 5])["input_ids"]
    seen = []
    processors = transformers.LogitsProcessorList([lambda ids, scores: (seen.append(scores.clone()), scores)[1]])
    with torch.no_grad():
        outputs = [greedy(model, logits_processor=processors), model(ids).logits, model(ids, use_cache=False).logits]
        logits, taps = cf_ops.hf.run(model, ids, ["layers.0.output"])
    assert cf_ops.hf.report(model).share == 1 and len(seen) == 12
    assert logits.dtype == torch.float32 and outputs[1].dtype == outputs[2].dtype == model.dtype
    return [*outputs, *seen, logits.to(model.dtype), taps["layers.0.output"]]


@pytest.mark.parametrize("name", ["neox-d80", "neox-bf16", "neox-tied", *JOINED])
def test_what_a_gpu_is_asked_for(root, name, request):
    """Addresses of parameters, memory for logits and torch's stream; the tensors that come back are the CPU's."""
    expected = all_outputs(cf_ops.hf.speed_up(load(root, name)))
    taken = request.getfixturevalue("stand_in").taken
    model = load(root, name)
    cf_ops.hf.speed_up(model)
    parameters = [(p, p.data_ptr()) for p in model.parameters()]
    outputs = all_outputs(model)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert [(p, p.data_ptr()) for p in model.parameters()] == parameters
    (tensors,) = taken
    own = {address for address, _, _ in tensors.values()}
    if name in JOINED:  # a matrix begins where its first part does
        assert own & {at for _, at in parameters} and len(own) < len(parameters)
        assert any(key.endswith("mlp.gate_up_proj.weight") for key in tensors)
        assert not any("gate_proj" in key or "q_proj" in key for key in tensors)
    else:
        assert [address for address, _, _ in tensors.values()] == [at for _, at in parameters]
    report = cf_ops.hf.report(model)
    copied = 2 * 2 * 96 if name == "llama-gqa1-biases" else 0  # the gate's and up's biases
    assert report.copied_bytes == copied and ("read in place" in str(report)) == (copied == 0)
    assert report.weight_bytes == sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("name", ["neox-gptq-mixed", *(name for name in hf_gptq.CHECKPOINTS if "neox" not in name)])
def test_a_gpu_is_given_dense_tensors_in_place_and_packs_the_others(root, name, request):
    expected = all_outputs(cf_ops.hf.speed_up(hf_gptq.load_gptq(name)))
    taken = request.getfixturevalue("stand_in").taken
    model = cf_ops.hf.speed_up(hf_gptq.load_gptq(name))
    assert all(torch.equal(a, b) for a, b in zip(all_outputs(model), expected, strict=True))
    report, backend = cf_ops.hf.report(model), model._cf_ops._loaded.backend
    dense = [at for key, (at, _, _) in taken[0].items() if key.rpartition(".")[2] not in hf_gptq.PARTS]
    assert backend.packed == dense and model.get_output_embeddings().weight.data_ptr() in dense
    assert report.copied_bytes == PACKED_BYTES and not report.in_place
    with torch.no_grad():
        next(buffer for key, buffer in model.named_buffers() if key.endswith("scales")).zero_()
        model(INPUTS["input_ids"][:1])
    assert len(taken) == 2 and cf_ops.hf.report(model).share == 1


def test_what_a_gpu_is_asked_for_by_the_greedy_loop(root, request):
    expected = greedy(cf_ops.hf.speed_up(load(root, NAME)))
    request.getfixturevalue("stand_in")
    model = cf_ops.hf.speed_up(load(root, NAME))
    assert torch.equal(greedy(model), expected)
    asked = model._cf_ops._loaded.backend._model
    assert asked.left == [[left] * 3 for left in range(10, -1, -1)] and asked.released == [0, 1, 2]
    assert not any(asked.stops)
    asked.left.clear(), asked.stops.clear(), asked.released.clear()
    end = int(expected[1, 9 + 3])
    until = [row.index(end) if end in row else 11 for row in expected[:, 9:].tolist()]
    ended = greedy(model, eos_token_id=end)
    assert [len(left) for left in asked.left] == [sum(n > step for n in until) for step in range(max(until))]
    assert asked.stops == [[end]] * max(until)
    running_out = [slot for step in range(max(until)) for slot in range(3) if until[slot] == step]
    assert asked.released == [*running_out, 0, 1, 2] and until[1] <= 3
    for row, free, last in zip(ended[:, 9:].tolist(), expected[:, 9:].tolist(), until):
        assert row[: last + 1] == free[: last + 1] and not any(row[last + 1 :])
    assert set(cf_ops.hf.report(model).cf_ops) == {"greedy prefill", "greedy loop"}


def test_a_gpu_sees_a_parameter_that_changes_in_place(root, stand_in):
    model = cf_ops.hf.speed_up(load(root, NAME))
    loaded = model._cf_ops.loaded(model)
    with torch.no_grad():
        assert model(INPUTS["input_ids"][:1]).logits.abs().max() > 0
        model.get_output_embeddings().weight.zero_()
        assert model(INPUTS["input_ids"][:1]).logits.abs().max() == 0
    assert model._cf_ops.loaded(model) is loaded and len(stand_in.taken) == 1


def test_what_a_gpu_cannot_read_in_place_is_copied(root, stand_in):
    model = load(root, NAME)
    expected = all_outputs(cf_ops.hf.speed_up(model))
    cf_ops.hf.restore(model)
    norm = model.gpt_neox.final_layer_norm
    size, alignment = norm.weight.numel(), 256
    block = torch.empty(2 * alignment + size, dtype=norm.weight.dtype)
    at = (-block.data_ptr() % alignment) // block.element_size() + 1
    block[at : at + size] = norm.weight.detach()
    norm.weight.data = block[at : at + size]
    assert norm.weight.data_ptr() % alignment == block.element_size()
    stand_in.core.WEIGHT_ALIGNMENT = alignment
    one, other = norm.weight.detach(), block[at - 1 :][:size]
    tensors, copied = _runner.aligned({"one": one, "other": other})
    assert copied == size * block.element_size() and list(tensors) == ["one", "other"] and tensors["other"] is other
    assert torch.equal(tensors["one"], one) and tensors["one"].data_ptr() != one.data_ptr()

    cf_ops.hf.speed_up(model)
    assert all(torch.equal(a, b) for a, b in zip(all_outputs(model), expected, strict=True))
    report = cf_ops.hf.report(model)
    assert not report.in_place and report.copied_bytes >= copied and "bytes of copies" in str(report)
    loads = len(stand_in.taken)
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.zero_()
        assert model(INPUTS["input_ids"][:1]).logits.abs().max() == 0
    assert len(stand_in.taken) == loads + 1


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_gpu_takes_no_value_that_is_not_finite(root, stand_in, value):
    model = load(root, NAME)
    with torch.no_grad():
        model.gpt_neox.layers[1].attention.dense.weight[2, 3] = float(value)
    name = "gpt_neox.layers.1.attention.dense.weight"
    with pytest.raises(ValueError, match=f"tensor '{name}': expected finite values, got 1 that are not"):
        cf_ops.hf.speed_up(model)


def test_restore_ends_a_gpus_model(root, stand_in):
    model = load(root, NAME)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    addresses = [p.data_ptr() for p in model.parameters()]
    cf_ops.hf.speed_up(model)
    with torch.no_grad():
        cache = model(INPUTS["input_ids"]).past_key_values
    theirs = weakref.ref(model._cf_ops._loaded.backend._model)
    assert theirs().free_slots == 0 and cache.cache_bytes > 0
    cf_ops.hf.restore(model)
    gc.collect()
    assert theirs() is None and cache.cache_bytes == 0
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    cf_ops.hf.speed_up(model)
    with torch.no_grad():
        model(INPUTS["input_ids"])
    parameter, theirs = weakref.ref(model.get_output_embeddings().weight), weakref.ref(model._cf_ops._loaded.backend)
    del model, cache
    gc.collect()
    assert theirs() is None and parameter() is None


class TestCache:
    """What the library and callers do with a cache, on ours: all logits are those of the same ids in one pass."""

    @pytest.fixture
    def begun(self, root):
        model = cf_ops.hf.speed_up(load(root, NAME, torch.float32))
        ids = padded([8, 8])["input_ids"]
        with torch.no_grad():
            return model, ids, model(ids).past_key_values

    @staticmethod
    def assert_goes_on(model, root, cache, ids):
        new = torch.tensor([[5, 9]]).repeat(len(ids), 1)
        reference = load(root, NAME, torch.float64)
        with torch.no_grad():
            got = model(new, past_key_values=cache).logits
            exact = reference(torch.cat([ids, new], 1)).logits[:, -2:]
        bound = max(ErrorBound(reference, row).relative for row in torch.cat([ids, new], 1))
        assert (got - exact).abs().max() <= bound * exact.abs().max()
        assert cf_ops.hf.report(model).share == 1

    def test_crop(self, begun, root):
        model, ids, cache = begun
        cache.crop(-3)
        assert cache.get_seq_length() == 5
        self.assert_goes_on(model, root, cache, ids[:, :5])
        cache.crop(4)
        assert cache.get_seq_length() == 4
        self.assert_goes_on(model, root, cache, ids[:, :4])

    def test_reorder(self, begun, root):
        model, ids, cache = begun
        cache.reorder_cache(torch.tensor([1, 1]))
        self.assert_goes_on(model, root, cache, ids[[1, 1]])

    def test_repeat_and_select(self, begun, root):
        model, ids, cache = begun
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 1, 3]))
        self.assert_goes_on(model, root, cache, ids[[0, 0, 1]])

    def test_reset(self, begun, root):
        model, ids, cache = begun
        cache.reset()
        assert cache.get_seq_length() == 0
        self.assert_goes_on(model, root, cache, ids[:, :0])

    def test_deepcopy(self, begun, root):
        model, ids, cache = begun
        copied = copy.deepcopy(cache)
        self.assert_goes_on(model, root, cache, ids)
        assert copied.get_seq_length() == 8 and cache.get_seq_length() == 10
        self.assert_goes_on(model, root, copied, ids)

    def test_another_number_of_sequences(self, begun):
        model, ids, cache = begun
        with torch.no_grad(), pytest.raises((RuntimeError, ValueError)):
            model(ids[:1, :1], past_key_values=cache)
        assert "another number of sequences than the cache has" in cf_ops.hf.report(model).hugging_face

    def test_another_model(self, begun, root):
        model, ids, cache = begun
        other = cf_ops.hf.speed_up(load(root, NAME))
        with torch.no_grad(), pytest.raises(ValueError, match="expected a cache that this model made"):
            other(ids[:, :1], past_key_values=cache)

    def test_weights_changed_since(self, begun, root):
        model, ids, cache = begun
        model.half().float()
        self.assert_goes_on(model, root, cache, ids)
