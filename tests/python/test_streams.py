"""Streams: models that go on without end with the first and the newest tokens of each sequence."""

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
        ({"window": 8, "device": "cuda"}, "window: expected it with device='cpu' alone, got 8 for a GPU"),
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
    assert cli.main([*words, "--window", "12", "--device", "cuda"]) == 2
    assert "--window: expected with --device cpu" in capsys.readouterr().err
