"""Several GPUs for one model: what ``devices`` takes, and a model on two."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cf_ops
from cf_ops import _core, cli
from cf_ops._device import gpu_numbers
from cf_ops.cli import _program as program
from cf_ops.cli import serve
from cf_ops.serve import _processes as processes
from cf_ops.serve._processes import Server


def has_gpus(count: int) -> bool:
    try:
        _core.check_cuda_device(count - 1)
    except (NotImplementedError, _core.CfError):
        return False
    return True


def test_devices_are_the_numbers_of_gpus() -> None:
    assert gpu_numbers("cpu", None) == []
    assert gpu_numbers("cpu", (3, 1)) == [3, 1]


@pytest.mark.parametrize(
    "device, devices, error, message",
    [
        ("cpu", "0,1", TypeError, r"devices: expected the numbers of GPUs, such as \[0, 1\], got '0,1'"),
        ("cpu", 2, TypeError, r"devices: expected the numbers of GPUs"),
        ("cpu", [0, 0.5], TypeError, r"devices: expected an integer, got 0.5"),
        ("cpu", [0, -1], ValueError, r"devices: expected 0 to 9999, got -1"),
        ("cpu", [], ValueError, r"devices: expected different GPUs, such as \[0, 1\], got \[\]"),
        ("cpu", [1, 1], ValueError, r"devices: expected different GPUs, such as \[0, 1\], got \[1, 1\]"),
        ("cuda:1", [0, 1], ValueError, r"device: expected none beside devices, got 'cuda:1'"),
    ],
)
def test_other_devices_are_refused(device: str, devices: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cf_ops.load("pythia-14m", device=device, devices=devices)


class Loaded(Exception):
    """Instead of a model: what it would have been loaded with."""


@pytest.mark.parametrize(
    "command, own",
    [
        ("generate", ["--prompt-ids", "1,2"]),
        ("stream", ["--prompt-ids", "1,2"]),
        ("eval", ["--tokens", "ids.npy"]),
        ("memorize", ["--tokens", "rows.npy", "--context", "2", "--continuation", "2"]),
    ],
)
def test_commands_load_a_model_that_gpus_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, command: str, own: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("ids.npy", np.arange(9, dtype=np.int32))
    np.save("rows.npy", np.arange(9, dtype=np.int32).reshape(1, 9))
    checked: list[int] = []
    monkeypatch.setattr(_core, "check_cuda_device", checked.append)

    def load(path: str, **options: Any) -> None:
        raise Loaded(path, options)

    monkeypatch.setattr(program, "load", load)
    with pytest.raises(Loaded) as loaded:
        cli.main([command, "--model", "pythia-14m", *own, "--devices", "3,1", "--impl", "graph"])
    path, options = loaded.value.args
    assert path == "pythia-14m"
    assert options["devices"] == [3, 1] and "device" not in options and options["impl"] == "graph"
    assert set(checked) == {1, 3}


def test_a_bench_of_a_model_that_gpus_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "check_cuda_device", lambda number: None)

    def on_device(weights: Any, path: str, eos: Any, device: int, **options: Any) -> None:
        raise Loaded(device, options)

    monkeypatch.setattr(program, "on_device", on_device)
    with pytest.raises(Loaded) as loaded:
        cli.main(["bench", "--model", "pythia-14m", "--devices", "3,1"])
    device, options = loaded.value.args
    assert device == 3 and options["devices"] == [3, 1]


def test_a_server_hands_its_worker_the_gpus() -> None:
    parser = argparse.ArgumentParser()
    serve.declare(parser)
    args = parser.parse_args(["--model", "m", "--devices", "0,1"])
    words = Server(args, "name", ["cpu"])._worker_arguments("cpu")
    assert words[words.index("--devices") + 1] == "0,1"
    assert "--devices" not in Server(parser.parse_args(["--model", "m"]), "name", ["cpu"])._worker_arguments("cpu")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--gpus", "2"], "--devices: expected without --gpus"),
        (["--workers", "2"], "--workers: expected on the CPU alone"),
    ],
)
def test_a_server_takes_either_a_worker_a_gpu_or_gpus_that_share(
    monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr(processes, "check_packages", lambda: None)
    parser = argparse.ArgumentParser()
    serve.declare(parser)
    with pytest.raises(ValueError, match=message):
        serve.run(parser.parse_args(["--model", "m", "--devices", "0,1", *words]))


@pytest.mark.parametrize("command", ["activations", "sweep"])
def test_what_needs_taps_or_other_weights_takes_no_several_gpus(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    own = {
        "activations": ["--model", "m", "--tokens", "t.npy", "--out", "d"],
        "sweep": ["--folders", "d", "--metric", "perplexity", "--out", "d.json"],
    }
    with pytest.raises(SystemExit) as ended:
        cli.main([command, *own[command], "--devices", "0,1"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --devices 0,1" in capsys.readouterr().err


class Shared:
    """What a model needs of one that the GPUs have, none of whose calls may come."""

    device, impl, slots, capacity = 0, "graph", 4, 64


def test_a_shared_model_refuses_in_one_line_what_its_parts_cannot_do(
    checkpoints: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    weights = _core.Weights.open(str(checkpoints / "neox-d80"))
    model = cf_ops.Model(weights, "neox-d80", "float16", [], Shared(), devices=[0, 1])  # type: ignore[arg-type]
    other, folder = checkpoints / "neox-d80", tmp_path / "taps"
    calls: list[tuple[str, Callable[[], object]]] = [
        ("taps", lambda: model.run([1, 2], taps=["layers.0.output"])),
        ("taps", lambda: cf_ops.activations(model, [[1, 2]], "hidden_states.1", out=folder)),
        ("swap", lambda: model.swap(other)),
    ]
    for name, call in calls:
        with pytest.raises(NotImplementedError) as refused:
            call()
        rest = "expected a model on the CPU or on one GPU, got one whose layers the GPUs [0, 1] share"
        assert str(refused.value) == f"{name}: {rest}"
    assert model.weights is weights and not folder.exists()
    assert model.devices == [0, 1] and "devices=[0, 1], impl='graph'" in repr(model)
    assert "cuda:0, cuda:1, graph" in model._repr_html_()
    assert cf_ops.load(other).devices == []


@pytest.mark.skipif(not has_gpus(2), reason="there are no two GPUs that this build has kernels for")
def test_two_gpus_make_the_logits_of_one() -> None:
    ids = [1, 2, 3, 4]
    with cf_ops.load("pythia-70m", device="cuda", impl="graph") as one:
        expected = one.logits(ids)
    with cf_ops.load("pythia-70m", devices=[0, 1], slots=4) as two:
        assert two.impl == "graph"
        assert two.device == "cuda:0" and two.devices == [0, 1]
        assert abs(two.logits(ids) - expected).max() < 0.02 * abs(expected).max()
        first, again = (two.generate_batch([[1, 2, 3], [4, 5]], max_new_tokens=16) for _ in range(2))
        assert [r.ids for r in first] == [r.ids for r in again]
        assert all(len(r.ids) == 16 for r in first)
        with pytest.raises(NotImplementedError, match="taps: expected a model on the CPU or on one GPU"):
            two.run(ids, taps=["layers.1.output"])
        with pytest.raises(NotImplementedError, match="swap: expected a model on the CPU or on one GPU"):
            two.swap("pythia-70m")
