"""What the installed package says of itself."""

import importlib.metadata
import importlib.resources
import re
import shutil
import subprocess
import sys
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


def test_the_description_is_cmakes() -> None:
    found = re.search(r'DESCRIPTION\s+"([^"]+)"', (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))
    assert found is not None
    assert importlib.metadata.metadata("cf-ops")["Summary"] == found[1]
    assert cf_ops.__doc__ == found[1] + "."


def test_the_metadata_says_what_an_index_shows() -> None:
    metadata = importlib.metadata.metadata("cf-ops")
    assert {"hf", "lm-eval", "serve", "test", "text"} == set(metadata.get_all("Provides-Extra") or ())
    assert metadata["Author"] in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Programming Language :: Python :: 3.10" in (metadata.get_all("Classifier") or ())
    home = dict(url.split(", ") for url in metadata.get_all("Project-URL") or ())
    assert {"Homepage", "Documentation", "Changelog", "Issues"} == set(home)
    assert all(url.startswith(home["Homepage"]) for url in home.values())


def test_the_readme_of_the_package_index_has_links_that_lead_somewhere() -> None:
    source = (ROOT / "python/README.md").read_text(encoding="utf-8")
    shown = importlib.metadata.metadata("cf-ops")["Description"]
    assert shown is not None
    hosts = r"https://(?:github\.com/cf-ops/cf-ops/blob|raw\.githubusercontent\.com/cf-ops/cf-ops)"
    release = rf"{hosts}/v{re.escape(cf_ops.__version__)}/"
    link = re.compile(r"\]\(([^)]*)\)")
    ours, theirs = link.findall(source), link.findall(shown)
    assert len(ours) == len(theirs) > 2
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", shown)
    for old, new in zip(ours, theirs, strict=True):
        if old.startswith("https:"):
            assert new == old
            continue
        found = re.fullmatch(release + r"([^#]*)(#.*)?", new)
        assert found is not None, new
        assert (ROOT / found[1]).exists(), new
        assert new.startswith("https://raw.") == (new in pictures), new
    assert link.sub("]()", shown).split() == link.sub("]()", source).split()


def test_the_command_is_installed() -> None:
    command = shutil.which("cf_ops", path=str(Path(sys.executable).parent))
    assert command is not None
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"cf_ops {cf_ops.__version__}\n"


def test_a_missing_openmp_library_is_named_with_its_package() -> None:
    lines = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "cf_ops._core":
            raise ImportError("libgomp.so.1: cannot open shared object file: No such file or directory")
sys.meta_path.insert(0, Missing())
import cf_ops
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "needs GCC's OpenMP library libgomp.so.1: apt-get install libgomp1" in done.stderr.splitlines()[-1]


def test_an_error_of_the_device_is_a_runtime_error() -> None:
    assert issubclass(cf_ops.CfError, RuntimeError)
