#!/usr/bin/env python3
"""Runs the commands of README.md's ```sh blocks in a copy of the tree with the programs of an existing build.
  test_readme.py BUILD_DIR [TestCase...]
`cmake` is a stub there, since the programs are built already. path/to/checkpoint is a model of 32 small layers,
path/to/quantised one of the GPTQ checkpoints, and the golden files that a dump would have made are two of data/golden.
"""

import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir))
BUILD = None
LAYERS = 32

# What a command is, by the first pattern that is found in it.
KINDS = [
    # The tests themselves, and commands that reach out of the tree.
    (
        "elsewhere",
        r"^(scripts/test\b|\.ci/run|scripts/setup|git |sudo |apt|pip |python3? -m pip|ctest|compute-sanitizer|ncu|nsys)",
    ),
    ("gpu", r"--backend[ =]cuda|/cf-op\b|^scripts/(bench|sanitize|test)_gpu\b"),
    # What needs the package: tests/python/test_readmes.py runs it.
    ("package", r"^python3? -m cf_ops\b"),
    # Scripts whose libraries (torch, matplotlib) need not be there.
    ("script", r"^(\w+=\S+ )*(python3? )?\S+\.py\b"),
    ("cpu", r""),
]


def commands(text):
    """The commands of a Markdown text's ```sh blocks, lines that end in a backslash joined."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            # A # within a word begins no comment.
            line = re.sub(r"(^|\s)#.*", "", line).strip()
            if line:
                found.append(" ".join(line.split()))
    return found


def kind(command):
    return next(name for name, pattern in KINDS if re.search(pattern, command))


def tree_files():
    """The paths of the tree's files, those that git ignores aside."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                                capture_output=True, text=True, check=True).stdout.split("\0")  # fmt: skip
        return [path for path in listed if path and os.path.exists(os.path.join(ROOT, path))]
    except (FileNotFoundError, subprocess.CalledProcessError):
        paths = glob.glob("**/*", root_dir=ROOT, recursive=True, include_hidden=True)
        return [p for p in paths if os.path.isfile(os.path.join(ROOT, p)) and not p.startswith(("build", ".git/"))]


def write_model(source, target):
    """A checkpoint of LAYERS layers, each the first of `source`, with a cache of 2048 entries."""
    os.makedirs(target)
    with open(os.path.join(source, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    config |= {"num_hidden_layers": LAYERS, "max_position_embeddings": 2048}
    with open(os.path.join(target, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    with open(os.path.join(source, "model.safetensors"), "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    header.pop("__metadata__", None)
    tensors, end, pieces = {}, 0, []
    for name, tensor in header.items():
        if re.search(r"layers\.[1-9]", name):
            continue
        first, last = tensor["data_offsets"]
        for layer in range(LAYERS if "layers.0." in name else 1):
            copy = name.replace("layers.0.", f"layers.{layer}.")
            tensors[copy] = tensor | {"data_offsets": [end, end + last - first]}
            end += last - first
            pieces.append(data[first:last])
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(target, "model.safetensors"), "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + b"".join(pieces))


def has_gpu():
    return bool(glob.glob("/dev/nvidia[0-9]*"))


class Readme(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.tree = os.path.join(folder.name, "cf")
        for path in tree_files():
            os.makedirs(os.path.dirname(os.path.join(cls.tree, path)), exist_ok=True)
            shutil.copy2(os.path.join(ROOT, path), os.path.join(cls.tree, path))
        apps = os.path.join(cls.tree, "build", "release", "apps")
        os.makedirs(apps)
        for program in glob.glob(os.path.join(BUILD, "apps", "cf-*")):
            if os.access(program, os.X_OK) and os.path.isfile(program):
                os.symlink(program, os.path.join(apps, os.path.basename(program)))
        stub = os.path.join(folder.name, "bin", "cmake")
        os.makedirs(os.path.dirname(stub))
        with open(stub, "w", encoding="utf-8") as file:
            file.write("#!/bin/sh\n")
        os.chmod(stub, 0o755)
        cls.environment = os.environ | {"PATH": os.path.dirname(stub) + ":" + os.environ["PATH"]}

        write_model(os.path.join(ROOT, "data/checkpoints/neox-d80"), os.path.join(cls.tree, "path/to/checkpoint"))
        shutil.copytree(
            os.path.join(ROOT, "data/checkpoints/neox-gptq-sym"), os.path.join(cls.tree, "path/to/quantised")
        )
        for name, golden in (("mine.h5", "neox-d80-kv17-b1.h5"), ("other.h5", "neox-d80-kv17-b1.h5")):
            shutil.copy(os.path.join(ROOT, "data/golden", golden), os.path.join(cls.tree, name))
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
            cls.text = file.read()
        cls.commands = commands(cls.text)

    def run_command(self, command):
        return subprocess.run(["bash", "-c", command], cwd=self.tree, env=self.environment, capture_output=True,
                              text=True, stdin=subprocess.DEVNULL, timeout=500, check=False)  # fmt: skip

    def of_kind(self, name):
        return [command for command in self.commands if kind(command) == name]

    def test_there_are_commands(self):
        self.assertGreater(len(self.of_kind("cpu")), 3)
        self.assertIn("scripts/layer", self.commands)
        self.assertIn("scripts/test", [command.split(" --")[0] for command in self.commands])

    def test_cpu_commands(self):
        for command in self.of_kind("cpu"):
            with self.subTest(command):
                result = self.run_command(command)
                self.assertEqual(result.returncode, 0, f"{command}\n{result.stdout[-2000:]}{result.stderr[-2000:]}")

    def test_the_first_model_command_prints_what_stands_below_it(self):
        first = next(command for command in self.commands if "cf-model" in command)
        result = self.run_command(first)
        self.assertRegex(result.stdout, r"\w{3}")
        self.assertIn(f"```\n{result.stdout.strip(chr(10))}\n```\n", self.text)

    def test_outputs_stand_outside_the_clone(self):
        for command in self.commands:
            for option, path in re.findall(r"--(json|csv|dump|out)[ =](\S+)", command):
                self.assertTrue(path.startswith("/tmp/"), f"{command}: --{option}")

    def test_gpu_commands(self):
        if has_gpu():
            self.skipTest("there is a GPU here")
        for command in self.of_kind("gpu"):
            program = next(word for word in shlex.split(command) if "=" not in word)
            if not os.path.exists(os.path.join(self.tree, program)):
                self.assertIn("cf-op", program)
                continue
            with self.subTest(command):
                result = self.run_command(command)
                self.assertEqual(result.returncode, 2, f"{command}\n{result.stdout}{result.stderr}")
                self.assertEqual(len(result.stderr.splitlines()), 1, f"{command}\n{result.stderr}")
                self.assertRegex(result.stderr, r"no CUDA (support|device)|no GPU found|no compute-sanitizer found")

    def test_scripts(self):
        """Each exists, may be run, prints its help without its libraries, and the help names the command's options."""
        for command in self.of_kind("script"):
            with self.subTest(command):
                words = [word for word in shlex.split(command) if not re.match(r"\w+=", word)]
                if not words[0].startswith("python"):
                    self.assertTrue(os.access(os.path.join(self.tree, words[0]), os.X_OK), f"{words[0]} has no run bit")
                at = next(i for i, word in enumerate(words) if word.endswith(".py"))
                result = self.run_command(shlex.join([*words[: at + 1], "--help"]))
                self.assertEqual(result.returncode, 0, f"{command}\n{result.stdout}{result.stderr}")
                for word in words[at + 1 :]:
                    if word.startswith("--"):
                        self.assertRegex(result.stdout, re.escape(word.split("=")[0]) + r"(?![\w-])", command)


class Parsing(unittest.TestCase):
    def test_commands_are_found(self):
        text = "a\n```sh\nscripts/layer    # why\nx --y 1 \\\n  --z#2\n\n# no\n```\n"
        text += "```cmake\nno(x)\n```\n```sh\nlast\n```\n"
        self.assertEqual(commands(text), ["scripts/layer", "x --y 1 --z#2", "last"])

    def test_kinds(self):
        for command, expected in (
            ("scripts/test --fast", "elsewhere"),
            ("build/release/apps/cf-layer --backend cuda --preset x", "gpu"),
            ("build/release/apps/cf-op linear", "gpu"),
            ("scripts/bench_gpu data/bench", "gpu"),
            ("scripts/test_gpu", "gpu"),
            ("golden/tools/dump_hf.py --model x", "script"),
            ("python3 -m cf_ops generate", "package"),
            ("build/release/apps/cf-golden run mine.h5", "cpu"),
            ("scripts/layer", "cpu"),
        ):
            self.assertEqual(kind(command), expected, command)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not os.path.isdir(os.path.join(sys.argv[1], "apps")):
        sys.exit("usage: test_readme.py BUILD_DIR [TestCase...], with the programs in BUILD_DIR/apps")
    BUILD = os.path.abspath(sys.argv.pop(1))
    unittest.main()
