#!/usr/bin/env python3
"""Tests of the scores of Hugging Face's model. They need numpy and h5py; the one that needs torch is skipped without
it."""

import contextlib
import importlib.util
import io
import json
import math
import os
import sys
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir)
sys.path.insert(0, os.path.join(ROOT, "golden", "tools"))

import numpy as np

import eval_hf

HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "safetensors"))
MODELS = [os.path.join(ROOT, "data/checkpoints", name) for name in ("stdlib-4m", "stdlib-llama-2m")]
MODEL = MODELS[0]
TOKENS = os.path.join(MODEL, "held_out.npy")


def run(*argv):
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = eval_hf.main([str(word) for word in argv])
    return code, out.getvalue(), error.getvalue()


def mean(value, error=0.0):
    return {"mean": value, "error": error}


class Parts(unittest.TestCase):
    def test_each_window_scores_what_the_one_before_has_not(self):
        self.assertEqual(eval_hf.windows(10, 4, 2), [(0, 4, 1), (2, 6, 4), (4, 8, 6), (6, 10, 8)])
        self.assertEqual(eval_hf.windows(5, 9, 9), [(0, 5, 1)])
        # A window that begins where the last one ended predicts nothing for its own first id.
        self.assertEqual(eval_hf.windows(10, 4, 4), [(0, 4, 1), (4, 8, 5), (8, 10, 9)])
        self.assertEqual(eval_hf.windows(9, 4, 4), [(0, 4, 1), (4, 8, 5)])

    def test_scores_are_the_formulas(self):
        reference = np.log([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
        ours = np.log([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]) + 3  # a shift changes no probability
        scores = eval_hf.Scores()
        scores.add(ours[:1], reference[:1], np.array([0]))
        scores.add(ours[1:], reference[1:], np.array([1]))
        figures = scores.figures()
        self.assertEqual(figures["positions"], 2)
        divergence = 0.5 * math.log(2) - 0.25 * math.log(2)
        self.assertAlmostEqual(figures["kl"]["mean"], divergence / 2, 12)
        self.assertAlmostEqual(figures["kl"]["error"], divergence / 2, 12)
        self.assertAlmostEqual(figures["kl_max"], divergence, 12)
        self.assertAlmostEqual(figures["nll"]["mean"], (math.log(4) - math.log(0.8)) / 2, 12)
        self.assertAlmostEqual(figures["log_perplexity_ratio"]["mean"], math.log(2) / 2, 12)
        self.assertAlmostEqual(figures["reference_perplexity"]["mean"], math.sqrt(2 / 0.8), 12)
        self.assertEqual(figures["top_1_percent"], 50)
        self.assertAlmostEqual(figures["logits_max_error"], 3 + math.log(2), 12)
        norm = math.sqrt((reference**2).sum())
        self.assertAlmostEqual(figures["logits_rel_l2"], math.sqrt(((ours - reference) ** 2).sum()) / norm, 12)

    def test_worse_is_beyond_chance_and_beyond_every_run(self):
        def figures(kl, nll, ratio):
            return {"kl": kl, "nll": nll, "log_perplexity_ratio": ratio}

        theirs = {
            "float16:eager": figures(mean(1.0, 0.1), mean(2.0, 0.1), mean(-0.1, 0.01)),
            "float16:sdpa": figures(mean(2.0, 0.1), mean(2.0, 0.1), mean(0.1, 0.01)),
        }
        same = mean(0.1)
        self.assertEqual(eval_hf.worse(figures(mean(2.2, 0.1), mean(2.1, 0.1), mean(0.12, 0.01)), theirs), [])
        self.assertEqual(eval_hf.worse(figures(mean(2.4, 0.1), mean(2.0), same), theirs), ["kl"])
        self.assertEqual(eval_hf.worse(figures(mean(0.5), mean(2.5), same), theirs), ["nll"])
        self.assertEqual(eval_hf.worse(figures(mean(0.5), mean(2.0), mean(0.13)), theirs), ["log_perplexity_ratio"])


class Refusals(unittest.TestCase):
    def refused(self, part, *argv):
        code, out, error = run(*argv)
        self.assertEqual((code, out, error.count("\n")), (2, "", 1), error)
        self.assertIn(part, error)

    def test_arguments(self):
        common = ("--model", MODEL, "--tokens", TOKENS)
        self.refused("--tokens", "--model", MODEL)
        self.refused("--stride: expected at most --context 8, got 9", *common, "--context", 8, "--stride", 9)
        self.refused("--runs: expected float16", *common, "--runs", "float16")
        self.refused("got 'int8:eager'", *common, "--runs", "float16:sdpa,int8:eager")

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "file")
            figures = {"positions": 7, "kl": mean(1.0), "nll": mean(2.0), "log_perplexity_ratio": mean(0.0)}
            for report, part in (
                ("no JSON", "expected a report of cf-model eval"),
                (json.dumps({"figures": {"float16": {"positions": 8, "nll": mean(1.0)}}}), "expected a report"),
                (json.dumps({"figures": {"float16": figures}}), "float16: expected 8 positions, got 7"),
            ):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(report)
                with self.assertRaises(eval_hf.Refusal) as refusal:
                    eval_hf.read_ours(path, 8)
                self.assertIn(part, str(refusal.exception))


@unittest.skipUnless(HAS_TORCH, "needs torch, transformers and safetensors")
class Whole(unittest.TestCase):
    def test_trained_models_in_float32(self):
        for model in MODELS:
            with self.subTest(model=model), tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "hf.json")
                code, out, error = run(
                    "--model", model, "--tokens", TOKENS, "--context", 64, "--stride", 32, "--limit", 200,
                    "--runs", "float32:sdpa", "--device", "cpu", "--json", path,
                )  # fmt: skip
                self.assertEqual((code, error), (0, ""))
                self.assertIn("| kl | ", out)
                with open(path, encoding="utf-8") as file:
                    figures = json.load(file)["figures"]["float32:sdpa"]
                self.assertEqual(figures["positions"], 199)
                self.assertLess(figures["kl"]["mean"], 1e-9)
                self.assertLess(figures["logits_rel_l2"], 1e-5)
                # The text is the model's own kind.
                self.assertLess(figures["nll"]["mean"], 3)


if __name__ == "__main__":
    unittest.main()
