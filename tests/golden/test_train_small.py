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

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "golden", "tools")
sys.path.insert(0, GOLDEN)

import numpy as np

import model_config
import train_small

HAS_ALL = all(importlib.util.find_spec(name) for name in train_small.PACKAGES)


def run(*argv):
    """The program's exit status and what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return train_small.main(list(argv)), said.getvalue()


class Parts(unittest.TestCase):
    def test_parameters(self):
        for family, expected in (("gpt_neox", 3421184), ("llama", 1967808)):
            size = train_small.SIZES[family]["small"]
            model = size.model
            self.assertEqual((model.model_type, model.vocab_size, model.head_dim), (family, 2048, 64))
            self.assertTrue(model.tie_word_embeddings)
            parameters = sum(int(np.prod(shape)) for shape in model_config.model_shapes(model).values())
            self.assertEqual(parameters, expected)
            self.assertEqual(size.held_out_tokens, 65536)
        of_neox, of_llama = (train_small.SIZES[family]["small"].model for family in ("gpt_neox", "llama"))
        self.assertEqual((of_neox.rotary_fraction, of_neox.hidden_act, of_neox.use_parallel_residual), (0.25, "gelu", True))
        self.assertEqual((of_llama.num_attention_heads, of_llama.kv_heads, of_llama.rotary_dim), (3, 1, 64))

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
                (["--out", f"{directory}/a", "--family", "gpt2"], "invalid choice: 'gpt2'"),
                (["--out", f"{directory}/a", "--batch", "0"], "got '0'"),
            ]:
                with self.subTest(argv=argv):
                    status, said = run(*argv)
                    self.assertEqual((status, said.count("\n")), (2, 1), said)
                    self.assertIn(words, said)
            self.assertEqual(os.listdir(directory), [])


@unittest.skipUnless(HAS_ALL, f"needs {', '.join(train_small.PACKAGES)}")
class Training(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name

    def train(self, family, name, *argv):
        """The directory of a tiny model after two steps."""
        out = os.path.join(self.directory, name)
        tiny = ("--family", family, "--size", "tiny", "--steps", "2", "--device", "cpu", "--seed", "3")
        status, said = run(*tiny, *argv, "--out", out)
        self.assertEqual(status, 0, said)
        self.assertIn(f"{name}: ", said)
        return out

    def check(self, family, out, batch, held_out):
        """Checks a tiny model's directory, and its provenance by the held-out ids of a directory."""
        import torch
        from transformers import AutoModelForCausalLM

        model = train_small.SIZES[family]["tiny"].model
        with open(os.path.join(out, "config.json"), encoding="utf-8") as file:
            self.assertEqual(model_config.parse_config(file.read(), "config.json"), model)
        hf = AutoModelForCausalLM.from_pretrained(out, torch_dtype="auto")
        self.assertEqual(hf.dtype, torch.float16)
        ids = np.load(os.path.join(held_out, "held_out.npy"))
        self.assertEqual((ids.dtype, ids.shape), (np.uint16, (2048,)))
        self.assertTrue(0 <= ids.min() and ids.max() < model.vocab_size)
        with open(os.path.join(out, "provenance.json"), encoding="utf-8") as file:
            about = json.load(file)
        self.assertEqual((about["steps"], about["seed"], about["sources"]["licence"]), (2, 3, "PSF-2.0"))
        self.assertEqual((about["training"]["family"], about["training"]["tokens_of_a_step"]), (family, 32 * batch))
        self.assertEqual([loss["step"] for loss in about["losses_in_nats"]], [1, 2])
        self.assertEqual(about["training"]["parameters"], hf.num_parameters())
        # What the stored weights say of the stored tokens is what the provenance says.
        loss = train_small.mean_loss(hf.float(), torch.from_numpy(ids.astype(np.int64)), model.max_position_embeddings)
        self.assertAlmostEqual(loss, about["held_out_loss_of_the_rounded_weights"], delta=1e-5)
        return about

    def test_two_steps(self):
        from tokenizers import Tokenizer

        out = self.train("gpt_neox", "tiny")
        self.assertEqual(os.listdir(self.directory), ["tiny"])
        files = ["config.json", "generation_config.json", "held_out.npy", "model.safetensors", "provenance.json"]
        self.assertEqual(sorted(os.listdir(out)), [*files, "tokenizer.json"])
        about = self.check("gpt_neox", out, 8, out)
        self.assertNotIn("tokenizer_and_held_out_ids", about)
        tokenizer = Tokenizer.from_file(os.path.join(out, "tokenizer.json"))
        self.assertEqual(tokenizer.token_to_id("<|endoftext|>"), 0)
        for text in ("def main():\n    return 1\n", "\u00e9\u4e2d\t \x00"):
            self.assertEqual(tokenizer.decode(tokenizer.encode(text).ids), text)

    def test_a_model_beside_another_has_its_tokenizer_and_its_held_out_ids(self):
        first = self.train("gpt_neox", "first")
        out = self.train("llama", "second", "--batch", "2", "--text-of", first)
        files = ["config.json", "generation_config.json", "model.safetensors", "provenance.json", "tokenizer.json"]
        self.assertEqual(sorted(os.listdir(out)), files)
        about = self.check("llama", out, 2, first)
        self.assertEqual(about["tokenizer_and_held_out_ids"], "first")
        contents = []
        for folder in (first, out):
            with open(os.path.join(folder, "tokenizer.json"), "rb") as file:
                contents.append(file.read())
        self.assertEqual(*contents)

        def refused(words):
            argv = ("--size", "tiny", "--device", "cpu", "--text-of", first, "--out", os.path.join(self.directory, "x"))
            status, said = run(*argv)
            self.assertEqual((status, said.count("\n")), (2, 1), said)
            self.assertIn(words, said)

        np.save(os.path.join(first, "held_out.npy"), np.zeros(2047, np.int32))
        refused("held_out.npy: expected 2048 ids, got 2047")
        np.save(os.path.join(first, "held_out.npy"), np.full(2048, 384, np.int32))
        refused("held_out.npy: expected ids of 0 to 383, got 384 to 384")
        large = train_small.train_tokenizer(["several words, and others"] * 2, 400)
        large.add_tokens([f"token {i}" for i in range(400)])
        large.save(os.path.join(first, "tokenizer.json"))
        refused("tokenizer.json: expected at most 384 tokens, <|endoftext|> the first of them, got ")
        os.remove(os.path.join(first, "tokenizer.json"))
        refused("tokenizer.json: No such file or directory")


if __name__ == "__main__":
    unittest.main()
