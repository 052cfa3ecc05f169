#!/usr/bin/env python3
"""Tests of full-size checkpoints of procedural weights. Needs numpy; what needs torch is skipped without it."""

import contextlib
import importlib.util
import io
import json
import os
import struct
import sys
import tempfile
import unittest
from collections import namedtuple
from dataclasses import replace
from unittest import mock

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "golden", "tools")
sys.path.insert(0, GOLDEN)

import numpy as np

import gptq
import make_checkpoints
import model_config
import preset_checkpoint
import procedural

HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "safetensors"))

NUMPY = {"F16": np.float16, "BF16": np.uint16, "F32": np.float32, "I32": np.int32}
ONE_LAYER = replace(model_config.PRESETS["pythia-14m"], num_hidden_layers=1)


def read_safetensors(path):
    """Name -> array, by the format's own words."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    tensors, at = {}, 0
    for name, about in header.items():
        begin, end = about["data_offsets"]
        assert begin == at, name
        tensors[name], at = np.frombuffer(data[begin:end], NUMPY[about["dtype"]]).reshape(about["shape"]), end
    assert at == len(data)
    return tensors


class Checkpoints(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        self.out = os.path.join(self.directory, "made")

    def run_program(self, *argv):
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            return make_checkpoints.main(["--preset", "pythia-14m", *argv]), stderr.getvalue()

    def make(self, *argv):
        self.assertEqual(self.run_program("--layers", "1", "--out", self.out, *argv), (0, ""))

    def read(self, name):
        with open(os.path.join(self.out, name), encoding="utf-8") as file:
            return json.load(file)

    def test_one_file_holds_the_tensors_of_the_generator(self):
        for dtype in procedural.DTYPES:
            self.out = os.path.join(self.directory, dtype)
            self.make("--dtype", dtype, "--seed", "5")
            self.assertEqual(
                sorted(os.listdir(self.out)), ["config.json", "model.safetensors", "provenance.json"], dtype
            )
            tensors = read_safetensors(os.path.join(self.out, "model.safetensors"))
            shapes = model_config.model_shapes(ONE_LAYER)
            self.assertEqual(list(tensors), list(shapes))
            for name, array in tensors.items():
                self.assertTrue(np.array_equal(array, procedural.weight(dtype, shapes[name], 5, name)), name)
            self.assertEqual(self.read("provenance.json")["weights_checksum"], procedural.weights_checksum(tensors))
            config = self.read("config.json")
            self.assertEqual((config["torch_dtype"], config["num_hidden_layers"]), (dtype, 1))
            self.assertEqual(model_config.parse_config(json.dumps(config), "config.json"), ONE_LAYER)

    def test_shards_hold_the_same_tensors(self):
        self.make("--shard-size", "300KB")
        index = self.read("model.safetensors.index.json")
        files = sorted(set(index["weight_map"].values()))
        self.assertEqual(files[0], f"model-00001-of-{len(files):05}.safetensors")
        tensors = {}
        for file in files:
            held = read_safetensors(os.path.join(self.out, file))
            self.assertTrue(all(index["weight_map"][name] == file for name in held))
            self.assertTrue(len(held) == 1 or sum(array.nbytes for array in held.values()) <= 300_000, file)
            tensors |= held
        self.assertEqual(list(tensors), list(model_config.model_shapes(ONE_LAYER)))
        self.assertEqual(index["metadata"]["total_size"], sum(array.nbytes for array in tensors.values()))
        self.assertEqual(self.read("provenance.json")["weights_checksum"], procedural.weights_checksum(tensors))

    def test_quantised_linears(self):
        for bits, group_size, words in ((4, 32, (16, 384)), (8, -1, (32, 384))):
            self.out = os.path.join(self.directory, str(bits))
            self.make("--gptq", str(bits), "--group-size", str(group_size))
            config = self.read("quantize_config.json")
            self.assertEqual(config, self.read("config.json")["quantization_config"])
            form = gptq.Format(config, "test")
            self.assertEqual((form.bits, form.group_size, form.is_v2), (bits, group_size, True))
            tensors = read_safetensors(os.path.join(self.out, "model.safetensors"))
            stored = {
                name.removeprefix("gpt_neox.layers.0."): array for name, array in tensors.items() if ".layers." in name
            }
            self.assertEqual(stored["attention.query_key_value.qweight"].shape, words)
            for name, shape in form.part_shapes(model_config.layer_shapes(ONE_LAYER)).items():
                self.assertEqual(stored[name].shape, shape, name)
            weight = form.dense(stored)["mlp.dense_4h_to_h.weight"]
            # The codes are uniform about the middle, and a step is 2^-(4 + bits).
            self.assertAlmostEqual(float(weight.std()), 2**bits / 12**0.5 * 2.0 ** -(4 + bits), delta=0.001)
            self.assertLess(abs(float(weight.mean())), 0.001)
            self.assertEqual(self.read("provenance.json")["weights_checksum"], procedural.weights_checksum(tensors))

    def test_refusals(self):
        os.mkdir(os.path.join(self.directory, "there"))
        there = os.path.join(self.directory, "there")
        for argv, words in [
            (["--preset", "pythia-3b", "--out", self.out], "--preset must be one of pythia-14m, "),
            ([], "--out is required with --preset"),
            (["--out", there], "there: is there already"),
            (["--out", f"{self.directory}/absent/x"], "absent: no such directory"),
            (["--out", self.out, "--layers", "7"], "--layers must be at most 6, got 7"),
            (
                ["--out", self.out, "--shard-size", "0GB"],
                "expected a number of B, KB, MB or GB, such as 4GB, got '0GB'",
            ),
            (["--out", self.out, "--group-size", "64"], "--group-size needs --gptq"),
            (["--out", self.out, "--gptq", "4", "--group-size", "0"], "--group-size must be -1 or at least 1, got 0"),
            (["--out", self.out, "--gptq", "3"], "--gptq: invalid choice"),
            (["--out", self.out, "--dtype", "float64"], "invalid choice: 'float64'"),
        ]:
            with self.subTest(argv=argv):
                status, said = self.run_program(*argv)
                self.assertEqual((status, said.count("\n")), (2, 1), said)
                self.assertIn(words, said)
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            self.assertEqual(make_checkpoints.main(["--layers", "1"]), 2)
        self.assertIn("--layers needs --preset", stderr.getvalue())
        self.assertEqual(os.listdir(self.directory), ["there"])

    def test_a_disk_that_is_too_small_is_refused_before_anything_is_made(self):
        usage = namedtuple("usage", "total used free")(10**9, 10**9 - 10**6, 10**6)
        unused = mock.Mock(side_effect=AssertionError)
        with mock.patch.object(preset_checkpoint.shutil, "disk_usage", return_value=usage):
            with mock.patch.object(procedural, "weight", unused):
                status, said = self.run_program("--out", self.out)
        self.assertEqual((status, said.count("\n")), (2, 1), said)
        self.assertRegex(said, r"made: needs 291\d{5} bytes, got 1000000 on its file system")
        self.assertEqual(os.listdir(self.directory), [])

    def test_a_failure_leaves_nothing(self):
        for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
            with mock.patch.object(preset_checkpoint.os, "fsync", side_effect=error):
                if isinstance(error, OSError):
                    status, said = self.run_program("--out", self.out)
                    self.assertEqual((status, said), (2, f"make_checkpoints.py: {self.out}: No space left on device\n"))
                else:
                    with self.assertRaises(KeyboardInterrupt):
                        self.run_program("--out", self.out)
            self.assertEqual(os.listdir(self.directory), [])

    @unittest.skipUnless(HAS_TORCH, "needs torch, transformers and safetensors")
    def test_transformers_loads_it(self):
        from transformers import AutoModelForCausalLM

        self.make("--shard-size", "5MB", "--seed", "3")
        hf = AutoModelForCausalLM.from_pretrained(self.out, torch_dtype="auto")
        name = "gpt_neox.layers.0.mlp.dense_4h_to_h.weight"
        expected = procedural.weight("float16", (128, 512), 3, name)
        self.assertTrue(np.array_equal(hf.gpt_neox.layers[0].mlp.dense_4h_to_h.weight.detach().numpy(), expected))
        head = procedural.weight("float16", (50304, 128), 3, "embed_out.weight")
        self.assertTrue(np.array_equal(hf.get_output_embeddings().weight.detach().numpy(), head))


if __name__ == "__main__":
    unittest.main()
