"""``python -m cf_ops``: what this installation is, and whether its ops are right on this machine."""

from __future__ import annotations

import importlib
import platform
import sys

from cf_ops import _core
from cf_ops._device import name_cublaslt
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
        *_cuda(),
    ]


def _cuda() -> list[tuple[str, str]]:
    """What the CUDA backend finds, or what is missing."""
    if not _core.has_cuda():
        return [("backend cuda", "not in this build")]
    driver, runtime = _core.cuda_versions()
    try:
        name, capability, bytes, free = _core.cuda_device(0)
    except _core.CfError as error:
        return [("backend cuda", f"built with CUDA {runtime}; {error}")]
    versions = f"driver for CUDA {driver}, built with {runtime}"
    memory = f"{free / 1e9:.1f} of {bytes / 1e9:.1f} GB free"
    name_cublaslt()
    return [
        ("backend cuda", f"{name}, compute capability {capability // 10}.{capability % 10}, {memory}; {versions}"),
        ("cublaslt", _core.cublaslt()),
    ]


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "ok" if value else "FAIL"
    return f"{value:.2e}" if isinstance(value, float) else str(value)
