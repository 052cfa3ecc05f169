#!/usr/bin/env python3
"""clang has nothing to say of the libraries and the programs: each source is parsed with the flags of the build, which
may be another compiler's.
  test_clang.py BUILD_DIR [TestCase...]
The compiler is clang++, or what the variable CF_CLANGXX names. Skips where there is none."""

import os
import shutil
import sys
import tempfile
import unittest

from test_host_headers import ROOT, host_commands, run_all

# Flags that clang does not know.
GCC_ALONE = ("-Wno-restrict", "-Wno-maybe-uninitialized")
ROOMS = ("core", "cpu_ref", "cuda", "golden", "apps", "python")

# Stands in for <omp.h> where clang has none: GCC's own has attributes that clang 14 does not know.
OMP = """#pragma once
extern "C" {
int omp_get_max_threads(), omp_get_num_procs(), omp_get_num_threads(), omp_get_thread_num();
void omp_set_num_threads(int);
}
"""


def parse(clang, flags, source, omp):
    """The command by which clang reads a source; omp.h lies in the folder `omp`."""
    kept = [flag for flag in flags[1:] if flag not in GCC_ALONE]
    return [clang, *kept, "-fsyntax-only", "-idirafter", omp, source]


def room(source):
    return os.path.relpath(source, ROOT).split(os.sep)[0]


class Clang(unittest.TestCase):
    def setUp(self):
        self.clang = os.environ.get("CF_CLANGXX", "clang++")
        if not shutil.which(self.clang):
            self.skipTest(f"no {self.clang} found")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.write("omp.h", OMP)

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def test_no_source_has_a_warning(self):
        sources = {}  # each once, without those that CUDA's headers belong to
        for source, _, flags, working in host_commands(BUILD):
            if room(source) in ROOMS and not any(flag.endswith("/include") and "cuda" in flag for flag in flags):
                sources[source] = (source, parse(self.clang, flags, source, self.folder), working)
        self.assertGreater(len(sources), 40)
        faults = run_all(sources.values())
        self.assertEqual(faults, [], "\n".join(faults))

    def test_a_warning_is_found(self):
        _, _, flags, working = next(host_commands(BUILD))
        for text, faults in (("int f() { return 0; }\n", 0), ("int f() { int unused; return 0; }\n", 1)):
            command = parse(self.clang, flags, self.write("x.cpp", text), self.folder)
            self.assertEqual(len(run_all([("x.cpp", command, working)])), faults)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not os.path.exists(os.path.join(sys.argv[1], "compile_commands.json")):
        sys.exit("usage: test_clang.py BUILD_DIR [TestCase...], with a compile_commands.json in it")
    BUILD = os.path.abspath(sys.argv.pop(1))
    unittest.main()
