"""Pages, pieces of prompts and invariant bits: options that leave a sequence what it is given."""

import numpy as np
import pytest

import cf_ops
from cf_ops import cli

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 10], [5], [3, 3, 3]]


@pytest.fixture(scope="module")
def directory(root):
    return root / "data" / "checkpoints" / "neox-d80"


def ids_of(model, prompts=PROMPTS, **options):
    return [r.ids for r in model.generate_batch(prompts, max_new_tokens=9, stop=[], **options)]


@pytest.mark.parametrize(
    "options",
    [
        {"step_tokens": 3},
        {"step_tokens": 0, "invariant": True},
        {"invariant": True},
        {"pages": 40, "page_entries": 4},
        {"pages": 5, "page_entries": 4},  # for no more than one sequence: the others wait
        {"pages": 40, "page_entries": 4, "share_prefixes": True, "step_tokens": 5},
    ],
)
def test_the_ids_are_those_of_a_model_without_the_option(directory, options):
    assert ids_of(cf_ops.load(directory, **options)) == ids_of(cf_ops.load(directory))


def test_samples_of_a_prompt_share_its_pages(directory):
    drawn = {"n": 3, "temperature": 2.0, "seed": 3}
    made = ids_of(cf_ops.load(directory, pages=40, page_entries=4), **drawn)
    assert made == ids_of(cf_ops.load(directory), **drawn)


def test_invariant_bits_do_not_depend_on_neighbours_or_pieces(directory):
    model = cf_ops.load(directory, invariant=True)
    ids = [(7 * i + i * i // 5) % 31 for i in range(40)]
    together = model.generate_batch([ids, *PROMPTS], max_new_tokens=4, stop=[], logprobs=0)[0]
    alone = model.generate_batch([ids], max_new_tokens=4, stop=[], logprobs=0)[0]
    pieces = cf_ops.load(directory, invariant=True, step_tokens=7).generate_batch(
        [ids, *PROMPTS], max_new_tokens=4, stop=[], logprobs=0
    )[0]
    assert together.logprobs == alone.logprobs == pieces.logprobs


def test_hundreds_of_slots(directory):
    prompts = [[i % 100 + 1] for i in range(150)]
    model = cf_ops.load(directory, pages=600, page_entries=4)
    assert ids_of(model, prompts, slots=150) == ids_of(cf_ops.load(directory), prompts)


def test_pages_score_and_run_as_a_contiguous_cache_does(directory):
    dense, paged = cf_ops.load(directory), cf_ops.load(directory, pages=40, page_entries=4)
    ids = PROMPTS[0]
    assert np.array_equal(dense.logits(ids), paged.logits(ids))
    assert dense.score([ids])[0].log_probs.tolist() == paged.score([ids])[0].log_probs.tolist()


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"pages": -1}, ValueError, "pages: expected 0 to 2147483647, got -1"),
        ({"pages": "4"}, TypeError, "pages: expected an integer, got '4'"),
        ({"pages": 2, "page_entries": 0}, ValueError, "page_entries: expected 1 to 2147483647, got 0"),
        ({"pages": 2, "page_entries": 4}, ValueError, "capacity: expected at most 8 entries, those of 2 pages, got 17"),
        ({"step_tokens": -1}, ValueError, "step_tokens: expected 0 to 2147483647, got -1"),
        ({"invariant": True, "activation": "float64"}, ValueError, "invariant: expected activations of float32"),
        ({"invariant": 1}, TypeError, "invariant: expected True or False, got 1"),
    ],
)
def test_options_without_meaning_are_refused(directory, options, error, message):
    with pytest.raises(error, match=message):
        ids_of(cf_ops.load(directory, **options))


def test_the_command_takes_the_options(directory, capsys):
    words = ["generate", "--model", str(directory), "--stop", "none", "--max-new-tokens", "9", "--prompt-ids"]
    words += [";".join(",".join(map(str, prompt)) for prompt in PROMPTS)]
    assert cli.main(words) == 0
    expected = sorted(capsys.readouterr().out.splitlines())
    more = ["--pages", "40", "--page-entries", "4", "--share-prefixes", "--step-tokens", "5", "--invariant"]
    assert cli.main([*words, *more]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == expected
    assert cli.main([*words, "--share-prefixes"]) == 2
    assert "--share-prefixes: expected with --pages" in capsys.readouterr().err
