#!/usr/bin/env python3
"""Tests of the kernels that bench_peers.py times beside ours: Triton's, which its interpreter runs on the CPU, and what
is known of torch's without a GPU. Those that need torch or triton are skipped without them."""

import argparse
import importlib.util
import os
import subprocess
import sys
import textwrap
import unittest
from dataclasses import replace
from unittest import mock

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir)
sys.path.insert(0, os.path.join(ROOT, "apps"))

import bench_peers  # noqa: F401: finds the golden tools
import gptq
import model_config
from peers import exactness, layer_bench, lines_of_code, timing, torch_int4, torch_norm, triton_gptq, triton_norm

HAS_TORCH = bool(importlib.util.find_spec("torch"))
HAS_TRITON = HAS_TORCH and bool(importlib.util.find_spec("triton"))
HAS_GPU = False
if HAS_TORCH:
    import torch

    HAS_GPU = torch.cuda.is_available()
if HAS_TRITON:
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is declared
    from peers import triton_kernels

# No tile's rows divide the 144 words of a column, and no tile's columns the outputs.
OUTPUTS, INPUTS = 72, 1152


@unittest.skipUnless(HAS_TRITON, "needs torch and triton")
class Triton(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)

    def norm(self, tokens, hidden, eps=1e-5):
        # Small rows: eps counts.
        x, residual = (torch.randn(tokens, hidden).mul(scale).half() for scale in (0.01, 1.0))
        gamma, beta = (torch.randn(hidden).half() for _ in range(2))
        y = triton_kernels.layernorm_residual(x, residual, gamma, beta, eps)
        return x, residual, gamma, beta, 1e-5, y

    def test_the_norm_is_within_its_bound(self):
        for tokens, hidden in ((1, 128), (3, 2560), (2, 96)):
            *_, y = found = self.norm(tokens, hidden)
            self.assertEqual((tuple(y.shape), y.dtype), ((tokens, hidden), torch.float16))
            triton_norm.check_layernorm_residual(*found)

    def test_another_norm_is_beyond_its_bound(self):
        x, residual, gamma, beta, eps, y = self.norm(3, 256)
        for wrong in (
            self.norm(3, 256, 1.2e-5),
            (x, residual, gamma, beta, eps, y - residual),
            (x, residual, gamma, beta, eps, y.roll(1, 0)),
            (x, residual, gamma, beta, eps, torch.where(torch.arange(256) == 7, torch.nan, y)),
        ):
            with self.assertRaisesRegex(RuntimeError, "layernorm_residual: .* times the error bound away from float64"):
                triton_norm.check_layernorm_residual(*wrong)

    def product(self, parts, x, bias):
        return triton_kernels.gptq_matvec(x, **parts, bias=bias)

    def test_every_choice_of_the_product_is_within_its_bound(self):
        x, bias = torch.randn(1, INPUTS).half(), torch.randn(OUTPUTS).half()
        parts = triton_gptq.random_gptq(OUTPUTS, INPUTS, "cpu")
        roundings = triton_kernels.gptq_matvec_roundings(INPUTS)
        kernel = triton_kernels.gptq_matvec_kernel
        self.assertGreater(len(kernel.configs), 4)
        for config in list(kernel.configs):
            with self.subTest(config=str(config)), mock.patch.object(kernel, "configs", [config]):
                y = self.product(parts, x, bias)
                self.assertEqual((tuple(y.shape), y.dtype), ((1, OUTPUTS), torch.float16))
                triton_gptq.check_gptq_linear(x, parts, bias, y, roundings)

    def test_another_product_is_beyond_its_bound(self):
        x, bias = torch.randn(1, INPUTS).half(), torch.randn(OUTPUTS).half()
        parts = triton_gptq.random_gptq(OUTPUTS, INPUTS, "cpu")
        kernel = triton_kernels.gptq_matvec_kernel
        zeros = torch.from_numpy(gptq.unpack(parts["qzeros"].numpy(), 4, 1))
        one_more = torch.from_numpy(gptq.pack((zeros.numpy() + 1) % 16, 4, 1))
        # The last code of all, where a code counts.
        x[0, -1], parts["scales"][-1, -1] = 1, 2.0**-7
        other_code = parts["qweight"].clone()
        other_code[-1, -1] ^= -(2**31)
        with mock.patch.object(kernel, "configs", kernel.configs[:1]):
            for name, wrong in {
                "zeros": parts | {"qzeros": one_more},
                "a code": parts | {"qweight": other_code},
                "groups": parts | {"scales": parts["scales"].roll(1, 0)},
                "columns": parts | {"qweight": parts["qweight"].roll(1, 1)},
            }.items():
                y = self.product(wrong, x, bias)
                with self.subTest(name), self.assertRaisesRegex(RuntimeError, "gptq_matvec: .* away from float64"):
                    triton_gptq.check_gptq_linear(x, parts, bias, y, triton_kernels.gptq_matvec_roundings(INPUTS))

    def test_a_layer_s_four_products_are_checked_and_run(self):
        model = replace(model_config.PRESETS["pythia-14m"], num_hidden_layers=2)
        kernel, made = triton_kernels.gptq_matvec_kernel, []
        choose = {"configs": kernel.configs[:1], "best_config": "the first"}
        with mock.patch.multiple(kernel, create=True, **choose):
            run, layers, chosen = triton_gptq.triton_gptq_linears(model, "cpu")
            with mock.patch.object(triton_kernels, "gptq_matvec", lambda x, **_: made.append(x.shape[1])):
                run()
        self.assertEqual((layers, made), (2, [128, 128, 128, 512] * 2))
        self.assertEqual(list(chosen), ["384 x 128", "128 x 128", "512 x 128", "128 x 512"])


@unittest.skipUnless(HAS_TORCH, "needs torch")
class TorchInt4(unittest.TestCase):
    """torch's kernel for a CPU takes the same codes, scales and zeros in a layout of its own."""

    def setUp(self):
        torch.manual_seed(1)

    def of_cpu(self):
        aten = torch.ops.aten
        packs = []

        def pack(codes, inner_k_tiles):
            packs.append(inner_k_tiles)
            return aten._convert_weight_to_int4pack_for_cpu(codes.int(), 2)

        return packs, mock.patch.multiple(torch_int4, pack_int4=pack, int4_product=aten._weight_int4pack_mm_for_cpu)

    def test_four_products_are_checked_and_run(self):
        model = replace(model_config.PRESETS["pythia-14m"], num_hidden_layers=2)
        packs, of_cpu = self.of_cpu()

        def exact(outputs, inputs, device):
            """Weights that bfloat16 holds, as a CPU does not round them."""
            codes, scales_and_zeros = random_int4(outputs, inputs, device)
            scales = torch.randint(-8, -5, scales_and_zeros.shape[:2]).double().exp2()
            zeros = torch.randint(-8, 8, scales.shape) * scales
            return codes, torch.stack([scales, zeros], -1).bfloat16()

        random_int4 = torch_int4.random_int4
        with of_cpu, mock.patch.object(torch_int4, "random_int4", exact):
            run, layers = torch_int4.torch_int4_linears(model, 4, "cpu")
            run()
        self.assertEqual((layers, packs), (2, [4] * 8))

    def test_other_weights_are_beyond_their_bound(self):
        x = torch.randn(1, 256).bfloat16()
        codes, scales_and_zeros = torch_int4.random_int4(64, 256, "cpu")
        scales, zeros = (t.repeat_interleave(128, 0).T for t in scales_and_zeros.double().unbind(-1))

        def product(codes, zeros):
            weight = ((codes.double() - 8) * scales + zeros).bfloat16().double()
            return (x.double() @ weight.T).bfloat16()

        torch_int4.check_int4_linear(x, codes, scales_and_zeros, product(codes, zeros))
        swapped = codes.view(64, 128, 2).flip(2).reshape(64, 256)
        for y in (product(swapped, zeros), product(codes, zeros - 8 * scales), product(codes.roll(1, 0), zeros)):
            with self.assertRaisesRegex(RuntimeError, "_weight_int4pack_mm: .* away from float64"):
                torch_int4.check_int4_linear(x, codes, scales_and_zeros, y)

    def test_two_codes_are_packed_to_a_byte_the_first_high(self):
        packed = []
        aten = mock.Mock(_convert_weight_to_int4pack=lambda *arguments: packed.append(arguments))
        with mock.patch.object(torch, "ops", mock.Mock(aten=aten)):
            torch_int4.pack_int4(torch.tensor([[1, 2, 15, 4]], dtype=torch.uint8), 8)
        ((codes, inner_k_tiles),) = packed
        self.assertEqual((codes.tolist(), codes.dtype, inner_k_tiles), ([[0x12, 0xF4]], torch.uint8, 8))


# Beside an interpreter Triton compiles nothing: a process of its own.
ON_GPU = """
import sys
from dataclasses import replace
sys.path.insert(0, sys.argv[1])
import torch
import bench_peers, model_config
from peers import timing, triton_gptq, triton_norm
model = replace(model_config.PRESETS["pythia-410m"], num_hidden_layers=1)
run, layers, chosen = triton_gptq.triton_gptq_linears(model)
timing.captured(run).replay()
for tokens in (1, 33):
    run, sets = triton_norm.triton_norm(model, tokens)
    timing.captured(run).replay()
torch.cuda.synchronize()
print(layers, len(chosen))
"""


@unittest.skipUnless(HAS_GPU, "needs torch and a GPU")
class OnGpu(unittest.TestCase):
    def test_torch_s_product_is_within_its_bound_in_every_layout(self):
        model = replace(model_config.PRESETS["pythia-410m"], num_hidden_layers=1)
        for inner_k_tiles in torch_int4.INNER_K_TILES:
            with self.subTest(inner_k_tiles=inner_k_tiles):
                run, layers = torch_int4.torch_int4_linears(model, inner_k_tiles)
                timing.captured(run).replay()
                torch.cuda.synchronize()
                self.assertEqual(layers, 1)

    @unittest.skipUnless(HAS_TRITON, "needs triton")
    def test_triton_s_kernels_are_within_their_bounds_as_they_are_tuned(self):
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-B", "-c", ON_GPU, os.path.join(ROOT, "apps")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        self.assertEqual((done.returncode, done.stdout), (0, "1 4\n"), done.stderr)


class Rows(unittest.TestCase):
    """What bench_peers.py makes of them, without a GPU."""

    def test_code_is_counted_without_blank_lines_comments_and_docstrings(self):
        python = textwrap.dedent('''
            # Not of it.
            @decorated(
                by="this",  # and counted
            )
            def kernel(x):
                """Says what.

                Nothing more."""
                # Why.
                text = """
                kept"""

                return x + 1

            def other():
                return 2
            ''')
        self.assertEqual(lines_of_code.lines_of_python(python, ("kernel",)), 7)
        self.assertEqual(lines_of_code.lines_of_python(python, ("kernel", "other")), 9)
        with self.assertRaises(KeyError):
            lines_of_code.lines_of_python(python, ("nowhere",))
        cuda = "#pragma once\n\n// Why.\nint a;  // one\n/* two\n   lines */ int b;\n  /// doc\n"
        self.assertEqual(lines_of_code.lines_of_cuda(cuda), 3)

    def test_our_kernels_are_counted_with_what_they_include(self):
        files = lines_of_code.cuda_files(lines_of_code.OURS["layernorm_residual"])
        self.assertIn("cuda/ops/norm/layernorm.cuh", files)
        self.assertIn("cuda/device/norm.cuh", files)
        self.assertNotIn("cuda/ops/norm/residual_layernorm.cu", files)
        self.assertNotIn("cuda/runtime/launch.hpp", files)
        files = lines_of_code.cuda_files(lines_of_code.OURS["gptq_linear"])
        self.assertIn("cuda/ops/linear/packed/ring.cuh", files)
        self.assertIn("cuda/ops/linear/pack/pack.cpp", files)
        for op in lines_of_code.OURS:
            ours, theirs = lines_of_code.our_lines(op)["code_lines"], lines_of_code.triton_lines(op)["code_lines"]
            self.assertTrue(ours > theirs > 0, (op, ours, theirs))
        self.assertEqual(lines_of_code.our_lines("attention"), {})

    def test_shapes_are_those_of_a_layer(self):
        self.assertEqual(exactness.product_shapes(model_config.PRESETS["pythia-2.8b"]),
                         [(7680, 2560), (2560, 2560), (10240, 2560), (2560, 10240)])  # fmt: skip

    def bench(self, *peers):
        arguments = {"runs": 1, "warmup": 1, "time_limit_s": 60, "peer_timeout_s": 30, "json": None}
        arguments |= {"peers": list(peers), "batch": [1, 4], "kv_len": [128], "cf_op": "cf-op"}
        bench = layer_bench.Bench(argparse.Namespace(**arguments), {"gpu": "a GPU"})
        bench.free = lambda: None
        return bench

    def test_our_rows_of_an_op_that_triton_has_say_how_long_the_kernel_is(self):
        commands = []

        def run_program(command, timeout_s):
            commands.append(command)
            op = command[1]
            times = {"median_us": 1.0, "p10_us": 1.0, "p99_us": 1.0, "bytes": 8, "cold": True, "floor_us": 0.5}
            row = {"site": "layer", "batch": 1, "kv_len": 1, "limit": "read"} | times
            return {"op": op, "results": [row], "commit": "abc"}

        bench = self.bench("linear", "layernorm_residual", "gptq_linear")
        with mock.patch.object(layer_bench, "run_program", run_program):
            bench.run_programs("pythia-2.8b")
        options = "--preset pythia-2.8b --batch 1 --layers 32 --quant gptq --group 128 --runs 1 --warmup 1"
        self.assertEqual(" ".join(commands[-1]), f"cf-op linear {options}")
        self.assertEqual(len(commands), 3)
        (linear,), (norm,), (int4,) = (bench.results[op] for op in ("linear", "layernorm_residual", "gptq_linear"))
        self.assertNotIn("code_lines", linear)
        self.assertEqual(norm["code_lines"], lines_of_code.our_lines("layernorm_residual")["code_lines"])
        self.assertEqual(int4["code_lines"], lines_of_code.our_lines("gptq_linear")["code_lines"])

    def test_of_torch_s_layouts_the_best_one_counts(self):
        times = {8: 30.0, 4: 20.0, 2: 40.0}
        timer = mock.Mock(graph=lambda run: [run()] * 3)
        linears = lambda model, inner_k_tiles: (lambda: times[inner_k_tiles], 2)
        with mock.patch.object(torch_int4, "torch_int4_linears", linears):
            row = torch_int4.time_torch_int4(None, timer)
        self.assertEqual((row["median_us"], row["layers"]), (10.0, 2))
        self.assertEqual(row["inner_k_tiles"], {"8": 15.0, "4": 10.0, "2": 20.0})

    def test_triton_s_row_says_what_was_chosen_and_how_long_the_kernel_is(self):
        timer = mock.Mock(graph=lambda run: [run()] * 3)
        linears = lambda model: (lambda: 30.0, 3, {"8 x 8": "all"})
        with mock.patch.object(triton_gptq, "triton_gptq_linears", linears):
            row = triton_gptq.time_triton_int4(None, timer)
        self.assertEqual((row["median_us"], row["layers"], row["chosen"]), (10.0, 3, {"8 x 8": "all"}))
        self.assertEqual(row["code_lines"], lines_of_code.triton_lines("gptq_linear")["code_lines"])

    def test_what_is_missing_is_said_in_its_row(self):
        bench = self.bench("layernorm_residual", "gptq_linear")
        # As where triton is missing, whatever torch finds.
        inputs = lambda *_, **__: ((None, None), [(None, None)])
        with mock.patch.dict(sys.modules, {"peers.triton_kernels": None, "torch": mock.MagicMock()}), \
             mock.patch.object(triton_norm, "norm_inputs", inputs), \
             mock.patch.object(torch_norm, "norm_inputs", inputs):  # fmt: skip
            bench.run_ops("pythia-14m")
        rows = [row for op in ("layernorm_residual", "gptq_linear") for row in bench.results[op]]
        missing = [row for row in rows if row["system"] == "Triton in a graph"]
        self.assertEqual([(row["batch"], row["kv_len"]) for row in missing], [(1, 1), (4096, 1), (1, 1)])
        for row in missing:
            self.assertRegex(row["error"], "^ModuleNotFoundError: import of peers.triton_kernels halted")

    @unittest.skipUnless(HAS_TORCH and not HAS_GPU, "needs torch, and no GPU")
    def test_without_a_gpu_every_row_says_so(self):
        bench = self.bench("gptq_linear")
        bench.run_ops("pythia-14m")
        systems = [row["system"] for row in bench.results["gptq_linear"]]
        self.assertEqual(systems, ["torch int4pack, bfloat16, in a graph", "Triton in a graph"])
        for row in bench.results["gptq_linear"]:
            self.assertRegex(row["error"], "(?i)cuda|nvidia")


if __name__ == "__main__":
    unittest.main()
