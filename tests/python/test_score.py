"""Log-probabilities of given ids: those of the logits, shared beginnings, texts, prompts that fail, refusals."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cf_ops
import cf_ops._score
from cf_ops import _core
from test_model import constant_arrays, weights_of

U64 = 2.0**-53


def log_softmax(logits: NDArray[Any]) -> NDArray[np.longdouble]:
    wide = logits.astype(np.longdouble)
    wide -= wide.max(axis=1, keepdims=True)
    result: NDArray[np.longdouble] = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return result


def positions(model: cf_ops.Model) -> int:
    config = model.config
    return int(config["n_positions" if "n_positions" in config else "max_position_embeddings"])


def check(model: cf_ops.Model, scored: cf_ops.Scored) -> None:
    """The scores are those of all logits of the prompt, made at once."""
    logits = model.logits(scored.prompt[:-1])[scored.first - 1 :]
    ids = np.array(scored.prompt[scored.first :])
    at = np.arange(len(ids)), ids
    exact = log_softmax(logits)
    # The pieces' logits and these are apart by twice the bound of either at most, and a log-probability is a logit less
    # a mean of logits.
    oracle = _core.Runner(model.weights, capacity=len(scored.prompt), activation="float64")
    largest_error = oracle.error_bound(scored.prompt[:-1], model.activation)[1] * float(np.abs(logits).max())
    assert scored.error is None and scored.log_probs.dtype == np.float64 and scored.log_probs.shape == ids.shape
    assert np.abs(scored.log_probs - exact[at]).max() <= 4 * largest_error + 200 * U64
    behind = logits.max(axis=1) - logits[at]
    assert (behind[scored.greedy] <= 4 * largest_error).all() and (behind[~scored.greedy] >= -4 * largest_error).all()
    assert scored.greedy.dtype == np.bool_
    rows = np.arange(len(ids))[:, None]
    if scored.top_ids.shape[1]:
        assert (np.diff(scored.top_log_probs, axis=1) <= 0).all()
        assert ((scored.top_ids[:, 0] == ids) == scored.greedy).all()
        assert np.abs(exact[rows, scored.top_ids] - scored.top_log_probs).max() <= 4 * largest_error + 200 * U64
    assert scored.sum == pytest.approx(float(exact[at].sum()), abs=len(ids) * (4 * largest_error + 1e-12))
    assert scored.perplexity == pytest.approx(np.exp(-scored.sum / len(ids)), rel=1e-14)


@pytest.mark.parametrize("activation", ["float64", "float32"])
@pytest.mark.parametrize("name", ["neox-d80", "llama-gptq-desc-act", "gpt2-d16"])
def test_scores_are_those_of_the_logits(checkpoints: pathlib.Path, name: str, activation: str) -> None:
    model = cf_ops.load(checkpoints / name, activation=activation)
    generator = np.random.default_rng(4)
    most = min(positions(model), 200)
    vocab = model.config["vocab_size"]
    prompts = [generator.integers(0, vocab, n) for n in (2, 3, 17, min(140, most), most)]
    first = [1, 2, 5, min(130, most - 1), 1]
    made = model.score(prompts, first, top=3, slots=2)
    for prompt, at, scored in zip(prompts, first, made):
        assert scored.prompt == prompt.tolist() and scored.first == at and scored.top_ids.shape == (len(prompt) - at, 3)
        check(model, scored)


def test_what_prompts_share_is_read_once_with_the_same_bits(
    checkpoints: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    scores = cf_ops._score._scores

    def counted(scorer: _core.Scorer, *arguments: Any) -> list[Any]:
        made = scores(scorer, *arguments)
        read.append(scorer.progress[1])
        return made

    monkeypatch.setattr(cf_ops._score, "_scores", counted)
    model = cf_ops.load(checkpoints / "stdlib-4m")
    context = np.load(checkpoints / "stdlib-4m" / "held_out.npy").reshape(-1)[:300].tolist()
    choices = [[5], [6, 7], [8, 9, 10], [6, 8]]
    prompts = [context + choice for choice in choices]
    together = model.score(prompts, len(context))
    alone = [model.score([prompt], len(context))[0] for prompt in prompts]
    for one, other in zip(together, alone):
        assert (one.log_probs == other.log_probs).all() and (one.greedy == other.greedy).all()
    # Of the four, two begin with the same ids but the last one: 256 ids in pieces, then 44, 45, 46.
    assert read == [256 + 44 + 45 + 46, 300, 301, 302, 301]


def test_greedy_ids_are_greedy(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "stdlib-llama-2m")
    prompt = np.load(checkpoints / "stdlib-4m" / "held_out.npy").reshape(-1)[:40].tolist()
    made = list(model.generate(prompt, max_new_tokens=20, stop=()))
    (scored,) = model.score([prompt + made], first=40, top=1)
    assert scored.is_greedy and (scored.top_ids[:, 0] == made).all()
    assert (scored.top_log_probs[:, 0] == scored.log_probs).all()
    (other,) = model.score([prompt + made[:-1] + [made[-1] ^ 1]], first=40)
    assert not other.is_greedy and other.greedy[:-1].all()


def test_texts_are_encoded(text_checkpoint: str) -> None:
    model = cf_ops.load(text_checkpoint)
    (text,) = model.score(["the fox é"])
    (ids,) = model.score([model.encode("the fox é")])
    assert (text.log_probs == ids.log_probs).all() and text.prompt == ids.prompt
    assert model.perplexity("the fox é").nll == pytest.approx(-text.sum / len(text.log_probs), rel=1e-14)


def test_a_prompt_that_fails_says_so_and_the_others_go_on() -> None:
    config, arrays = constant_arrays(np.full(16, np.finfo(np.float32).max, np.float32))
    # Behind id 1 alone the last norm makes more than 1, and the logits overflow.
    arrays["gpt_neox.final_layer_norm.weight"][0] = arrays["gpt_neox.embed_in.weight"][1, 0] = 1
    model = cf_ops.Model(weights_of(config, arrays), "", "float32", [])
    good, failed, other = model.score([[2, 3, 4], [2, 3, 1, 4, 5], [5, 6]], top=2)
    assert good.log_probs == pytest.approx([-np.log(16)] * 2, rel=1e-14) and other.error is None
    assert failed.error == "score: ids[3]: logits[0] is infinity, expected a number below infinity"
    assert failed.log_probs == pytest.approx([-np.log(16)] * 2, rel=1e-14) and failed.top_ids.shape == (2, 2)
    assert np.isnan(failed.sum) and np.isnan(failed.perplexity) and not failed.is_greedy
    with pytest.raises(ValueError, match=r"ids 0 to 4: score: ids\[3\]: logits\[0\] is infinity"):
        model.perplexity([2, 3, 1, 4, 5])


def test_no_prompts_have_no_scores(checkpoints: pathlib.Path) -> None:
    assert cf_ops.load(checkpoints / "neox-d80").score([]) == []


def test_bad_prompts_are_refused(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "gpt2-d16")
    most = positions(model)
    vocab = model.config["vocab_size"]
    calls: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        (([[]],), {}, ValueError, "prompt 0: expected at least 2 ids, one to score and one before it, got 0"),
        (([[1, 2], [3]],), {}, ValueError, "prompt 1: expected at least 2 ids, one to score and one before it, got 1"),
        (([[1, 2], [1, vocab]],), {}, ValueError, rf"prompt 1\[1\]: expected an id of 0 to {vocab - 1}, got {vocab}"),
        (([[-1, 2]],), {}, ValueError, rf"prompt 0\[0\]: expected an id of 0 to {vocab - 1}, got -1"),
        (([[1, 2.5]],), {}, TypeError, r"prompt 0\[1\]: expected an integer, got 2.5"),
        (([[1, 2, 3]],), {"first": 3}, ValueError, "prompt 0: first: expected 1 to 2, got 3"),
        (([[1, 2, 3]],), {"first": 0}, ValueError, "prompt 0: first: expected 1 to 2, got 0"),
        (([[1, 2], [3, 4]],), {"first": [1]}, ValueError, "first: expected one position, or 2, one a prompt, got 1"),
        (([[1, 2]],), {"first": "1"}, TypeError, "first: expected an integer, got '1'"),
        (([[1, 2]],), {"top": -1}, ValueError, f"top: expected 0 to {vocab}, got -1"),
        (([[1, 2]],), {"slots": 0}, ValueError, "slots: expected 1 to"),
        (([1, 2],), {}, TypeError, "prompt 0: expected a text or ids, got int"),
        (("text",), {}, TypeError, "prompts: expected a list of prompts, got one str"),
        (([[1] * (most + 2)],), {}, ValueError, f"prompt 0: expected at most {most + 1} ids, one more than"),
    ]
    for arguments, options, kind, message in calls:
        with pytest.raises(kind, match=message) as caught:
            model.score(*arguments, **options)
        assert "\n" not in str(caught.value)
    assert len(model.score([[1] * (most + 1)])[0].log_probs) == most


def test_ctrl_c_ends_a_long_call(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load("pythia-70m", threads=1)
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        model.score([list(range(2000))])
    timer.join()
    assert model.score([[1, 2]])[0].error is None
