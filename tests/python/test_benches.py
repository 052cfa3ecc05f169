"""The benchmark of what researchers ask runs on the CPU, on a small model."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

BENCH = pathlib.Path(__file__).parents[2] / "apps" / "bench_research.py"


def test_memorisation_swaps_and_taps_are_timed(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, str(BENCH), "--preset", "pythia-14m", "--device", "cpu", "--slots", "2", "--waves", "1"]
    command += ["--prompts", "1", "--runs", "1", "--folder", str(tmp_path), "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["memorize", "swap", "taps"]
    assert figures["memorize"]["sequences_per_s"] > 0 and figures["taps"]["ids_per_s"] > 0
    assert len(figures["swap"]["swap_s"]) == 1 and figures["taps"]["taps"] == 7
    assert [p.name for p in tmp_path.iterdir()] == ["figures.json"]
    refused = [sys.executable, str(BENCH), "--device", "cpu", "--parts", "all"]
    done = subprocess.run(refused, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and "--parts must be of memorize, swap, taps, got 'all'" in done.stderr
