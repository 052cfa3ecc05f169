"""What speed_up takes and gives back: memory, methods, copies, threads."""

import copy
import gc
import os
import pathlib
import pickle
import threading
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")

import cf_ops.hf
from hf_models import ErrorBound, load, padded

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
