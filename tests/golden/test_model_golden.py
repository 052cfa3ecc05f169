#!/usr/bin/env python3
"""Tests of golden files of whole models. Needs numpy and h5py; tests that need torch are skipped without it."""

import contextlib
import importlib.util
import io
import json
import os
import sys
import tempfile
import unittest
from dataclasses import replace
from unittest import mock

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "golden", "tools")
sys.path.insert(0, GOLDEN)

import numpy as np

import dump_hf
import golden_file
import model_config
import model_golden
import numpy_model
import procedural
from model_config import Model

HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "safetensors"))
NEEDS_TORCH = "needs torch, transformers and safetensors"

MODEL = Model(32, 2, 2, 64, vocab_size=24, max_position_embeddings=16)


def run(*argv):
    """dump_hf's exit status and what it printed to stderr."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        return dump_hf.main(["--whole-model", *argv]), stderr.getvalue()


def tables(model, tokens):
    """cos and sin (tokens, rotary_dim / 2)."""
    half = model.rotary_dim // 2
    angle = np.arange(tokens)[:, None] * model.rope_theta ** -(np.arange(half) / half)
    return np.cos(angle), np.sin(angle)


def reference(model, ids, seed=1, dtype="float16"):
    weights = {
        name: procedural.weight(dtype, shape, seed, name) for name, shape in model_config.model_shapes(model).items()
    }
    return numpy_model.reference_model(model, weights, np.array(ids), *tables(model, len(ids)), dtype), weights


class Reference(unittest.TestCase):
    """The model in numpy, against which every dump is checked."""

    def test_a_position_depends_on_those_before_it(self):
        for parallel in (True, False):
            model = replace(MODEL, use_parallel_residual=parallel)
            (taps, logits), _ = reference(model, [3, 1, 4, 1, 5])
            (before, first), _ = reference(model, [3, 1, 4])
            self.assertLess(numpy_model.relative_l2(first, logits[:3]), 1e-14)
            self.assertLess(numpy_model.relative_l2(before["layers.1.output"], taps["layers.1.output"][:3]), 1e-14)
            (_, other), _ = reference(model, [3, 1, 4, 2, 5])
            self.assertGreater(numpy_model.relative_l2(other[4], logits[4]), 1e-3)

    def test_it_is_the_layers_between_the_embedding_and_the_head(self):
        (taps, logits), weights = reference(MODEL, [7, 7, 0], dtype="bfloat16")
        self.assertEqual(list(taps), ["embed_in", "layers.0.output", "layers.1.output", "final_layer_norm"])
        rows = procedural.widen(weights["gpt_neox.embed_in.weight"], "bfloat16")[[7, 7, 0]]
        self.assertTrue(np.array_equal(taps["embed_in"], rows))
        gamma, beta = (
            procedural.widen(weights[f"gpt_neox.final_layer_norm.{part}"], "bfloat16") for part in ("weight", "bias")
        )
        normed = model_config.layernorm(taps["layers.1.output"], gamma, beta, MODEL.layer_norm_eps)
        self.assertTrue(np.array_equal(taps["final_layer_norm"], normed))
        expected = normed @ procedural.widen(weights["embed_out.weight"], "bfloat16").T
        self.assertLess(numpy_model.relative_l2(logits, expected), 1e-15)

    def test_tied_embeddings_are_the_head(self):
        tied = replace(MODEL, tie_word_embeddings=True)
        (taps, logits), weights = reference(tied, [1, 2])
        self.assertNotIn("embed_out.weight", weights)
        expected = taps["final_layer_norm"] @ procedural.widen(weights["gpt_neox.embed_in.weight"], "float16").T
        self.assertLess(numpy_model.relative_l2(logits, expected), 1e-15)


class TopLogits(unittest.TestCase):
    def test_the_lowest_of_equal_ids_is_first(self):
        logits = np.array([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
        self.assertEqual(model_golden.top_ids(logits, 3).tolist(), [[1, 2, 3], [0, 1, 2]])

    def test_log_sum_exp_does_not_overflow(self):
        got = model_golden.log_sum_exp(np.array([[1e4, 1e4], [-1e4, -1e4 - 1]]))
        self.assertTrue(np.allclose(got, [1e4 + np.log(2), -1e4 + np.log1p(np.exp(-1))], rtol=1e-15))


class Arguments(unittest.TestCase):
    def test_command_line(self):
        with tempfile.TemporaryDirectory() as directory:
            out = os.path.join(directory, "x.h5")
            preset = ["--preset", "pythia-14m", "--out", out]
            for argv, words in [
                ([*preset, "--kv-len", "4"], "--kv-len is of one layer's step, got it with --whole-model"),
                ([*preset, "--weights", "stored"], "--weights is of one layer's step"),
                ([*preset, "--layers", "7"], "--layers must be at most 6, got 7"),
                (["--model", directory, "--out", out, "--layers", "1"], "--layers needs --preset, got --model"),
                ([*preset, "--prompt-ids", "1,50304"], "--prompt-ids must be below vocab_size 50304, got 50304"),
                ([*preset, "--prompt-ids", "1,,2"], "got '1,,2'"),
                ([*preset, "--prompt-ids", "1", "--prompt-len", "2"], "not allowed with argument"),
                ([*preset, "--new-tokens", "0"], "got '0'"),
                ([*preset, "--prompt-len", "2040", "--new-tokens", "10"], "must be at most 2049 tokens, the last of"),
                ([*preset, "--top", "50305"], "--top must be at most vocab_size 50304, got 50305"),
                ([*preset, "--taps-of", "0,6"], "--taps-of must be 0 to 5, got 6"),
                ([*preset, "--taps-of", "all"], "got 'all'"),
                ([*preset, "--out", f"{out}/x/y"], "no such directory"),
            ]:
                with self.subTest(argv=argv):
                    status, said = run(*argv)
                    self.assertEqual((status, said.count("\n")), (2, 1), said)
                    self.assertIn(words, said)
            self.assertEqual(os.listdir(directory), [])


@unittest.skipUnless(HAS_TORCH, NEEDS_TORCH)
class HuggingFace(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        self.out = os.path.join(self.directory, "x.h5")

    def checkpoint(self, model=MODEL, dtype="float16", **options):
        import make_checkpoints

        return make_checkpoints.write(make_checkpoints.Spec("tiny", dtype, model, **options), self.directory, "test")

    def dump(self, *argv):
        self.assertEqual(run(*argv, "--out", self.out), (0, ""))
        return golden_file.read_sealed(self.out)

    def test_the_ids_are_greedy(self):
        path = self.checkpoint()
        with self.dump("--model", path, "--prompt-ids", "3,1,4", "--new-tokens", "6") as file:
            about = golden_file.attributes_of(file)
            self.assertEqual((about["schema"], about["schema_version"]), ("cf-golden-model", 1))
            self.assertEqual(
                (about["prompt_len"], about["weights"], about["weights_checkpoint"]), (3, "checkpoint", "tiny")
            )
            ids = file["ids"][()]
            self.assertEqual((ids.dtype, ids.shape, ids[:3].tolist()), (np.int32, (9,), [3, 1, 4]))
            logits = file["logits/float64"]
            self.assertEqual((logits.dtype, logits.shape), (np.float64, (8, 24)))
            self.assertEqual(logits[2:].argmax(1).tolist(), ids[3:].tolist())
            for name, implementation in (("float16_eager", "eager"), ("float16_sdpa", "sdpa")):
                low = file[f"logits/{name}"]
                self.assertEqual((low.dtype, low.shape), (np.float16, (8, 24)))
                self.assertLess(numpy_model.relative_l2(low[()].astype(np.float64), logits[()]), 0.05)
                for group in (low, file[f"taps/{name}"]):
                    attributes = golden_file.attributes_of(group)
                    self.assertEqual(
                        (attributes["dtype"], attributes["attn_implementation"]), ("float16", implementation)
                    )
                    self.assertTrue(attributes["device"])
            taps = ["embed_in", "final_layer_norm", "layers.0.output", "layers.1.output"]
            self.assertEqual(sorted(file["taps/float64"]), taps)
            self.assertEqual(file["taps/float64/embed_in"].shape, (8, 32))
            self.assertEqual(file["inputs/cos"].shape, (8, 2))

    def test_top_logits_are_those_of_all(self):
        path = self.checkpoint(dtype="bfloat16")
        base = ["--model", path, "--prompt-len", "3", "--new-tokens", "4", "--seed", "2"]
        with self.dump(*base) as file:
            ids = file["ids"][()]
            every = {
                name: procedural.widen(logits[()], "bfloat16" if logits.dtype == np.uint16 else "float64")
                for name, logits in file["logits"].items()
            }
        with self.dump(*base, "--top", "5", "--taps-of", "none") as file:
            self.assertNotIn("taps", file)
            self.assertEqual(file["ids"][()].tolist(), ids.tolist())
            self.assertEqual(list(file["logits"]), ["bfloat16_eager", "bfloat16_sdpa", "float64"])
            for name, group in file["logits"].items():
                best = group["ids"][()]
                self.assertEqual(best.tolist(), np.argsort(-every["float64"], 1, kind="stable")[:, :5].tolist())
                values = procedural.widen(group["values"][()], golden_file.attributes_of(group)["dtype"])
                self.assertTrue(np.array_equal(values, np.take_along_axis(every[name], best, 1)))
                expected = np.log(np.exp(every[name]).sum(1))
                self.assertTrue(np.allclose(group["log_sum_exp"][()], expected, rtol=1e-14), name)
            attributes = golden_file.attributes_of(file["logits/bfloat16_eager/values"])
            self.assertEqual(attributes, {"dtype": "bfloat16"})

    def test_checkpoints_of_every_form(self):
        import quantize_gptq

        tied = replace(MODEL, tie_word_embeddings=True)
        for model, options in ((tied, {}), (MODEL, {"max_shard_size": "10KB"}), (MODEL, {"dtype": "float32"})):
            path = self.checkpoint(model, **options)
            with self.dump("--model", path, "--new-tokens", "2") as file:
                self.assertEqual(file["logits/float64"].shape, (6, 24))
                self.assertEqual(json.loads(golden_file.attributes_of(file)["config"])["vocab_size"], 24)
        source = self.checkpoint()
        quantised = os.path.join(self.directory, "gptq")
        self.assertEqual(quantize_gptq.main(["--model", source, "--out", quantised, "--group", "16", "--rtn"]), 0)
        with self.dump("--model", quantised, "--taps-of", "1") as file, self.dump("--model", source) as dense:
            self.assertNotEqual(file.attrs["weights_checksum"], dense.attrs["weights_checksum"])
            self.assertEqual(sorted(file["taps/float64"]), ["embed_in", "final_layer_norm", "layers.1.output"])

    def test_some_layers_of_a_preset(self):
        with self.dump("--preset", "pythia-14m", "--layers", "2", "--prompt-len", "2", "--new-tokens", "2") as file:
            about = golden_file.attributes_of(file)
            self.assertEqual(json.loads(about["config"])["num_hidden_layers"], 2)
            self.assertEqual((about["weights"], about["model"]), ("procedural", "pythia-14m"))
            self.assertNotIn("weights_checkpoint", about)
            self.assertEqual(file["logits/float64/values"].shape, (3, 64))
            shapes = model_config.model_shapes(replace(model_config.PRESETS["pythia-14m"], num_hidden_layers=2))
            weights = {name: procedural.weight("float16", shape, 0, name) for name, shape in shapes.items()}
            self.assertEqual(int(about["weights_checksum"]), procedural.weights_checksum(weights))

    def test_a_wrong_run_is_refused(self):
        import hf_model

        path = self.checkpoint()
        whole, decode = hf_model.run_model, hf_model.generate

        def other_tap(hf, model, ids):
            taps, made = whole(hf, model, ids)
            taps["layers.0.output"][1, 3] += 1e-6
            return taps, made

        def other_id(hf, prompt, new_tokens):
            ids, logits = decode(hf, prompt, new_tokens)
            ids[-1] = (ids[-1] + 1) % MODEL.vocab_size
            return ids, logits

        def other_logits(hf, prompt, new_tokens):
            ids, logits = decode(hf, prompt, new_tokens)
            return ids, logits * (1 + 1e-9)

        for name, wrong, words in [
            ("run_model", other_tap, "float64: tap layers.0.output must be within 1e-10 of its reference"),
            ("generate", other_id, "one pass must choose the ids of the run with a cache"),
            ("generate", other_logits, "float64 with a cache: tap logits must be within 1e-10"),
        ]:
            with self.subTest(words=words), mock.patch.object(model_golden, name, wrong):
                status, said = run("--model", path, "--out", self.out)
                self.assertEqual((status, said.count("\n")), (2, 1), said)
                self.assertIn(words, said)
                self.assertFalse(os.path.exists(self.out))


if __name__ == "__main__":
    unittest.main()
