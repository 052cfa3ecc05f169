"""Drafts of generate(): the ids, pieces, log-probabilities and ends of a generation without them."""

from __future__ import annotations

import gc
import json
import pathlib
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest

import cf_ops

DRAWN: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 3}
PROMPTS = [[486, 500, 525, 555, 278, 302], [5, 6, 7, 5, 6, 7, 5, 6], [100, 200, 300]]


@pytest.fixture(scope="module", params=["stdlib-4m", "stdlib-llama-2m-gptq"])
def model(checkpoints: pathlib.Path, request: pytest.FixtureRequest) -> cf_ops.Model:
    return cf_ops.load(checkpoints / request.param)


def knowing(prompt: list[int], ids: list[int], wrong: int = 0) -> Any:
    """Drafts of what comes; each id whose place `wrong` divides is another one."""

    def draft(seen: Any, most: int) -> Any:
        assert seen.dtype == np.int32 and seen[: len(prompt)].tolist() == prompt and 1 <= most <= 7
        first = len(seen) - len(prompt)
        places = range(first, min(first + most, len(ids)))
        return [ids[place] ^ (wrong > 0 and place % wrong == 0) for place in places]

    return draft


@pytest.mark.parametrize("settings", [{}, DRAWN, {"logit_bias": {5: 3.0}, "frequency_penalty": 0.5, **DRAWN}])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_generation_is_the_same_with_drafts(
    model: cf_ops.Model, settings: dict[str, Any], logprobs: int | None
) -> None:
    options = {"max_new_tokens": 25, "ignore_eos": True, "logprobs": logprobs, **settings}
    plain = model.generate_batch(PROMPTS, **options)
    for result in plain:
        assert result.drafted is None and result.accepted is None
    for draft_len in (1, 7):
        made = model.generate_batch(PROMPTS, draft="lookup", draft_len=draft_len, **options)
        for mine, theirs in zip(made, plain, strict=True):
            assert mine.ids == theirs.ids and mine.finish == theirs.finish == "length"
            assert mine.logprobs == theirs.logprobs and mine.top_logprobs == theirs.top_logprobs
            assert mine.drafted is not None and mine.accepted is not None and mine.accepted <= mine.drafted
    for wrong in (0, 1, 4):
        generation = model.generate(PROMPTS[0], draft=knowing(PROMPTS[0], plain[0].ids, wrong), **options)
        pieces = []
        for id in generation:
            pieces.append(id)
            assert generation.ids[: len(pieces)] == pieces
        assert pieces == plain[0].ids and generation.result.logprobs == plain[0].logprobs
        accepted = generation.result.accepted
        # Right drafts have 2, 4, 7 and 7 ids, and each step makes one more.
        assert accepted is not None and (accepted == 20 if wrong == 0 else accepted < 20)


@pytest.mark.parametrize("place", [3, 4, 9])
def test_an_id_of_stop_and_an_error_end_it_where_they_do_without(model: cf_ops.Model, place: int) -> None:
    prompt = PROMPTS[0]
    ids = list(model.generate(prompt, max_new_tokens=20, ignore_eos=True, **DRAWN))
    draft = knowing(prompt, ids)
    generation = model.generate(prompt, max_new_tokens=20, stop=[ids[place]], draft=draft, **DRAWN)
    assert list(generation) == ids[: ids.index(ids[place]) + 1] and generation.finish == "stop"

    def process(row: Any, seen: Any) -> Any:
        if len(seen) == len(prompt) + place:
            row[:] = np.nan
        return row

    generation = model.generate(
        prompt, max_new_tokens=20, ignore_eos=True, logits_processor=process, draft=draft, **DRAWN
    )
    pieces = []
    with pytest.raises(cf_ops.CfError, match="is NaN"):
        for id in generation:
            pieces.append(id)
    assert pieces == ids[:place] == generation.ids and generation.finish == "failed"
    assert list(generation) == []


def test_a_text_of_stop_ends_it_within_a_draft(checkpoints: pathlib.Path) -> None:
    pytest.importorskip("tokenizers", reason="prompts are texts")
    model = cf_ops.load(checkpoints / "stdlib-4m")
    prompt = "def __len__(self):\n    return "
    whole = model.generate(prompt, max_new_tokens=30, ignore_eos=True)
    text = "".join(whole)
    result = whole.result
    for stop in (text[5:8], text[12:14], text[-3:]):
        draft = knowing(result.prompt, result.ids)
        for settings in ({}, {"logprobs": 1}):
            ended = model.generate(prompt, max_new_tokens=30, ignore_eos=True, stop=[stop], draft=draft, **settings)
            alone = model.generate(prompt, max_new_tokens=30, ignore_eos=True, stop=[stop], **settings)
            assert "".join(ended) == "".join(alone) == text[: text.index(stop)]
            assert ended.ids == alone.ids and ended.finish == alone.finish == "stop"
            assert ended.result.logprobs == alone.result.logprobs


def test_what_a_draft_raises_the_iterator_raises(model: cf_ops.Model) -> None:
    class Own(Exception):
        pass

    def failing(seen: Any, most: int) -> Any:
        if len(seen) == len(PROMPTS[0]) + 2:
            raise Own("of the draft")
        return []

    ids = list(model.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True))
    generation = model.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True, draft=failing)
    assert [next(generation), next(generation)] == ids[:2]
    with pytest.raises(Own, match="of the draft"):
        next(generation)
    for wrong, kind, match in (
        ([10**6], ValueError, "draft.*id"),
        ([[1], [2]], ValueError, "draft"),
        (["a"], (TypeError, ValueError), "draft"),
        (None, (TypeError, ValueError), "draft"),
    ):
        with pytest.raises(kind, match=match):
            list(model.generate(PROMPTS[0], max_new_tokens=8, draft=lambda seen, most, made=wrong: made))
    assert list(model.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True)) == ids


def test_drafts_are_checked_by_name(model: cf_ops.Model, checkpoints: pathlib.Path) -> None:
    for options, kind, match in (
        ({"draft": "ngram"}, ValueError, "draft: expected 'lookup' or a function .*, got 'ngram'"),
        ({"draft": 3}, TypeError, "draft: expected 'lookup' or a function .*, got int"),
        ({"draft": "lookup", "draft_len": 0}, ValueError, "draft_len: expected 1 to 7, got 0"),
        ({"draft": "lookup", "draft_len": 8}, ValueError, "draft_len: expected 1 to 7, got 8"),
        ({"draft": "lookup", "draft_len": "2"}, TypeError, "draft_len: expected an integer"),
    ):
        with pytest.raises(kind, match=match):
            model.generate([1, 2, 3], **options)
    unfit = "draft: expected a model that gives a token the same bits in a step of any size"
    with pytest.raises(ValueError, match=unfit):
        model.generate_batch([[1, 2, 3]] * 9, max_new_tokens=2, draft="lookup")
    in_float64 = cf_ops.load(checkpoints / "stdlib-4m", activation="float64")
    with pytest.raises(ValueError, match=unfit):
        in_float64.generate([1, 2, 3], draft="lookup")
    invariant = cf_ops.load(checkpoints / "stdlib-4m", invariant=True)
    prompts = [[1, 2, 3, place] for place in range(9)]
    plain = invariant.generate_batch(prompts, max_new_tokens=9)
    assert [r.ids for r in invariant.generate_batch(prompts, max_new_tokens=9, draft="lookup")] == [
        r.ids for r in plain
    ]


def test_a_generation_that_is_left_is_collected(model: cf_ops.Model) -> None:
    class Draft:
        generation: Any = None

        def __call__(self, seen: Any, most: int) -> list[int]:
            return []

    draft = Draft()
    draft.generation = model.generate(PROMPTS[0], max_new_tokens=50, draft=draft)
    next(draft.generation)
    gone = weakref.ref(draft)
    del draft
    gc.collect()
    assert gone() is None


def test_the_command_counts_drafts_and_makes_the_same(checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "cf_ops", "generate", "--model", str(checkpoints / "stdlib-4m")]
    command += ["--prompt-ids", "5,6,7,5,6,7,5,6", "--stop", "none", "--max-new-tokens", "24"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], capture_output=True, text=True, check=True)

    report = tmp_path / "report.json"
    plain, drafted = run(), run("--draft", "lookup", "--draft-len", "5", "--json", str(report))
    assert drafted.stdout == plain.stdout and "drafts" not in plain.stderr
    (sequence,) = json.loads(report.read_text())["sequences"]
    counts = sequence["drafts"]
    assert 0 <= counts["accepted"] <= counts["drafted"] and counts["drafted"] > 0
    assert f"drafts: {counts['drafted']} ids, {counts['accepted']} accepted" in drafted.stderr
