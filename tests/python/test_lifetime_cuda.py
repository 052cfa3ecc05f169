"""A thousand times: what the package takes of a GPU and of the host is given back.

Memory is read as the driver and the kernel count it, so nothing else may run on the GPU beside these tests. The first
cycles may keep what is taken once: loaded kernels, the allocators' own blocks. From then on memory stays where it is.
"""

import contextlib
import ctypes
import gc
import os
import pathlib
import signal
import threading
import time
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is missing")

from cuda_models import gpu  # noqa: E402

import cf_ops  # noqa: E402
from cf_ops import clusterfusion  # noqa: E402

STATM = pathlib.Path("/proc/self/statm")
CYCLES, FIRST = 1000, 50
# A test of a thousand cycles takes 20 s at most: where one takes longer than 20 ms, as the capture of a model's graphs
# may, so many fit in that there are fewer.
SECONDS = 20
MIB = 1 << 20
# By which memory may differ: two blocks of torch's allocator, and what the heap leaves between its ends.
DEVICE_BYTES, HOST_BYTES = 4 * MIB, 8 * MIB

pytestmark = [
    gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
    pytest.mark.skipif(not STATM.exists(), reason="memory is read from /proc/self/statm, which is missing"),
]


class Taken(NamedTuple):
    """Bytes of the GPU and of the host that are not free, once all that nothing refers to is given back."""

    device: int
    host: int

    @staticmethod
    def now():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        free, total = torch.cuda.mem_get_info()
        return Taken(total - free, int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


def grown(once, record_property, cycles=CYCLES):
    """How much memory is taken beyond that after the first cycles, once all are done; and the number of cycles."""
    begin = time.monotonic()
    for _ in range(FIRST):
        once()
    each = (time.monotonic() - begin) / FIRST
    count = max(4 * FIRST, min(cycles, int(SECONDS / each)))
    before = Taken.now()
    for _ in range(count - FIRST):
        once()
    after = Taken.now()
    more = Taken(after.device - before.device, after.host - before.host)
    record_property("cycles", count)
    record_property("ms_a_cycle", round(1e3 * each, 3))
    print(f"{count} cycles of {1e3 * each:.2f} ms: {more.device} bytes of the GPU and {more.host} of the host more")
    return more, count


def check(once, record_property, cycles=CYCLES):
    more, _ = grown(once, record_property, cycles)
    assert more.device <= DEVICE_BYTES and more.host <= HOST_BYTES, more


@pytest.mark.parametrize("where", ["device", "host"])
def test_what_is_kept_is_seen(record_property, where):
    """The check can fail: 64 KiB a cycle."""
    kept = []

    def once():
        if where == "device":
            kept.append(torch.zeros(64 << 10, dtype=torch.uint8, device="cuda"))
        else:
            kept.append(b"1" * (64 << 10))

    more, count = grown(once, record_property)
    assert count == CYCLES
    assert (more.device > DEVICE_BYTES) == (where == "device") and (more.host > HOST_BYTES) == (where == "host")


def test_graph_contexts(record_property):
    """Each holds a cache of 320 KiB in this library's layout, and takes two steps, the second one by a graph, which
    may be running still when the context is destroyed."""
    hidden, heads, rows = 320, 4, 256
    calls = clusterfusion.DecoderCalls("small", hidden, heads)

    def random(*shape):
        return (0.05 * torch.randn(shape, device="cuda")).half()

    matrices = {
        "weight_qkv": random(3 * hidden, hidden),
        "weight_o": random(hidden, hidden),
        "mlp_up_weight": random(4 * hidden, hidden),
        "mlp_down_weight": random(hidden, 4 * hidden),
    }
    caches = {"k_cache": random(rows, hidden), "v_cache": random(rows, hidden)}
    names = ("ln_weight", "ln_bias", "post_ln_weight", "post_ln_bias", "o_bias", "mlp_down_bias")
    step = {"input": random(1, hidden), "mlp_up_bias": random(4 * hidden), "qkv_bias": random(3 * hidden)}
    step |= {name: random(hidden) for name in names}
    step |= {name: torch.ones(hidden // heads, device="cuda") for name in ("cos", "sin")}
    outputs = []

    def once():
        calls.create_graph_context(1, **caches, **matrices, max_seq_len=rows)
        try:
            calls.graph_decode_step(1, **step, **caches, current_seq_len=100)
            outputs[:] = calls.graph_decode_step(1, **step, **caches, current_seq_len=101)
            with pytest.raises(ValueError, match="id 1 is a context of small"):
                calls.create_graph_context(1, **caches, **matrices, max_seq_len=rows)
        finally:
            calls.destroy_graph_context(1)

    assert (CYCLES - FIRST) * 2 * rows * hidden * 2 > 10 * DEVICE_BYTES
    check(once, record_property)
    assert torch.isfinite(outputs[0]).all() and 1 not in clusterfusion._contexts


@pytest.mark.parametrize("ends", ["close", "drop"])
def test_models(root, record_property, ends):
    expected = []

    def once():
        model = cf_ops.load(root / "data" / "checkpoints" / "neox-d80", device="cuda", slots=2, capacity=64)
        ids = list(model.generate([1, 2, 3], max_new_tokens=3, stop=()))
        expected[:] = expected or ids
        assert ids == expected
        if ends == "close":
            model.close()

    check(once, record_property)


def test_generations_that_are_left(root, record_property):
    """A generation that its caller leaves in the middle gives its slot back, by close() or when it is dropped."""
    model = cf_ops.load(root / "data" / "checkpoints" / "neox-d80", device="cuda", slots=2, capacity=64)
    closes = True

    def once():
        nonlocal closes
        one, other = (model.generate([1, 2, 3], max_new_tokens=30, stop=()) for _ in range(2))
        assert next(one) == next(other)
        if closes := not closes:
            one.close()
            other.close()

    check(once, record_property)
    assert len(model.generate_batch([[1, 2, 3], [4]], max_new_tokens=8, stop=())) == 2


class TestHuggingFace:
    @pytest.fixture
    def model(self, root):
        pytest.importorskip("transformers", reason="transformers is missing")
        from hf_models import load

        return load(root, "neox-d80").to("cuda")

    @pytest.fixture
    def inputs(self, model):
        from hf_models import padded

        return {name: tensor.to("cuda") for name, tensor in padded([6, 3]).items()}

    def test_speed_up_and_restore(self, model, inputs, record_property):
        """The call between them takes a cache and captures its graphs."""
        logits = []

        def once():
            cf_ops.hf.speed_up(model)
            with torch.no_grad():
                logits[:] = [model(inputs["input_ids"]).logits]
            assert cf_ops.hf.report(model).share == 1
            cf_ops.hf.restore(model)

        check(once, record_property)
        assert torch.isfinite(logits[0]).all() and "_cf_ops" not in model.__dict__

    @pytest.mark.parametrize("who", ["criterion", "streamer"])
    def test_interrupts_by_a_callback(self, model, inputs, record_property, who):
        import transformers

        cf_ops.hf.speed_up(model)
        expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        calls = 0

        def count():
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt

        class Streamer(transformers.generation.streamers.BaseStreamer):
            def put(self, value):
                count()

            def end(self):
                raise AssertionError("the generation ended")

        class Criterion(transformers.StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                count()
                return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        def once():
            nonlocal calls
            calls = 0
            how = {"stopping_criteria": transformers.StoppingCriteriaList([Criterion()])}
            if who == "streamer":
                how = {"streamer": Streamer()}
            with pytest.raises(KeyboardInterrupt):
                model.generate(**inputs, max_new_tokens=300, do_sample=False, **how)
            assert calls == 3

        check(once, record_property)
        assert cf_ops.hf.report(model).cache_bytes == 0 and cf_ops.hf.report(model).share == 1
        assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), expected)

    def test_interrupts_by_ctrl_c(self, model, inputs, record_property):
        """Real signals, wherever they come; fewer cycles, for each waits 20 ms for its own."""
        cf_ops.hf.speed_up(model)
        expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)

        def once():
            timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                model.generate(**inputs, max_new_tokens=20_000, do_sample=False)
            timer.join()

        check(once, record_property, cycles=4 * FIRST)
        assert cf_ops.hf.report(model).cache_bytes == 0 and cf_ops.hf.report(model).share == 1
        assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), expected)
