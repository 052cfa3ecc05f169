"""What the installed package says of itself."""

import importlib.metadata
import importlib.resources
import re
from pathlib import Path

import cf_ops

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_cmakes() -> None:
    found = re.search(r"project\(cf VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))
    assert found is not None
    assert cf_ops.__version__ == found[1]
    assert importlib.metadata.version("cf-ops") == found[1]


def test_the_package_is_typed() -> None:
    files = {path.name for path in importlib.resources.files("cf_ops").iterdir()}
    assert {"py.typed", "_core.pyi"} <= files


def test_an_error_of_the_device_is_a_runtime_error() -> None:
    assert issubclass(cf_ops.CfError, RuntimeError)
