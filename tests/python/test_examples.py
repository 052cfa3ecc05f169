"""The programs of python/examples: each passes, fails under its fault, and refuses bad usage in one line."""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_models import gpu

import cf_ops
from cf_ops import _core

EXAMPLES = Path(__file__).resolve().parents[2] / "python" / "examples"
SHARED = {"checkpoints", "common", "torch_layer"}
# What a program needs, and the arguments of its smallest runs.
PROGRAMS: dict[str, tuple[list[str], list[list[str]]]] = {
    "decode_ablation": (["torch"], [["--new-tokens", "6"]]),
    "decode_quality": (["torch", "transformers"], [["--prompts", "1", "--new-tokens", "6"]]),
    "full_benchmark": (
        ["torch", "transformers"],
        [["--new-tokens", "6", "--runs", "1", "--text-len", "20"]],
    ),
    "layer_of_checkpoint": (
        ["torch"],
        [["--seq-len", "9", "--benchmark", "--runs", "2"], ["--seq-len", "9", "--layer", "0"]],
    ),
    "layer_vs_torch": (
        ["torch"],
        [["--runs", "3", "--seq-len", "9"], ["--runs", "2", "--seq-len", "2", "--sequential"]],
    ),
    "ln_qkv_gptq": (
        [],
        [["quick"], ["full"], ["integration"], ["performance", "--hidden", "256", "--heads", "4", "--runs", "1"]],
    ),
    "lossless_check": ([], [["--runs", "3", "--new-tokens", "8"]]),
}
RUNS = [
    pytest.param(
        name,
        [*packages, "torch"] if device == "cuda" and name != "lossless_check" else packages,
        [*words, "--device", device],
        id=" ".join([name, *words[:1], device]),
        marks=[gpu] if device == "cuda" else [],
    )
    for device in ("cpu", "cuda")
    for name, (packages, runs) in PROGRAMS.items()
    for words in runs
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The work is too small for more: threads of torch and of the package would wait for each other."""
    threads = _core.num_threads()
    _core.set_num_threads(1)
    torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    torch_threads = torch and torch.get_num_threads()
    if torch:
        torch.set_num_threads(1)
    yield
    _core.set_num_threads(threads)
    if torch:
        torch.set_num_threads(torch_threads)


def code_of(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a program, which runs in this process: torch is imported once."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert isinstance(end.value.code, int)
    return end.value.code


def without_torch(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A program where neither torch nor transformers can be imported."""
    program = str(EXAMPLES / f"{name}.py")
    code = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
        "sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv[0].rpartition('/')[0]); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, program, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_every_program_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} - SHARED == set(PROGRAMS)


def test_every_program_is_on_the_page() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [name for name in PROGRAMS if f"{name}.py" not in page] == []


@pytest.mark.parametrize(("name", "packages", "words"), RUNS)
def test_it_passes_and_fails_under_its_fault(
    name: str,
    packages: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is missing")
    code = code_of(name, words, monkeypatch)
    output = capsys.readouterr()
    assert code == 0, output.out + output.err
    assert "\nok " in output.out and "FAILED" not in output.out
    assert code_of(name, [*words, "--inject-fault"], monkeypatch) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_text_is_a_prompt(
    text_checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", text_checkpoint, "--prompt", "in the end, ", "--runs", "2", "--new-tokens", "4"]
    assert code_of("lossless_check", words, monkeypatch) == 0, capsys.readouterr()


def test_a_text_is_scored(
    text_checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in PROGRAMS["full_benchmark"][0]:
        pytest.importorskip(package, reason=f"{package} is missing")
    text = tmp_path / "text.txt"
    text.write_text("the end of the thing in the end", encoding="utf-8")
    words = ["--model", text_checkpoint, "--text", str(text), "--text-len", "9", "--runs", "1", "--new-tokens", "2"]
    assert code_of("full_benchmark", words, monkeypatch) == 0, capsys.readouterr()
    assert "perplexity of 9 ids" in capsys.readouterr().out
    text.write_text("", encoding="utf-8")
    assert code_of("full_benchmark", words, monkeypatch) == 2
    assert "expected a text of at least 2 ids, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_needs_no_torch(name: str) -> None:
    done = without_torch(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "--inject-fault" in done.stdout and "--device" in done.stdout


@pytest.mark.parametrize("name", [name for name, (packages, _) in PROGRAMS.items() if packages])
def test_missing_torch_is_one_line(name: str) -> None:
    done = without_torch(name)
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.count("\n") == 1 and f"{name}.py: needs torch" in done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_bad_usage_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    packages, _ = PROGRAMS[name]
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is missing")
    bad = [["--no-such"], ["--device", "tpu"]]
    if name == "ln_qkv_gptq":
        bad += [["integration", "--model", str(tmp_path / "none")], ["performance", "--hidden", "250"]]
    elif name == "layer_vs_torch":
        bad += [["--runs", "1"], ["--size", "pythia-0b"]]
    else:
        bad += [["--model", str(tmp_path / "none")], ["--seed", "one"]]
    for words in bad:
        assert code_of(name, words, monkeypatch) == 2, words
        output = capsys.readouterr()
        assert output.out == "" and output.err.count("\n") == 1, words
        assert output.err.startswith(f"{name}.py: "), words


@pytest.mark.skipif(cf_ops.cuda_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_without_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("lossless_check", ["--device", "cuda"], monkeypatch) == 2
    assert "--device cuda: cf_ops finds no GPU, expected cpu" in capsys.readouterr().err
    if importlib.util.find_spec("torch") is None:
        assert code_of("ln_qkv_gptq", ["--device", "cuda"], monkeypatch) == 2
        assert "--device cuda: needs torch" in capsys.readouterr().err


def test_the_device_is_refused_where_no_backend_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch", reason="torch is missing")
    if torch.cuda.is_available():
        pytest.skip("torch finds a GPU")
    assert code_of("layer_vs_torch", ["--device", "cuda"], monkeypatch) == 2
    assert "--device cuda: torch finds no GPU, expected cpu" in capsys.readouterr().err
