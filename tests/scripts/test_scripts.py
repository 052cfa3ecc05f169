#!/usr/bin/env python3
"""Tests of scripts/, on a copy of it in a folder of its own. The programs that the scripts call are stubs, which append
their command lines to a log."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir)

CTEST = shutil.which("ctest", path="/usr/bin:/bin:/usr/local/bin")

# cuobjdump -sass FILE: the file itself.
CUOBJDUMP = 'exec cat "$2"'
ROPE = "_ZN2cf4cuda39_GLOBAL__N__5f9db8cb_7_rope_cu_66fcd08511rope_kernelIfEEvi"
MOVED_ROPE = "_ZN2cf4cuda3ops47_GLOBAL__N__0123abcd_14_rope_rotate_cu_66fcd08511rope_kernelIfEEvi"


def sass(name, *instructions, arch="sm_90a"):
    """What cuobjdump -sass prints of a kernel."""
    lines = [f"\tcode for {arch}", f"\t\tFunction : {name}", '\t.headerflags\t@"EF_CUDA_SM90"']
    for i, text in enumerate(instructions):
        lines += [
            f"        /*{16 * i:04x}*/                   {text} ;   /* 0x00000a00ff017b82 */",
            "   /* 0x000fe2 */",
        ]
    return "\n".join([*lines, "\t\t.........."]) + "\n"


class Scripts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = os.path.realpath(folder.name)
        self.bin = os.path.join(self.root, "bin")
        self.log = os.path.join(self.root, "log")
        shutil.copytree(os.path.join(ROOT, "scripts"), os.path.join(self.root, "scripts"))
        # Every package is installed, and there is no compiler cache, no GPU and no CUDA.
        for name in ("cmake", "ctest", "apt-get", "g++", "gcc", "make", "ninja"):
            self.stub(f"bin/{name}")
        self.stub("bin/dpkg-query", "printf installed", log=False)
        self.stub("bin/nvidia-smi", "exit 9", log=False)

    def stub(self, path, code="", log=True):
        path = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        record = f'echo "${{0##*/}} $*" >>{self.log}\n' if log else ""
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\n{record}{code}\n")
        os.chmod(path, 0o755)
        return path

    def run_script(self, name, *arguments, **environment):
        path = f"{self.bin}:/usr/bin:/bin"
        return subprocess.run(
            [os.path.join(self.root, "scripts", name), *arguments],
            capture_output=True,
            text=True,
            env={"PATH": path, "HOME": self.root} | environment,
            cwd=self.root,
            check=False,
        )

    def calls(self):
        if not os.path.exists(self.log):
            return []
        with open(self.log, encoding="utf-8") as file:
            return file.read().splitlines()

    def refused(self, result, *parts):
        self.assertEqual(result.returncode, 2, result)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        for part in parts:
            self.assertIn(part, result.stderr)


class CommandLines(Scripts):
    def test_help_is_printed_and_nothing_built(self):
        for name in ("setup", "layer", "test", "test_gpu", "bench_gpu", "sanitize_gpu", "compare_sass"):
            for option in ("--help", "-h"):
                result = self.run_script(name, option)
                self.assertEqual(result.returncode, 0, result)
                usage = f"usage: {name}" if name == "compare_sass" else f"usage: scripts/{name}"
                self.assertTrue(result.stdout.startswith(usage), result.stdout)
                self.assertNotIn("set -", result.stdout)
                self.assertEqual(result.stderr, "")
        self.assertEqual(self.calls(), [])

    def test_unknown_arguments_are_refused(self):
        for name in ("setup", "test", "bench_gpu", "sanitize_gpu"):
            self.refused(self.run_script(name, "--what"), f"scripts/{name}", "'--what'", "expected")
        self.refused(self.run_script("test_gpu", "--what"), "scripts/test_gpu", "--what", "expected")
        self.refused(self.run_script("test", "--fast", "release"), "'release'")
        self.refused(self.run_script("bench_gpu", "out", "build", "more"), "'more'", "OUT_DIR and BUILD_DIR alone")
        self.refused(self.run_script("sanitize_gpu", "build", "more"), "'more'", "BUILD_DIR alone")
        self.refused(self.run_script("compare_sass", "old", "new", "--what"), "scripts/compare_sass: ", "--what")
        self.assertEqual(self.calls(), [])

    def test_missing_arguments_are_refused(self):
        self.refused(self.run_script("bench_gpu"), "scripts/bench_gpu: expected OUT_DIR")
        self.refused(self.run_script("compare_sass"), "scripts/compare_sass: ", "OLD, NEW")
        for limit in ("", "0", "ten", "-1"):
            self.refused(self.run_script("sanitize_gpu", "--limit-s", limit), "--limit-s", f"got '{limit}'")
        self.refused(self.run_script("sanitize_gpu", "--limit-s"), "--limit-s: expected 1 to 999999 seconds, got ''")
        for jobs in ("0", "many"):
            self.refused(self.run_script("sanitize_gpu", "--jobs", jobs), "--jobs", f"got '{jobs}'")
        self.assertEqual(self.calls(), [])


class Setup(Scripts):
    """With nothing on PATH but what the script itself needs and the stubs."""

    def setUp(self):
        super().setUp()
        for name in ("bash", "dirname", "env", "sed", "sh"):
            os.symlink(shutil.which(name, path="/usr/bin:/bin"), os.path.join(self.bin, name))

    def set_up(self):
        return self.run_script("setup", PATH=self.bin)

    def test_nothing_is_installed_where_nothing_is_missing(self):
        self.assertEqual(self.set_up().returncode, 0)
        self.assertEqual(self.calls(), [])

    def test_missing_programs_and_libraries_are_installed(self):
        for name in ("make", "ninja"):
            os.remove(os.path.join(self.bin, name))
        self.stub("bin/dpkg-query", "case $* in *libfmt-dev) exit 1;; esac; printf installed", log=False)
        self.stub("bin/sudo", 'exec "$@"', log=False)
        result = self.set_up()
        self.assertEqual(result.returncode, 0, result)
        self.assertIn("cf: installing ninja-build make libfmt-dev", result.stdout)
        update, install = self.calls()
        self.assertTrue(update.startswith("apt-get update"), update)
        self.assertTrue(install.endswith("ninja-build make libfmt-dev"), install)

    def test_without_apt_it_says_what_the_build_needs(self):
        for name in ("apt-get", "cmake"):
            os.remove(os.path.join(self.bin, name))
        result = self.set_up()
        self.assertEqual(result.returncode, 0, result)
        self.assertIn("no apt-get here; the build needs cmake, and Eigen", result.stdout)

    def test_a_failed_installation_is_a_failure(self):
        os.remove(os.path.join(self.bin, "ninja"))
        self.stub("bin/sudo", 'exec "$@"', log=False)
        self.stub("bin/apt-get", "exit 100")
        self.assertEqual(self.set_up().returncode, 100)

    def test_a_long_installation_says_that_it_goes_on(self):
        self.stub("bin/dpkg-query", "exit 1", log=False)
        self.stub("bin/sudo", 'exec "$@"', log=False)
        self.stub("bin/apt-get", "case $1 in install) /bin/sleep 3;; esac")
        result = self.run_script("setup", PATH=self.bin, CF_HEARD_S="1")
        self.assertEqual(result.returncode, 0, result)
        self.assertRegex(result.stdout, r"(\ncf: still installing after \d+ s){2}")

    @unittest.skipIf(os.geteuid() == 0, "root needs no sudo")
    def test_without_sudo_it_says_what_to_install(self):
        os.remove(os.path.join(self.bin, "ninja"))
        result = self.set_up()
        self.assertEqual(result.returncode, 1, result)
        self.assertIn("neither root nor sudo to install them: apt-get install ninja-build", result.stderr)


class Layer(Scripts):
    def setUp(self):
        super().setUp()
        self.stub("build/release/apps/cf-layer")

    def layers(self, *arguments):
        result = self.run_script("layer", *arguments)
        self.assertEqual(result.returncode, 0, result)
        return [line for line in self.calls() if line.startswith("cf-layer")]

    def test_without_arguments_two_models_are_checked(self):
        small, large = self.layers()
        self.assertEqual(
            small, f"cf-layer --model {self.root}/data/checkpoints/neox-d80 --layer 1 --kv-len 128 --check"
        )
        self.assertEqual(large, "cf-layer --preset pythia-2.8b --layer 3 --kv-len 128 --check")

    def test_every_program_is_built(self):
        self.layers()
        self.assertTrue(any(line.startswith("cmake --preset release") for line in self.calls()))
        self.assertTrue(any("--build --preset release --target cf_programs" in line for line in self.calls()))

    def test_arguments_go_to_one_run(self):
        self.assertEqual(self.layers("--kv-len", "128,2048", "--runs", "50"),
                         ["cf-layer --preset pythia-2.8b --layer 0 --kv-len 128,2048 --runs 50"])  # fmt: skip

    def test_another_model_takes_the_place_of_the_preset(self):
        self.assertEqual(
            self.layers("--model=x", "--json", "y"), ["cf-layer --layer 0 --kv-len 128 --model=x --json y"]
        )

    def test_a_whole_model_has_no_single_layer(self):
        self.assertEqual(self.layers("--whole-model", "--seq-len=9"),
                         ["cf-layer --preset pythia-2.8b --whole-model --seq-len=9"])  # fmt: skip

    def test_an_unknown_argument_is_refused_by_cf_layer(self):
        self.stub("build/release/apps/cf-layer", 'echo "cf-layer: $*: unknown" >&2; exit 2')
        result = self.run_script("layer", "--what")
        self.assertEqual(result.returncode, 2, result)
        last = result.stderr.splitlines()[-1]
        self.assertEqual(last, "cf-layer: --preset pythia-2.8b --layer 0 --kv-len 128 --what: unknown")

    def test_nothing_is_timed_after_a_failed_build(self):
        self.stub("bin/cmake", 'case "$*" in --build*) exit 1;; esac')
        self.assertEqual(self.run_script("layer").returncode, 1)
        self.assertFalse([line for line in self.calls() if line.startswith("cf-layer")])


class Test(Scripts):
    def setUp(self):
        super().setUp()
        self.stub("bin/ctest", 'while [ "$1" != --output-log ]; do shift; done; echo "100% tests passed" >"$2"')

    def presets(self, *arguments):
        for preset in ("release", "asan"):
            os.makedirs(os.path.join(self.root, "build", preset), exist_ok=True)
        result = self.run_script("test", *arguments)
        self.assertEqual(result.returncode, 0, result)
        return [line.split()[2] for line in self.calls() if line.startswith("ctest")], result.stdout

    def test_everything_is_built_and_tested(self):
        presets, out = self.presets()
        self.assertEqual(presets, ["release", "asan"])
        self.assertIn("left out: nothing", out)

    def test_fast_leaves_the_sanitizers_out(self):
        presets, out = self.presets("--fast")
        self.assertEqual(presets, ["release"])
        self.assertIn("left out: --fast, the sanitizers", out)
        self.assertFalse(any("asan" in line for line in self.calls()))

    def test_without_a_gpu_it_says_what_is_skipped(self):
        self.stub("build/release/cuda/libcf_cuda.a")
        self.assertIn("left out: no GPU found, the GPU tests are skipped", self.presets()[1])
        self.stub("bin/nvidia-smi")
        self.assertIn("left out: nothing", self.presets()[1])

    def test_what_was_skipped_is_counted(self):
        skips = r"The following tests did not run:\n\t  2 - a (Skipped)\n\t  3 - b (Skipped)"
        self.stub("bin/ctest", 'while [ "$1" != --output-log ]; do shift; done; '
                  f'printf "100%% tests passed, 0 tests failed out of 9\n{skips}\n" >"$2"')  # fmt: skip
        lines = self.presets()[1].splitlines()[-2:]
        expected = "100% tests passed, 0 tests failed out of 9, 2 skipped"
        self.assertEqual(lines, [f"release: {expected}", f"asan: {expected}"])
        os.makedirs(os.path.join(self.root, "build/release/Testing/Temporary"))
        log = os.path.join(self.root, "build/release/Testing/Temporary/LastTest.log")
        with open(log, "w", encoding="utf-8") as file:
            file.write("1 passed in 1.00s\nSKIPPED [1] x.py: no torch\n404 passed, 31 skipped in 99.12s (0:01:39)\n")
        self.assertEqual(self.presets("--fast")[1].splitlines()[-1],
                         f"release: {expected}, 31 more inside the package")  # fmt: skip

    def test_a_long_test_is_named_while_it_runs(self):
        ctest = """echo "      Start  1: quick"
            echo "      Start 22: the long one"
            echo "1/2 Test  #1: quick ....   Passed"
            sleep 3
            echo "2/2 Test #22: the long one ....   Passed"
            while [ "$1" != --output-log ]; do shift; done; echo "100% tests passed" >"$2" """
        self.stub("bin/ctest", ctest)
        os.makedirs(os.path.join(self.root, "build", "release"))
        result = self.run_script("test", "--fast", CF_HEARD_S="1")
        self.assertEqual(result.returncode, 0, result)
        self.assertRegex(result.stdout, r"Passed\n(cf: still testing after \d+ s: the long one\n)+2/2 Test")

    def test_nothing_is_tested_after_a_failed_build(self):
        self.stub("bin/cmake", 'case "$*" in --build*) exit 1;; esac')
        self.assertEqual(self.run_script("test").returncode, 1)
        self.assertFalse([line for line in self.calls() if line.startswith("ctest")])

    def test_a_failed_test_is_a_failure(self):
        self.stub("bin/ctest", 'while [ "$1" != --output-log ]; do shift; done; echo "90% tests passed" >"$2"; exit 8')
        os.makedirs(os.path.join(self.root, "build", "release"))
        self.assertEqual(self.run_script("test", "--fast").returncode, 1)

    @unittest.skipUnless(CTEST, "needs ctest")
    def test_the_last_lines_name_what_failed_behind_the_end_of_its_output(self):
        self.stub("bin/ctest", f"""shift; build=build/$1; shift; exec {CTEST} --test-dir "$build" "$@" """)
        first = '1: bad "x" (it)'
        tests = {
            "release": {"good": "echo fine", first: "seq 100; exit 3", "killed": "echo begun; kill -9 $$",
                        "skipped": "echo no GPU; exit 77", **{f"bad {i}": "exit 1" for i in range(20)}},
            "asan": {"all is well": "true"},
        }  # fmt: skip
        for preset, cases in tests.items():
            folder = os.path.join(self.root, "build", preset)
            # What an earlier run has left is not named.
            os.makedirs(os.path.join(folder, "Testing", "Temporary"))
            with open(os.path.join(folder, "Testing/Temporary/LastTestsFailed.log"), "w", encoding="utf-8") as file:
                file.write("1:of old\n")
            with open(os.path.join(folder, "CTestTestfile.cmake"), "w", encoding="utf-8") as file:
                for name, code in cases.items():
                    file.write(f"add_test([[{name}]] /bin/sh -c [[{code}]])\n")
                    file.write(f"set_tests_properties([[{name}]] PROPERTIES SKIP_RETURN_CODE 77)\n")
                    if name.startswith("bad"):
                        file.write(f"set_tests_properties([[{name}]] PROPERTIES DEPENDS [[{first};killed]])\n")
        result = self.run_script("test")
        self.assertEqual(result.returncode, 1, result)
        out = result.stdout[result.stdout.index("cf: left out:") :].splitlines()[1:]
        bad = [f"bad {i}" for i in range(20)]
        names = [first, "killed", *bad]
        self.assertEqual(out[-22:], ["release failed: " + name for name in names])
        self.assertRegex(out[-24], r"^release: \d+% tests passed, 22 tests failed out of 24, 1 skipped$")
        self.assertEqual(out[-23], "asan: 100% tests passed, 0 tests failed out of 1, 0 skipped")
        # Ten of them at most, in the order in which they ended.
        heads = [line for line in out if line.startswith("---- ")]
        self.assertEqual(len(heads), 10)
        self.assertEqual(len(out), len(heads) + 40 + 1 + 24, "the ends of two outputs, all others are empty")
        end = out.index(f"---- {first}:") + 1
        self.assertEqual(out[end : end + 40], [str(i) for i in range(61, 101)])

    def test_missing_packages_are_installed_after_an_update(self):
        self.stub("bin/dpkg-query", "exit 1", log=False)
        self.stub("bin/sudo", 'exec "$@"', log=False)
        self.presets("--fast")
        apt = [line for line in self.calls() if line.startswith("apt-get")]
        self.assertEqual(len(apt), 2)
        self.assertIn("update", apt[0])
        self.assertIn("catch2", apt[1])


class SanitizeGpu(Scripts):
    def setUp(self):
        super().setUp()
        self.stub("bin/nvidia-smi", log=False)
        # What each program lists for the tags that it is asked for.
        self.program("test_gpu_ops", "*[[]persistent*|*[[]library*|*[[]lane*) exit;;")
        self.program("test_gpu_persistent", "*[[]reruns*|*[[]library*|*[[]lane*|*~*) exit;;")
        self.program("test_gpu_session", "*][[]reruns*|*][[]lane*) exit;;")
        self.program("test_gpu_cluster", "*) exit;;")
        self.sanitizer()

    def program(self, name, nothing_for):
        # Catch2 2 ends with the number of tests as its exit code.
        lists = f"case $2 in {nothing_for} esac; echo '  [gpu][small]'; exit 1"
        self.stub(f"build/release/tests/{name}", lists, log=False)

    def sanitizer(self, code=""):
        self.stub("bin/compute-sanitizer", code)

    # Runs go on side by side: each prints its line when it has ended, in any order.

    def test_clean_programs(self):
        result = self.run_script("sanitize_gpu")
        self.assertEqual(result.returncode, 0, result)
        lines = [line.split() for line in result.stdout.splitlines()]
        for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
            ok = "ok," if tool == "racecheck" else "ok"
            self.assertEqual([line[2] for line in lines if line[:2] == [tool, "test_gpu_ops"]], [ok])
        self.assertIn(["synccheck", "test_gpu_persistent", "ok"], lines)
        races = [" ".join(line) for line in lines if line[0] == "racecheck"]
        self.assertCountEqual(
            races,
            [
                "racecheck test_gpu_ops ok, without [reruns]",
                "racecheck test_gpu_persistent skipped, without [persistent]",
                "racecheck test_gpu_session ok, without [persistent]",
            ],
        )
        self.assertIn("initcheck test_gpu_session ok, without [library]", [" ".join(line) for line in lines])
        self.assertNotIn("test_gpu_cluster", result.stdout)
        self.assertEqual(lines[-1], ["11", "runs,", "all", "ok"])
        tags = [call.split()[-1] for call in self.calls() if "racecheck" in call]
        self.assertCountEqual(tags, ["[small]~[reruns]", "[small]~[persistent]"])
        self.assertEqual(len(self.calls()), 11)

    def test_findings_are_named(self):
        self.sanitizer('case "$*" in *initcheck*test_gpu_ops*) echo "==== ERROR SUMMARY: 3 errors"; exit 99;; esac')
        result = self.run_script("sanitize_gpu")
        self.assertEqual(result.returncode, 1, result)
        lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
        failed = [line for line in lines if "FAILED" in line]
        self.assertEqual(failed, ["initcheck test_gpu_ops FAILED: ERROR SUMMARY: 3 errors"])
        self.assertEqual(lines[-1], "11 runs, 1 failed: initcheck test_gpu_ops: ERROR SUMMARY: 3 errors")

    def test_what_tools_misread_is_left_out_and_a_line_says_whether_they_still_do(self):
        self.program("test_gpu_handovers", "*[[]persistent*|*[[]reruns*|*[[]library*) exit;;")
        self.sanitizer('case "$*" in *"barriers 16 "*) exit 99;; esac')
        result = self.run_script("sanitize_gpu", "--tools", "synccheck", "--programs", "handovers")
        lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
        barriers = "synccheck 64 barriers for 16 reports it, as ever"
        self.assertEqual(lines, ["synccheck test_gpu_handovers ok", barriers, "1 runs, all ok"])
        for code, says in (("99", "reports it, as ever"), ("0", "reports it no longer"), ("7", "exit 7")):
            self.sanitizer(f'case "$*" in *"[small][lane]") exit {code};; esac')
            result = self.run_script("sanitize_gpu", "--tools", "racecheck", "--programs", "handovers")
            self.assertEqual(result.returncode, 0, result)
            lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
            ring = f"racecheck a right ring, [lane] {says}"
            self.assertEqual(lines, ["racecheck test_gpu_handovers ok, without [lane]", ring, "1 runs, all ok"])

    def test_a_run_that_does_not_end_is_a_failure(self):
        self.sanitizer('case "$*" in *racecheck*test_gpu_ops*) echo "==== begun"; sleep 60;; esac')
        result = self.run_script("sanitize_gpu", "--limit-s", "1")
        self.assertEqual(result.returncode, 1, result)
        lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
        at = lines.index("racecheck test_gpu_ops FAILED: not ended after 1 s")
        self.assertEqual(lines[at + 1], "==== begun")
        self.assertEqual(lines[-1], "11 runs, 1 failed: racecheck test_gpu_ops: not ended after 1 s")

    def test_several_runs_at_once(self):
        self.sanitizer('case "$*" in *memcheck*test_gpu_ops*) sleep 2; exit 99;; esac')
        result = self.run_script("sanitize_gpu", "--jobs", "4")
        self.assertEqual(result.returncode, 1, result)
        lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
        # The first run to begin is the last to end.
        self.assertIn("memcheck test_gpu_ops FAILED", " ".join(lines[-3:-1]))
        self.assertIn("11 runs, 1 failed: memcheck test_gpu_ops", lines[-1])

    def test_some_tools_and_programs_alone(self):
        arguments = "--tools", "memcheck,synccheck", "--programs", "session,ops"
        result = self.run_script("sanitize_gpu", *arguments)
        self.assertEqual(result.returncode, 0, result)
        runs = [" ".join(line.split()[:2]) for line in result.stdout.splitlines()[:-1]]
        self.assertCountEqual(
            runs,
            [f"{tool} test_gpu_{name}" for name in ("session", "ops") for tool in ("memcheck", "synccheck")],
        )
        self.refused(self.run_script("sanitize_gpu", "--programs", "what"), "test_gpu_what: no such file")
        self.refused(self.run_script("sanitize_gpu", "--programs"), "--programs: expected names such as")
        for tools in ("", "memcheck,what"):
            self.refused(self.run_script("sanitize_gpu", "--tools", tools), "--tools: expected some of memcheck", tools)

    def test_a_signal_ends_the_runs(self):
        self.sanitizer("exec sleep 60")
        script = subprocess.Popen(
            [os.path.join(self.root, "scripts/sanitize_gpu"), "--jobs", "4"],
            stdout=subprocess.PIPE,
            env={"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": self.root},
        )
        until = time.monotonic() + 30
        while len(self.calls()) < 4 and time.monotonic() < until:
            time.sleep(0.05)
        script.terminate()
        # The pipe closes when the last run has ended.
        script.communicate(timeout=30)
        self.assertEqual(script.returncode, 130)
        self.assertEqual(len(self.calls()), 4)

    def test_an_exit_code_of_124_is_no_time_limit(self):
        self.sanitizer('case "$*" in *memcheck*test_gpu_ops*) exit 124;; esac')
        self.assertIn("FAILED: exit 124", self.run_script("sanitize_gpu").stdout)

    def test_a_failed_case_is_a_failure(self):
        self.sanitizer("exit 42")
        result = self.run_script("sanitize_gpu")
        self.assertEqual(result.returncode, 1, result)
        self.assertIn("FAILED: exit 42", result.stdout)

    def test_what_is_missing_is_named(self):
        self.refused(self.run_script("sanitize_gpu", "nowhere"), "nowhere/tests/test_gpu_*")
        self.program("test_gpu_ops", "*) exit;;")
        shutil.copytree(os.path.join(self.root, "build/release"), os.path.join(self.root, "large"))
        for name in ("persistent", "session"):
            os.remove(os.path.join(self.root, "large/tests", "test_gpu_" + name))
        self.refused(self.run_script("sanitize_gpu", "large"), "no case with the tag [small] in large/tests")
        self.stub("bin/nvidia-smi", "exit 9")
        self.refused(self.run_script("sanitize_gpu"), "no GPU found")

    @unittest.skipIf(shutil.which("compute-sanitizer", path="/usr/bin:/bin:/usr/local/cuda/bin"), "it is found here")
    def test_no_sanitizer(self):
        os.remove(os.path.join(self.bin, "compute-sanitizer"))
        self.refused(self.run_script("sanitize_gpu"), "no compute-sanitizer found")


class BenchGpu(Scripts):
    def test_what_is_missing_is_named(self):
        self.refused(self.run_script("bench_gpu", "out"), "scripts/bench_gpu: no GPU found")
        self.stub("bin/nvidia-smi", log=False)
        self.refused(self.run_script("bench_gpu", "out"), "build/release/apps/cf-layer: no such file")
        self.stub("build/release/apps/cf-layer")
        self.refused(self.run_script("bench_gpu", "out"), "build/release/apps/cf-op: no such file")
        self.stub("build/release/apps/cf-op")
        self.refused(self.run_script("bench_gpu", "out"), "build/release/apps/cf-model: no such file")
        self.refused(self.run_script("bench_gpu", "out", "nowhere"), "nowhere/apps/cf-layer: no such file")
        self.assertFalse(os.path.exists(os.path.join(self.root, "out")))
        self.assertEqual(self.calls(), [])

    WRITE = 'while [ $# -gt 1 ]; do if [ "$1" = --json ]; then echo {} >"$2"; fi; shift; done'

    def measure(self, arguments=("out",), **codes):
        """The result of a run whose programs write what --json names, but for those in `codes`, and all calls."""
        self.stub("bin/nvidia-smi", log=False)
        for name in ("layer", "op", "model"):
            self.stub(f"build/release/apps/cf-{name}", codes.get(f"cf_{name}", self.WRITE))
        self.stub("bin/python3", log=False)
        scratch = os.path.join(self.root, "scratch")  # the calls that name it are the same in each run
        self.stub("bin/mktemp", f"mkdir {scratch} && echo {scratch}", log=False)
        for name in ("apps/bench_peers.py", "apps/plot_bench.py", "apps/bench_page.py", "apps/bench_python.py",
                     "apps/bench_busy.py", "apps/bench_record.py", "apps/bench_research.py", "apps/bench_serve.py",
                     "golden/tools/eval_hf.py", "golden/tools/make_checkpoints.py"):  # fmt: skip
            self.stub(name, self.WRITE)
        result = self.run_script("bench_gpu", *arguments)
        self.assertTrue(os.path.isdir(os.path.join(self.root, "out")))
        return result, self.calls()

    PAGE = ("bench_page.py", "plot_bench.py")

    def measurements(self, calls):
        """The calls but for those that make records, pages and pictures of what was measured."""
        return [call for call in calls if not call.startswith(("bench_record.py", *self.PAGE))]

    def test_the_parts_make_up_the_whole(self):
        _, whole = self.measure()
        parts = []
        for part, programs in (
            ("layers", {"cf-layer", "cf-op"}),
            ("models", {"cf-model", "make_checkpoints.py"}),
            ("many", {"cf-model", "bench_peers.py"}),
            ("quality", {"cf-model", "eval_hf.py"}),
            ("python", {"bench_python.py"}),
            ("peers", {"bench_peers.py"}),
            ("layer-peers", {"bench_peers.py"}),
            ("int4", {"bench_peers.py"}),
        ):
            os.remove(self.log)
            result, calls = self.measure(arguments=("--only", part, "out"))
            self.assertEqual(result.returncode, 0, result)
            page = f"bench_page.py out {self.root}/README.md {self.root}/python/README.md"
            self.assertEqual(next(call for call in calls if call.startswith(self.PAGE)), page)
            self.assertEqual({call.split()[0] for call in self.measurements(calls)}, programs)
            parts += self.measurements(calls)
        self.assertEqual(sorted(parts), sorted(self.measurements(whole)))
        for part in ("", "all"):
            self.refused(
                self.run_script("bench_gpu", "--only", part, "out"), "--only: expected one of layers", f"'{part}'"
            )
        self.refused(self.run_script("bench_gpu", "--only", "peers"), "expected OUT_DIR")

    def files_of(self, *arguments):
        """The names of the files that the script's programs are told to write, without .json."""
        if os.path.exists(self.log):
            os.remove(self.log)
        _, calls = self.measure(arguments=(*arguments, "out"))
        words = [call.split() for call in calls]
        files = [call[call.index("--json") + 1] for call in words if "--json" in call]
        return [os.path.basename(f).removesuffix(".json") for f in files if os.path.dirname(f) == "out"]

    def test_each_recorded_file_is_made_by_the_script(self):
        found = {name for name in os.listdir(os.path.join(ROOT, "data", "bench")) if name.endswith(".json")}
        self.assertGreater(len(found), 50)
        made = [*self.files_of(), *self.files_of("--only", "users"), *self.files_of("--only", "cpu")]
        self.assertEqual(self.files_of("--only", "users"), ["serve-pythia-2.8b", "research-pythia-2.8b"])
        self.assertEqual(sorted(found - {name + ".json" for name in made}), [])

    def test_gpus_measure_side_by_side_each_once_and_on_cores_of_its_own(self):
        alone = self.measurements(self.measure()[1])
        os.remove(self.log)
        about = (
            'echo "$CUDA_VISIBLE_DEVICES $(taskset -cp $$ | sed "s/.*: //")" >>' + self.root + "/lanes; sleep 0.02; "
        )
        self.WRITE = about + self.WRITE
        result, calls = self.measure(arguments=("--gpus", "0,3", "out"))
        self.assertEqual(result.returncode, 0, result)
        self.assertEqual(sorted(self.measurements(calls)), sorted(alone))
        with open(os.path.join(self.root, "lanes"), encoding="utf-8") as file:
            lanes = {line.strip() for line in file if line.strip()[:1].isdigit() and " " in line.strip()}
        self.assertEqual({lane.split()[0] for lane in lanes}, {"0", "3"})
        if len(os.sched_getaffinity(0)) > 1:
            self.assertEqual(len({lane.split()[1] for lane in lanes}), 2, lanes)
        for gpus in ("", "0,", "all"):
            self.refused(self.run_script("bench_gpu", "--gpus", gpus, "out"), "--gpus: expected numbers", f"'{gpus}'")

    def test_what_takes_too_long_or_does_not_begin_says_so(self):
        result, calls = self.measure(("--limit-s", "3", "--only", "layers", "out"), cf_layer="sleep 60")
        self.assertEqual(result.returncode, 1, result)
        records = [call for call in calls if call.startswith("bench_record.py")]
        files = [call.split()[1] for call in records]
        self.assertEqual(len(files), len(set(files)))
        self.assertTrue(records[0].startswith("bench_record.py out/stack-pythia-410m.json "), records)
        self.assertIn(" --fault stopped after ", records[0])
        for call in records[1:]:
            self.assertTrue(call.endswith(" --fault not begun: the 3 s were over"), call)
        self.assertTrue(calls[-1].startswith(self.PAGE), "the page is made of what was measured")
        for limit in ("0", "soon"):
            self.refused(
                self.run_script("bench_gpu", "--limit-s", limit, "out"), "--limit-s: expected 1 to", f"'{limit}'"
            )

    def test_what_is_missing_is_measured_alone(self):
        self.measure(("--only", "layers", "out"))
        kept = '{"rows":[{"error":"no such peer"}],"commit":"abc"}'
        for name, content in (
            ("stack-pythia-12b", '{"error":"stopped after 60 s"}'),
            ("stack-pythia-2.8b", '{"rows":[],"commit":"abc","error":"exit 1"}'),
            ("stack-pythia-6.9b", kept),
        ):
            with open(os.path.join(self.root, "out", name + ".json"), "w", encoding="utf-8") as file:
                file.write(content + "\n")
        os.remove(os.path.join(self.root, "out", "growth-pythia-2.8b.json"))
        os.remove(self.log)
        result, calls = self.measure(("--missing", "--only", "layers", "out"))
        self.assertEqual(result.returncode, 0, result)
        words = [call.split() for call in self.measurements(calls)]
        files = sorted(call[call.index("--json") + 1] for call in words)
        self.assertEqual(files, [f"out/{name}.json" for name in
                                 ("growth-pythia-2.8b", "stack-pythia-12b", "stack-pythia-2.8b")])  # fmt: skip
        with open(os.path.join(self.root, "out/stack-pythia-6.9b.json"), encoding="utf-8") as file:
            self.assertEqual(file.read(), kept + "\n")

    def test_a_page_is_made_of_other_records_without_a_gpu(self):
        for name in ("apps/plot_bench.py", "apps/bench_page.py"):
            self.stub(name)
        self.refused(self.run_script("bench_gpu", "--page", "new", "out"), "--page: expected a folder", "'new'")
        os.mkdir(os.path.join(self.root, "new"))
        result = self.run_script("bench_gpu", "--page", "new", "out")
        self.assertEqual(result.returncode, 0, result)
        self.assertEqual(
            self.calls(), [f"bench_page.py --records new out {self.root}/README.md {self.root}/python/README.md"]
        )
        # Where the page is refused there are no pictures.
        os.remove(self.log)
        self.stub("apps/bench_page.py", "exit 2")
        open(os.path.join(self.root, "out", "growth-pythia-2.8b.json"), "w").close()
        self.assertEqual(self.run_script("bench_gpu", "--page", "new", "out").returncode, 1)
        self.assertEqual(len(self.calls()), 1)

    def test_each_model_beside_pythia_s_runs_in_its_own_dtype(self):
        _, calls = self.measure()
        (stack,) = [call for call in self.measurements(calls) if "out/stack-llama-3.1-8b.json" in call]
        rest = "--preset llama-3.1-8b --dtype bf16 --impl graph,persistent --kv-len 128,512,2048"
        self.assertTrue(stack.startswith("cf-layer ") and f" {rest} " in stack, stack)
        dtypes = {"llama-3.2-1b": "bf16", "llama-3.2-3b": "bf16", "llama-3.1-8b": "bf16", "qwen2.5-7b": "bf16"}
        for preset, dtype in (dtypes | {"llama-2-7b": "f16", "llama-2.8b-shape": "f16"}).items():
            (run,) = [call for call in self.measurements(calls) if f"out/model-{preset}.json" in call]
            rest = f"--preset {preset} --dtype {dtype} --prompt-len 512 --new-tokens 32"
            self.assertTrue(run.startswith("cf-model bench ") and f" {rest} " in run, run)
        for preset in (*dtypes, "llama-2-7b"):
            (call,) = [call for call in self.measurements(calls) if f"out/model-peers-{preset}.json" in call]
            self.assertTrue(call.startswith("bench_peers.py --what model ") and f" --preset {preset} " in call, call)
            self.assertIn(" --peers hf_generate,torch_graph,hf_static_compile --prompt-len 512 ", call)

    def test_pictures_are_drawn_of_what_is_there(self):
        os.mkdir(os.path.join(self.root, "out"))
        for name in ("growth-pythia-2.8b", "python-pythia-2.8b", "model-peers-pythia-2.8b"):
            open(os.path.join(self.root, "out", name + ".json"), "w").close()
        _, calls = self.measure(arguments=("--only", "models", "out"))
        plots = [call for call in calls if call.startswith("plot_bench.py")]
        self.assertEqual(plots, ["plot_bench.py out/growth-pythia-2.8b.json",
                                 "plot_bench.py out/python-pythia-2.8b.json",
                                 "plot_bench.py --hero out/hero.svg out/model-peers-pythia-2.8b.json"])  # fmt: skip

    def test_every_measurement_has_a_file_of_its_own(self):
        result, calls = self.measure()
        self.assertEqual(result.returncode, 0, result)
        words = [call.split() for call in calls]
        files = [call[call.index("--json") + 1] for call in words if "--json" in call]
        files = [
            file for file in files if not file.startswith(self.root + "/scratch/")
        ]  # what a text's record is made of
        self.assertEqual(len(files), len(set(files)))
        self.assertTrue(all(file.startswith("out/") and file.endswith(".json") for file in files), files)
        self.assertEqual({call[0] for call in words if "--json" in call},
                         {"cf-layer", "cf-op", "cf-model", "eval_hf.py", "bench_python.py", "bench_peers.py"})  # fmt: skip
        models = [call for call in words if call[:3] == ["bench_peers.py", "--what", "model"]]
        llamas = "llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "qwen2.5-7b", "llama-3.1-8b"
        names = "pythia-2.8b-many", "pythia-2.8b", "pythia-6.9b", *llamas
        self.assertEqual({call[-1] for call in models}, {f"out/model-peers-{name}.json" for name in names})
        records = [call[1] for call in words if call[0] == "bench_record.py"]
        self.assertEqual(sorted(records), sorted(files), "each of them becomes a record")

    def test_a_failed_measurement_is_a_failure_and_the_others_go_on(self):
        _, expected = self.measure()
        os.remove(self.log)
        result, calls = self.measure(cf_op="exit 3")
        self.assertEqual(result.returncode, 1, result)
        self.assertEqual(self.measurements(calls), self.measurements(expected))
        program = f"{self.root}/build/release/apps/cf-model"
        record = rf"(?m)^bench_record.py out/gptq-linears-pythia-2.8b.json --cf-model {program} --took-s \d+ --fault exit 3"
        self.assertRegex("\n".join(calls), record + "$")


@unittest.skipUnless(CTEST, "needs ctest")
class TestGpu(Scripts):
    """Through CTest. Its tests are a line of shell each and write what tests/cuda/gpu_resources.cmake gives to them."""

    GIVEN = "env | sed -n 's/^CTEST_RESOURCE_GROUP_[0-9]*_GPUS=//p' | sort | tr '\\n' ' '"
    KINDS = {"alone": "cf_gpu_alone", "ranks": "cf_rank_tests", "ranks alone": "cf_rank_alone"}

    def setUp(self):
        super().setUp()
        os.remove(os.path.join(self.bin, "ctest"))
        os.symlink(CTEST, os.path.join(self.bin, "ctest"))
        self.gpus(4)
        self.stub("bin/git", 'case "$*" in *rev-parse*) echo 12ab;; esac', log=False)
        self.tests = dict.fromkeys(("a", "b", *self.KINDS), "true")

    def gpus(self, count):
        lines = "".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-{i})\\n" for i in range(count))
        self.stub("bin/nvidia-smi", f"printf '{lines}'", log=False)

    def build(self):
        """Writes build/ as CMake would with self.tests, and a test that fails and needs no GPU."""
        os.makedirs(os.path.join(self.root, "build"), exist_ok=True)
        with open(os.path.join(self.root, "build/CTestTestfile.cmake"), "w", encoding="utf-8") as file:
            file.write("add_test([[of the CPU]] /bin/false)\n")
            for name, code in self.tests.items():
                logged = f'echo "{name}: $CUDA_VISIBLE_DEVICES: $({self.GIVEN})" >>{self.log}; {code}'
                file.write(f"add_test([[{name}]] /bin/sh -c [==[{logged}]==])\n")
                file.write(f"set_tests_properties([[{name}]] PROPERTIES LABELS gpu SKIP_RETURN_CODE 77 TIMEOUT 600)\n")
                kind = self.KINDS.get(name, "cf_gpu_tests")
                file.write(f"list(APPEND {kind} [[{name}]])\n")
            file.write(f"include([[{os.path.realpath(ROOT)}/tests/cuda/gpu_resources.cmake]])\n")

    def ran(self, *arguments, **environment):
        """The exit status, the last line without the name of the file of outcomes, and that file's lines."""
        self.build()
        if os.path.exists(self.log):
            os.remove(self.log)
        result = self.run_script("test_gpu", *arguments, "build", **environment)
        self.assertNotRegex(result.stderr, "scripts/test_gpu|Traceback")
        self.out = result.stdout
        last, file = result.stdout.splitlines()[-1].rsplit(": ", 1)
        self.assertEqual(file, "build/gpu-tests.txt")
        with open(os.path.join(self.root, file), encoding="utf-8") as outcomes:
            return result.returncode, last, outcomes.read().splitlines()

    def given(self):
        """What each test saw: CUDA_VISIBLE_DEVICES, and of each of its GPUs (id, slots)."""
        found = {}
        for line in self.calls():
            name, visible, groups = line.split(": ")
            ids = [dict(pair.split(":") for pair in group.split(",")) for group in groups.split()]
            found[name] = visible, sorted((int(i["id"]), int(i["slots"])) for i in ids)
        return found

    def test_a_test_gets_its_share_of_the_gpus(self):
        for count, ranks in ((1, 1), (2, 2), (4, 4), (6, 4)):
            self.gpus(count)
            self.assertEqual(self.ran()[:2], (0, "5 passed, 0 failed, 0 skipped, 0 not run"))
            given = self.given()
            self.assertEqual({visible for visible, _ in given.values()}, {",".join(map(str, range(count)))})
            slots = {name: [n for _, n in gpus] for name, (_, gpus) in given.items()}
            several = {"ranks": [5] * ranks, "ranks alone": [8] * ranks}
            self.assertEqual(slots, {"a": [1], "b": [1], "alone": [8]} | several)
            for name, (_, gpus) in given.items():
                self.assertEqual(len({i for i, _ in gpus}), len(gpus), f"{name} has each GPU once")
                self.assertTrue(all(i < count for i, _ in gpus), name)

    def test_what_measures_a_gpu_has_it_to_itself_and_the_other_gpus_go_on(self):
        # Each test writes when it begins and ends; with the spec file "alone" waits for one GPU, without it for all.
        self.tests = {f"of one {i}": "sleep 0.2" for i in range(12)} | {"alone": "sleep 0.2"}
        about = f"""begin=$(date +%s%N); {{}}; echo "$begin $(date +%s%N) $({self.GIVEN})" >>{self.root}/times"""
        self.tests = {name: about.format(code) for name, code in self.tests.items()}
        self.gpus(2)
        self.assertEqual(self.ran("--jobs", "16")[0], 0)
        with open(os.path.join(self.root, "times"), encoding="utf-8") as file:
            times = [line.split() for line in file]
        self.assertEqual(len(times), 13)
        ((begin, end, mine),) = [time for time in times if time[2].endswith("slots:8")]
        beside = [gpu for b, e, gpu in times if int(b) < int(end) and int(e) > int(begin) and gpu != mine]
        gpu = mine.split(",")[0]
        self.assertEqual([other for other in beside if other.startswith(gpu + ",")], [])

    def test_without_the_script_what_measures_runs_alone_and_ranks_see_all(self):
        self.build()
        done = subprocess.run([CTEST, "--test-dir", os.path.join(self.root, "build"), "--show-only=json-v1"],
                              capture_output=True, text=True, check=True)  # fmt: skip
        found = {}
        for test in json.loads(done.stdout)["tests"]:
            properties = {p["name"]: p["value"] for p in test["properties"]}
            found[test["name"]] = properties.get("RUN_SERIAL", False), "RESOURCE_GROUPS" in properties
        self.assertEqual(found, {"of the CPU": (False, False), "a": (False, True), "b": (False, True),
                                 "alone": (True, False), "ranks": (False, False),
                                 "ranks alone": (True, False)})  # fmt: skip
        done = subprocess.run([CTEST, "--test-dir", os.path.join(self.root, "build"), "-L", "gpu", "-j", "8"],
                              capture_output=True, text=True, check=True)  # fmt: skip
        self.assertIn("100% tests passed, 0 tests failed out of 5", done.stdout)
        self.assertEqual({tuple(gpus) for _, gpus in self.given().values()}, {()})

    def test_gpus_are_those_that_are_named(self):
        self.assertEqual(self.ran("--gpus", "3,1")[0], 0)
        self.assertEqual({visible for visible, _ in self.given().values()}, {"3,1"})
        self.assertEqual([i for i, _ in self.given()["ranks"][1]], [0, 1])
        self.ran(CUDA_VISIBLE_DEVICES="2")
        self.assertEqual({visible for visible, _ in self.given().values()}, {"2"})
        self.assertEqual(self.given()["ranks"][1], [(0, 5)])

    def test_the_oracles_of_all_tests_at_once_have_the_cores_between_them(self):
        cores = len(os.sched_getaffinity(0))
        self.tests = {"a": f'echo "$OMP_NUM_THREADS" >>{self.root}/threads'}
        for arguments, environment, threads in (
            (("--jobs", "1"), {}, cores),
            (("--jobs", "9999", "--gpus", "1"), {}, max(1, cores // 8)),
            ((), {"OMP_NUM_THREADS": "3"}, 3),
        ):
            self.assertEqual(self.ran(*arguments, **environment)[0], 0)
            with open(os.path.join(self.root, "threads"), encoding="utf-8") as file:
                self.assertEqual(file.read().split()[-1], str(threads))

    def test_outcomes_are_counted_and_named(self):
        self.tests = {"good": "true", "bad [x], worse": "exit 1", "dies": "kill -9 $$", "lacks one": "exit 77"}
        status, last, outcomes = self.ran()
        self.assertEqual((status, last), (1, "1 passed, 2 failed, 1 skipped, 0 not run"))
        self.assertEqual(outcomes, ["failed: bad [x], worse", "failed: dies", "skipped: lacks one", "passed: good"])
        self.tests = dict.fromkeys(("a", "b"), "echo SKIPPED: no GPU; exit 77")
        self.assertEqual(self.ran()[:2], (0, "0 passed, 0 failed, 2 skipped, 0 not run"))

    def test_at_the_limit_what_runs_is_stopped_and_no_more_begins(self):
        self.tests = {"a": "true", "b": "sleep 600", "c": "sleep 600", "d": "true"}
        status, last, outcomes = self.ran("--jobs", "2", "--limit-s", "8")
        self.assertEqual(status, 1)
        self.assertIn(" 0 failed, 0 skipped", last)
        self.assertTrue({"not run: b", "not run: c"} <= set(outcomes), outcomes)
        passed = sum(line.startswith("passed") for line in outcomes)
        self.tests = dict.fromkeys(self.tests, "true")
        more = f", {passed} passed before" if passed else ""
        self.assertEqual(self.ran("--missing")[:2], (0, f"{4 - passed} passed, 0 failed, 0 skipped, 0 not run{more}"))

    def test_missing_is_what_has_not_passed_at_this_commit(self):
        self.stub("bin/git", 'case "$*" in *rev-parse*) cat head;; *diff*) cat changes;; esac', log=False)
        self.tests = {"a": "true", "b": "exit 1", "c": "exit 77"}

        def at(head, changes, *arguments):
            for name, text in (("head", head), ("changes", changes)):
                with open(os.path.join(self.root, name), "w", encoding="utf-8") as file:
                    file.write(text)
            return self.ran(*arguments)[1], sorted(self.given())

        self.assertEqual(at("12ab\n", "", "--missing"), ("1 passed, 1 failed, 1 skipped, 0 not run", ["a", "b", "c"]))
        with open(os.path.join(self.root, "build/gpu-tests-passed.txt"), encoding="utf-8") as file:
            self.assertEqual(file.read(), "12ab\na\n")
        self.tests["b"] = "true"
        again = "1 passed, 0 failed, 1 skipped, 0 not run, 1 passed before"
        self.assertEqual(at("12ab\n", "", "--missing"), (again, ["b", "c"]))
        self.tests["c"] = "true"
        self.assertEqual(at("12ab\n", "", "--missing")[1], ["c"])
        nothing = "0 passed, 0 failed, 0 skipped, 0 not run, 3 passed before"
        self.assertEqual(at("12ab\n", "", "--missing"), (nothing, []))
        # Another commit, changes to it, and a run of all begin anew.
        everything = "3 passed, 0 failed, 0 skipped, 0 not run", ["a", "b", "c"]
        for changes, *arguments in (("", "--missing"), ("-x", "--missing"), ("-x",)):
            self.assertEqual(at("34cd\n", changes, *arguments), everything)
        self.assertEqual(at("34cd\n", "-x", "--missing")[0], nothing)
        with open(os.path.join(self.root, "build/CMakeCache.txt"), "w", encoding="utf-8") as file:
            file.write("CF_COMMIT:STRING=5678\n")
        self.assertEqual(at("34cd\n", "-x", "--missing")[1], ["a", "b", "c"])
        self.assertEqual(at("", "", "--missing")[0], nothing)

    def test_the_longest_begins_first(self):
        self.tests = {"short": "true", "long": "sleep 0.5", "also short": "true"}
        self.assertEqual(self.ran("--jobs", "2")[0], 0)
        self.assertEqual(self.ran("--jobs", "2")[0], 0)
        self.assertEqual(re.findall(r"Start +\d+: (.*)", self.out)[0], "long")

    def test_what_cannot_be_is_refused(self):
        def refused(*parts, arguments=("build",)):
            self.refused(self.run_script("test_gpu", *arguments), "scripts/test_gpu: ", *parts)

        refused("build: no CTestTestfile.cmake in it, expected a build folder")
        self.build()
        for wanted in ("", "0,", "all", "4", "1,1"):
            refused("--gpus: expected different numbers below 4", f"'{wanted}'", arguments=("--gpus", wanted, "build"))
        for option, most in (("--jobs", 9999), ("--limit-s", 80000)):
            for given in ("0", "many", "-1", str(most + 1)):
                refused(f"{option}: expected 1 to {most}, got '{given}'", arguments=(f"{option}={given}", "build"))
        self.stub("bin/nvidia-smi", "exit 9", log=False)
        refused("no GPU found, expected one that nvidia-smi -L lists")
        self.gpus(1)
        with open(os.path.join(self.root, "build/CTestTestfile.cmake"), "w", encoding="utf-8") as file:
            file.write("add_test(a /bin/true)\n")
        refused("build: no test has the label gpu, expected a build with CUDA")
        with open(os.path.join(self.root, "build/CTestTestfile.cmake"), "a", encoding="utf-8") as file:
            file.write("add_test(test_gpu_ops_NOT_BUILT-1eb06d2 test_gpu_ops_NOT_BUILT-1eb06d2)\n")
        refused("build: test_gpu_ops is not built")
        self.stub("bin/git", "exit 128", log=False)
        self.build()
        refused("--missing: expected a git tree", arguments=("--missing", "build"))
        self.assertFalse(os.path.exists(os.path.join(self.root, "build/gpu-tests.txt")))


@unittest.skipUnless(shutil.which("c++filt", path="/usr/bin:/bin"), "needs c++filt of binutils")
class CompareSass(Scripts):
    def compare(self, old, new, *arguments):
        self.stub("bin/cuobjdump", CUOBJDUMP, log=False)
        for name, text in (("old", old), ("new", new)):
            with open(os.path.join(self.root, name), "w", encoding="utf-8") as file:
                file.write(text)
        return self.run_script("compare_sass", "old", "new", *arguments)

    def test_a_moved_kernel_is_equal(self):
        old, new = sass(ROPE, "LDC R1, c[0x0][0x28]", "EXIT"), sass(MOVED_ROPE, "LDC  R1, c[0x0][0x28]", "EXIT")
        result = self.compare(old, new, "--all")
        self.assertEqual(result.returncode, 0, result)
        self.assertIn("sm_90a  void rope_kernel<float>(int): equal", result.stdout)
        self.assertIn("1 equal, 0 different, 0 only in OLD, 0 only in NEW", result.stdout)

    def test_a_changed_instruction_is_named(self):
        result = self.compare(sass(ROPE, "LDC R1", "EXIT"), sass(MOVED_ROPE, "LDC R2", "EXIT"))
        self.assertEqual(result.returncode, 1, result)
        self.assertIn("different (instruction 0: 'LDC R1' became 'LDC R2')", result.stdout)
        result = self.compare(sass(ROPE, "EXIT"), sass(ROPE, "EXIT", "NOP"))
        self.assertIn("1 instructions became 2", result.stdout)

    def test_kernels_of_one_side_are_named(self):
        both = sass(ROPE, "EXIT") + sass(ROPE, "EXIT", arch="sm_120a")
        result = self.compare(both, sass(ROPE, "EXIT"))
        self.assertEqual(result.returncode, 1, result)
        self.assertIn("sm_120a  void rope_kernel<float>(int): only in OLD", result.stdout)
        self.assertIn("only in NEW", self.compare(sass(ROPE, "EXIT"), both).stdout.splitlines()[0])

    def test_kernels_of_one_plain_name_are_matched_by_their_instructions(self):
        a, b = sass(ROPE, "LDC R1"), sass(MOVED_ROPE, "LDC R2")
        self.assertEqual(self.compare(a + b, b + a).returncode, 0)
        self.assertEqual(self.compare(a + b, a + a).returncode, 1)

    def test_a_failure_of_cuobjdump_is_passed_on(self):
        self.compare(sass(ROPE, "EXIT"), sass(ROPE, "EXIT"))
        broken = self.stub("bin/broken", "echo 'cuobjdump fatal: no device code' >&2; exit 255", log=False)
        result = self.run_script("compare_sass", "old", "new", "--cuobjdump", broken)
        self.refused(result, "exit 255: cuobjdump fatal: no device code")

    def test_build_folders_stand_for_their_library(self):
        self.compare(sass(ROPE, "EXIT"), sass(MOVED_ROPE, "EXIT"))
        for name in ("old", "new"):
            os.makedirs(os.path.join(self.root, name + "_build/cuda"))
            os.rename(os.path.join(self.root, name), os.path.join(self.root, name + "_build/cuda/libcf_cuda.a"))
        result = self.run_script("compare_sass", "old_build", "new_build")
        self.assertEqual(result.returncode, 0, result)
        self.assertEqual(result.stdout, "1 equal, 0 different, 0 only in OLD, 0 only in NEW\n")

    def test_what_is_missing_is_named(self):
        self.refused(self.compare("", sass(ROPE, "EXIT")), "old: no kernel in it")
        self.refused(self.run_script("compare_sass", "nowhere", "new"), "nowhere: no such file")
        self.refused(self.run_script("compare_sass", "scripts", "new"), "scripts/cuda/libcf_cuda.a: no such file")

    @unittest.skipIf(shutil.which("cuobjdump", path="/usr/bin:/bin:/usr/local/cuda/bin"), "it is found here")
    def test_no_cuobjdump(self):
        self.refused(self.run_script("compare_sass", "old", "new"), "no cuobjdump found")


if __name__ == "__main__":
    unittest.main()
