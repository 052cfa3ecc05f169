#!/usr/bin/env python3
"""Host code reaches no header that its target does not link. What lies in /usr/local/include is found without a flag
and hides a missing link, and so do CPATH and its like: both are hidden here, the folder in a mount namespace.
  test_host_headers.py BUILD_DIR [TestCase...]
Skips where a mount namespace is not permitted."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor

HIDDEN = "/usr/local/include"
ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir))
INSIDE = "CF_HOST_HEADERS_INSIDE"
# The headers of a folder are read with the flags of a source file of the same target, whose CMake name this is.
LIBRARIES = ["core", "cpu_ref", "checkpoint", "golden", "cuda", "cli", "verify", "bench"]
FOLDERS = {
    "checkpoint": "golden/checkpoint",
    "golden": "golden/file",
    "cli": "apps/cli",
    "verify": "apps/verify",
    "bench": "apps/bench",
}  # of the libraries that are not in a folder of their name


def host_commands(build):
    """(source path, target's folder, compiler and flags, working folder) of every C++ source of the build."""
    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as file:
        for entry in json.load(file):
            if not entry["file"].endswith(".cpp"):
                continue
            words = shlex.split(entry["command"])
            at = words.index("-o")
            target = words[at + 1].split("CMakeFiles/")[1].split(".dir/")[0]
            flags = [w for w in words[:at] + words[at + 2 :] if w not in ("-c", entry["file"])]
            # A compiler launcher such as ccache stands before the compiler.
            while os.path.basename(flags[0]) in ("ccache", "sccache", "distcc"):
                del flags[0]
            yield entry["file"], target, flags, entry["directory"]


def run_all(commands):
    """One line for each (name, command, folder) that fails: the name and the compiler's first error."""

    def fault(item):
        name, command, folder = item
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return None
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit {done.returncode}"]
        return f"{os.path.relpath(name, ROOT)}: {errors[0]}"

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return [line for line in pool.map(fault, commands) if line]


def namespace(folder):
    """The command that runs another one with `folder` empty; None where that is not permitted."""
    if not os.path.isdir(folder):
        return ["env"]
    hide = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', folder]
    for unshare in (["unshare", "-m"], ["unshare", "-rm"]):
        try:
            if subprocess.run([*unshare, *hide, "true"], capture_output=True, check=False).returncode == 0:
                return [*unshare, *hide]
        except FileNotFoundError:
            return None
    return None


def preprocess(flags, source):
    return [*flags, "-M", source]


def first_include(source):
    """The path within the repository that the source includes before anything else; "" where it includes none."""
    with open(source, encoding="utf-8") as file:
        found = re.search(r'^#include [<"]([^>"]+)', file.read(), re.MULTILINE)
    return found[1] if found else ""


class HostHeaders(unittest.TestCase):
    def test_every_source_finds_its_headers(self):
        commands = [(f, preprocess(flags, f), folder) for f, _, flags, folder in host_commands(BUILD)]
        self.assertGreater(len(commands), 40)
        if found := run_all(commands):
            self.fail("\n" + "\n".join(found))

    def test_every_library_header_compiles_alone(self):
        flags_of = {target: (flags, folder) for _, target, flags, folder in host_commands(BUILD)}
        # The build itself compiles a header alone where a source begins with it.
        begun_with = {os.path.join(ROOT, first_include(source)) for source, *_ in host_commands(BUILD)}
        commands, seen, headers = [], set(), 0
        for name in LIBRARIES:
            if f"cf_{name}" not in flags_of:
                self.assertIn(name, ("cuda", "cli", "verify", "bench"))
                continue
            seen.add(name)
            flags, working = flags_of[f"cf_{name}"]
            for folder, _, files in os.walk(os.path.join(ROOT, FOLDERS.get(name, name))):
                for file in sorted(files):
                    if file.endswith(".hpp"):
                        path = os.path.join(folder, file)
                        headers += 1
                        if path in begun_with:
                            continue
                        # The program includes the header, since -Wall speaks of `#pragma once` in the main file.
                        command = [*flags, "-w", "-fsyntax-only", "-x", "c++", "-include", path, os.devnull]
                        commands.append((path, command, working))
        self.assertGreater(len(seen), 3)
        self.assertGreater(headers, 40)
        self.assertGreater(headers, len(commands))
        if found := run_all(commands):
            self.fail("\n" + "\n".join(found))


class Finds(unittest.TestCase):
    """The checks themselves: a header that only the hidden folder has is missed."""

    def test_hidden_header_is_missed(self):
        with tempfile.TemporaryDirectory() as folder:
            include, source = os.path.join(folder, "include"), os.path.join(folder, "x.cpp")
            os.mkdir(include)
            with open(os.path.join(include, "cf_hidden.h"), "w", encoding="utf-8"):
                pass
            with open(source, "w", encoding="utf-8") as file:
                file.write("#include <cf_hidden.h>\n")
            _, _, flags, working = next(host_commands(BUILD))
            command = preprocess([*flags, "-idirafter", include], source)
            self.assertEqual(run_all([(source, command, working)]), [])
            found = run_all([(source, [*namespace(include), *command], working)])
            self.assertEqual(len(found), 1)
            self.assertIn("cf_hidden.h", found[0])

    def test_first_include(self):
        with tempfile.TemporaryDirectory() as folder:
            for text, expected in (
                ('// About.\n#include "core/a.hpp"\n\n#include <vector>\n', "core/a.hpp"),
                ('#include <vector>\n#include "core/a.hpp"\n', "vector"),
                ("int x;\n", ""),
            ):
                source = os.path.join(folder, "x.cpp")
                with open(source, "w", encoding="utf-8") as file:
                    file.write(text)
                self.assertEqual(first_include(source), expected)

    def test_the_folder_is_empty(self):
        self.assertEqual(os.listdir(HIDDEN) if os.path.isdir(HIDDEN) else [], [])
        self.assertFalse({"CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"} & set(os.environ))


if __name__ == "__main__":
    if len(sys.argv) < 2 or not os.path.exists(os.path.join(sys.argv[1], "compile_commands.json")):
        sys.exit("usage: test_host_headers.py BUILD_DIR [TestCase...], with a compile_commands.json in it")
    BUILD = os.path.abspath(sys.argv.pop(1))
    if INSIDE in os.environ:
        unittest.main()
    enter = namespace(HIDDEN)
    if enter is None:
        print("SKIPPED: a mount namespace is not permitted here (unshare -m, unshare -rm)")
        sys.exit(77)
    hidden = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")
    kept = {k: v for k, v in os.environ.items() if k not in hidden}
    arguments = [*enter, sys.executable, "-B", os.path.abspath(__file__), BUILD, *sys.argv[1:]]
    os.execvpe(arguments[0], arguments, kept | {INSIDE: "1"})
