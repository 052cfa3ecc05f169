#!/usr/bin/env python3
"""Tests of data/sampling_cases.json and of what makes it. Needs numpy; tests that need torch are skipped without it."""

import contextlib
import importlib.util
import io
import json
import os
import sys
import tempfile
import unittest
from unittest import mock

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir)
sys.path.insert(0, os.path.join(ROOT, "golden", "tools"))

import numpy as np

import console
import make_sampling_cases as maker

HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "safetensors", "h5py"))
NEEDS_TORCH = "needs torch, transformers, safetensors and h5py"
PATH = os.path.join(ROOT, "data", "sampling_cases.json")


def stored():
    with open(PATH, encoding="utf-8") as file:
        return json.load(file)


class SamplingCases(unittest.TestCase):
    def test_the_file_has_every_case_and_says_where_it_comes_from(self):
        content = stored()
        self.assertEqual(content["about"]["command"], maker.COMMAND)
        self.assertLessEqual({"torch", "transformers", "numpy"}, set(content["about"]["versions"]))
        self.assertEqual([case["name"] for case in content["cases"]], list(maker.CASES))
        for case in content["cases"]:
            vocabulary, scale, given = maker.CASES[case["name"]]
            wanted = maker.NEUTRAL | given | {"vocabulary": vocabulary, "scale": scale, "history": maker.HISTORY}
            self.assertEqual({key: case[key] for key in wanted}, wanted)
            self.assertAlmostEqual(sum(case["probabilities"]), 1, delta=1e-9)
        self.assertLess(os.path.getsize(PATH), 200_000)

    def test_missing_packages_are_named_in_one_line(self):
        with tempfile.TemporaryDirectory() as folder:
            out, stderr = os.path.join(folder, "x.json"), io.StringIO()
            with mock.patch.object(console.importlib.util, "find_spec", return_value=None):
                with contextlib.redirect_stderr(stderr):
                    self.assertEqual(maker.main(["--out", out]), 2)
            self.assertIn("needs torch, transformers", stderr.getvalue())
            self.assertEqual(stderr.getvalue().count("\n"), 1)
            self.assertFalse(os.path.exists(out))

    @unittest.skipUnless(HAS_TORCH, NEEDS_TORCH)
    def test_made_again_the_cases_are_the_same(self):
        for again, case in zip(maker.make_cases()["cases"], stored()["cases"], strict=True):
            with self.subTest(case["name"]):
                np.testing.assert_allclose(again.pop("probabilities"), case.pop("probabilities"), rtol=1e-9)
                self.assertEqual(again, case)

    @unittest.skipUnless(HAS_TORCH, NEEDS_TORCH)
    def test_a_cut_off_on_the_edge_is_refused(self):
        logits = np.sort(maker.logits_of(97, 1, 1).astype(np.float64))
        ratio, sum_above = np.exp(logits[-9] - logits[-1]), np.exp(logits[-9:]).sum() / np.exp(logits).sum()
        for given in ({"min_p": float(ratio)}, {"top_p": float(sum_above)}):
            with mock.patch.object(maker, "CASES", {"edge": (97, 1, given)}):
                with self.assertRaisesRegex(maker.Refusal, "a cut-off lies within"):
                    maker.make_cases()


if __name__ == "__main__":
    unittest.main()
