#!/usr/bin/env python3
"""Tests of the GPTQ packing and of the quantiser. They need numpy and h5py; those that need torch are skipped without
it."""

import contextlib
import importlib.util
import io
import json
import os
import sys
import tempfile
import unittest
from dataclasses import replace

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "golden", "tools")
sys.path.insert(0, GOLDEN)

import numpy as np

import golden_file
import gptq
import quantize_gptq
from model_config import Model
from quantize_gptq import Recipe, quantise

HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "safetensors"))

RNG = np.random.default_rng(3)
# Inputs that belong together, as a layer's do: rounding them one by one is not the best that there is.
X = RNG.standard_normal((256, 96)) @ RNG.standard_normal((96, 96)) * np.linspace(0.2, 3, 96)
HESSIAN = 2 * X.T @ X
WEIGHT = RNG.standard_normal((24, 96))


def dense(parts, recipe):
    return gptq.dequantise(parts, recipe.bits, recipe.checkpoint_format == "gptq_v2").astype(np.float64)


def output_error(parts, recipe):
    return np.linalg.norm(X @ (dense(parts, recipe) - WEIGHT).T)


class Calibration(unittest.TestCase):
    def windows(self, ids, **settings):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "ids.npy")
            np.save(path, ids)
            return quantize_gptq.windows(path, **({"vocab_size": 100, "samples": 3, "length": 4} | settings))

    def test_windows_are_spread_over_the_text(self):
        ids = self.windows(np.arange(24, dtype=np.int32))
        self.assertEqual(ids.tolist(), [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]])

    def test_what_is_no_text_is_refused(self):
        for ids, part in (
            (np.arange(3, dtype=np.int32), "at least the 4 ids of a window, got 3"),
            (np.array([], np.int32), "a row of at least 2 integers, got shape (0,)"),
            (np.array([1, 2, 3, 100]), "ids of 0 to 99, got 1 to 100"),
            (np.zeros((2, 8), np.int32), "a row of at least 2 integers, got shape (2, 8)"),
            (np.zeros(8), "of float64"),
        ):
            with self.assertRaises(quantize_gptq.Refusal) as refusal:
                self.windows(ids)
            self.assertIn(part, str(refusal.exception))


class Packing(unittest.TestCase):
    def test_words_hold_codes_low_bits_first(self):
        words = gptq.pack(np.arange(16).reshape(16, 1), 4, 0)
        self.assertEqual([hex(w) for w in words.view(np.uint32)[:, 0]], ["0x76543210", "0xfedcba98"])
        self.assertEqual(gptq.pack(np.array([[1, 2, 3, 255]]), 8, 1).view(np.uint32).tolist(), [[0xFF030201]])

    def test_unpack_is_the_inverse(self):
        for bits in (4, 8):
            for axis in (0, 1):
                codes = RNG.integers(0, 1 << bits, (16, 24))
                self.assertTrue(np.array_equal(gptq.unpack(gptq.pack(codes, bits, axis), bits, axis), codes))

    def test_dequantise_is_the_formula(self):
        for recipe in (Recipe(group_size=32), Recipe(bits=8, group_size=32, checkpoint_format="gptq_v2", sym=False)):
            parts = quantise(WEIGHT, None, recipe)
            parts["g_idx"] = RNG.permutation(parts["g_idx"])
            got, b = dense(parts, recipe), recipe.bits
            for n, k in [(0, 0), (5, 17), (23, 95), (7, 64)]:
                g = parts["g_idx"][k]
                q = parts["qweight"].view(np.uint32)[k * b // 32, n] >> (k * b % 32) & ((1 << b) - 1)
                z = parts["qzeros"].view(np.uint32)[g, n * b // 32] >> (n * b % 32) & ((1 << b) - 1)
                z += recipe.checkpoint_format == "gptq"
                self.assertEqual(got[n, k], float(parts["scales"][g, n]) * (int(q) - int(z)))


class Quantiser(unittest.TestCase):
    def test_round_to_nearest_is_within_half_a_step(self):
        for recipe in (
            Recipe(group_size=32, sym=False),
            Recipe(group_size=-1, sym=False, bits=8),
            Recipe(group_size=64),
        ):
            parts = quantise(WEIGHT, None, recipe)
            step = parts["scales"].astype(np.float64)[parts["g_idx"]].T
            error = np.abs(dense(parts, recipe) - WEIGHT) / step
            # The symmetric grid ends half a step before its largest weight; a zero is rounded itself.
            self.assertLessEqual(error.max(), 1.01)
            self.assertLess(np.median(error), 0.3)

    def test_gptq_beats_round_to_nearest_at_the_output(self):
        for recipe in (Recipe(group_size=32), Recipe(group_size=32, sym=False), Recipe(group_size=-1, sym=False)):
            nearest = output_error(quantise(WEIGHT, None, recipe), recipe)
            for desc_act in (False, True):
                made = replace(recipe, desc_act=desc_act)
                self.assertLess(output_error(quantise(WEIGHT, HESSIAN, made), made), nearest)

    def test_both_formats_hold_the_same_weights(self):
        v1, v2 = Recipe(group_size=32, sym=False), Recipe(group_size=32, sym=False, checkpoint_format="gptq_v2")
        a, b = (quantise(WEIGHT, HESSIAN, recipe) for recipe in (v1, v2))
        self.assertTrue(np.array_equal(dense(a, v1), dense(b, v2)))
        self.assertTrue(np.array_equal(gptq.unpack(a["qzeros"], 4, 1) + 1, gptq.unpack(b["qzeros"], 4, 1)))
        self.assertTrue((gptq.unpack(quantise(WEIGHT, None, Recipe())["qzeros"], 4, 1) == 7).all())

    def test_a_group_that_is_all_positive_has_a_zero_that_v1_can_store(self):
        for form in ("gptq", "gptq_v2"):
            recipe = Recipe(group_size=32, sym=False, checkpoint_format=form)
            error = dense(quantise(np.abs(WEIGHT) + 1, None, recipe), recipe) - np.abs(WEIGHT) - 1
            self.assertLess(np.abs(error).max(), 0.5)

    def test_desc_act_takes_the_largest_activations_first(self):
        parts = quantise(WEIGHT, HESSIAN, Recipe(group_size=32, desc_act=True))
        order = np.argsort(-np.diag(HESSIAN), kind="stable")
        self.assertTrue(np.array_equal(parts["g_idx"][order], np.arange(96) // 32))
        self.assertTrue(np.array_equal(quantise(WEIGHT, HESSIAN, Recipe())["g_idx"], np.zeros(96)))

    def test_inputs_that_are_never_met_and_weights_of_zero(self):
        hessian, weight = HESSIAN.copy(), WEIGHT.copy()
        hessian[5], hessian[:, 5], weight[3] = 0, 0, 0
        recipe = Recipe(group_size=32)
        got = dense(quantise(weight, hessian, recipe), recipe)
        self.assertTrue(np.isfinite(got).all())
        self.assertTrue((got[3] == 0).all())


class CommandLine(unittest.TestCase):
    def refused(self, *argv):
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            self.assertEqual(quantize_gptq.main(list(argv)), 2)
        self.assertEqual(stderr.getvalue().count("\n"), 1)
        return stderr.getvalue()

    def test_bad_arguments_are_refused_in_one_line(self):
        with tempfile.TemporaryDirectory() as out:
            base = ["--model", out, "--out", os.path.join(out, "x")]
            self.assertIn("--group must be -1 or at least 1, got 0", self.refused(*base, "--group", "0"))
            self.assertIn("--bits: invalid choice", self.refused(*base, "--bits", "3"))
            self.assertIn("--desc-act excludes --rtn", self.refused(*base, "--desc-act", "--rtn"))
            self.assertIn("--modules must be among", self.refused(*base, "--modules", "mlp"))

    @unittest.skipUnless(HAS_TORCH, "needs torch, transformers and safetensors")
    def test_a_checkpoint_is_written_and_dumped(self):
        import dump_hf
        import make_checkpoints

        model = Model(64, 2, 2, 128, vocab_size=32, max_position_embeddings=64)
        with tempfile.TemporaryDirectory() as directory:
            source = make_checkpoints.write(make_checkpoints.Spec("source", "bfloat16", model), directory, "test")
            with open(os.path.join(source, "tokenizer.json"), "w", encoding="utf-8") as file:
                file.write("a tokenizer")
            out = os.path.join(directory, "out")
            argv = ["--model", source, "--out", out, "--group", "32", "--asym", "--samples", "2", "--format", "gptq_v2"]
            self.assertEqual(quantize_gptq.main(argv), 0)
            with open(os.path.join(out, "quantize_config.json"), encoding="utf-8") as file:
                self.assertEqual(json.load(file)["checkpoint_format"], "gptq_v2")
            with open(os.path.join(out, "tokenizer.json"), encoding="utf-8") as file:
                self.assertEqual(file.read(), "a tokenizer")
            dump = os.path.join(directory, "x.h5")
            self.assertEqual(dump_hf.main(["--model", out, "--layer", "1", "--kv-len", "5", "--out", dump]), 0)
            with dump_hf.read_sealed(dump) as file:
                self.assertEqual(golden_file.attributes_of(file)["weights"], "checkpoint")
                self.assertEqual(file["taps/float64/mlp.dense_4h_to_h.weight"].shape, (64, 128))
                kept = {name for name in file["taps/float64"] if not name.endswith(".weight")}
                self.assertEqual(len(file["taps/float64"]), len(kept) + 4)
            thin = ["--model", out, "--layer", "1", "--kv-len", "5", "--no-dequantised-weights", "--out", dump]
            self.assertEqual(dump_hf.main(thin), 0)
            with dump_hf.read_sealed(dump) as file:
                self.assertEqual(set(file["taps/float64"]), kept)
            self.assertIn("no such directory", self.refused("--model", out + "x", "--out", source))
            self.assertIn("is quantised already", self.refused("--model", out, "--out", source))

    @unittest.skipUnless(HAS_TORCH, "needs torch, transformers and safetensors")
    def test_a_conv1d_is_packed_as_a_linear(self):
        import dump_hf
        import hf_model

        source = os.path.join(GOLDEN, os.pardir, os.pardir, "data", "checkpoints", "gpt2-d64")
        with tempfile.TemporaryDirectory() as directory:
            out = os.path.join(directory, "out")
            base = ["--model", source, "--out", out, "--group", "32", "--asym"]
            self.assertIn("--length must be at most the model's 320", self.refused(*base, "--length", "321"))
            self.assertEqual(quantize_gptq.main([*base, "--desc-act", "--samples", "2"]), 0)
            checkpoint, original = hf_model.Checkpoint(out), hf_model.Checkpoint(source)
            stored, dense, _ = checkpoint.layer(1)
            self.assertEqual(stored["attn.c_attn.qweight"].shape, (128 // 8, 3 * 128))
            self.assertEqual(stored["mlp.c_proj.g_idx"].shape, (192,))
            for name, weight in original.layer(1)[1].items():
                if name.rpartition(".")[0] in checkpoint.gptq.modules and name.endswith("weight"):
                    self.assertLess(np.linalg.norm(dense[name] - weight), 0.2 * np.linalg.norm(weight), name)
            dump = os.path.join(directory, "x.h5")
            self.assertEqual(dump_hf.main(["--model", out, "--layer", "1", "--kv-len", "5", "--out", dump]), 0)
            with dump_hf.read_sealed(dump) as file:
                weight = file["taps/float64/attn.c_attn.weight"][()]
            self.assertTrue(np.array_equal(weight, dense["attn.c_attn.weight"].T))


if __name__ == "__main__":
    unittest.main()
