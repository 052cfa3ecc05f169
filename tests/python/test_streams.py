"""Streams: models that go on without end with the first and the newest tokens of each sequence."""

import json

import numpy as np
import pytest

import cf_ops
from cf_ops import cli


@pytest.fixture(scope="module")
def directory(root):
    return root / "data" / "checkpoints" / "neox-d80"


def test_a_stream_goes_on_behind_its_window(directory):
    model = cf_ops.load(directory, activation="float64", window=12, sinks=4)
    prompt = [1, 2, 3]
    ids = list(model.generate(prompt, max_new_tokens=200, stop=[]))
    assert len(ids) == 200
    logits = model.logits(prompt + ids[:-1])
    assert logits[2:].argmax(axis=1).tolist() == ids
    # The first tokens are seen for ever.
    assert (logits[-1] != model.logits([5, *prompt[1:], *ids[:-1]])[-1]).any()


def test_a_stream_scores_a_text_of_any_length(directory):
    model = cf_ops.load(directory, activation="float64", window=12, sinks=4)
    ids = np.array([(7 * i + i * i // 5) % 31 for i in range(900)])
    logits = model.logits(ids[:-1].tolist())
    log_probs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    nll = -log_probs[np.arange(ids.size - 1), ids[1:]].mean()
    assert model.perplexity(ids, context=ids.size).nll == pytest.approx(nll, rel=1e-12)


def test_a_window_that_holds_all_is_the_model_itself(directory):
    ids = [7 * i % 31 for i in range(20)]
    dense = cf_ops.load(directory, activation="float64").logits(ids)
    stream = cf_ops.load(directory, activation="float64", window=16, sinks=4).logits(ids)
    # The angles of a stream are computed in float64, those of the model in float32, as transformers does.
    assert abs(stream - dense).max() < 1e-5 * abs(dense).max()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sinks": 4}, "window must be 0 or more keys, and sinks 0 or more beside a window, got 0 and 4"),
        ({"window": -1}, "window must be 0 or more keys, and sinks 0 or more beside a window, got -1 and 0"),
        ({"window": 8, "pages": 4}, "pages: expected none for streams, got 4"),
    ],
)
def test_options_that_no_stream_has_are_refused(directory, options, message):
    with pytest.raises(ValueError, match=message):
        cf_ops.load(directory, **options).logits([1])


def test_a_model_without_rope_has_no_streams(root):
    model = cf_ops.load(root / "data" / "checkpoints" / "gpt2-d16", window=8)
    with pytest.raises(ValueError, match="window, sinks: expected a model with RoPE, got one without"):
        model.logits([1])


def test_the_command_streams(directory, capsys):
    words = ["generate", "--model", str(directory), "--prompt-ids", "1,2,3", "--stop", "none", "--max-new-tokens", "90"]
    assert cli.main([*words, "--window", "12", "--sinks", "4"]) == 0
    out = capsys.readouterr()
    ids = [int(id) for id in out.out.strip().split(",")]
    model = cf_ops.load(directory, window=12, sinks=4)
    assert ids == list(model.generate([1, 2, 3], max_new_tokens=90, stop=[]))
    assert "max_position_embeddings" not in out.err


def test_a_stream_is_iterated_in_memory_that_does_not_grow(directory):
    model = cf_ops.load(directory, window=12, sinks=4)
    expected = list(model.generate([1, 2, 3], max_new_tokens=120, stop=[]))
    with model.stream([1, 2, 3]) as stream:
        assert [next(stream) for _ in expected] == expected
        assert stream.count == len(expected)
    assert list(stream) == []
    assert list(model.stream([1, 2, 3], max_new_tokens=7)) == expected[:7]
    stop = expected[20]
    assert list(model.stream([1, 2, 3], stop=stop)) == expected[: expected.index(stop) + 1]
    drawn = {"temperature": 2.0, "top_k": 40, "seed": 3}
    assert list(model.stream([1, 2, 3], max_new_tokens=40, **drawn)) == list(
        model.generate([1, 2, 3], max_new_tokens=40, stop=[], **drawn)
    )


def test_a_stream_of_text_forgets_old_ids_and_loses_no_character(text_checkpoint, monkeypatch):
    monkeypatch.setattr("cf_ops._streams._MOST_IDS", 10)
    monkeypatch.setattr("cf_ops._streams._KEPT_IDS", 4)
    model = cf_ops.load(text_checkpoint, window=12, sinks=4)
    options = {"temperature": 3.0, "seed": 5, "stop": []}
    text = "".join(model.generate("ab", max_new_tokens=150, **options))
    stream = model.stream("ab", max_new_tokens=150, **options)
    assert "".join(stream) == text
    assert len(stream._newest) < 30


def test_what_is_no_stream_is_refused(directory):
    with pytest.raises(ValueError, match="stream: expected a model with a window"):
        cf_ops.load(directory).stream([1])
    model = cf_ops.load(directory, window=12)
    with pytest.raises(ValueError, match="stop: expected ids, which end a stream, got 'x'"):
        model.stream([1], stop="x")
    with pytest.raises(TypeError, match="expected options among temperature, .*, got 'echo'"):
        model.stream([1], echo=True)
    with pytest.raises(ValueError, match="max_new_tokens: expected at least 1, got 0|max_new_tokens: expected 1 to"):
        model.stream([1], max_new_tokens=0)


def test_the_stream_command_streams(directory, capsys, tmp_path):
    words = ["stream", "--model", str(directory), "--prompt-ids", "1,2,3", "--max-new-tokens", "90", "--window", "12"]
    assert cli.main([*words, "--json", str(tmp_path / "x.json")]) == 0
    out = capsys.readouterr()
    model = cf_ops.load(directory, window=12, sinks=4)
    assert [int(id) for id in out.out.strip().split(",")] == list(model.stream([1, 2, 3], max_new_tokens=90))
    assert "90 new tokens in " in out.err
    assert json.loads((tmp_path / "x.json").read_text())["sinks"] == 4
