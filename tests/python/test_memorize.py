"""Memorisation: the scores are those of the published evaluation, and an interrupted run goes on."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import cf_ops
from cf_ops import _memorize, _token_files

VOCAB = 128


@pytest.fixture(scope="module")
def model(checkpoints: pathlib.Path) -> cf_ops.Model:
    return cf_ops.load(checkpoints / "neox-d80", activation="float64")


@pytest.fixture(scope="module")
def rows(model: cf_ops.Model) -> np.ndarray[Any, Any]:
    """40 sequences of 64 ids and 6 more: the model's own continuation up to some id, then others."""
    random = np.random.default_rng(3)
    rows = random.integers(0, VOCAB, (40, 70)).astype(np.uint16)
    made = model.generate_batch([r[:32].tolist() for r in rows], max_new_tokens=32, stop=())
    for row, one, own in zip(rows, made, random.integers(0, 33, len(rows))):
        row[32 : 32 + own] = one.ids[:own]
    rows[0, 32:64] = made[0].ids
    rows[1, 32] = (made[1].ids[0] + 1) % VOCAB
    rows[1, 33:64] = made[1].ids[1:]  # equal ids behind one that differs
    return rows


def published(model: Any, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """score() of EleutherAI/pythia, predictable-memorization/eval_memorization.py: greedy ids up to 64, no fewer, and
    the share of equal ones."""
    torch = pytest.importorskip("torch")
    rows = torch.tensor(rows[:, :64].astype(np.int64))
    with torch.no_grad():
        generations = model.generate(rows[:, :32], do_sample=False, max_length=64, min_length=64)
    accuracies: np.ndarray[Any, Any] = (rows[:, 32:] == generations[:, 32:64]).float().mean(axis=-1).numpy()
    return accuracies


@pytest.mark.parametrize("eos", ["the checkpoint's", "a frequent id"])
def test_scores_are_the_published_ones(
    eos: str, model: cf_ops.Model, rows: np.ndarray[Any, Any], checkpoints: pathlib.Path
) -> None:
    torch = pytest.importorskip("torch", reason="torch is missing")
    transformers = pytest.importorskip("transformers", reason="transformers is missing")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoints / "neox-d80", torch_dtype=torch.float64)
    never = model.eos_token_ids
    if eos == "a frequent id":  # it would be the last id of some, and an earlier one of others
        made = np.array([one.ids for one in model.generate_batch(rows[:, :32].tolist(), max_new_tokens=32, stop=())])
        last = np.bincount(made[:, -1], minlength=VOCAB) > 0
        never = [int((np.bincount(made[:, :-1].ravel(), minlength=VOCAB) * last).argmax())]
    theirs.generation_config.eos_token_id = never
    expected = published(theirs, rows)
    assert len(set(expected.tolist())) > 8 and (expected == 1).any()
    ours = cf_ops.memorize(model, rows, slots=7, never=None if eos == "the checkpoint's" else never)
    np.testing.assert_array_equal(ours.accuracy, expected)
    np.testing.assert_array_equal(ours.exact, expected == 1)
    np.testing.assert_array_equal(ours.equal, expected * 32)


def test_results_do_not_depend_on_slots_and_exact_match_may_end_early(
    model: cf_ops.Model, rows: np.ndarray[Any, Any]
) -> None:
    full = cf_ops.memorize(model, rows, slots=3)
    assert full.exact[0] and not full.exact[1]
    assert full.prefix[1] == 0 and full.equal[1] > 0
    other = cf_ops.memorize(model, rows, slots=16)
    assert (other.equal == full.equal).all() and (other.prefix == full.prefix).all()
    early = cf_ops.memorize(model, rows, exact_only=True)
    assert (early.prefix == full.prefix).all() and (early.exact == full.exact).all()
    assert (early.equal == np.where(full.exact, 32, -1)).all()
    assert (np.isnan(early.accuracy) == ~full.exact).all()
    part = cf_ops.memorize(model, rows, first=5, count=4, context=20, continuation=8)
    assert part.first == 5 and part.equal.shape == (4,) and (part.equal <= 8).all()


def test_files_are_mapped(model: cf_ops.Model, rows: np.ndarray[Any, Any], tmp_path: pathlib.Path) -> None:
    expected = cf_ops.memorize(model, rows, count=6)
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "line.npy", rows.astype(np.int32).ravel())
    rows.astype("<u2").tofile(tmp_path / "document.bin")
    rows.astype("<i4").tofile(tmp_path / "wide.idx")
    calls: list[tuple[str, dict[str, Any]]] = [
        ("rows.npy", {}),
        ("line.npy", {"row": 70}),
        ("document.bin", {"row": 70}),
        ("wide.idx", {"row": 70, "dtype": "int32"}),
    ]
    for name, options in calls:
        mapped = _token_files.map_rows(str(tmp_path / name), **options)
        assert isinstance(mapped, np.memmap) or isinstance(mapped.base, np.memmap)
        made = cf_ops.memorize(model, tmp_path / name, count=6, **options)
        assert (made.equal == expected.equal).all()


@pytest.mark.parametrize("name", ["out.csv", "out.npy"])
def test_an_interrupted_run_goes_on(
    name: str,
    model: cf_ops.Model,
    rows: np.ndarray[Any, Any],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_memorize, "_FLUSH", 4)
    expected = cf_ops.memorize(model, rows)
    begun: list[tuple[int, int]] = []
    ids = _memorize._Work._ids

    def interrupted(work: Any, begin: int, end: int) -> Any:
        if begin >= 20:
            raise KeyboardInterrupt
        return noted(work, begin, end)

    def noted(work: Any, begin: int, end: int) -> Any:
        begun.append((begin, end))
        return ids(work, begin, end)

    monkeypatch.setattr(_memorize._Work, "_ids", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cf_ops.memorize(model, rows, slots=5, out=tmp_path / name)
    if name == "out.csv":
        with open(tmp_path / name, "a", encoding="ascii") as file:
            file.write("25,0.")  # a line that was cut

    monkeypatch.setattr(_memorize._Work, "_ids", noted)
    made = cf_ops.memorize(model, rows, slots=5, out=tmp_path / name)
    # Ten sequences, and five more wherever five have ended; what was under way is begun again.
    assert begun == [(0, 10), (10, 15), (15, 20), (15, 25), *((n, n + 5) for n in range(25, 40, 5))]
    assert (made.equal == expected.equal).all() and (made.prefix == expected.prefix).all()
    if name == "out.npy":
        records = np.load(tmp_path / name)
    else:
        lines = [tuple(line.split(",")) for line in (tmp_path / name).read_text().splitlines()]
        assert lines[0] == ("index", "accuracy", "equal", "prefix")
        records = np.array(lines[1:], _memorize._RECORD)
    assert (records["index"] == np.arange(40)).all() and (records["accuracy"] == expected.accuracy).all()
    assert (records["equal"] == expected.equal).all() and (records["prefix"] == expected.prefix).all()
    begun.clear()
    assert (cf_ops.memorize(model, rows, out=tmp_path / name).equal == expected.equal).all() and begun == []
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, name + ".json"]
    before = (tmp_path / name).read_bytes()
    with pytest.raises(ValueError, match="continuation is 32, and 16 was asked"):
        cf_ops.memorize(model, rows, continuation=16, out=tmp_path / name)
    with pytest.raises(ValueError, match="sha256_of_first_sequences is"):
        cf_ops.memorize(model, rows[::-1], out=tmp_path / name)
    (tmp_path / (name + ".json")).unlink()
    with pytest.raises(ValueError, match="out: expected a new file"):
        cf_ops.memorize(model, rows, out=tmp_path / name)
    assert (tmp_path / name).read_bytes() == before


def test_what_is_refused(model: cf_ops.Model, rows: np.ndarray[Any, Any], tmp_path: pathlib.Path) -> None:
    bad = rows.copy()
    bad[3, 40] = VOCAB
    rows.astype("<u2").tofile(tmp_path / "document.bin")
    (tmp_path / "odd.bin").write_bytes(b"123")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (rows[:, :63], {}, "at least 64 ids, got 63"),
        (rows[0], {}, r"\(sequences, ids of each\), got uint16 of the shape \(70,\)"),
        (rows[:0], {}, "at least one sequence"),
        ([[1, 2], [3]], {}, "^tokens: expected equal lengths"),
        (bad, {}, "sequence 3: expected ids of 0 to 127, got"),
        (rows, {"first": 40}, "first: expected 0 to 39, got 40"),
        (rows, {"count": 41}, "count: expected 1 to 40, got 41"),
        (rows, {"never": [VOCAB]}, "never: expected 0 to 127, got 128"),
        (rows, {"out": tmp_path / "out.txt"}, "named .csv or .npy"),
        (tmp_path / "document.bin", {}, "row=2049"),
        (tmp_path / "document.bin", {"row": 64}, "a multiple of 64 ids, got 2800"),
        (tmp_path / "odd.bin", {"row": 1}, "ids of 2 bytes each, got 3 bytes"),
    ]
    for tokens, options, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            cf_ops.memorize(model, tokens, **options)
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError):
        cf_ops.memorize(model, tmp_path / "missing.bin", row=64)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["document.bin", "odd.bin"]


def test_the_command(rows: np.ndarray[Any, Any], checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rows.astype("<u2").tofile(tmp_path / "document.bin")
    command = [sys.executable, "-m", "cf_ops", "memorize", "--model", str(checkpoints / "neox-d80")]
    command += ["--activation", "float64", "--tokens", "document.bin", "--row", "70", "--json", "report.json"]
    done = subprocess.run([*command, "--out", "out.csv"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    records = np.loadtxt(tmp_path / "out.csv", delimiter=",", skiprows=1)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["memorized"] == (records[:, 1] == 1).sum() > 0 and report["sequences"] == 40
    assert re.search(rf"^\| memorised +\| +{report['memorized']} \(", done.stdout, re.M)
    done = subprocess.run(
        [*command, "--out", "document.bin"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "cf_ops: --out: expected a file of its own, got 'document.bin' as for --tokens\n"
