#!/usr/bin/env python3
"""Tests of the Python side of golden files. Needs numpy and h5py; tests that need torch are skipped without it."""

import contextlib
import importlib.util
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
from dataclasses import replace
from unittest import mock

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "golden", "tools")
sys.path.insert(0, GOLDEN)

import h5py
import numpy as np

import convert_golden
import dump_hf
import golden_file
import gptq
import model_config
import numpy_model
import procedural
from console import Refusal
from families import join, join_shapes, split
from model_config import Model
from numpy_model import Step

HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "safetensors"))
NEEDS_TORCH = "needs torch, transformers and safetensors"
SCHEMA_1 = os.path.join(os.path.dirname(os.path.abspath(__file__)), "schema_1")

CONFIG = {
    "model_type": "gpt_neox",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 16,
    "max_position_embeddings": 64,
}
MODEL = model_config.parse_config(json.dumps(CONFIG), "test")


def run(*argv):
    """dump_hf's exit status and what it printed to stderr."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        return dump_hf.main(list(argv)), stderr.getvalue()


def read_bytes(path):
    with open(path, "rb") as file:
        return file.read()


class Procedural(unittest.TestCase):
    """The constants come from core/procedural.cpp."""

    def test_checksums_of_values(self):
        name = "layers.3.mlp.dense_4h_to_h.weight"
        for dtype, kind, seed, expected in [
            ("float16", "weight", 7, 17163320938103917729),
            ("float16", "gain", 0, 13312910661308580303),
            ("float16", "activation", procedural.MASK, 6327421334972817765),
            ("bfloat16", "weight", 7, 8553580632210245799),
            ("bfloat16", "gain", 7, 16142940147729106682),
            ("bfloat16", "activation", 0, 9103674625896469309),
            ("float32", "weight", procedural.MASK, 13599590972232306018),
            ("float32", "gain", 7, 18382778030060605748),
            ("float32", "activation", 7, 13781937127083469527),
        ]:
            with self.subTest(dtype=dtype, kind=kind, seed=seed):
                array = procedural.values(dtype, (100001,), kind, seed, name, first=3)
                self.assertEqual(procedural.checksum(array), expected)

    def test_layer_checksums(self):
        shapes = procedural.weight_shapes(128, 512)
        for dtype, expected in [
            ("float16", 12371719754337072618),
            ("bfloat16", 13790096683530865694),
            ("float32", 1056189333991289875),
        ]:
            weights = procedural.layer_weights(shapes, 5, 42, dtype)
            self.assertEqual(procedural.weights_checksum(weights), expected)
        without_bias = procedural.weight_shapes(128, 512, attention_bias=False)
        self.assertNotIn("attention.dense.bias", without_bias)
        weights = procedural.layer_weights(without_bias, 0, 1, "float16")
        self.assertEqual(procedural.weights_checksum(weights), 11688534671166767482)

    def test_model_checksums(self):
        for layers, seed, dtype, is_tied, bits, group_size, expected in [
            (2, 7, "float16", False, 0, -1, 5040128787465765401),
            (1, 7, "bfloat16", False, 0, -1, 1981259006726477557),
            (1, 0, "float32", True, 0, -1, 5696743861741765792),
            (1, 3, "float16", False, 4, 128, 5976509386906160943),
            (2, 3, "bfloat16", False, 8, -1, 8527875017976013586),
        ]:
            with self.subTest(dtype=dtype, bits=bits):
                model = replace(
                    model_config.PRESETS["pythia-14m"], num_hidden_layers=layers, tie_word_embeddings=is_tied
                )
                shapes = model_config.layer_shapes(model)
                if bits:
                    shapes = gptq.Format({"bits": bits, "group_size": group_size}, "test").part_shapes(shapes)
                total = procedural.WeightsChecksum()
                for name, shape in model_config.model_shapes(model, shapes).items():
                    total.add(procedural.weight(dtype, shape, seed, name, bits, group_size))
                self.assertEqual(total.value, expected)

    def test_model_checksums_of_other_families(self):
        sizes = {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 96,
            "vocab_size": 64,
        }
        for preset, dtype, seed, expected in [
            ("llama-3.2-1b", "float16", 7, 10242718634212766589),
            ("qwen2.5-7b", "bfloat16", 3, 2072485581779247481),
        ]:
            with self.subTest(preset=preset):
                model = replace(model_config.PRESETS[preset], **sizes)
                stored = model_config.model_shapes(model)
                joined = {
                    name: procedural.weight(dtype, shape, seed, name)
                    for name, shape in join_shapes(model.names, stored).items()
                }
                self.assertEqual(procedural.weights_checksum(joined), expected)
                # What a checkpoint stores of them is joined to the same.
                parts = split(model.names, joined, stored)
                self.assertEqual({name: array.shape for name, array in parts.items()}, stored)
                again = join(model.names, parts)
                self.assertEqual(list(again), list(joined))
                self.assertEqual(procedural.weights_checksum(again), expected)

    def test_a_model_holds_the_layers(self):
        shapes = model_config.model_shapes(replace(MODEL, num_hidden_layers=2))
        weights = {name: procedural.weight("float16", shape, 3, name) for name, shape in shapes.items()}
        for name, array in procedural.layer_weights(model_config.layer_shapes(MODEL), 1, 3, "float16").items():
            self.assertTrue(np.array_equal(weights[f"gpt_neox.layers.1.{name}"], array), name)
        self.assertEqual(next(iter(weights)), "gpt_neox.embed_in.weight")
        self.assertEqual(list(weights)[-1], "embed_out.weight")
        self.assertNotIn("embed_out.weight", model_config.model_shapes(replace(MODEL, tie_word_embeddings=True)))

    def test_checksum_of_odd_lengths(self):
        self.assertEqual(procedural.checksum(b""), 0)
        self.assertEqual(procedural.checksum(b"golden"), 13826274397845189753)
        self.assertNotEqual(procedural.checksum(b"golden\0"), procedural.checksum(b"golden"))

    def test_chunks_do_not_show(self):
        whole = procedural.values("float16", (10, 100), "activation", 9, "x")
        with mock.patch.object(procedural, "CHUNK", 7):
            self.assertTrue(np.array_equal(procedural.values("float16", (10, 100), "activation", 9, "x"), whole))
            self.assertTrue(
                np.array_equal(procedural.values("float16", (58,), "activation", 9, "x", 42), whole.reshape(-1)[42:100])
            )
            self.assertEqual(procedural.checksum(whole), procedural.checksum(whole.tobytes()))
            chunked = procedural.checksum(whole)
        self.assertEqual(procedural.checksum(whole), chunked)

    def test_values_lie_where_documented(self):
        for kind, low, high in [("weight", -0.0624, 0.0624), ("gain", 0.875, 1.125), ("activation", -4, 4)]:
            x = procedural.widen(procedural.values("float32", (50000,), kind, 1, "x"), "float32")
            self.assertGreaterEqual(x.min(), low)
            self.assertLessEqual(x.max(), high)
        self.assertAlmostEqual(float(x.std()), 296 / 256, delta=0.02)

    def test_bfloat16_rounds_to_nearest_even(self):
        x = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -3.5], np.float32)
        got = procedural.widen(procedural.round_to(x, "bfloat16"), "bfloat16")
        self.assertEqual(got.tolist(), [1, 1 + 2.0**-6, 1 + 2.0**-7, -3.5])


class Config(unittest.TestCase):
    def test_both_namings(self):
        old = CONFIG | {"rotary_pct": 0.5, "rotary_emb_base": 500}
        new = CONFIG | {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_type": "default"}}
        models = [model_config.parse_config(json.dumps(c), "test") for c in (old, new)]
        self.assertEqual(models[0], models[1])
        self.assertEqual((models[0].rotary_dim, models[0].rope_theta, models[0].layer_norm_eps), (8, 500, 1e-5))

    def test_presets_have_the_published_numbers_of_parameters(self):
        published = {
            "pythia-14m": 14067712,
            "pythia-12b": 11846072320,
            "gpt-neox-20b": 20554567680,
            "llama-2-7b": 6738415616,
            "llama-3.2-1b": 1235814400,
            "llama-3.2-3b": 3212749824,
            "llama-3.1-8b": 8030261248,
            "llama-3.1-70b": 70553706496,
            "llama-2.8b-shape": 2779548160,  # published nowhere: counted by hand
            "qwen2.5-7b": 7615616512,
            "qwen3-0.6b": 596049920,
            "qwen3-1.7b": 1720574976,
            "qwen3-4b": 4022468096,
            "qwen3-8b": 8190735360,
            "gpt2": 124439808,
            "stablelm-3b-4e1t": 2795443200,
        }
        for name, parameters in published.items():
            shapes = model_config.model_shapes(model_config.PRESETS[name])
            self.assertEqual(sum(int(np.prod(shape)) for shape in shapes.values()), parameters, name)
        others = [name for name in model_config.PRESETS if name not in model_config.PYTHIA_PRESETS]
        self.assertEqual(others, [name for name in published if not name.startswith("pythia")])
        self.assertEqual(len(model_config.PYTHIA_PRESETS), 10)

    def test_presets_round_trip(self):
        for name, model in model_config.PRESETS.items():
            self.assertEqual(model_config.parse_config(model_config.config_json(model), name), model)

    def test_refusals(self):
        for change, words in [
            (
                {"model_type": "gemma"},
                "model_type must be one of gpt_neox, llama, mistral, qwen2, qwen3, gpt2, stablelm, got 'gemma'",
            ),
            (
                {"model_type": "llama", "partial_rotary_factor": 0.5},
                "partial_rotary_factor must be 1.0, got 0.5",
            ),
            ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type must be default, got 'linear'"),
            ({"hidden_act": "relu"}, "hidden_act must be one of gelu, "),
            ({"num_attention_heads": 3}, "num_attention_heads must divide hidden_size 32, got 3"),
            ({"hidden_size": "32"}, "hidden_size must be a positive integer, got '32'"),
            ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
            ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
            ({"rotary_pct": 0.2}, "rotary_dim must be even, 2 to head_dim 16, got 3"),
        ]:
            with self.subTest(change=change), self.assertRaisesRegex(Refusal, words):
                model_config.parse_config(json.dumps(CONFIG | change), "config.json")
        incomplete = {name: value for name, value in CONFIG.items() if name != "vocab_size"}
        for text, words in [
            (json.dumps(incomplete), "vocab_size is missing"),
            ("{", "not JSON"),
            ("[]", "expected a JSON object, got list"),
        ]:
            with self.subTest(text=text), self.assertRaisesRegex(Refusal, words):
                model_config.parse_config(text, "config.json")


class Arguments(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        self.out = os.path.join(self.directory, "out.h5")

    def refused(self, *argv):
        """What a refused run says: one line, exit status 2, and nothing written."""
        status, said = run(*argv)
        self.assertEqual(status, 2, said)
        self.assertEqual(said.count("\n"), 1, said)
        self.assertTrue(said.startswith("dump_hf.py: "), said)
        self.assertFalse(os.path.exists(self.out))
        self.assertFalse([name for name in os.listdir(self.directory) if name.endswith(".tmp")])
        return said

    def test_command_line(self):
        preset = ["--preset", "pythia-14m", "--out", self.out]
        for argv, words in [
            ([], "one of --model and --preset is required"),
            (["--preset", "pythia-14m"], "--out is required"),
            (["--preset", "pythia-3b", "--out", self.out], "--preset must be one of pythia-14m, "),
            ([*preset, "--model", "x"], "not allowed with argument"),
            ([*preset, "--kv-len", "0"], "got '0'"),
            ([*preset, "--kv-len", "4,,5"], "got '4,,5'"),
            ([*preset, "--kv-len", "2049"], "--kv-len must be at most max_position_embeddings 2048, got 2049"),
            ([*preset, "--kv-len", "4,5", "--batch", "3"], "--kv-len must name 1 or --batch 3 lengths, got 2"),
            ([*preset, "--kv-len", "4", "--q-len", "5"], "--kv-len must be at least --q-len 5, got 4"),
            ([*preset, "--layer", "6"], "--layer must be 0 to 5, got 6"),
            ([*preset, "--layer", "-1"], "got '-1'"),
            ([*preset, "--seed", "18446744073709551616"], "got '18446744073709551616'"),
            ([*preset, "--cache", "prefill"], "--cache prefill needs the weights of a --model"),
            ([*preset, "--weights", "checkpoint"], "--weights checkpoint needs --model"),
            ([*preset, "--top", "3"], "--top needs --whole-model"),
            ([*preset, "--no-dequantised-weights"], "--no-dequantised-weights needs a GPTQ checkpoint"),
            ([*preset, "--whole-model", "--no-dequantised-weights"], "--dequantised-weights is of one layer's step"),
            ([*preset, "--dtype", "float64"], "invalid choice: 'float64'"),
            ([*preset, "--unknown"], "unrecognized arguments"),
        ]:
            with self.subTest(argv=argv):
                self.assertIn(words, self.refused(*argv))

    def test_output_that_cannot_be_written(self):
        absent = os.path.join(self.directory, "absent")
        self.assertIn(f"{absent}: no such directory", self.refused("--preset", "pythia-14m", "--out", f"{absent}/x.h5"))
        self.assertIn("is a directory", self.refused("--preset", "pythia-14m", "--out", self.directory))

    def test_checkpoint_directory(self):
        def said(**files):
            with tempfile.TemporaryDirectory() as directory:
                for name, text in files.items():
                    with open(os.path.join(directory, name.replace("__", ".")), "w", encoding="utf-8") as file:
                        file.write(text)
                return self.refused("--model", directory, "--out", self.out)

        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
        self.assertIn("config.json: is a git-lfs pointer, ", said(config__json=pointer))
        config = json.dumps(CONFIG)
        self.assertIn("index.json: is a git-lfs", said(config__json=config, model__safetensors__index__json=pointer))
        self.assertIn("no such directory", self.refused("--model", f"{self.directory}/absent", "--out", self.out))
        self.assertIn("config.json: No such file", said())
        self.assertIn("config.json: not JSON", said(config__json="{"))
        self.assertIn("no model.safetensors and no model.safetensors.index.json\n", said(config__json=config))
        self.assertIn("for .bin files see --help", said(config__json=config, pytorch_model__bin=""))
        self.assertIn("index.json: not JSON", said(config__json=config, model__safetensors__index__json="{"))
        for index in ("[]", '{"weight_map": 1}', "{}", '{"weight_map": {"a": 1}}'):
            self.assertIn(
                "expected a JSON object with weight_map",
                said(config__json=config, model__safetensors__index__json=index),
            )
        # A shard lies beside the index, and nowhere else.
        for shard in ("../a", "/etc/passwd", "b/a", "..", ""):
            index = json.dumps({"weight_map": {"a": "a", "b": shard}})
            said_of_shard = said(config__json=config, model__safetensors__index__json=index)
            self.assertIn(f"tensor 'b': expected a plain file name for its shard, got {shard!r}\n", said_of_shard)
        with mock.patch("console.MOST_JSON_BYTES", 9):
            self.assertIn("config.json: expected at most 9 bytes", said(config__json=config))

    def test_help_tells_how_to_dump_an_own_model(self):
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout), self.assertRaises(SystemExit) as end:
            dump_hf.main(["--help"])
        self.assertEqual(end.exception.code, 0)
        self.assertIn("a layer of your own model", stdout.getvalue())


class File(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        self.path = os.path.join(self.directory, "x.h5")

    def write(self, value=1.5):
        hidden = procedural.values("bfloat16", (2, 32), "activation", 1, "hidden")
        output = np.full((2, 32), value, np.float16)
        golden_file.write_golden(
            self.path,
            {"schema": "cf-golden", "seed": np.uint64(procedural.MASK)},
            {"inputs": {"hidden": (hidden, "bfloat16"), "kv_len": (np.array([3], np.int32), "int32")}},
            {"float16_sdpa": ({"dtype": "float16"}, {"attention.rotary_emb.q": output}, "float16")},
        )
        return hidden

    def test_content(self):
        hidden = self.write()
        with golden_file.read_sealed(self.path) as file:
            self.assertEqual(int(file.attrs["seed"]), procedural.MASK)
            self.assertEqual(golden_file.attributes_of(file)["schema"], "cf-golden")
            self.assertEqual(golden_file.attributes_of(file["inputs/hidden"]), {"dtype": "bfloat16"})
            self.assertTrue(np.array_equal(file["inputs/hidden"][()], hidden))
            self.assertNotIn("dtype", file["inputs/kv_len"].attrs)
            self.assertEqual(file["inputs/kv_len"].dtype, np.int32)
            self.assertEqual(golden_file.attributes_of(file["taps/float16_sdpa"]), {"dtype": "float16"})
            self.assertEqual(file["taps/float16_sdpa/attention.rotary_emb.q"].dtype, np.float16)

    def test_nothing_is_of_variable_length(self):
        self.write()
        texts = []

        def visit(_, target):
            for name in target.attrs:
                type_ = target.attrs.get_id(name).get_type()
                if isinstance(type_, h5py.h5t.TypeStringID):
                    self.assertFalse(type_.is_variable_str())
                    self.assertEqual(type_.get_cset(), h5py.h5t.CSET_UTF8)
                    texts.append(name)

        with golden_file.read_sealed(self.path) as file:
            visit("", file)
            file.visititems(visit)
        self.assertEqual(sorted(texts), ["dtype", "dtype", "schema"])

    def test_texts(self):
        for text in ("", "é\n", "x" * 65000):
            golden_file.write_golden(self.path, {"command": text}, {}, {})
            with golden_file.read_sealed(self.path) as file:
                self.assertEqual(golden_file.attributes_of(file), {"command": text})
        for text in ("x" * 65001, "a\0b"):
            with self.assertRaisesRegex(Refusal, "attribute 'command': expected at most 65000 bytes without zero"):
                golden_file.write_golden(self.path, {"command": text}, {}, {})

    def test_seal_finds_damage(self):
        self.write()
        with open(self.path, "rb") as file:
            content = file.read()
        self.assertEqual(content[24:512], bytes(488))
        self.assertEqual(content[512:520], b"\x89HDF\r\n\x1a\n")
        middle = len(content) // 2
        for damaged in (content[:-1], content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]):
            with open(self.path, "wb") as file:
                file.write(damaged)
            with self.assertRaisesRegex(Refusal, "seal"):
                golden_file.read_sealed(self.path)
        for other in (b"", b"cfgold", b"version https://git-lfs.github.com/spec/v1"):
            with open(self.path, "wb") as file:
                file.write(other)
            with self.assertRaisesRegex(Refusal, "no golden file"):
                golden_file.read_sealed(self.path)

    def test_failure_keeps_the_old_file(self):
        self.write()
        with open(self.path, "rb") as file:
            before = file.read()
        full = (
            "Can't close file (file write failed: time = now\n, errno = 28, error message = 'No space left on device')"
        )
        for error, refusal in (
            (OSError(28, "No space left on device"), Refusal),
            (OSError(28, full), Refusal),
            (KeyboardInterrupt(), KeyboardInterrupt),
        ):
            with mock.patch.object(golden_file, "seal", side_effect=error), self.assertRaises(refusal) as raised:
                self.write(2.5)
            if refusal is Refusal:
                self.assertEqual(str(raised.exception), f"{self.path}: No space left on device")
            with open(self.path, "rb") as file:
                self.assertEqual(file.read(), before)
            self.assertEqual(os.listdir(self.directory), ["x.h5"])

    def test_same_content_same_bytes(self):
        contents = []
        for _ in range(2):
            self.write()
            with open(self.path, "rb") as file:
                contents.append(file.read())
        self.assertEqual(contents[0], contents[1])


class Convert(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        self.paths = []
        for name in sorted(os.listdir(SCHEMA_1)):
            self.paths.append(shutil.copy(os.path.join(SCHEMA_1, name), self.directory))

    def run_program(self, *argv):
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            status = convert_golden.main(list(argv))
        return status, stdout.getvalue() + stderr.getvalue()

    def change(self, path, change):
        """Changes a golden file and seals it again."""
        with h5py.File(path, "r+") as file:
            change(file)
        golden_file.seal(path)

    def test_old_files_are_rewritten_and_keep_their_content(self):
        self.assertEqual(len(self.paths), 2)
        self.assertEqual(self.run_program(*self.paths), (0, "2 of 2 files rewritten in schema 2\n"))
        for path in self.paths:
            with golden_file.read_sealed(path) as file:
                self.assertEqual(int(file.attrs["schema_version"]), 2)
                self.assertIsInstance(file.attrs["config"], bytes)
            self.assertNotIn(b"GCOL", read_bytes(path))
        same = (0, "2 files compared, 0 differ\n")
        self.assertEqual(self.run_program("--compare", SCHEMA_1, *self.paths), same)
        contents = [read_bytes(path) for path in self.paths]
        self.assertEqual(self.run_program(*self.paths), (0, "0 of 2 files rewritten in schema 2\n"))
        self.assertEqual(contents, [read_bytes(path) for path in self.paths])

    def test_differences_are_found(self):
        def set_attribute(name, value):
            return lambda file: file.attrs.__setitem__(name, value)

        def set_element(file):
            file["inputs/hidden"][0, 3] += 1

        def set_shape(file):
            hidden = file["inputs/hidden"][()]
            del file["inputs/hidden"]
            file["inputs/hidden"] = hidden.reshape(-1)
            file["inputs/hidden"].attrs["dtype"] = "bfloat16"

        for change, words in [
            (set_attribute("command", "other"), "/: attribute command"),
            (set_attribute("seed", np.uint64(7)), "/: attribute seed"),
            (set_attribute("more", "x"), "/: attribute more"),
            (set_element, "/inputs/hidden: other bytes"),
            (set_shape, "/inputs/hidden: uint16 (1, 128) and uint16 (128,)"),
            (lambda file: file.__delitem__("taps"), "/taps"),
            (lambda file: file["inputs/hidden"].attrs.__delitem__("dtype"), "/inputs/hidden: attribute dtype"),
        ]:
            path = shutil.copy(os.path.join(SCHEMA_1, "layer.h5"), self.directory)
            self.change(path, change)
            status, said = self.run_program("--compare", self.directory, os.path.join(SCHEMA_1, "layer.h5"))
            self.assertEqual(status, 1, words)
            self.assertIn(words, said)
            self.assertIn("1 files compared, 1 differ", said)

    def test_what_cannot_be_kept_is_refused(self):
        path = self.paths[0]
        for change, words in [
            (lambda file: file.attrs.__setitem__("schema_version", 3), "schema_version must be 1 to 2, got 3"),
            (
                lambda file: file.attrs.__setitem__("schema", "cf-golden-model"),
                "schema must be cf-golden, got 'cf-golden-m",
            ),
            (lambda file: file.create_group("more"), "cannot be converted without a loss: /more: in one file only"),
        ]:
            shutil.copy(os.path.join(SCHEMA_1, os.path.basename(path)), path)
            self.change(path, change)
            before = read_bytes(path)
            status, said = self.run_program(path)
            self.assertEqual((status, said.count("\n")), (2, 1), said)
            self.assertIn(words, said)
            self.assertEqual(read_bytes(path), before)
            self.assertEqual(len(os.listdir(self.directory)), 2)
        self.assertEqual(self.run_program(os.path.join(self.directory, "absent"))[0], 2)

    def test_what_golden_files_do_not_have_is_refused(self):
        path = os.path.join(self.directory, "layer.h5")

        def refused(*argv):
            status, said = self.run_program(*argv)
            self.assertEqual((status, said.count("\n")), (2, 1), said)
            self.assertIn("layer.h5: expected the HDF5 of golden files; 'cf-golden info' says what is wrong", said)

        # libhdf5 never gets beyond a heap's free space of 0 bytes.
        content = bytearray(read_bytes(path))
        at = content.find(b"GCOL") + 16
        while (index := int.from_bytes(content[at : at + 2], "little")) != 0:
            at += 16 + (int.from_bytes(content[at + 8 : at + 16], "little") + 7) // 8 * 8
        content[at + 8 : at + 16] = bytes(8)
        self.assertEqual(index, 0)
        with open(path, "wb") as file:
            file.write(content)
        golden_file.seal(path)
        before = os.times().children_user
        refused(path)
        refused("--compare", SCHEMA_1, path)
        self.assertLess(os.times().children_user - before, 1)

        for change in (
            lambda file: file.__setitem__("more", h5py.SoftLink("/inputs")),
            lambda file: file.__setitem__("more", h5py.ExternalLink("other.h5", "/")),
            lambda file: file["inputs"].__setitem__("back", file["/"]),
            lambda file: file.create_dataset("more", data=np.zeros(9), chunks=True),
            lambda file: file.create_dataset("more", shape=(1 << 40,), dtype="f4"),
            lambda file: file.create_dataset("more", (4,), "i1", external=[("/etc/passwd", 0, 4)]),
            lambda file: file.attrs.__setitem__("more", [1, 2]),
        ):
            shutil.copy(os.path.join(SCHEMA_1, "layer.h5"), path)
            self.change(path, change)
            refused(path)

    def test_texts_that_attributes_share_are_refused(self):
        path = os.path.join(self.directory, "layer.h5")
        self.change(path, lambda file: file.attrs.create("long", "A" * 30000, dtype=h5py.string_dtype()))
        content = bytearray(read_bytes(path))
        # A text is stored as its length, its heap's address and its number there. All become the long text.
        texts = {}
        for at in range(512, len(content) - 15):
            length, heap, _ = struct.unpack_from("<IQI", content, at)
            if length and content[512 + heap : 516 + heap] == b"GCOL":
                texts[at] = length
        longest = max(texts, key=texts.get)
        for at in texts:
            content[at : at + 16] = content[longest : longest + 16]
        with open(path, "wb") as file:
            file.write(content)
        golden_file.seal(path)
        self.assertGreater(len(texts), 9)
        with self.assertRaisesRegex(Refusal, "expected the HDF5 of golden files"):
            golden_file.read_sealed(path)


class Programs(unittest.TestCase):
    """The programs without the packages that they need."""

    TORCH = ("torch", "transformers", "safetensors")
    NEEDS = {
        "convert_golden.py": ("numpy", "h5py"),
        "dump_hf.py": ("numpy", "h5py", *TORCH),
        "eval_hf.py": ("numpy", "h5py", *TORCH),
        "make_checkpoints.py": ("numpy", "h5py", *TORCH),
        "make_goldens.py": ("numpy", "h5py", *TORCH),
        "make_sampling_cases.py": ("numpy", "torch", "transformers"),
        "quantize_fp8.py": ("numpy", "torch", "safetensors", "h5py"),
        "quantize_gptq.py": ("numpy", "h5py", *TORCH),
        "tokenize_text.py": ("numpy", "tokenizers"),
        "train_small.py": ("numpy", "tokenizers", *TORCH),
    }

    def run_without(self, packages, program, *argv):
        code = (
            "import runpy, sys\n"
            f"for package in {packages!r}: sys.modules[package] = None\n"
            f"sys.argv = {[program, *argv]!r}\n"
            f"sys.path.insert(0, {GOLDEN!r})\n"
            f"runpy.run_path({os.path.join(GOLDEN, program)!r}, run_name='__main__')\n"
        )
        return subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=False)

    def test_they_are_executable(self):
        for name in os.listdir(GOLDEN):
            if name.endswith(".py"):
                path = os.path.join(GOLDEN, name)
                with open(path, "rb") as file:
                    is_program = file.read(2) == b"#!"
                self.assertEqual(is_program, name in self.NEEDS, name)
                self.assertEqual(os.access(path, os.X_OK), is_program, name)

    def test_help_needs_numpy_alone(self):
        for name, needs in self.NEEDS.items():
            with self.subTest(name=name):
                result = self.run_without(needs[1:], name, "--help")
                self.assertEqual((result.returncode, result.stderr), (0, ""))
                self.assertIn(f"usage: {name}", result.stdout)
                self.assertIn("\nNeeds ", result.stdout)

    def test_what_is_missing_is_said_in_one_line(self):
        with tempfile.TemporaryDirectory() as directory:
            model = os.path.join(GOLDEN, os.pardir, os.pardir, "data", "checkpoints", "neox-d80")
            out = os.path.join(directory, "out")
            arguments = {
                "convert_golden.py": [os.path.join(SCHEMA_1, "layer.h5")],
                "dump_hf.py": ["--preset", "pythia-14m", "--out", out],
                "eval_hf.py": ["--model", model, "--tokens", out],
                "make_checkpoints.py": ["--out", out],
                "make_goldens.py": ["--out", out],
                "make_sampling_cases.py": ["--out", out],
                "quantize_fp8.py": ["--model", model, "--out", out],
                "quantize_gptq.py": ["--model", model, "--out", out],
                "tokenize_text.py": ["--tokenizer", out, "--literal", "text", "--out", f"{out}.npy"],
                "train_small.py": ["--out", out],
            }
            for name, needs in self.NEEDS.items():
                for packages in (needs[:1], needs[1:]):
                    with self.subTest(name=name, packages=packages):
                        result = self.run_without(packages, name, *arguments[name])
                        self.assertEqual((result.returncode, result.stdout), (2, ""))
                        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
                        self.assertTrue(result.stderr.startswith(f"{name}: needs "), result.stderr)
                        for package in packages:
                            self.assertIn(package, result.stderr)
            self.assertEqual(os.listdir(directory), [])


class Layer(unittest.TestCase):
    """The layer in numpy, against which every dump is checked."""

    def table(self, model, step):
        exponent = np.arange(0, model.rotary_dim, 2, dtype=np.float32) / np.float32(model.rotary_dim)
        inv_freq = np.float32(1) / np.float32(model.rope_theta) ** exponent
        angle = step.all_positions().astype(np.float32)[:, None] * inv_freq
        return np.cos(angle), np.sin(angle)

    def taps(self, model, step, weights=None):
        weights = weights or procedural.layer_weights(model_config.layer_shapes(model), 0, 1, step.dtype)
        return numpy_model.reference_layer(model, weights, step, *self.table(model, step))

    def test_decode_repeats_prefill(self):
        for parallel in (True, False):
            model = Model(**{**vars(MODEL), "use_parallel_residual": parallel, "hidden_act": "gelu_new"})
            whole = numpy_model.made_step(model, "float32", 5, [5], "procedural", 1)
            prefill = self.taps(model, whole)
            k, v = (prefill[f"attention.kv_append.{name}"].astype(np.float32) for name in ("k_cache", "v_cache"))
            last = Step("float32", 1, [5], whole.hidden[4:], "prefill", k[:, :, :4], v[:, :, :4])
            for name, tap in self.taps(model, last).items():
                expected = prefill[name][..., -1:, :] if "kv_append" in name else prefill[name][-1:]
                self.assertLess(numpy_model.relative_l2(tap, expected), 1e-6, name)

    def test_sequences_do_not_see_each_other(self):
        step = numpy_model.made_step(MODEL, "float16", 2, [9, 2, 6], "random", 1)
        self.assertEqual(np.count_nonzero(step.k_cache[1]), 0)
        together = self.taps(MODEL, step)
        for b, n in enumerate(step.kv_len):
            alone = Step("float16", 2, [n], step.hidden[2 * b : 2 * b + 2], "random", *(c[None] for c in step.past(b)))
            error = numpy_model.relative_l2(self.taps(MODEL, alone)["output"], together["output"][2 * b : 2 * b + 2])
            self.assertLess(error, 1e-14)

    def test_one_entry_attends_to_itself(self):
        taps = self.taps(MODEL, numpy_model.made_step(MODEL, "float16", 1, [1, 1], "procedural", 1))
        self.assertTrue(np.array_equal(taps["attention.context"], taps["attention.rotary_emb.v"]))

    def test_residual_forms(self):
        step = numpy_model.made_step(MODEL, "float16", 1, [3], "procedural", 1)
        taps = self.taps(MODEL, step)
        expected = procedural.widen(step.hidden, "float16") + taps["hf.attention.dense"] + taps["hf.mlp.dense_4h_to_h"]
        self.assertLess(numpy_model.relative_l2(taps["output"], expected), 1e-15)
        sequential = self.taps(Model(**{**vars(MODEL), "use_parallel_residual": False}), step)
        self.assertTrue(np.array_equal(sequential["attention.residual"], taps["attention.residual"]))
        # The two differ in what the second norm reads.
        weights = procedural.layer_weights(model_config.layer_shapes(MODEL), 0, 1, "float16")
        gamma, beta = (
            procedural.widen(weights[f"post_attention_layernorm.{part}"], "float16") for part in ("weight", "bias")
        )
        for form, source in (
            (taps, procedural.widen(step.hidden, "float16")),
            (sequential, taps["attention.residual"]),
        ):
            expected = model_config.layernorm(source, gamma, beta, MODEL.layer_norm_eps)
            self.assertTrue(np.array_equal(form["post_attention_layernorm"], expected))
        self.assertFalse(np.array_equal(sequential["output"], taps["output"]))

    def test_gelus(self):
        x = np.linspace(-6, 6, 1001)
        self.assertEqual(float(model_config.gelu_erf(np.array([0.0]))[0]), 0)
        self.assertAlmostEqual(float(model_config.gelu_erf(np.array([1.0]))[0]), 0.8413447460685429, delta=1e-15)
        difference = np.abs(model_config.gelu_erf(x) - model_config.gelu_tanh(x)).max()
        self.assertTrue(4e-4 < difference < 5e-4, difference)

    def test_taps_that_differ_are_refused(self):
        reference = {"output": np.ones((2, 3))}
        numpy_model.check_taps("v", {"output": np.ones((2, 3)) + 1e-12}, reference, 1e-10)
        for taps, words in [
            ({}, "expected the taps"),
            ({"output": np.ones((3, 2))}, r"must have shape \(2, 3\), got \(3, 2\)"),
            ({"output": np.ones((2, 3)) + 1e-9}, "must be within 1e-10"),
            ({"output": np.full((2, 3), np.nan)}, "got inf"),
        ]:
            with self.assertRaisesRegex(Refusal, words):
                numpy_model.check_taps("v", taps, reference, 1e-10)

    def test_rope_of_16_bit_frequencies_is_refused(self):
        model = model_config.PRESETS["pythia-2.8b"]
        step = Step("float16", 1, [2048], None, "none")
        cos, sin = self.table(model, step)
        numpy_model.check_rope(model, step, cos.astype(np.float64), sin.astype(np.float64))
        inv_freq = (model.rope_theta ** -(np.arange(0, 20, 2) / 20)).astype(np.float16)
        angle = (2047 * inv_freq.astype(np.float32))[None]
        for wrong in ((np.cos(angle), np.sin(angle)), (cos[:, :-1], sin[:, :-1])):
            with self.assertRaisesRegex(Refusal, "cos must"):
                numpy_model.check_rope(model, step, *wrong)
        wide = np.cos(2047 * model.rope_theta ** -(np.arange(0, 20, 2) / 20))[None]
        with self.assertRaisesRegex(Refusal, "float32 values"):
            numpy_model.check_rope(model, step, wide, wide)


@unittest.skipUnless(HAS_TORCH, NEEDS_TORCH)
class HuggingFace(unittest.TestCase):
    def test_selfcheck(self):
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            status, said = run("--selfcheck")
        self.assertEqual((status, said), (0, ""))
        self.assertTrue(stdout.getvalue().startswith("OK: "), stdout.getvalue())

    def test_checkpoint_tensors_are_checked(self):
        import torch
        from safetensors.torch import load_file, save_file

        import make_checkpoints

        with tempfile.TemporaryDirectory() as directory:
            path = make_checkpoints.write(make_checkpoints.SPECS[0], directory, "test")
            file, out = os.path.join(path, "model.safetensors"), os.path.join(directory, "x.h5")
            whole = load_file(file)
            name = "gpt_neox.layers.0.attention.dense.bias"
            # Buffers of old checkpoints are no weights.
            save_file(whole | {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool)}, file)
            self.assertEqual(run("--model", path, "--out", out), (0, ""))
            os.unlink(out)
            for change, words in [
                ({}, f"tensor {name} is missing"),
                ({name: torch.zeros(3, dtype=torch.float16)}, f"tensor {name} must have shape (160,), got (3,)"),
                ({name: torch.zeros(160)}, f"tensor {name} must be of dtype float16, got float32"),
            ]:
                save_file({k: v for k, v in whole.items() if k != name} | change, file)
                status, said = run("--model", path, "--out", out)
                self.assertEqual((status, said.count("\n")), (2, 1))
                self.assertIn(words, said)
            with open(file, "wb") as pointer:
                pointer.write(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
            self.assertIn("model.safetensors: is a git-lfs pointer", run("--model", path, "--out", out)[1])
            save_file(whole, file)
            with open(file, "r+b") as damaged:
                damaged.truncate(1000)
            status, said = run("--model", path, "--out", out)
            self.assertEqual((status, said.count("\n")), (2, 1), said)
            self.assertFalse(os.path.exists(out))


if __name__ == "__main__":
    unittest.main()
