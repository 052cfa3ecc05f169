"""The Python of the READMEs runs as it stands, and so do their commands."""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

READMES = ("README.md", "python/README.md")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(root: Path, tmp_path: Path) -> Path:
    """A clone as its readers have it, with two checkpoints that they have downloaded. The ids stand for those that a
    command of the page makes."""
    (tmp_path / "data").symlink_to(root / "data")
    trained = root / "data" / "checkpoints" / "stdlib-4m"
    (tmp_path / "pythia-70m-step3000").symlink_to(trained)
    shutil.copy(trained / "held_out.npy", tmp_path)
    earlier = tmp_path / "pythia-70m-step1000"
    earlier.mkdir()
    (earlier / "config.json").symlink_to(trained / "config.json")
    weights = bytearray((trained / "model.safetensors").read_bytes())
    np.frombuffer(weights, "<f2", offset=8 + int.from_bytes(weights[:8], "little"))[:] *= np.float16(0.875)
    (earlier / "model.safetensors").write_bytes(weights)
    return tmp_path


@pytest.mark.parametrize("name", READMES)
def test_the_python_runs(name: str, root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = blocks(root / name, "python")
    assert found
    for number, text in enumerate(found):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, f"{name}, block {number}", "exec"), {"__name__": "__main__"})
        assert printed.getvalue().strip()


@pytest.mark.parametrize("name", READMES)
def test_the_commands_run(name: str, root: Path, folder: Path) -> None:
    texts = [block.replace("\\\n", " ") for block in blocks(root / name, "sh")]
    lines = [line.partition("  #")[0] for text in texts for line in text.splitlines()]
    commands = [shlex.split(line) for line in lines if re.match(r"python3 -(m cf_ops|c)( |$)", line)]
    assert commands
    np.save(folder / "ids.npy", np.arange(1, 100, dtype=np.int32))
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    for _, *arguments in commands:
        command = [sys.executable, *arguments]
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"
