"""Streams by speed_up(): the ids of cf_ops.load(), in a cache that does not grow, and no path of Hugging Face's."""

import pathlib

import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")

from hf_models import CACHE, load

import cf_ops

STREAM = {"window": 12, "sinks": 4}
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def directory(root: pathlib.Path) -> pathlib.Path:
    return root / "data" / "checkpoints" / "neox-d80"


@pytest.fixture
def model(root):
    return load(root, "neox-d80", torch.float32)


def generated(model, prompt=PROMPT, **options):
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, pad_token_id=0, **options)[0, len(prompt) :].tolist()


def test_the_ids_are_those_of_a_stream(model, directory, root):
    cf_ops.hf.speed_up(model, **STREAM)
    expected = list(cf_ops.load(directory, **STREAM).generate(PROMPT, max_new_tokens=150, stop=[]))
    assert generated(model, max_new_tokens=150, do_sample=False) == expected
    dense = cf_ops.hf.speed_up(load(root, "neox-d80", torch.float32))
    assert generated(dense, max_new_tokens=150, do_sample=False) != expected


def test_a_cache_goes_on_and_does_not_grow(model, directory):
    cf_ops.hf.speed_up(model, **STREAM)
    ids = torch.tensor([[(7 * i) % 31 + 1 for i in range(300)]])
    with torch.no_grad():
        at_once = model(ids, use_cache=False).logits
        out = model(ids[:, :40])
        sizes = set()
        for i in range(40, 300):
            out = model(ids[:, i : i + 1], **{CACHE: getattr(out, CACHE)})
            sizes.add(cf_ops.hf.report(model).cache_bytes)
            assert torch.allclose(out.logits[0, -1], at_once[0, i], rtol=1e-3, atol=1e-3 * float(at_once.abs().max()))
    assert len(sizes) == 1
    stream = cf_ops.load(directory, **STREAM).logits(ids[0].tolist())
    assert abs(at_once[0].numpy() - stream).max() < 1e-4 * abs(stream).max()


def test_what_has_no_stream_is_refused(model, root):
    cf_ops.hf.speed_up(model, **STREAM)
    with pytest.raises(NotImplementedError, match="Hugging Face's path has no streams.*generation mode"):
        generated(model, max_new_tokens=3, num_beams=2, do_sample=False)
    with pytest.raises(ValueError, match="expected those of the first speed_up"):
        cf_ops.hf.speed_up(model)
    cf_ops.hf.speed_up(model, **STREAM)
    cf_ops.hf.restore(model)
    with pytest.raises(ValueError, match="sinks: expected them beside a window, got 4"):
        cf_ops.hf.speed_up(model, sinks=4)
    with pytest.raises(ValueError, match="window: expected 0 to"):
        cf_ops.hf.speed_up(model, window=-1)
    gpt2 = load(root, "gpt2-d16", torch.float32)
    with pytest.raises(ValueError, match="window, sinks: expected a model with RoPE, got one without"):
        cf_ops.hf.speed_up(gpt2, window=8)
