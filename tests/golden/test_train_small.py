#!/usr/bin/env python3
"""Tests of train_small.py. Needs numpy; what needs torch and tokenizers is skipped without them."""

import contextlib
import importlib.util
import io
import json
import os
import sys
import tempfile
import unittest

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "golden")
sys.path.insert(0, GOLDEN)

import numpy as np

import neox
import train_small

HAS_ALL = all(importlib.util.find_spec(name) for name in train_small.PACKAGES)


def run(*argv):
    """The program's exit status and what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return train_small.main(list(argv)), said.getvalue()


class Parts(unittest.TestCase):
    def test_the_model_has_three_million_parameters_and_seven_megabytes(self):
        model = train_small.SIZES["small"].model
        self.assertEqual((model.vocab_size, model.head_dim, model.rotary_pct), (2048, 64, 0.25))
        self.assertEqual((model.hidden_act, model.use_parallel_residual), ("gelu", True))
        self.assertTrue(model.tie_word_embeddings)
        parameters = sum(int(np.prod(shape)) for shape in neox.model_shapes(model).values())
        self.assertTrue(3.4e6 < parameters < 3.5e6, parameters)
        self.assertLess(2 * parameters + 10_000, 7e6)
        self.assertEqual(train_small.SIZES["small"].held_out_tokens, 65536)

    def test_sources_are_sorted_and_bounded(self):
        with tempfile.TemporaryDirectory() as folder:
            contents = {
                "b.py": b"b = 1",
                "a/z.py": b"z = 2",
                "a/test/t.py": b"t",
                "site-packages/p.py": b"p",
                "latin.py": b"# \xe9",
                "empty.py": b"\n",
                "c.txt": b"text",
                "large.py": b"x" * 100,
            }
            for path, content in contents.items():
                path = os.path.join(folder, path)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(content)
            every = [("a/z.py", "z = 2"), ("b.py", "b = 1"), ("large.py", "x" * 100)]
            self.assertEqual(train_small.sources(folder, 1000), every)
            self.assertEqual(train_small.sources(folder, 50), every[:2])

    def test_a_tenth_is_held_out_whatever_else_there_is(self):
        share = np.mean([train_small.is_held_out(f"package/module_{i}.py") for i in range(5000)])
        self.assertAlmostEqual(share, 26 / 256, delta=0.015)
        self.assertEqual([train_small.is_held_out(path) for path in ("ast.py", "json/decoder.py")], [False, False])

    def test_learning_rates(self):
        rates = [train_small.rate_at(step, 100, 1.0) for step in range(100)]
        self.assertEqual((rates[0], rates[4], rates[5]), (0.2, 1.0, 1.0))
        self.assertEqual(rates[5:], sorted(rates[5:], reverse=True))
        self.assertAlmostEqual(rates[99], 0.1, delta=0.001)
        self.assertEqual(train_small.rate_at(0, 1, 1.0), 1.0)

    def test_refusals(self):
        with tempfile.TemporaryDirectory() as directory:
            for argv, words in [
                ([], "the following arguments are required: --out"),
                (["--out", directory], "is there already"),
                (["--out", f"{directory}/a/b"], "a: no such directory"),
                (["--out", f"{directory}/a", "--steps", "0"], "got '0'"),
                (["--out", f"{directory}/a", "--size", "huge"], "invalid choice: 'huge'"),
            ]:
                with self.subTest(argv=argv):
                    status, said = run(*argv)
                    self.assertEqual((status, said.count("\n")), (2, 1), said)
                    self.assertIn(words, said)
            self.assertEqual(os.listdir(directory), [])


@unittest.skipUnless(HAS_ALL, f"needs {', '.join(train_small.PACKAGES)}")
class Training(unittest.TestCase):
    def test_two_steps(self):
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as directory:
            out = os.path.join(directory, "tiny")
            status, said = run("--size", "tiny", "--steps", "2", "--device", "cpu", "--seed", "3", "--out", out)
            self.assertEqual(status, 0, said)
            self.assertIn("tiny: ", said)
            self.assertEqual(os.listdir(directory), ["tiny"])
            files = ["config.json", "generation_config.json", "held_out.npy", "model.safetensors", "provenance.json"]
            self.assertEqual(sorted(os.listdir(out)), [*files, "tokenizer.json"])

            model = train_small.SIZES["tiny"].model
            with open(os.path.join(out, "config.json"), encoding="utf-8") as file:
                self.assertEqual(neox.parse_config(file.read(), "config.json"), model)
            hf = AutoModelForCausalLM.from_pretrained(out, torch_dtype="auto")
            self.assertEqual(hf.dtype, torch.float16)
            ids = np.load(os.path.join(out, "held_out.npy"))
            self.assertEqual((ids.dtype, ids.shape), (np.int32, (2048,)))
            self.assertTrue(0 <= ids.min() and ids.max() < model.vocab_size)
            tokenizer = Tokenizer.from_file(os.path.join(out, "tokenizer.json"))
            self.assertEqual(tokenizer.token_to_id("<|endoftext|>"), 0)
            for text in ("def main():\n    return 1\n", "\u00e9\u4e2d\t \x00"):
                self.assertEqual(tokenizer.decode(tokenizer.encode(text).ids), text)

            with open(os.path.join(out, "provenance.json"), encoding="utf-8") as file:
                about = json.load(file)
            self.assertEqual((about["steps"], about["seed"], about["sources"]["licence"]), (2, 3, "PSF-2.0"))
            self.assertEqual([loss["step"] for loss in about["losses_in_nats"]], [1, 2])
            self.assertEqual(about["training"]["parameters"], hf.num_parameters())
            # What the stored weights say of the stored tokens is what the provenance says.
            loss = train_small.mean_loss(hf.float(), torch.from_numpy(ids).long(), model.max_position_embeddings)
            self.assertAlmostEqual(loss, about["held_out_loss_of_the_rounded_weights"], delta=1e-5)


if __name__ == "__main__":
    unittest.main()
