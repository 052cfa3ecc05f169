"""A sweep over revisions: metrics by step, what is wrong with a revision, and that an interrupted one goes on."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import pathlib
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cf_ops
from cf_ops import _core, _safetensors, _sweep

Change = Callable[[dict[str, np.ndarray[Any, Any]]], None]
IDS = (np.arange(1, 81) * 37 % 128).astype(np.int32)
MLP = "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"


@pytest.fixture
def revision(checkpoints: pathlib.Path, tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """Makes the checkpoint of a step: a walk that goes on from neox-tanh's weights, as training does, then changed."""
    source = checkpoints / "neox-tanh"
    stored, _ = _safetensors.read(str(source / "model.safetensors"))

    def make(step: int, change: Change = lambda tensors: None, name: str = "") -> pathlib.Path:
        directory = tmp_path / (name or f"model-step{step}")
        shutil.copytree(source, directory)
        path = directory / "model.safetensors"
        path.unlink()
        made = _safetensors.create(str(path), {n: (t.dtype, t.shape) for n, t in stored.items()}, {"format": "pt"})
        for name, elements in made.items():
            elements[...] = stored[name].elements()
        for walked in range(step):
            random = np.random.default_rng(walked)
            for elements in made.values():
                elements[...] += (0.02 * random.standard_normal(elements.shape)).astype(elements.dtype)
        change(made)
        return directory

    return make


def ppl(model: cf_ops.Model) -> float:
    return model.perplexity(IDS, 40).perplexity


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def faults(made: cf_ops.Sweep) -> dict[str, str]:
    return {pathlib.Path(fault.revision).name: fault.what for fault in made.faults}


def test_each_revision_is_measured(revision: Callable[..., pathlib.Path], tmp_path: pathlib.Path) -> None:
    directories = [revision(step) for step in (8, 0, 4)]
    made = cf_ops.sweep(directories, {"ppl": ppl, "text": lambda m: m.perplexity(IDS)}, activation="float64")
    assert made.faults == [] and [r.step for r in made.revisions] == [8, 0, 4]
    for directory, row in zip(directories, made.revisions):
        score = cf_ops.load(directory, activation="float64").perplexity(IDS, 40)
        assert row.metrics["ppl"] == score.perplexity and row.metrics["text.positions"] == IDS.size - 1
        assert row.directory == str(directory) and row.config["model_type"] == "gpt_neox"
        assert row.files == {"model.safetensors": (directory / "model.safetensors").stat().st_size}
        assert row.files_sha256 == {name: _sha256((directory / name).read_bytes()) for name in row.files}
        stored, _ = _safetensors.read(str(directory / "model.safetensors"))
        described = {n: f"{t.dtype}{list(t.shape)} {_sha256(t.data.tobytes())}" for n, t in stored.items()}
        assert row.tensors == described
        assert row.sha256 == _sha256("".join(f"{n} {described[n]}\n" for n in sorted(described)).encode())
    assert len({r.sha256 for r in made.revisions}) == 3
    made.to_csv(tmp_path / "table.csv")
    table = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [row["step"] for row in table] == ["8", "0", "4"]
    assert [float(row["ppl"]) for row in table] == [r.metrics["ppl"] for r in made.revisions]


def test_the_next_revision_is_read_while_one_is_measured(
    revision: Callable[..., pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [str(revision(step)) for step in (0, 1, 2)]
    read, begun = _sweep._Loads.read, {name: threading.Event() for name in directories}

    def noted(loads: Any, row: _sweep.Revision) -> Any:
        begun[row.name].set()
        return read(loads, row)

    def metric(model: cf_ops.Model) -> float:
        following = directories[directories.index(model.directory) + 1 :][:1]
        assert all(begun[name].wait(30) for name in following)
        assert not any(begun[name].is_set() for name in directories[directories.index(model.directory) + 2 :])
        return len(following)

    monkeypatch.setattr(_sweep._Loads, "read", noted)
    made = cf_ops.sweep(directories, {"next": metric})
    assert [r.metrics["next"] for r in made.revisions] == [1, 1, 0]


def test_revisions_of_the_hub(revision: Callable[..., pathlib.Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        if revision == "step2":
            raise RuntimeError("no such\nrevision")
        return str(directory)

    directory = revision(0)
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    made = cf_ops.sweep(["step1", "step2"], {"ppl": ppl}, model="someone/a-model")
    assert asked == [("someone/a-model", "step1"), ("someone/a-model", "step2")]
    first, second = made.revisions
    assert (first.name, first.step, first.directory, first.error) == ("step1", 1, str(directory), None)
    assert second.error == "someone/a-model: the download failed: no such revision" and second.metrics == {}


def test_on_a_gpu_weights_are_swapped_and_one_model_at_a_time_has_memory(
    revision: Callable[..., pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []

    class OnDevice:
        def __init__(self, weights: Any, path: str, eos_token_ids: Any, device: int, **options: Any) -> None:
            self.step = pathlib.Path(path).name
            assert eos_token_ids == [0] and options == {"slots": 4, "capacity": 99, "impl": "graph"}
            events.append(("made", self.step, device))

        def _take(self, weights: Any, path: str, eos_token_ids: Any) -> None:
            self.step = pathlib.Path(path).name
            if self.step == "model-step2":
                raise ValueError("swap: expected the same config")
            assert eos_token_ids == [0]
            events.append(("swapped", self.step))

        def close(self) -> None:
            events.append(("closed", self.step))

    monkeypatch.setattr(_sweep, "on_device", OnDevice)
    monkeypatch.setattr(_core, "check_cuda_device", lambda index: events.append(("asked for", index)))
    options: dict[str, Any] = {"device": "cuda:1", "slots": 4, "capacity": 99, "impl": "graph"}

    def metric(model: cf_ops.Model) -> float:
        events.append("ran")
        return 1

    cf_ops.sweep([revision(0), revision(1), revision(2)], {"m": metric}, **options)
    assert events == [
        ("asked for", 1),
        ("made", "model-step0", 1),
        "ran",
        ("swapped", "model-step1"),
        "ran",
        ("closed", "model-step2"),
        ("made", "model-step2", 1),
        "ran",
        ("closed", "model-step2"),
    ]


def test_a_corrupted_revision_and_a_copy_are_named(revision: Callable[..., pathlib.Path]) -> None:
    def spoil(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        tensors[MLP][3, 5] = math.nan

    first, second = revision(0), revision(2)
    spoilt = revision(4, spoil)
    copy = revision(2, name="model-step6")
    made = cf_ops.sweep([first, second, spoilt, copy], {"ppl": ppl})
    named = faults(made)
    assert set(named) == {"model-step4", "model-step6"}
    assert MLP in named["model-step4"] and "element (3, 5): expected a finite number, got NaN" in named["model-step4"]
    assert named["model-step6"] == f"all tensors are those of {second}"
    spoilt_row = made.revisions[2]
    assert spoilt_row.error is not None and spoilt_row.metrics == {} and spoilt_row.sha256
    assert made.revisions[3].metrics == made.revisions[1].metrics


def both_programs(
    cf_model: str, folders: list[pathlib.Path], options: list[object], tmp_path: pathlib.Path
) -> tuple[list[list[str]], cf_ops.Sweep]:
    """The table of ``cf_ops sweep``, once that of ``cf-model sweep`` is known to be the same, and the latter's file."""
    tables: list[list[list[str]]] = []
    reports: list[cf_ops.Sweep] = []
    for number, program in enumerate(([sys.executable, "-m", "cf_ops"], [cf_model])):
        table, report = tmp_path / f"{number}.csv", tmp_path / f"{number}.json"
        command = [*program, "sweep", "--folders", *folders, *options, "--csv", table]
        done = subprocess.run(
            [*map(str, command), "--json" if number else "--out", str(report)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        tables.append(list(csv.reader(table.open())))
        reports.append(cf_ops.Sweep.read(report))
    ours, theirs = tables
    assert ours[0] == theirs[0] and len(ours) == len(theirs) == len(folders) + 1
    for row, other in zip(ours, theirs):
        for name, value, found in zip(ours[0], row, other):
            if name in ("revision", "step", "sha256", "directory", "error") or not value or row is ours[0]:
                assert value == found
            else:  # sums in another order
                assert float(value) == pytest.approx(float(found), rel=1e-12)
    assert reports[0].faults == reports[1].faults
    assert [r.tensors for r in reports[0].revisions] == [r.tensors for r in reports[1].revisions]
    return ours, reports[1]


def test_cf_model_makes_the_same_table(
    revision: Callable[..., pathlib.Path], cf_model: str, tmp_path: pathlib.Path
) -> None:
    def spoil(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        tensors[MLP][3, 5] = math.nan

    folders = [revision(4), revision(0), revision(2), revision(6, spoil), revision(4, name="copy-of-step4, once")]
    np.save(tmp_path / "ids.npy", IDS)
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).integers(0, 128, (7, 66)).astype(np.int32))
    options: list[object] = ["--tokens", tmp_path / "ids.npy", "--context", 30, "--stride", 20, "--slots", 3]
    options += ["--metric", "perplexity", "--metric", "surprisal", "--metric", "memorization"]
    options += ["--sequences", tmp_path / "rows.npy", "--activation", "float64"]
    table, read = both_programs(cf_model, folders, options, tmp_path)
    assert table[0][2:4] == ["perplexity", "perplexity.error"]
    assert set(faults(read)) == {"model-step6", "copy-of-step4, once"}
    if _has_matplotlib():
        read.plot(tmp_path / "plot.svg")
        assert (tmp_path / "plot.svg").read_text().count('<g id="axes_') == 5


def test_steps_of_a_training_are_told_apart(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Three steps of golden/tools/train_small.py, of which one is spoilt, and a copy."""
    for package in ("torch", "transformers", "tokenizers", "safetensors"):
        pytest.importorskip(package, reason=f"{package} is missing")
    for step in (2, 8, 14):
        command = [sys.executable, str(root / "golden" / "tools" / "train_small.py"), "--size", "tiny", "--batch", "2"]
        command += ["--device", "cpu", "--steps", str(step), "--out", str(tmp_path / f"step{step}")]
        command += ["--text-of", str(tmp_path / "step2")] if step > 2 else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    shutil.copytree(tmp_path / "step2", tmp_path / "step20")
    path = tmp_path / "step8" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64] + b"\xff" * 64)  # NaN
    ids = np.load(tmp_path / "step2" / "held_out.npy")[:512]
    steps = [tmp_path / f"step{step}" for step in (2, 8, 14, 20)]
    made = cf_ops.sweep(steps, {"ppl": lambda model: model.perplexity(ids, 64)}, out=tmp_path / "sweep.json")
    named = faults(made)
    assert set(named) == {"step8", "step20"}
    assert "expected a finite number" in named["step8"] and named["step20"] == f"all tensors are those of {steps[0]}"
    losses = [row.metrics.get("ppl.perplexity") for row in made.revisions]
    assert losses[1] is None and losses[0] == losses[3] and losses[2] < losses[0]
    built = sorted(root.glob("build/*/apps/cf-model"))
    if built:
        np.save(tmp_path / "ids.npy", ids)
        options: list[object] = ["--metric", "perplexity", "--tokens", tmp_path / "ids.npy", "--context", 64]
        table, read = both_programs(str(built[0]), steps, options, tmp_path)
        assert read.faults == made.faults and float(table[1][2]) == losses[0]


def test_other_ways_to_be_wrong_are_named(revision: Callable[..., pathlib.Path], checkpoints: pathlib.Path) -> None:
    def of_another_run(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        for seed, (name, elements) in enumerate(tensors.items()):
            if elements.ndim == 2:
                elements[...] = np.random.default_rng(seed).permutation(elements.ravel()).reshape(elements.shape)

    def swapped(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        other = MLP.replace("layers.0", "layers.1")
        tensors[MLP][...], tensors[other][...] = tensors[other].copy(), tensors[MLP].copy()

    def names(*directories: pathlib.Path) -> dict[str, str]:
        return faults(cf_ops.sweep(directories, {}))

    steps = [revision(step) for step in (0, 2, 4, 6, 8)]
    assert names(*steps) == {}
    aside = revision(5, of_another_run)
    what = "its weights lie farther from those of {} and {} than these lie from each other"
    assert names(*steps, aside) == {aside.name: what.format(steps[2], steps[3])}
    aside.rename(aside.with_name("aside"))
    mixed = revision(7, swapped)
    assert names(*steps[:4], revision(7, name="true-step7"), mixed)[mixed.name].startswith(f"{MLP} has the elements of")
    # Steps 3 and 13 under each other's names.
    order = [steps[0], revision(13, name="model-step3"), *steps[2:], revision(3, name="model-step13")]
    found = names(*order)
    assert "model-step3" in found and all("its weights lie" in what for what in found.values())
    cut = revision(9)
    with open(cut / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    other = checkpoints / "neox-d128"
    found = names(steps[0], cut, other)
    assert "model.safetensors: truncated: the header asks for" in found[cut.name]
    assert f"that of {steps[0]}" in found[other.name]


def test_an_interrupted_sweep_goes_on(revision: Callable[..., pathlib.Path], tmp_path: pathlib.Path) -> None:
    directories = [revision(step) for step in (0, 1, 2, 3)]
    out, measured = tmp_path / "sweep.json", []

    def metric(model: cf_ops.Model) -> float:
        measured.append(pathlib.Path(model.directory).name)
        if len(measured) == 3:
            raise KeyboardInterrupt
        if len(measured) == 2:
            raise ValueError("of this run alone")
        return len(measured)

    with pytest.raises(KeyboardInterrupt):
        cf_ops.sweep(directories, {"m": metric}, out=out)
    written = json.loads(out.read_text())
    assert [row["error"] for row in written["revisions"]] == [None, "of this run alone"]
    made = cf_ops.sweep(directories, {"m": metric}, out=out)
    steps = ["model-step0", "model-step1", "model-step2", "model-step1", "model-step2", "model-step3"]
    assert measured == steps and made.faults == []
    assert [r.metrics["m"] for r in made.revisions] == [1, 4, 5, 6]
    assert cf_ops.sweep(directories[:2], {"m": metric}, out=out).revisions == made.revisions[:2] and len(measured) == 6
    before = out.read_bytes()
    assert cf_ops.Sweep.read(out).revisions == made.revisions and cf_ops.Sweep.read(out).faults == []
    for wrong in ({"revisions": 1}, {}, {"revisions": [{"name": "a", "step": 1, "tensors": 3}]}):
        (tmp_path / "wrong.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"wrong.json: expected the rows of a sweep"):
            cf_ops.Sweep.read(tmp_path / "wrong.json")
    with pytest.raises(ValueError, match="expected a sweep with metrics"):
        cf_ops.sweep(directories, {"other": metric}, out=out)
    with pytest.raises(ValueError, match="expected a sweep with settings {'ids': 1}, to go on with, got {}"):
        cf_ops.sweep(directories, {"m": metric}, out=out, settings={"ids": 1})
    assert out.read_bytes() == before

    def broken(model: cf_ops.Model) -> float:
        raise ZeroDivisionError("a metric's own mistake ends the sweep")

    with pytest.raises(ZeroDivisionError):
        cf_ops.sweep(directories, {"m": broken})


def test_what_is_refused(checkpoints: pathlib.Path) -> None:
    directory = checkpoints / "neox-tanh"
    with pytest.raises(TypeError, match="expected several, got one str"):
        cf_ops.sweep(str(directory), {})
    with pytest.raises(ValueError, match="expected each once"):
        cf_ops.sweep([directory, directory], {})
    with pytest.raises(TypeError, match="metrics: expected functions of a model, got int for 'm'"):
        cf_ops.sweep([directory], {"m": 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="activation: expected float32 or float64"):
        cf_ops.sweep([directory], {}, activation="float16")
    made = cf_ops.sweep(["no-such-folder"], {})
    assert made.revisions[0].error is not None and "no-such-folder" in made.revisions[0].error
    assert len(cf_ops.pythia_steps()) == 154 and cf_ops.pythia_steps()[-1] == "step143000"


def test_surprisal_is_what_perplexity_means(checkpoints: pathlib.Path) -> None:
    model = cf_ops.load(checkpoints / "neox-tanh", activation="float64")
    for context, stride in ((2048, None), (30, None), (30, 7)):
        made = cf_ops.surprisal(model, IDS, context, stride)
        score = model.perplexity(IDS, context, stride)
        assert made.shape == IDS.shape and np.isnan(made[0]) and (~np.isnan(made)).sum() == score.positions
        assert np.nanmean(made) == pytest.approx(score.nll, rel=1e-14)
    logits = model.logits(IDS)[:-1]
    of_next = logits[np.arange(IDS.size - 1), IDS[1:]]
    expected = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1) - of_next
    np.testing.assert_allclose(cf_ops.surprisal(model, IDS)[1:], expected, rtol=1e-12)
    with pytest.raises(ValueError, match="ids: expected integers of 0 to 127, got 3 to 128"):
        cf_ops.surprisal(model, [3, 128])
    with pytest.raises(ValueError, match="ids: expected at least 2 integers"):
        cf_ops.surprisal(model, [3])


def test_a_plot_has_the_metrics(revision: Callable[..., pathlib.Path], tmp_path: pathlib.Path) -> None:
    made = cf_ops.sweep([revision(0), revision(1)], {"one": lambda m: 1.0, "two": lambda m: {"": 2.0, "error": 0.1}})
    if "matplotlib" not in sys.modules and not _has_matplotlib():
        with pytest.raises(ImportError, match="pip install matplotlib"):
            made.plot(tmp_path / "plot.svg")
        return
    made.plot(tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().count('<g id="axes_') == 2
    with pytest.raises(ValueError, match="expected names among"):
        made.plot(tmp_path / "plot.svg", ["three"])


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError:
        return False
    return True


def test_the_command(revision: Callable[..., pathlib.Path], tmp_path: pathlib.Path) -> None:
    for step in (0, 2):
        revision(step)
    revision(2, name="model-step4")
    np.save(tmp_path / "ids.npy", IDS)
    np.save(tmp_path / "rows.npy", np.random.default_rng(1).integers(0, 128, (3, 64)))
    (tmp_path / "own.py").write_text("def layers(model):\n    return model.config['num_hidden_layers']\n")
    command = [sys.executable, "-m", "cf_ops", "sweep", "--folders", "model-step0", "model-step2", "model-step4"]
    for metric in ("perplexity", "surprisal", "memorization", "own.py:layers"):
        command += ["--metric", metric]
    command += ["--tokens", "ids.npy", "--context", "40", "--sequences", "rows.npy", "--per-token", "nats"]
    command += ["--out", "sweep.json", "--csv", "table.csv", "--json", "report.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr  # a revision is a copy
    assert "cf_ops: model-step4: all tensors are those of model-step2\n" in done.stderr
    table = list(csv.DictReader((tmp_path / "table.csv").open()))
    nats = np.loadtxt(tmp_path / "nats" / "model-step2.csv", delimiter=",", skiprows=1)
    assert (nats[:, 1] == IDS).all() and np.nanmean(nats[:, 2]) == pytest.approx(float(table[1]["surprisal.mean"]))
    assert math.exp(float(table[1]["surprisal.mean"])) == pytest.approx(float(table[1]["perplexity"]))
    assert float(table[1]["perplexity.error"]) > 0
    assert float(table[0]["layers"]) == 2 and 0 <= float(table[0]["memorization.accuracy"]) <= 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["faults"] == [{"revision": "model-step4", "what": "all tensors are those of model-step2"}]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert again.stdout == done.stdout and "to run" in done.stderr and "to run" not in again.stderr
    bad = [*command[:-2], "--csv", "ids.npy"]
    done = subprocess.run(bad, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "--csv: expected a file of its own, got 'ids.npy' as for --tokens" in done.stderr
