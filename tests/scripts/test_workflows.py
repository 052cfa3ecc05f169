#!/usr/bin/env python3
"""The workflows of .github, read by linters of PyPI: check-jsonschema knows the schema, zizmor what is unsafe. Skipped
where PyPI cannot be reached or Python has no venv."""

import glob
import os
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir))
FILES = sorted(glob.glob(os.path.join(ROOT, ".github", "workflows", "*.yml")))


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


class Workflows(unittest.TestCase):
    def test_the_linters_find_nothing(self):
        with tempfile.TemporaryDirectory() as venv:
            programs = os.path.join(venv, "bin")
            pip = [os.path.join(programs, "pip"), "install", "--quiet", "--retries", "1", "--timeout", "20"]
            if run(sys.executable, "-m", "venv", venv).returncode:
                self.skipTest(f"{sys.executable} has no venv")
            if run(*pip, "check-jsonschema>=0.39", "zizmor>=1.32").returncode:
                self.skipTest("the linters cannot be had from PyPI")
            schema = [os.path.join(programs, "check-jsonschema"), "--builtin-schema", "vendor.github-workflows"]
            for linter in (schema, [os.path.join(programs, "zizmor"), "--offline", "--no-progress"]):
                done = run(*linter, *FILES)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_scripts_test_and_wheels_are_run_and_nothing_is_published(self):
        self.assertEqual([os.path.basename(path) for path in FILES], ["test.yml", "wheels.yml"])
        tests, wheels = map(text, FILES)
        self.assertRegex(tests, r"- run: scripts/test\n")
        self.assertIn("pipx run cibuildwheel==", wheels)
        self.assertIsNone(re.search(r"twine==\S+ upload|pypi-publish|id-token|secrets\.", tests + wheels))

    def test_every_action_is_pinned_by_its_commit(self):
        used = re.findall(r"uses: *(\S+)", "".join(map(text, FILES)))
        self.assertTrue(used)
        for action in used:
            self.assertRegex(action, r"@[0-9a-f]{40}$")


if __name__ == "__main__":
    unittest.main()
