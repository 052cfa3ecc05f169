"""``python -m cf_ops``: what this installation is, and whether its ops are right on this machine."""

from __future__ import annotations

import importlib
import platform
import sys

from cf_ops import _core
from cf_ops.cli import _program as program


def run() -> int:
    """Prints versions, backends and the self-check; returns CHECK_FAILED where a check fails."""
    for name, value in facts():
        print(f"{name:<14}{value}")
    print()
    try:
        selfcheck = importlib.import_module("cf_ops.selfcheck")
    except ImportError as error:
        print(f"self-check    missing: {error}")
        return program.OK
    sys.stdout.flush()
    rows = [row._asdict() for row in selfcheck.rows()]
    program.print_table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows])
    return program.OK if all(row["ok"] for row in rows) else program.CHECK_FAILED


def facts() -> list[tuple[str, str]]:
    """What is installed and what the work runs on."""
    packages = ("numpy", "torch", "transformers", "tokenizers")
    return [
        ("cf_ops", _core.version()),
        ("python", platform.python_version()),
        *((package, program.version_of(package) or "not installed") for package in packages),
        ("cpu", program.cpu_name()),
        ("backend cpu", f"float64 (the oracle); float32 with {_core.instruction_set()}, {_core.num_threads()} threads"),
        ("backend cuda", "not in this build"),
    ]


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "ok" if value else "FAIL"
    return f"{value:.2e}" if isinstance(value, float) else str(value)
