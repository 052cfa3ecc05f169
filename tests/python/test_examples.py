"""The programs of python/examples: each passes, and fails under its injected fault."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = {
    "layer_vs_torch": (["torch"], ["--runs", "10", "--capacity", "40"]),
    "lossless_check": ([], ["--runs", "6", "--new-tokens", "30"]),
    "full_benchmark": (["torch", "transformers"], ["--prompt-len", "24", "--new-tokens", "12", "--runs", "2"]),
    "decode_quality": (["torch", "transformers"], ["--new-tokens", "16"]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_passes_and_fails_under_its_fault(root: pathlib.Path, name: str) -> None:
    packages, words = EXAMPLES[name]
    for package in packages:
        pytest.importorskip(package)
    command = [sys.executable, str(root / "python" / "examples" / f"{name}.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok" in done.stdout and "FAIL" not in done.stdout
    done = subprocess.run([*command, "--inject-fault"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert "FAIL" in done.stdout


def test_every_example_is_tested(root: pathlib.Path) -> None:
    assert {path.stem for path in (root / "python" / "examples").glob("*.py")} == {*EXAMPLES, "bounds"}
