#!/usr/bin/env python3
"""Tests of the fp8 quantiser. They need numpy and h5py; those that need torch and safetensors are skipped without
them."""

import contextlib
import importlib.util
import io
import json
import os
import sys
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir)
sys.path.insert(0, os.path.join(ROOT, "golden", "tools"))

import quantize_fp8

HAS_TORCH = all(importlib.util.find_spec(name) for name in quantize_fp8.PACKAGES)
SOURCE = os.path.join(ROOT, "data", "checkpoints", "llama-gqa1-biases")


class Arguments(unittest.TestCase):
    def refusal(self, *argv):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.assertEqual(quantize_fp8.main(list(argv)), 2)
        self.assertEqual((out.getvalue(), err.getvalue().count("\n")), ("", 1))
        return err.getvalue()

    def test_what_cannot_be_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            out = ["--out", os.path.join(folder, "out")]
            self.assertIn("invalid choice: 'rows'", self.refusal("--model", SOURCE, *out, "--layout", "rows"))
            self.assertIn("required: --model", self.refusal(*out))
            if HAS_TORCH:
                self.assertIn("no such directory", self.refusal("--model", "/none/such", *out))
                self.assertIn("got 'mlp'", self.refusal("--model", SOURCE, *out, "--dense", "mlp"))
                transposed = os.path.join(ROOT, "data", "checkpoints", "gpt2-d16")
                self.assertIn("got one of transposed ones", self.refusal("--model", transposed, *out))
            self.assertEqual(os.listdir(folder), [])


@unittest.skipUnless(HAS_TORCH, "torch and safetensors are not installed")
class Quantising(unittest.TestCase):
    def test_a_number_is_rounded_to_nearest(self):
        import torch

        weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
        weight[3] = 0
        shapes = {"block": (2, 3), "channel": (200, 1), "tensor": (1,), "fbgemm": (200, 1)}
        for layout in quantize_fp8.LAYOUTS:
            stored = quantize_fp8.quantise(weight, layout)
            end = "weight_scale_inv" if layout == "block" else "weight_scale"
            scales = stored[end]
            self.assertEqual(tuple(scales.shape), shapes[layout])
            self.assertEqual(scales.dtype, torch.bfloat16 if layout in ("block", "channel") else torch.float32)
            dense = quantize_fp8.dequantise({f"a.{part}": tensor for part, tensor in stored.items()})["a.weight"]
            spread = quantize_fp8.spread(scales.double(), weight.shape)
            # Half a unit in the last of three bits of mantissa; below 2^-6 half of 2^-9; and what a rounded scale clamps.
            bound = torch.maximum(weight.double().abs() * 2.0**-4, spread * 2.0**-10)
            bound = torch.where(weight.double().abs() > 448 * spread, weight.double().abs() * 2.0**-7, bound)
            self.assertTrue(bool(((dense - weight).abs() <= bound).all()))
            self.assertEqual(float(stored["weight"].float().abs().max()), 448)

    def test_a_checkpoint_is_written_with_its_config(self):
        from safetensors.torch import load_file

        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "out")
            argv = ["--model", SOURCE, "--out", out, "--layout", "fbgemm", "--dense", "mlp.up_proj"]
            self.assertEqual(quantize_fp8.main(argv), 0)
            tensors = load_file(os.path.join(out, "model.safetensors"))
            with open(os.path.join(out, "config.json"), encoding="utf-8") as file:
                self.assertEqual(json.load(file)["quantization_config"]["quant_method"], "fbgemm_fp8")
        fp8 = {name for name in tensors if f"{name}_scale" in tensors}
        parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
        parts += ("mlp.gate_proj", "mlp.down_proj")
        self.assertEqual(fp8, {f"model.layers.0.{part}.weight" for part in parts})


if __name__ == "__main__":
    unittest.main()
