#!/usr/bin/env python3
"""Runs the tests of cf_ops.hf, and the self-check's row of it, with the newest transformers on PyPI.
  newest_transformers.py FOLDER [PYTEST ARGUMENT...]
FOLDER is that of in_clean_venv.py, which has built the wheel there. torch is taken from a Python that has it, since
PyPI's is larger than all else: CF_TORCH_PYTHON names one, otherwise it is this Python or the first python3 of PATH.

A release that is not newer than the newest tested one passes or fails. A newer one is reported, and exits with 77
either way: what changed there is for the next version of cf_ops, and no fault of this one. Exits with 77, too, where
there is no wheel, no Python with torch or no PyPI.
"""

import glob
import os
import re
import shutil
import subprocess
import sys

from in_clean_venv import ROOT, SKIPPED, require, run, skip

TESTS = [f"tests/python/test_hf_{name}.py" for name in ("versions", "generate", "fallback")]


def python_with_torch():
    """The first Python that can import torch."""
    for python in filter(shutil.which, (os.environ.get("CF_TORCH_PYTHON", ""), sys.executable, "python3")):
        if run(python, "-c", "import torch", stderr=subprocess.DEVNULL).returncode == 0:
            return python
    skip("no Python with torch found, CF_TORCH_PYTHON names one: the newest transformers is not tested")


def newest_tested():
    with open(os.path.join(ROOT, "python", "cf_ops", "hf", "_patch.py"), encoding="utf-8") as file:
        return tuple(map(int, re.search(r"^NEWEST = \((\d+), (\d+)\)", file.read(), re.M).groups()))


def verdict(status, version, tested):
    """The exit status for that of the tests with a version of transformers, and the line that says why."""
    result = "passes" if status == 0 else "FAILS"
    if tuple(map(int, version.split(".")[:2])) <= tested:
        return status, f"cf: transformers {version}, the newest on PyPI, {result}"
    newest = ".".join(map(str, tested))
    return SKIPPED, f"cf: skipped: transformers {version} is newer than the newest tested one, {newest}, and {result}"


def main():
    if len(sys.argv) < 2:
        sys.exit("usage: newest_transformers.py FOLDER [PYTEST ARGUMENT...]")
    folder = os.path.abspath(sys.argv[1])
    wheels = glob.glob(os.path.join(folder, "wheels", "*.whl"))
    if not wheels:
        skip(f"no wheel in {folder}, expected in_clean_venv.py to have built it")
    python, packages = python_with_torch(), os.path.join(folder, "newest-transformers")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    options = ["--quiet", "--upgrade", "--retries", "1", "--timeout", "20", "--target", packages]
    if run(*pip, "install", *options, "transformers", "pytest").returncode:
        skip("PyPI cannot be reached")
    require(*pip, "install", *options, *wheels)
    environment = {"PYTHONPATH": packages, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    options = {"cwd": ROOT, "env": os.environ | environment}
    asked = run(python, "-c", "import transformers as t; print(t.__version__)", stdout=subprocess.PIPE, **options)
    if asked.returncode:
        sys.exit("transformers: expected one that can be imported")
    status = run(
        python, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", *TESTS, *sys.argv[2:], **options
    ).returncode
    status, line = verdict(status, asked.stdout.strip(), newest_tested())
    print(line)
    return status


if __name__ == "__main__":
    sys.exit(main())
