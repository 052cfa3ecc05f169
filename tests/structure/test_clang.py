#!/usr/bin/env python3
"""clang has nothing to say of the libraries and the programs: each source is parsed with the flags of the build, which
may be another compiler's.
  test_clang.py BUILD_DIR [TestCase...]
The compiler is clang++, or what the variable CF_CLANGXX names. Skips where there is none."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

from test_host_headers import ROOT, host_commands, run_all

# Flags that clang does not know.
GCC_ALONE = ("-Wno-restrict", "-Wno-maybe-uninitialized")
ROOMS = ("core", "cpu_ref", "golden", "apps", "python")


def parse(clang, flags, source):
    """The command by which clang reads a source. <omp.h> is GCC's where clang has none."""
    found = subprocess.run([flags[0], "-print-file-name=include/omp.h"], capture_output=True, text=True, check=False)
    kept = [flag for flag in flags[1:] if flag not in GCC_ALONE]
    return [clang, *kept, "-fsyntax-only", "-idirafter", os.path.dirname(found.stdout.strip()), source]


def room(source):
    return os.path.relpath(source, ROOT).split(os.sep)[0]


class Clang(unittest.TestCase):
    def setUp(self):
        self.clang = os.environ.get("CF_CLANGXX", "clang++")
        if not shutil.which(self.clang):
            self.skipTest(f"no {self.clang} found")

    def test_no_source_has_a_warning(self):
        sources = [item for item in host_commands(BUILD) if room(item[0]) in ROOMS]
        self.assertGreater(len(sources), 40)
        faults = run_all([(s, parse(self.clang, flags, s), folder) for s, _, flags, folder in sources])
        self.assertEqual(faults, [], "\n".join(faults))

    def test_a_warning_is_found(self):
        _, _, flags, working = next(host_commands(BUILD))
        with tempfile.TemporaryDirectory() as folder:
            source = os.path.join(folder, "x.cpp")
            for text, faults in (("int f() { return 0; }\n", 0), ("int f() { int unused; return 0; }\n", 1)):
                with open(source, "w", encoding="utf-8") as file:
                    file.write(text)
                self.assertEqual(len(run_all([(source, parse(self.clang, flags, source), working)])), faults)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not os.path.exists(os.path.join(sys.argv[1], "compile_commands.json")):
        sys.exit("usage: test_clang.py BUILD_DIR [TestCase...], with a compile_commands.json in it")
    BUILD = os.path.abspath(sys.argv.pop(1))
    unittest.main()
