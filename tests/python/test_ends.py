"""What ends a call early: files that others change, threads that no one means, signals in the middle of a prompt."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import pytest

import cf_ops


def test_weights_that_become_shorter_are_named(tmp_path: pathlib.Path, checkpoints: pathlib.Path) -> None:
    directory = shutil.copytree(checkpoints / "stdlib-4m", tmp_path / "model")
    weights = directory / "model.safetensors"
    weights.chmod(0o644)
    size = weights.stat().st_size
    model = cf_ops.load(str(directory))
    ids: list[int] = []
    with pytest.raises(OSError, match=f"{weights}: expected the {size} bytes that it had when it was opened, got 4096"):
        for made in model.generate([1], max_new_tokens=100, stop=[]):
            ids.append(int(made))
            if len(ids) == 3:
                os.truncate(weights, 4096)
    assert len(ids) == 3
    # The process goes on, and a copy of the checkpoint that nobody shortened still runs.
    assert len(list(cf_ops.load(str(checkpoints / "stdlib-4m")).generate([1], max_new_tokens=3, stop=[]))) == 3


@pytest.mark.parametrize(
    "variables, line",
    [
        ({"OMP_NUM_THREADS": "10000"}, "OMP_NUM_THREADS: expected 1 to 1024, got 10000"),
        (
            {"OMP_NUM_THREADS": "2", "OMP_STACKSIZE": "16K"},
            "OMP_STACKSIZE: expected stacks of at least 512 KiB for each thread, got 16",
        ),
    ],
)
def test_threads_that_no_one_means_are_one_line(
    variables: dict[str, str], line: str, checkpoints: pathlib.Path
) -> None:
    code = f"import cf_ops; list(cf_ops.load({str(checkpoints / 'llama-gqa8')!r}).generate([1], max_new_tokens=2))"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == f"ValueError: {line}"


def test_reports_never_replace_inputs(tmp_path: pathlib.Path, checkpoints: pathlib.Path) -> None:
    directory = shutil.copytree(checkpoints / "neox-d80", tmp_path / "model")
    weights, text = directory / "model.safetensors", tmp_path / "prompts.txt"
    weights.chmod(0o644)
    text.write_text("a\n")
    (tmp_path / "link").symlink_to(directory / "config.json")
    os.link(weights, tmp_path / "hard")
    before = weights.read_bytes()

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cf_ops", "generate", "--model", str(directory), "--max-new-tokens", "2"]
            + [str(word) for word in words],
            capture_output=True,
            text=True,
            timeout=300,
        )

    for report in (weights, directory / "config.json", tmp_path / "link", tmp_path / "hard"):
        ended = run("--prompt-ids", "1,2", "--json", report)
        assert ended.returncode == 2 and ended.stdout == ""
        assert ended.stderr.count("\n") == 1
        assert (
            f"--json: expected a file of its own, got '{report}', which is one of --model {directory}" in ended.stderr
        )
    ended = run("--prompts-file", text, "--json", text)
    assert ended.returncode == 2 and "as for --prompts-file" in ended.stderr
    assert weights.read_bytes() == before and text.read_text() == "a\n"
    # A report that is no input is written: its name may have 255 bytes, and a file that was there keeps its mode.
    report = tmp_path / ("x" * 255)
    assert run("--prompt-ids", "1,2", "--json", report).returncode == 0
    report.chmod(0o600)
    assert run("--prompt-ids", "1,2", "--json", report).returncode == 0
    assert report.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_ends_a_prompt() -> None:
    model = cf_ops.load("pythia-14m")
    prompt = [i % 100 for i in range(30000)]  # minutes
    interrupt = threading.Timer(0.5, lambda: os.kill(os.getpid(), 2))
    interrupt.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(model.generate(prompt, max_new_tokens=2))
    assert time.monotonic() - start < 10  # half a second and one, on a machine that has nothing else to do
