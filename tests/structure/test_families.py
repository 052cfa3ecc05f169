#!/usr/bin/env python3
"""No code but a family's own names a family: everything else asks core/families what a family is."""

import ast
import os
import re
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir)
FAMILIES = "core/families"
FOLDERS = ("core", "cpu_ref", "cuda", "golden", "apps", "python")
# What may name families: file -> why.
ALLOWED = {
    "apps/bench_page.py": "the models of the page",
    "golden/tools/dump_hf.py": "examples in its help",
    "golden/tools/make_checkpoints.py": "the checkpoints of data/, of every family",
    "golden/tools/train_small.py": "the trained checkpoints of data/",
    "python/cf_ops/clusterfusion.py": "the ancestor's calls, of one family's layers",
    "python/examples/checkpoints.py": "of one family's checkpoints",
    "python/examples/decode_ablation.py": "of one family's checkpoints",
    "python/examples/layer_vs_torch.py": "of one family's layer",
}

CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def model_types():
    with open(os.path.join(ROOT, FAMILIES, "families.def"), encoding="utf-8") as file:
        return re.findall(r"^CF_FAMILY\((\w+)\)$", file.read(), re.MULTILINE)


def code_of(path, text):
    """The lines of a file without its comments and docstrings: (number, line)."""
    if not path.endswith(".py"):
        text = CPP_COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text)
        return list(enumerate(text.split("\n"), 1))
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number in range(node.lineno, node.end_lineno + 1):
                lines[number - 1] = ""
    return [(number, re.sub(r"(^|\s)#.*", "", line)) for number, line in enumerate(lines, 1)]


def faults(root, names):
    """One line for each place that names a family."""
    # The name of a preset or of a data file names no family.
    pattern = re.compile(rf"(?<![\w./-])({'|'.join(names)})(?![\w-]|\.\d)")
    found = []
    for folder in FOLDERS:
        for directory, _, files in os.walk(os.path.join(root, folder)):
            for name in sorted(files):
                path = os.path.relpath(os.path.join(directory, name), root)
                if not re.search(r"\.(cpp|hpp|cu|cuh|def|py)$", name) or path.startswith(FAMILIES) or path in ALLOWED:
                    continue
                with open(os.path.join(root, path), encoding="utf-8") as file:
                    for number, line in code_of(path, file.read()):
                        if pattern.search(line):
                            found.append(f"{path}:{number}: {line.strip()}")
    return found


class Families(unittest.TestCase):
    def test_every_family_has_a_file(self):
        self.assertGreater(len(model_types()), 3)
        for name in model_types():
            self.assertTrue(os.path.exists(os.path.join(ROOT, FAMILIES, f"{name}.hpp")), name)

    def test_no_other_code_names_a_family(self):
        found = faults(ROOT, model_types())
        if found:
            self.fail(f"expected no family's name outside {FAMILIES}:\n" + "\n".join(found))

    def test_allowed_files_exist(self):
        for path in ALLOWED:
            self.assertTrue(os.path.exists(os.path.join(ROOT, path)), path)


class Finds(unittest.TestCase):
    def test_code_and_no_comment(self):
        with tempfile.TemporaryDirectory() as root:
            for path, text in {
                "core/a.cpp": '// llama\nif (type == ModelType::llama) f();\n/* llama */ g("llama-2-7b");\n',
                "python/b.py": '"""llama"""\nif kind == "llama":  # llama\n    pass\n',
            }.items():
                os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                    file.write(text)
            self.assertEqual(
                faults(root, ["llama"]),
                ["core/a.cpp:2: if (type == ModelType::llama) f();", 'python/b.py:2: if kind == "llama":'],
            )


if __name__ == "__main__":
    unittest.main()
