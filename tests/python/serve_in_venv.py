#!/usr/bin/env python3
"""Runs the tests of the server, tests/python/test_serve.py, with NVIDIA Dynamo from PyPI, and the test that needs the
package huggingface_hub, which comes with it.
  serve_in_venv.py FOLDER [PYTEST ARGUMENT...]
FOLDER is that of in_clean_venv.py, which has built the wheel there; the environment lies beside it. The packages are
those that python/SERVING.md names, about 150 MB. Exits with 77 where there is no wheel, no PyPI or no package of Dynamo
for this Python: the tests are skipped then. CF_SERVE_FULL=1 takes a release's numbers of requests and connections.
"""

import glob
import os
import re
import shutil
import sys

from in_clean_venv import ROOT, require, run, skip


def dynamo_version():
    """The version that the package names."""
    with open(os.path.join(ROOT, "python", "cf_ops", "serve", "_processes.py"), encoding="utf-8") as file:
        return re.search(r'^DYNAMO = "([\d.]+)"', file.read(), re.M)[1]


def main():
    if len(sys.argv) < 2:
        sys.exit("usage: serve_in_venv.py FOLDER [PYTEST ARGUMENT...]")
    folder = os.path.abspath(sys.argv[1])
    venv = os.path.join(folder, "serve-venv")
    wheels = glob.glob(os.path.join(folder, "wheels", "*.whl"))
    if not wheels:
        skip(f"no wheel in {folder}, expected in_clean_venv.py to have built it")
    shutil.rmtree(venv, ignore_errors=True)
    if run(sys.executable, "-m", "venv", venv).returncode:
        skip(f"{sys.executable} -m venv failed, expected Debian's python3-venv")
    python = os.path.join(venv, "bin", "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", "--retries", "1"]
    if run(*pip, "--no-deps", f"ai-dynamo=={dynamo_version()}").returncode:
        skip("no ai-dynamo on PyPI, or PyPI cannot be reached")
    require(*pip, "openai", "pytest", *(f"{wheel}[serve]" for wheel in wheels))
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    tests = ["tests/python/test_serve.py", "tests/python/test_arguments.py::test_the_hubs_own_package_without_a_network"]
    require(python, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", *tests, *sys.argv[2:],
            cwd=ROOT, env=environment)  # fmt: skip


if __name__ == "__main__":
    main()
