"""Log-probabilities of given ids against Hugging Face's model in float64, by torch's log_softmax."""

import pytest

torch = pytest.importorskip("torch", reason="torch is missing")
transformers = pytest.importorskip("transformers", reason="transformers is missing")

import numpy as np

import cf_ops
from cf_ops import _core
from hf_models import ErrorBound, load

NAMES = ["neox-d80", "neox-bf16", "llama-gqa3-scaled", "qwen2-gqa7", "qwen3-gqa2", "gpt2-d64"]


def theirs(model, ids):
    """log p(id | the ids before it), (ids - 1), and the logits of each of these rows."""
    with torch.no_grad():
        logits = model(ids[None, :-1]).logits[0]
    assert logits.dtype == torch.float64
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0].numpy(), logits


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_float64s_within_the_bound(root, name):
    model, exact = cf_ops.load(root / "data" / "checkpoints" / name), load(root, name, torch.float64)
    ids = torch.randint(0, model.config["vocab_size"], (20,), generator=torch.Generator().manual_seed(2))
    expected, logits = theirs(exact, ids)
    # A log-probability is a logit less the log of a sum of exp, which is apart by no more than its furthest logit.
    most = float(logits.abs().max())
    largest_error = ErrorBound(exact, ids[:-1]).relative * most
    (scored,) = model.score([ids.numpy()], top=1)
    assert np.abs(scored.log_probs - expected).max() <= 2 * largest_error
    assert scored.sum == pytest.approx(expected.sum(), abs=2 * largest_error * len(expected))
    top = logits.topk(2).values
    decisive = (top[:, 0] - top[:, 1] > 2 * largest_error).numpy()
    assert decisive.mean() > 0.5
    greedy = (logits.argmax(-1) == ids[1:]).numpy()
    assert (scored.greedy == greedy)[decisive].all()
    assert (scored.top_ids[:, 0] == logits.argmax(-1).numpy())[decisive].all()


@pytest.mark.parametrize("name", ["gpt2-d16", "gpt2-d64"])
def test_float64_scores_are_float64s(root, name):
    """GPT-2 has no RoPE, whose tables are float32 and another's in the last bit."""
    model = cf_ops.load(root / "data" / "checkpoints" / name, activation="float64")
    ids = torch.randint(0, model.config["vocab_size"], (60,), generator=torch.Generator().manual_seed(3))
    expected, logits = theirs(load(root, name, torch.float64), ids)
    runner = _core.Runner(model.weights, capacity=59, activation="float64")
    # Each of the two may be so far from the exact sums.
    largest_error = runner.error_bound(ids[:-1].numpy(), "float64")[1] * float(logits.abs().max())
    (scored,) = model.score([ids.numpy()])
    assert np.abs(scored.log_probs - expected).max() <= 4 * largest_error
    assert (scored.greedy == (logits.argmax(-1) == ids[1:]).numpy()).all()
