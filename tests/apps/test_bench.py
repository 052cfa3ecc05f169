#!/usr/bin/env python3
"""Tests of the GPU benchmarks' scripts, as far as neither a GPU nor torch is needed."""

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import math
import os
import stat
import sys
import tempfile
import types
import unittest
from dataclasses import replace
from unittest import mock

import numpy as np

HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))

APPS = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir, "apps")
sys.path.insert(0, APPS)

import bench_busy
import bench_page
import bench_peers
import bench_python
import bench_record
import bench_versions
import console
import families
import gptq
import hf_model
import model_config
import plot_bench
import procedural
from peers import flashinfer_attention, int4_bench, int4_products, layer_bench, model_bench, model_peers, programs
from peers import stacks, table, timing, triton_gptq


def configuration(kv_len, median_us, impl="graph", sites=()):
    timing = {"median_us": median_us, "p10_us": median_us - 1, "p99_us": median_us + 1}
    total = {"site": "total", "bytes": 158_000_000, "percent_of_read": 80.0} | timing
    return {
        "batch": 1, "kv_len": kv_len, "impl": impl, "read_best_gb_per_s": 4000.0, "sites": list(sites), "total": total
    }  # fmt: skip


SITES = [{"site": "input_layernorm", "percent_of_read": 1.5}, {"site": "attention.dense", "percent_of_read": 60.0}]
LAYER = {
    "program": "cf-layer",
    "model": "pythia-2.8b",
    "gpu": "a GPU",
    "configurations": [configuration(128, 50.0, sites=SITES), configuration(2048, 60.0, sites=SITES)],
}


def step(layers, kv_len, median_us):
    """A configuration of a stack of four layers, of which a step takes so many."""
    step = {"site": f"{layers} layers", "median_us": median_us}
    sizes = {"step_layers": layers, "resident_layers": 4, "step": step}
    return configuration(kv_len, median_us / layers, "persistent") | sizes


GROWTH = LAYER | {
    "commit": "abc",
    "command": "cf-layer",
    "configurations": [step(1, 128, 50.0), step(2, 128, 90.0), step(4, 128, 170.0), step(4, 228, 173.0),
                       step(4, 328, 172.0)],
}  # fmt: skip


def peer(system, kv_len, **fields):
    return {"preset": "pythia-2.8b", "batch": 1, "kv_len": kv_len, "system": system} | fields


def run(script, *argv):
    """A script's exit status and what it printed on stdout and stderr."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        return script.main(list(argv)), stdout.getvalue(), stderr.getvalue()


class Files(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name

    def write(self, name, text, executable=False):
        path = os.path.join(self.directory, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        if executable:
            os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
        return path


class Rows(Files):
    def test_spread_is_per_layer(self):
        self.assertEqual(timing.spread([10.0, 30.0, 20.0], 10)["median_us"], 2.0)

    def test_a_layer_report_becomes_rows(self):
        rows = programs.layer_rows(LAYER, "pythia-2.8b")
        self.assertEqual([(r["kv_len"], r["median_us"], r["system"]) for r in rows],
                         [(128, 50.0, "cf-layer graph"), (2048, 60.0, "cf-layer graph")])  # fmt: skip

    def test_earlier_names_of_impls_are_read_as_today_s(self):
        impls = "fused", "stack", "persistent"
        report = LAYER | {"configurations": [configuration(128, 50.0, impl) for impl in impls]}
        systems = [row["system"] for row in programs.layer_rows(report, "pythia-2.8b")]
        self.assertEqual(systems, ["cf-layer layer", "cf-layer persistent", "cf-layer persistent"])

    def test_earlier_names_of_fields_are_read_as_today_s(self):
        configurations = [step(1, 128, 50.0), step(2, 128, 90.0), step(4, 128, 170.0)]
        earlier = []
        for c in configurations:
            times = {"stack": c["step"], "seq_len": c["kv_len"]}
            earlier.append({key: c[key] for key in c if key not in ("step", "kv_len")} | times)
        report = LAYER | {"configurations": configurations}
        self.assertEqual(plot_bench.growths(report), [
            ("pythia-2.8b, batch 1, persistent, kv_len 128", "layer", [(1, 50.0), (2, 90.0), (4, 170.0)])
        ])  # fmt: skip
        self.assertEqual(plot_bench.growths(LAYER | {"configurations": earlier}), plot_bench.growths(report))
        self.assertEqual(programs.layer_rows(LAYER | {"configurations": earlier}, "p"),
                         programs.layer_rows(report, "p"))  # fmt: skip

    def test_of_the_products_the_four_together_count(self):
        times = {"median_us": 1.0, "p10_us": 1.0, "p99_us": 1.0, "bytes": 8}
        times |= {"cold": True, "floor_us": 0.5, "limit": "read"}
        results = [{"site": site, "batch": 1, "kv_len": 1} | times for site in ("attention.dense", "layer")]
        self.assertEqual(len(programs.op_rows({"op": "linear", "results": results}, "p")), 1)
        self.assertEqual(len(programs.op_rows({"op": "attention", "results": results}, "p")), 2)

    def test_a_prompt_s_attention_is_the_site_s(self):
        times = {"median_us": 2.0, "p10_us": 1.0, "p99_us": 3.0, "bytes": 8}
        sites = [{"site": site} | times for site in ("attention.dense", "attention.context")]
        found = programs.prompt_rows(LAYER | {"configurations": [configuration(512, 9.0, "unfused", sites)]}, "p")
        row = {"preset": "p", "batch": 1, "kv_len": 512, "system": "cf-layer unfused"}
        self.assertEqual(found, [row | times])

    def test_ratios_are_over_our_fastest_on_the_same_work(self):
        rows = [peer("cf-layer graph", 128, median_us=50.0), peer("cf-layer unfused", 128, median_us=80.0),
                peer("torch_ops", 128, median_us=200.0), peer("torch_ops", 2048, median_us=300.0),
                peer("hf_eager", 128, error="RuntimeError: no")]  # fmt: skip
        rows[0]["code_lines"] = 7
        expected = {"preset": "pythia-2.8b", "batch": 1, "kv_len": 128, "peer": "torch_ops", "ours": "cf-layer graph"}
        self.assertEqual(table.ratios({"stack": rows}), {"stack": [expected | {"ratio": 4.0}]})
        with contextlib.redirect_stdout(io.StringIO()) as out:
            table.print_table({"stack": rows})
        self.assertIn("| stack | pythia-2.8b | 1 | 128 | cf-layer graph | 50.00 |  | 7 |\n", out.getvalue())
        self.assertIn("| stack | pythia-2.8b | 1 | 128 | torch_ops | 200.00 | 4.00 |  |\n", out.getvalue())
        self.assertIn("| stack | pythia-2.8b | 1 | 128 | hf_eager | RuntimeError: no |  |  |\n", out.getvalue())

    def test_a_program_s_report_or_its_refusal(self):
        script = '#!/bin/sh\nwhile [ "$1" != --json ]; do shift; done\necho \'{"a": 1}\' >"$2"\n'
        good = self.write("good", script, True)
        bad = self.write("bad", "#!/bin/sh\necho 'cf-op: no CUDA device' >&2\nexit 2\n", True)
        self.assertEqual(programs.run_program([good, "--runs", "1"], 10), {"a": 1})
        with self.assertRaisesRegex(RuntimeError, "^exit code 2: cf-op: no CUDA device$"):
            programs.run_program([bad], 10)

    def test_a_measurement_that_takes_too_long_ends(self):
        with self.assertRaisesRegex(TimeoutError, "stopped after 1 s"):
            with timing.time_limit(1):
                while True:
                    pass

    def test_what_was_measured_is_kept_and_what_comes_too_late_is_not_begun(self):
        path = os.path.join(self.directory, "r.json")
        arguments = argparse.Namespace(runs=1, warmup=0, time_limit_s=60, peer_timeout_s=30, json=path)
        script = '#!/bin/sh\nwhile [ "$1" != --json ]; do shift; done\necho \'{"commit": "abc"}\' >"$2"\n'
        program = self.write("cf-op", script, True)
        bench = layer_bench.Bench(arguments, {"gpu": "a GPU"})
        rows = lambda report, preset: [peer("cf-op", 128, median_us=10.0)]
        bench.program("attention", "pythia-2.8b", [program], rows)
        with open(path, encoding="utf-8") as file:
            kept = json.load(file)
        self.assertEqual((kept["gpu"], kept["commit"]), ("a GPU", "abc"))
        self.assertEqual(kept["results"]["attention"], rows(None, None))
        bench.end_s -= 60
        bench.program("attention", "pythia-2.8b", [program], rows)
        with open(path, encoding="utf-8") as file:
            kept = json.load(file)["results"]["attention"]
        self.assertEqual(kept[0], rows(None, None)[0])
        self.assertEqual(kept[1]["error"], "TimeoutError: not begun: the run's 60 s are over")

    def test_an_error_is_one_line(self):
        self.assertEqual(timing.one_line(ValueError("a\nb")), "ValueError: a")
        self.assertEqual(timing.one_line(MemoryError()), "MemoryError: no message")
        raised = OSError("it raised:\n\n  no compiler\nmore")
        self.assertEqual(timing.one_line(raised), "OSError: it raised: no compiler")
        compiler = RuntimeError("backend raised:\nno more")  # as torch wraps what stopped its compiler
        compiler.inner_exception = TimeoutError("stopped after 9 s")
        self.assertEqual(timing.one_line(compiler), "TimeoutError: stopped after 9 s")


def model_row(system, total_ms, **fields):
    row = {"preset": "pythia-2.8b", "slots": 1, "prompt_len": 16, "new_tokens": 3, "system": system}
    times = {"ttft_ms": total_ms / 4, "tpot_ms": total_ms * 3 / 8, "total_ms": total_ms, "tokens_per_s": 3e3 / total_ms}
    return row | times | fields


SAME = {"preset": "pythia-160m", "of": 3, "equal": 3, "first_divergence": None}
OTHER = {"preset": "pythia-2.8b", "of": 3, "equal": 1, "first_divergence": 1}
NO_ROW = {"preset": "pythia-2.8b", "slots": 1, "prompt_len": 128, "new_tokens": 3, "system": "hf_generate"}
MODEL_ROWS = [
    model_row("cf-model graph", 12.0),
    model_row("cf-model persistent", 8.0, agreement=SAME),
    model_row("torch_graph", 16.0, agreement=OTHER),
    NO_ROW | {"error": "E: no"},
]

PYTHON_ROWS = [
    model_row("cf-model persistent", 8.0),
    model_row("hf_generate", 80.0),
    model_row("speed_up", 8.4, agreement=OTHER),
    NO_ROW | {"error": "E: no"},
]
HOST = {"calls": 50, "call_us": 9.5, "host_us": 8.25, "host_p10_us": 8.0, "host_p99_us": 12.0}
PYTHON = {
    "program": "bench_python.py", "gpu": "a GPU", "versions": {"torch": "2"}, "commit": "abc", "dtype": "float16",
    "command": "bench_python.py --slots 1", "ratios": [],
    "results": {
        "model": PYTHON_ROWS,
        "ops": [{"preset": "small", "system": "ops.rope"} | HOST, {"preset": "small", "system": "ops.x", "error": "E"}],
        "clusterfusion": [{"preset": "pythia-2.8b", "system": "pythia_2b8_decoder_layer", "kv_len": 128} | HOST,
                          {"preset": "pythia-2.8b", "system": "pythia_2b8_graph_decode_step", "error": "E: no"}],
    },
}  # fmt: skip

# A cf-model that knows one impl, whose ids are 0, 1, 2, ..., and which reports the dtype that it is given.
CF_MODEL = """#!/usr/bin/env python3
import json, sys
of = lambda option: sys.argv[sys.argv.index(option) + 1]
if of("--impl") != "auto":
    sys.exit("cf-model: no such impl")
report = {"commit": "abc", "impl": "graph", "dtype": of("--preset") + " in " + of("--dtype")}
if sys.argv[1] == "generate":
    prompts = of("--prompt-ids").split(";")
    report["sequences"] = [{"ids": list(range(int(of("--max-new-tokens"))))} for _ in prompts]
else:
    sizes = {"slots": int(of("--slots")), "new_tokens": int(of("--new-tokens"))}
    times = dict.fromkeys(("ttft_ms", "tpot_ms", "total_ms", "inter_token_p50_ms", "inter_token_p99_ms"), 2.0)
    times |= {"tokens_per_s": 5.0, "decode_percent_of_read": 50.0, "impl": "graph"}
    report["results"] = [times | sizes | {"prompt_len": int(n)} for n in of("--prompt-len").split(",")]
with open(of("--json"), "w") as file:
    json.dump(report, file)
"""


class Models(Files):
    def bench(self, **fields):
        program = self.write("cf-model", CF_MODEL, True)
        arguments = {"runs": 2, "warmup": 1, "time_limit_s": 60, "peer_timeout_s": 30, "json": None}
        arguments |= {"cf_model": program, "impl": "auto", "slots": [1], "prompt_len": [3, 5], "new_tokens": [4]}
        arguments |= {"peers": list(model_peers.PEERS), "agreement_preset": "pythia-14m"}
        bench = model_bench.ModelBench(argparse.Namespace(**(arguments | fields)), {"gpu": "a GPU"})
        bench.free = lambda: None
        return bench

    def test_prompts_are_those_of_cf_model(self):
        # The formula of prompt_of() in apps/bench/model_bench.cpp.
        first, second = model_peers.Load(2, 3, 1).prompts(97)
        self.assertEqual(first[0], 2654435761 % 97)
        self.assertEqual(second[2], (3 * 2654435761 + 40503) % 97)
        self.assertEqual((len(first), len(second)), (3, 3))
        self.assertEqual(model_peers.Load(1, 3, 2).capacity, 4)

    def test_figures_are_medians_by_cf_model_s_definitions(self):
        load = model_peers.Load(2, 16, 3)
        got = model_peers.figures([[4.0, 6.0, 10.0], [2.0, 5.0, 8.0], [3.0, 4.0, 9.0]], load)
        self.assertEqual((got["ttft_ms"], got["total_ms"], got["tpot_ms"]), (3.0, 9.0, 3.0))
        self.assertEqual(got["inter_token_p50_ms"], 3.0)
        self.assertAlmostEqual(got["tokens_per_s"], 6e3 / 9)
        one = model_peers.figures([[4.0]], model_peers.Load(1, 16, 1))
        self.assertEqual((one["ttft_ms"], one["tpot_ms"], one["tokens_per_s"]), (4.0, 0.0, 250.0))

    def test_agreement_counts_equal_ids_and_names_the_first_other(self):
        same = {"of": 4, "equal": 4, "equal_fraction": 1.0, "first_divergence": None, "distinct_ids": 3}
        self.assertEqual(model_peers.agreement([1, 2, 3, 3], [1, 2, 3, 3]), same)
        other = same | {"equal": 2, "equal_fraction": 0.5, "first_divergence": 1}
        self.assertEqual(model_peers.agreement([1, 7, 3, 7], [1, 2, 3, 3]), other)
        with self.assertRaisesRegex(RuntimeError, "expected 4 ids, got 3"):
            model_peers.agreement([1, 2, 3], [1, 2, 3, 3])

    @unittest.skipUnless(HAS_TORCH, "needs torch and transformers")
    def test_ids_that_part_have_float64_s_margin_between_them(self):
        import torch

        prompt = [3, 1, 4, 1, 5]
        for name, model in self.small_models().items():
            weights = {key: procedural.weight("float16", shape, 0, key)
                       for key, shape in model_config.model_shapes(model).items()}  # fmt: skip
            own, wide = (hf_model.build_causal(model, weights, "float16", dtype, "sdpa", "cpu")
                         for dtype in ("float16", "float64"))  # fmt: skip
            hf_model.widen_norms(wide)
            made, _ = hf_model.generate(own, prompt, 4)
            theirs = made.tolist()[len(prompt) :]
            same = model_peers.margin(own, prompt, theirs, theirs)
            self.assertEqual(same, model_peers.agreement(theirs, theirs))
            ours = [*theirs[:2], (theirs[2] + 1) % model.vocab_size, theirs[3]]
            found = model_peers.margin(own, prompt, ours, theirs)
            self.assertEqual((found["equal"], found["first_divergence"]), (3, 2), name)
            with torch.no_grad():
                of_own, exact = (m(torch.tensor([prompt + theirs[:2]])).logits[0, -1].double() for m in (own, wide))
            self.assertAlmostEqual(found["margin"], (exact[theirs[2]] - exact[ours[2]]).item(), 12)
            self.assertAlmostEqual(found["own_error"], (of_own - exact).abs().max().item(), 12)
            self.assertGreater(found["margin"] + 2 * found["own_error"], 0, "no 16 bits would have chosen the other id")

    def test_a_peer_s_row_has_its_times_over_our_fastest(self):
        rows = model_peers.with_ratios(MODEL_ROWS)
        self.assertEqual(rows[:2] + rows[3:], MODEL_ROWS[:2] + MODEL_ROWS[3:])
        added = {"ours": "cf-model persistent", "ttft_ratio": 2.0, "tpot_ratio": 2.0, "total_ratio": 2.0}
        self.assertEqual(rows[2], MODEL_ROWS[2] | added)
        one = [model_row(system, 8.0, tpot_ms=0.0) for system in ("cf-model graph", "hf_generate")]
        self.assertNotIn("tpot_ratio", model_peers.with_ratios(one)[1])

    def test_the_table_has_a_row_a_system(self):
        self.assertEqual(model_peers.table(model_peers.with_ratios(MODEL_ROWS))[2:], [
            "| pythia-2.8b | cf-model graph | 1 | 16 | 3 | 3.00 |  | 4.50 |  | 250.0 |  |",
            "| pythia-2.8b | cf-model persistent | 1 | 16 | 3 | 2.00 |  | 3.00 |  | 375.0 | 3 of 3 (pythia-160m) |",
            "| pythia-2.8b | torch_graph | 1 | 16 | 3 | 4.00 | 2.00x | 6.00 | 2.00x | 187.5 | 1 of 3, first other 1 |",
            "| pythia-2.8b | hf_generate | 1 | 128 | 3 | E: no |  |  |  |  |  |",
        ])  # fmt: skip
        apart = model_row("speed_up", 8.0, agreement=OTHER | {"margin": -0.00123, "own_error": 0.0456})
        self.assertEqual(model_peers.agreement_text(apart), "1 of 3, first other 1: float64 has -0.0012 between them, "
                                                            "16 bits an error of 0.046")  # fmt: skip

    def test_ours_and_peers_and_their_ids_are_rows_of_one_file(self):
        path = os.path.join(self.directory, "r.json")
        bench = self.bench(json=path, impl="auto,other", slots=[1, 2])

        def timed(peer, hf, load, captured, runs, warmup):
            if peer == "torch_graph":
                raise MemoryError
            ids = [0, 1, 9, 3] if peer == "hf_generate" else [0, 1, 2, 3]
            return model_peers.figures([[4.0] * load.new_tokens] * runs, load), ids

        models = {"random_model": lambda preset: preset, "procedural_model": lambda preset: preset}
        apart = lambda hf, prompt, *ids: model_peers.agreement(*ids) | {"margin": len(prompt), "own_error": hf}
        with mock.patch.multiple(model_peers, timed=timed, margin=apart, **models):
            bench.run("pythia-14m")
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)["results"]["model"]
        ours = [row for row in rows if row["system"] == "cf-model graph"]
        self.assertEqual([(r["slots"], r["prompt_len"]) for r in ours], [(1, 3), (1, 5), (2, 3), (2, 5)])
        self.assertEqual([r.get("agreement", {}).get("equal") for r in ours], [3, 3, None, None])
        self.assertEqual(ours[0]["agreement"]["first_divergence"], 2)
        self.assertEqual(ours[0]["agreement"]["impl"], "graph")
        self.assertEqual([ours[i]["agreement"]["margin"] for i in (0, 1)], [3, 5])
        refused = [row for row in rows if row["system"] == "cf-model other"]
        self.assertEqual([row["slots"] for row in refused], [1, 2])
        self.assertEqual(refused[0]["error"], "RuntimeError: exit code 1: cf-model: no such impl")
        peers = [row for row in rows if not model_peers.is_ours(row)]
        self.assertEqual([row["system"] for row in peers[::4]], list(model_peers.PEERS))
        self.assertEqual({row["error"] for row in peers if row["system"] == "torch_graph"}, {"MemoryError: no message"})
        compiled = peers[-1]
        self.assertEqual((compiled["system"], compiled["slots"], compiled["prompt_len"]), ("hf_static_compile", 2, 5))
        self.assertEqual((compiled["ours"], compiled["ttft_ratio"]), ("cf-model graph", 2.0))
        self.assertEqual((compiled["agreement"]["equal"], compiled["agreement"]["preset"]), (3, "pythia-14m"))
        self.assertEqual((compiled["agreement"]["margin"], compiled["agreement"]["own_error"]), (5, "pythia-14m"))

    def test_ids_that_cannot_be_compared_say_why_and_times_are_there(self):
        def no_model(preset):
            raise MemoryError("too large")

        bench = self.bench(peers=[], slots=[1])
        with mock.patch.object(model_peers, "procedural_model", no_model):
            bench.run("pythia-14m")
        rows = bench.results["model"]
        self.assertEqual([row["total_ms"] for row in rows], [2.0, 2.0])
        self.assertEqual(rows[0]["agreement"]["error"], "RuntimeError: hf_generate: MemoryError: too large")
        bench = self.bench(peers=[], agreement_preset=None)
        bench.run("pythia-14m")
        self.assertNotIn("agreement", bench.results["model"][0])

    def test_each_family_runs_in_its_own_dtype_and_is_compared_with_a_small_model_of_its_own(self):
        bench = self.bench(peers=["hf_generate"], prompt_len=[3], agreement_preset="auto")
        made = []

        def timed(peer, hf, load, captured, runs, warmup):
            return model_peers.figures([[4.0] * load.new_tokens] * runs, load), [0, 1, 2, 3]

        models = {"random_model": made.append, "procedural_model": made.append}
        with mock.patch.multiple(model_peers, timed=timed, **models):
            for preset in ("pythia-14m", "llama-2-7b", "qwen2.5-7b"):
                bench.run(preset)
        expected = ["pythia-160m", "pythia-14m", "llama-3.2-1b", "llama-2-7b", "qwen2.5-7b"]
        self.assertEqual(made, expected)
        self.assertEqual([program["dtype"] for program in bench.programs],
                         ["pythia-14m in float16", "llama-2-7b in float16", "qwen2.5-7b in bfloat16"])  # fmt: skip
        compared = [row["agreement"]["preset"] for row in bench.results["model"] if model_peers.is_ours(row)]
        self.assertEqual(compared, ["pythia-160m", "llama-3.2-1b", "llama-3.2-1b"])

    def test_the_dtypes_of_presets_are_those_of_the_one_list(self):
        dtypes = model_config.PRESET_DTYPES
        self.assertEqual(list(dtypes), list(model_config.PRESETS))
        self.assertEqual({dtypes[name] for name in model_config.PYTHIA_PRESETS}, {"float16"})
        self.assertEqual((dtypes["llama-2-7b"], dtypes["llama-3.1-8b"]), ("float16", "bfloat16"))

    def small_models(self):
        """A small model of each family: Llama's with tied embeddings and scaled RoPE, Qwen2's with biases."""
        sizes = {"num_hidden_layers": 2, "vocab_size": 512}
        grouped = sizes | {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 32, "intermediate_size": 80}
        presets = model_config.PRESETS
        return {
            "pythia": replace(presets["pythia-14m"], **sizes),
            "llama": replace(presets["llama-3.2-1b"], **grouped, num_key_value_heads=2),
            "ungrouped": replace(presets["llama-2.8b-shape"], **grouped, num_key_value_heads=6),
            "qwen2": replace(presets["qwen2.5-7b"], **grouped, num_key_value_heads=1),
        }

    def sharp(self, model):
        """Hugging Face's model in float32, with weights so large that heads look at few tokens, and ids differ."""
        weights = {}
        for name, shape in model_config.model_shapes(model).items():
            weights[name] = procedural.weight("float32", shape, 0, name) * np.float32(8 if len(shape) == 2 else 1)
        return hf_model.build_causal(model, weights, "float32", "float32", "sdpa", "cpu")

    @staticmethod
    def captured(step, before=lambda: None):
        """What a graph does, without one: a warm-up, then the step at each replay."""
        for _ in range(3):
            before()
            step()
        before()
        return types.SimpleNamespace(replay=step)

    @unittest.skipUnless(HAS_TORCH, "needs torch and transformers")
    def test_peers_choose_the_ids_of_hugging_face_s_own_pass(self):
        for name, model in self.small_models().items():
            hf = self.sharp(model)
            # 14 + 3 - 1 entries fill the cache of the mask's multiple of 16.
            for load in (model_peers.Load(1, 14, 3), model_peers.Load(2, 17, 6), model_peers.Load(1, 16, 1)):
                prompts = load.prompts(model.vocab_size)
                expected = hf_model.generate(hf, prompts[0], load.new_tokens)[0].tolist()[load.prompt_len :]
                for peer in (name for name in model_peers.PEERS if name != "hf_continuous"):  # whose pool is all memory
                    # The compiler is torch's own: here the function that it would compile runs.
                    with mock.patch("torch.compile", lambda function, **_: function):
                        found, ids = model_peers.timed(peer, hf, load, self.captured, 2, 1)
                    self.assertEqual(ids, expected, (name, peer, load))
                    self.assertGreater(found["total_ms"], 0)

    @unittest.skipUnless(HAS_TORCH, "needs torch and transformers")
    def test_answers_of_continuous_batching_are_a_stream_by_their_own_times(self):
        asked = []

        class Model:
            config = types.SimpleNamespace(vocab_size=97, _attn_implementation="sdpa")
            device = types.SimpleNamespace(type="cpu")
            attention, error = [], None

            def set_attn_implementation(self, name):
                self.attention.append(name)

            def generate_batch(self, prompts, generation_config, record_timestamps):
                asked.append((prompts, generation_config.max_new_tokens, generation_config.do_sample))
                made = {"generated_tokens": [5, 6, 7], "created_time": 2.0, "error": self.error}
                first = types.SimpleNamespace(**made, timestamps=[2.5, 3.0, 3.25])
                made |= {"generated_tokens": [8, 9, 3], "created_time": 2.125}
                return {"a": first, "b": types.SimpleNamespace(**made, timestamps=[2.75, 2.875, 3.5])}

        model, load = Model(), model_peers.Load(2, 4, 3)
        found, ids = model_peers.timed("hf_continuous", model, load, None, 1, 0)
        self.assertEqual(ids, [5, 6, 7])
        self.assertEqual((found["ttft_ms"], found["total_ms"], found["tpot_ms"]), (750.0, 1500.0, 375.0))
        self.assertEqual(asked, [(load.prompts(97), 3, False)])
        self.assertEqual(model.attention, ["sdpa"])
        for sizes, message in (((3, 4, 3), "expected 3 answers, got 2"), ((2, 4, 4), "expected 4 new tokens, got 3")):
            with self.assertRaisesRegex(RuntimeError, message):
                model_peers.timed("hf_continuous", model, model_peers.Load(*sizes), None, 1, 0)
        model.error = "out of pages"
        with self.assertRaisesRegex(RuntimeError, "out of pages"):
            model_peers.timed("hf_continuous", model, load, None, 1, 0)

    @unittest.skipUnless(HAS_TORCH, "needs torch and transformers")
    def test_flashinfer_s_attention_over_pages_is_compared_with_sdpa(self):
        import torch

        class Wrapper:
            """What FlashInfer computes, by its plan."""

            scale = 1.0

            def __init__(self, workspace, layout):
                assert layout == "NHD" and workspace.dtype == torch.uint8

            def plan(self, begins, order, in_last, heads, kv_heads, head_dim, page, *, q_data_type, kv_data_type):
                assert (heads, kv_heads, head_dim) == (4, 4, 32) and begins.dtype == order.dtype == torch.int32
                self.begins, self.order, self.in_last, self.page = begins.tolist(), order.tolist(), in_last, page

            def run(self, q, cache):
                made = []
                for i, (begin, end) in enumerate(zip(self.begins, self.begins[1:])):
                    entries = (end - begin - 1) * self.page + int(self.in_last[i])
                    k, v = torch.cat([cache[page] for page in self.order[begin:end]], 1)[:, :entries].float()
                    weights = torch.einsum("hd,nhd->hn", q[i].float(), k).mul(self.scale * 32**-0.5).softmax(-1)
                    made.append(torch.einsum("hn,nhd->hd", weights, v))
                return torch.stack(made).half()

        class PromptWrapper(Wrapper):
            def plan(self, q_begins, *where_and_sizes, causal, **kinds):
                assert causal and q_begins.dtype == torch.int32
                self.q_begins = q_begins.tolist()
                super().plan(*where_and_sizes, **kinds)

            def run(self, q, cache):
                tokens = self.q_begins[1]
                assert tokens == len(q) == (self.begins[1] - 1) * self.page + int(self.in_last[0])
                k, v = torch.cat([cache[page] for page in self.order], 1)[:, :tokens].float()
                weights = torch.einsum("qhd,nhd->hqn", q.float(), k).mul(self.scale * 32**-0.5)
                hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
                return torch.einsum("hqn,nhd->qhd", weights.masked_fill(hidden, -torch.inf).softmax(-1), v).half()

        wrappers = {"Decode": Wrapper, "Prefill": PromptWrapper}
        found = types.SimpleNamespace(**{f"Batch{n}WithPagedKVCacheWrapper": w for n, w in wrappers.items()})
        model = types.SimpleNamespace(num_attention_heads=4, head_dim=32, hidden_size=128)
        self.assertEqual(flashinfer_attention.pages(3, 65), ([0, 2, 4, 6], 1))
        self.assertEqual(flashinfer_attention.pages(2, 64), ([0, 1, 2], 64))
        sizes = mock.patch.multiple(flashinfer_attention, sets_beyond_l2=lambda _: 2, WORKSPACE_BYTES=16)
        with mock.patch.dict(sys.modules, flashinfer=found), sizes:
            run, count = flashinfer_attention.flashinfer_decode(model, 3, 130, "cpu")
            self.assertEqual((count, [tuple(out.shape) for out in run()]), (2, [(3, 4, 32)] * 2))
            with mock.patch.object(Wrapper, "scale", 2.0):
                with self.assertRaisesRegex(RuntimeError, "expected sdpa's result, got a relative error of"):
                    flashinfer_attention.flashinfer_decode(model, 3, 130, "cpu")
                with self.assertRaisesRegex(RuntimeError, "expected sdpa's result, got a relative error of"):
                    flashinfer_attention.flashinfer_prefill(model, 130, "cpu")
            run, count = flashinfer_attention.flashinfer_prefill(model, 130, "cpu")
            self.assertEqual((count, [tuple(out.shape) for out in run()]), (2, [(130, 4, 32)] * 2))
        with mock.patch.dict(sys.modules, flashinfer=None), self.assertRaises(ImportError):
            flashinfer_attention.flashinfer_decode(model, 3, 130, "cpu")

    @unittest.skipUnless(HAS_TORCH, "needs torch and transformers")
    def test_torch_s_operators_make_what_hugging_face_s_modules_make(self):
        import torch

        load, norm = model_peers.Load(1, 17, 4), model_peers.torch_norm
        for name, model in self.small_models().items():
            hf = self.sharp(model)
            self.assertEqual(model_peers.model_of(hf), model)
            ids, _ = hf_model.generate(hf, load.prompts(model.vocab_size)[0], load.new_tokens)
            taps, _ = hf_model.run_model(hf, model, ids[:-1])
            expected = torch.from_numpy(taps[model.names.final_norm_tap])[load.prompt_len - 1 :]
            for peer in (model_peers.torch_graph, model_peers.torch_graphs):
                made = []
                run = peer(hf, load, self.captured)
                keep = lambda *arguments: made.append(norm(*arguments)) or made[-1]
                with mock.patch.object(model_peers, "torch_norm", keep):
                    run()
                of_a_pass = 2 * model.num_hidden_layers + 1
                last = torch.cat([of_norm[:, -1] for of_norm in made[of_a_pass - 1 :: of_a_pass]])
                self.assertLess(stacks.relative_l2(last, expected), 1e-5, (name, peer))

    def test_hugging_face_gets_the_weights_that_cf_model_makes(self):
        small = self.small_models()
        with mock.patch.multiple(model_config, PRESETS=small, PRESET_DTYPES=dict.fromkeys(small, "bfloat16")):
            for name, model in small.items():
                weights, shapes = model_peers.procedural_weights(name), model_config.model_shapes(model)
                self.assertEqual({key: array.shape for key, array in weights.items()}, shapes, name)
                # cf-model has one matrix for q, k and v, and one for gate and up.
                for key, array in families.join(model.names, weights).items():
                    expected = procedural.weight("bfloat16", array.shape, model_peers.WEIGHTS_SEED, key)
                    self.assertEqual(array.tobytes(), expected.tobytes(), (name, key))

    @unittest.skipUnless(HAS_TORCH, "needs torch and transformers")
    def test_models_are_made_in_their_own_dtype_with_the_head_that_they_have(self):
        import torch

        small = self.small_models()
        dtypes = dict.fromkeys(small, "bfloat16") | {"pythia": "float16"}
        with mock.patch.multiple(model_config, PRESETS=small, PRESET_DTYPES=dtypes):
            for name, model in small.items():
                dtype = getattr(torch, dtypes[name])
                for made in (model_peers.random_model(name, "cpu"), model_peers.procedural_model(name, "cpu")):
                    self.assertEqual({p.dtype for p in made.parameters()}, {dtype}, name)
                    parameters = sum(p.numel() for p in made.parameters())
                    shapes = model_config.model_shapes(model)
                    self.assertEqual(parameters, sum(map(math.prod, shapes.values())), name)
                    tied = made.get_output_embeddings().weight is made.get_input_embeddings().weight
                    self.assertEqual(tied, name == "llama")
                for key in (f"{model.names.embedding}.weight", f"{model.names.final_norm}.weight"):
                    expected = procedural.weight(dtypes[name], shapes[key], model_peers.WEIGHTS_SEED, key)
                    got = hf_model.to_numpy(made.get_submodule(key.removesuffix(".weight")).weight)
                    self.assertEqual(got.tobytes(), expected.tobytes(), (name, key))


class Python(Files):
    """bench_python.py: the package's calls beside Hugging Face and cf-model."""

    def test_help_needs_no_gpu(self):
        with self.assertRaises(SystemExit) as end:
            run(bench_python, "--help")
        self.assertEqual(end.exception.code, 0)

    def test_ratios_are_of_one_work(self):
        (row,) = bench_python.ratios(PYTHON_ROWS)
        sizes = {"preset": "pythia-2.8b", "slots": 1, "prompt_len": 16, "new_tokens": 3}
        self.assertEqual({key: row[key] for key in sizes}, sizes)
        self.assertAlmostEqual(row["hf_over_speed_up"], 80 / 8.4)
        self.assertAlmostEqual(row["speed_up_over_cf_model"], 1.05)
        self.assertEqual(bench_python.ratios(PYTHON_ROWS[:2] + PYTHON_ROWS[3:]), [])
        (alone,) = bench_python.ratios(PYTHON_ROWS[2:])
        self.assertEqual(set(alone), set(sizes))

    def test_a_table_a_part(self):
        code, out, error = run(plot_bench, "--tables", self.write("p.json", json.dumps(PYTHON)))
        self.assertEqual((code, error), (0, ""))
        self.assertEqual(out.splitlines()[0], "a GPU, torch 2, commit abc: `bench_python.py --slots 1`")
        self.assertEqual(out.splitlines()[2:], bench_python.tables(PYTHON))
        self.assertEqual(bench_python.tables(PYTHON)[2:], [
            "| pythia-2.8b | cf-model persistent | 1 | 16 | 3 | 2.00 |  | 3.00 |  | 375.0 |  |",
            "| pythia-2.8b | hf_generate | 1 | 16 | 3 | 20.00 | 10.00x | 30.00 | 10.00x | 37.5 |  |",
            "| pythia-2.8b | speed_up | 1 | 16 | 3 | 2.10 | 1.05x | 3.15 | 1.05x | 357.1 | 1 of 3, first other 1 |",
            "| pythia-2.8b | hf_generate | 1 | 128 | 3 | E: no |  |  |  |  |  |",
            "",
            "- pythia-2.8b, 1 at once, 16 + 3 tokens: Hugging Face takes 9.52 times speed_up's time a token, "
            "speed_up takes 1.050 times cf-model's",
            "",
            "| call | host us, median | 10 % | 99 % |",
            "|---|---:|---:|---:|",
            "| ops.rope | 8.2 | 8.0 | 12.0 |",
            "| ops.x | E |  |  |",
            "",
            "| call | kv_len | us from call to call | host us, median |",
            "|---|---:|---:|---:|",
            "| pythia_2b8_decoder_layer | 128 | 9.5 | 8.2 |",
            "| pythia_2b8_graph_decode_step |  | E: no |  |",
        ])  # fmt: skip
        parts = {"model": [], "ops": PYTHON["results"]["ops"], "clusterfusion": []}
        self.assertEqual(len(bench_python.tables(PYTHON | {"results": parts})), 4)

    def test_the_page_has_what_is_recorded(self):
        self.assertEqual(bench_page.python(bench_page.Figures(self.directory)), ["Not recorded."])
        self.write("python-pythia-2.8b.json", json.dumps(PYTHON))
        lines = bench_page.python(bench_page.Figures(self.directory))
        self.assertEqual(lines[0], "torch 2. [`python-pythia-2.8b.json`](python-pythia-2.8b.json).")
        self.assertEqual(lines[2], "![Milliseconds a token from Python](python-pythia-2.8b.svg)")
        self.assertEqual(lines[4:], bench_python.tables(bench_page.measured(PYTHON)))
        self.assertFalse([line for line in lines if "E: no" in line or "| E |" in line], "what was not measured")
        calls = {"model": [], "ops": [], "clusterfusion": PYTHON["results"]["clusterfusion"]}
        port = PYTHON | {"commit": "def", "results": calls}
        self.write("python-port-pythia-2.8b.json", json.dumps(port))
        apart = bench_page.python(bench_page.Figures(self.directory))
        others = bench_page.measured(PYTHON | {"results": PYTHON["results"] | {"clusterfusion": []}})
        of_others, of_port = bench_python.tables(others), bench_python.tables(bench_page.measured(port))
        source = "torch 2. [`python-pythia-2.8b.json`](python-pythia-2.8b.json), commit abc."
        self.assertEqual(apart[:4], [source, *lines[1:4]], "a commit that all share stands once on the page")
        self.assertEqual(apart[4:-len(of_port)], [
            *of_others, "", "[`python-port-pythia-2.8b.json`](python-port-pythia-2.8b.json), commit def.", ""
        ])  # fmt: skip
        self.assertEqual(apart[-len(of_port) :], of_port)

    def test_calls_are_timed_in_blocks_behind_a_rewind(self):
        made = []
        blocks = iter([([9.0] * 2, 99.0), ([1.0, 2.0], 4.0), ([3.0, 6.0], 8.0)])

        def block_us(call, calls):
            made.append(calls)
            return next(blocks)

        # The host does not always get ahead of the device.
        device = [3.0, None, 5.0]

        def device_us(call, calls, rewind):
            return device.pop()

        with mock.patch.multiple(bench_python, BLOCK=2, DEVICE_BLOCKS=3, block_us=block_us, device_us=device_us):
            found = bench_python.timed_calls(None, 3, lambda: made.append("rewind"))
        self.assertEqual(made, ["rewind", 2] * 3)
        self.assertEqual((found["calls"], found["call_us"], found["host_us"]), (4, 6.0, 2.5))
        self.assertEqual(found["device_us"], 4.0)
        blocks = iter([([9.0] * 2, 99.0), ([1.0, 2.0], 4.0)])
        with mock.patch.multiple(bench_python, BLOCK=2, block_us=block_us, device_us=lambda *_: None):
            self.assertNotIn("device_us", bench_python.timed_calls(None, 2))

    def test_the_devices_time_has_a_column_where_it_is_known(self):
        rows = [{"system": "ops.rope", "kv_len": 7} | HOST | {"device_us": 2.25}, {"system": "ops.x", "error": "E"}]
        self.assertEqual(bench_python.host_table(rows), [
            "| call | host us, median | 10 % | 99 % | device us |",
            "|---|---:|---:|---:|---:|",
            "| ops.rope | 8.2 | 8.0 | 12.0 | 2.2 |",
            "| ops.x | E |  |  |  |",
        ])  # fmt: skip
        self.assertEqual(bench_python.call_table(rows), [
            "| call | kv_len | us from call to call | host us, median | device us |",
            "|---|---:|---:|---:|---:|",
            "| ops.rope | 7 | 9.5 | 8.2 | 2.2 |",
            "| ops.x |  | E |  |  |",
        ])  # fmt: skip

    def test_a_graph_context_s_impls_are_rows_of_one_table(self):
        made = []

        class LayerCalls:
            def __init__(self, preset, kv_len):
                self.kv_len = kv_len

            def decoder_layer(self, calls):
                made.append((self.kv_len, calls))
                return dict(HOST)

            def graph_decode_step(self, calls, impl):
                made.append((self.kv_len, calls, impl))
                return dict(HOST)

        arguments = {"runs": 2, "warmup": 1, "time_limit_s": 60, "peer_timeout_s": 30, "json": None, "calls": 3}
        arguments |= {"parts": ["clusterfusion"], "kv_len": [5, 7], "step_impl": ["graph", "unfused"]}
        bench = bench_python.PythonBench(argparse.Namespace(**arguments), {"gpu": "a GPU"})
        bench.free = lambda: None
        with mock.patch.object(bench_python, "LayerCalls", LayerCalls):
            bench.run("pythia-6.9b")
        self.assertEqual(made, [(5, 3), (7, 3), *((n, 3, impl) for impl in ("graph", "unfused") for n in (5, 7))])
        step = "pythia_6b9_graph_decode_step"
        self.assertEqual([(row["system"], row["kv_len"]) for row in bench.results["clusterfusion"]],
                         [(name, n) for name in ("pythia_6b9_decoder_layer", step, f"{step}, unfused")
                          for n in (5, 7)])  # fmt: skip

    def test_theirs_and_ours_are_rows_of_one_file(self):
        program, path = self.write("cf-model", CF_MODEL, True), os.path.join(self.directory, "r.json")
        arguments = {"runs": 2, "warmup": 1, "time_limit_s": 60, "peer_timeout_s": 30, "json": path, "parts": ["model"]}
        arguments |= {"cf_model": program, "impl": "auto", "slots": [1, 2], "prompt_len": [3], "new_tokens": [4]}
        bench = bench_python.PythonBench(argparse.Namespace(**arguments), {"gpu": "a GPU"})
        bench.free = lambda: None
        is_ours = []

        def timed(peer, hf, load, captured, runs, warmup):
            self.assertEqual((peer, hf), ("hf_generate", "pythia-14m"))
            return model_peers.figures([[1.0 if is_ours else 4.0] * load.new_tokens] * runs, load), [0, 1, 2, 3]

        report = types.SimpleNamespace(share=1, hugging_face={})
        speed_up = types.SimpleNamespace(speed_up=is_ours.append, restore=is_ours.remove, report=lambda model: report)
        package = types.SimpleNamespace(hf=speed_up)
        with mock.patch.dict(sys.modules, {"cf_ops": package, "cf_ops.hf": speed_up}):
            with mock.patch.multiple(model_peers, timed=timed, random_model=lambda preset: preset):
                bench.run("pythia-14m")
                report.share, report.hugging_face = 0.5, {"a hook on a module": 3}
                bench.run_generate("pythia-14m")
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)["results"]["model"]
        self.assertEqual([row["system"] for row in rows[:6]],
                         ["cf-model graph"] * 2 + ["hf_generate", "speed_up"] * 2)  # fmt: skip
        self.assertEqual([row["slots"] for row in rows[:6]], [1, 2, 1, 1, 2, 2])
        self.assertEqual((rows[2]["ttft_ms"], rows[3]["ttft_ms"], rows[3]["agreement"]["equal"]), (4.0, 1.0, 4))
        self.assertEqual(rows[7]["error"],
                         "RuntimeError: calls ran on Hugging Face's path: {'a hook on a module': 3}")  # fmt: skip
        self.assertEqual(is_ours, [])


class Busy(Files):
    """bench_busy.py with a program in the place of cf-model that says how its threads would wait."""

    PROGRAM = """#!{python}
import json, os, sys
spins = os.environ.get("GOMP_SPINCOUNT")
assert os.environ.get("OMP_WAIT_POLICY") != "ACTIVE"
report = {{"commit": "abc", "cpu": "a CPU", "threads": 2, "results": [{{"tpot_ms": 4.0 if spins else 0.5}}]}}
with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
    json.dump(report | {{"words": sys.argv[1:]}}, file)
sys.exit("no such model" if "--preset" in sys.argv else 0)
"""

    def program(self):
        return self.write("cf-model", self.PROGRAM.format(python=sys.executable), executable=True)

    def test_both_ways_to_wait_are_timed_alone_and_beside_loops(self):
        out = os.path.join(self.directory, "busy.json")
        words = ["--cf-model", self.program(), "--model", self.directory, "--loops", "1", "--repeats", "2"]
        with mock.patch.dict(os.environ, {"OMP_WAIT_POLICY": "ACTIVE"}):
            code, printed, error = run(bench_busy, *words, "--json", out)
        self.assertEqual((code, error), (0, ""))
        with open(out, encoding="utf-8") as file:
            report = json.load(file)
        name = os.path.basename(self.directory)
        expected = [("default", 0.5), ("sleep", 0.5), ("spin", 4.0)]
        self.assertEqual(
            report["results"],
            [{"model": name, "waits": w, "alone_ms": ms, "busy_ms": ms, "ratio": 1.0} for w, ms in expected],
        )
        self.assertEqual((report["commit"], report["busy_loops"], report["repeats"]), ("abc", 1, 2))
        self.assertTrue(report["command"].startswith("apps/bench_busy.py --cf-model "))
        self.assertIn(f"| {name} | spin | 4.00 | 4.00 | 1.0 |", printed)

    def test_the_ratio_is_that_of_the_medians(self):
        times = {("default", 0): [1, 9, 2], ("default", 2): [6, 5, 99], ("spin", 0): [1], ("spin", 2): [30]}
        times |= {("sleep", 0): [2], ("sleep", 2): [8]}
        self.assertEqual([row["ratio"] for row in bench_busy.rows_of("m", times, 2)], [3, 4, 30])

    def test_what_cf_model_refuses_is_one_line(self):
        code, _, error = run(bench_busy, "--cf-model", self.program(), "--model", "nowhere")
        self.assertEqual((code, error.count("\n")), (2, 1))
        self.assertRegex(error, "^bench_busy.py: .*--preset nowhere.*: no such model")
        code, _, error = run(bench_busy, "--cf-model", os.path.join(self.directory, "absent"), "--model", "m")
        self.assertEqual((code, error.count("\n")), (2, 1))


class Versions(Files):
    """bench_versions.py with programs in the place of two builds'."""

    PROGRAM = """#!{python}
import json, sys
argv = sys.argv
report = {{"commit": "{commit}", "gpu": "a GPU"}}
report["configurations"] = [{{"impl": i, "kv_len": 512, "step": {{"median_us": {us}}}}} for i in ("graph", {impl!r})]
report["results"] = [{{"prompt_len": 128, "impl": "auto", "ttft_ms": 2.0}}]
with open(argv[argv.index("--json") + 1], "w") as file:
    json.dump(report, file)
sys.exit("no such model" if "nowhere" in argv else 0)
"""

    def build(self, commit, us, impl="persistent"):
        for program in ("cf-layer", "cf-model"):
            text = self.PROGRAM.format(python=sys.executable, commit=commit, us=us, impl=impl)
            os.makedirs(os.path.join(self.directory, commit, "apps"), exist_ok=True)
            self.write(os.path.join(commit, "apps", program), text, executable=True)
        return os.path.join(self.directory, commit)

    def test_a_ratio_is_new_over_old_and_the_exit_code_says_whether_all_are_near(self):
        out = os.path.join(self.directory, "versions.json")
        words = [self.build("aaa", 100), self.build("bbb", 103, "split"), "--preset", "pythia-14m"]
        words += ["--batch", "1", "--prompt-len", "128", "--rounds", "2"]
        code, printed, error = run(bench_versions, *words, "--json", out)
        self.assertEqual((code, error), (1, ""))
        self.assertIn("| pythia-14m | step, batch 1, kv 512 | graph | 100.0 | 103.0 | 1.0300 |", printed)
        self.assertIn("| pythia-14m | prompt, 128 | auto | 2000.0 | 2000.0 | 1.0000 |", printed)
        self.assertNotIn("split", printed)  # one build alone has it
        self.assertIn("1 of 2 within 1.0 %", printed)
        self.assertEqual(run(bench_versions, *words, "--percent", "4")[0], 0)
        with open(out, encoding="utf-8") as file:
            report = json.load(file)
        self.assertEqual((report["old_commit"], report["commit"], report["gpu"]), ("aaa", "bbb", "a GPU"))

    def test_what_a_program_refuses_is_one_line(self):
        builds = [self.build("aaa", 1), self.build("bbb", 1)]
        for words in ([*builds, "--preset", "nowhere"], ["absent", "absent", "--preset", "pythia-14m"]):
            code, _, error = run(bench_versions, *words)
            self.assertEqual((code, error.count("\n")), (2, 1))


CF_OP_INT4 = """#!/usr/bin/env python3
import json, sys
of = lambda option: sys.argv[sys.argv.index(option) + 1]
if of("--preset") == "pythia-160m":
    sys.exit("cf-op: no memory")
times = {key: 2.0 for key in ("median_us", "p10_us", "p99_us", "bytes", "floor_us")} | {"cold": True}
results = [
    times | {"batch": int(n), "site": site} for n in of("--batch").split(",") for site in ("a", "b", "c", "d", "layer")
]
with open(of("--json"), "w") as file:
    json.dump({"commit": "abc", "op": "linear", "group": of("--group"), "results": results}, file)
"""


class Int4(Files):
    class Peer:
        is_ours, sets = False, 4

        def __init__(self, product):
            self.product = product

        def activations(self, tokens):
            return tokens

        def run(self, x):
            pass

        def errors(self, x):
            return {"max_error": 0.001, "of_bound": 0.5, "non_finite": int(x == 512)}

    class Ours(Peer):
        is_ours = True

    class Missing(Peer):
        def __init__(self, product):
            raise ImportError("no module")

    def bench(self, **fields):
        arguments = {"runs": 2, "warmup": 1, "time_limit_s": 60, "peer_timeout_s": 30, "json": None}
        arguments |= {"cf_op": self.write("cf-op", CF_OP_INT4, True), "tokens": [1, 512]}
        arguments |= {"peers": ["cf_ops", "good", "missing"]}
        bench = int4_bench.Int4Bench(argparse.Namespace(**(arguments | fields)), {"gpu": "a GPU"})
        bench.free = lambda: None
        bench.timer.graph = lambda step: [4.0, 8.0, 16.0]
        return bench

    def test_the_products_of_a_layer(self):
        of = lambda preset: [
            (p.name, p.outputs, p.inputs) for p in int4_products.products_of(model_config.PRESETS[preset])
        ]
        self.assertEqual(of("pythia-2.8b"), [("qkv", 7680, 2560), ("dense", 2560, 2560), ("up", 10240, 2560),
                                             ("down", 2560, 10240)])  # fmt: skip
        self.assertEqual(of("llama-3.1-8b"), [("qkv", 6144, 4096), ("dense", 4096, 4096), ("up", 28672, 4096),
                                              ("down", 4096, 14336)])  # fmt: skip

    def test_ours_and_peers_are_rows_with_times_and_errors(self):
        bench = self.bench()
        with mock.patch.object(
            int4_products, "PEERS", {"cf_ops": self.Ours, "good": self.Peer, "missing": self.Missing}
        ):
            bench.run("pythia-14m")
            bench.run("pythia-160m")
        rows = bench.findings()["results"]["int4"]
        ours = [r for r in rows if r["system"] == "cf-op"]
        self.assertEqual([(r["preset"], r["tokens"], r["product"]) for r in ours if "error" not in r],
                         [("pythia-14m", n, name) for n in (1, 512) for name in ("qkv", "dense", "up", "down")])  # fmt: skip
        self.assertIn("cf-op: no memory", ours[-1]["error"])
        good = [r for r in rows if r["system"] == "good"]
        self.assertEqual(good[0], {"preset": "pythia-14m", "tokens": 1, "product": "qkv", "system": "good",
                                   "median_us": 2.0, "p10_us": 1.2, "p99_us": 3.96, "max_error": 0.001,
                                   "of_bound": 0.5, "non_finite": 0, "ratio": 1.0})  # fmt: skip
        self.assertNotIn("ratio", good[-1])  # of pythia-160m there are no times of ours
        checked = [r for r in rows if r["system"] == "cf_ops"]
        self.assertEqual((len(checked), {"median_us" in r for r in checked}), (16, {False}))
        self.assertEqual({r["error"] for r in rows if r["system"] == "missing"}, {"ImportError: no module"})
        table = int4_products.table(rows)
        self.assertEqual(
            table[0], "| preset | product | tokens | cf-op, us | good, us | missing, us | beyond roundings |"
        )
        self.assertEqual(table[3], "| pythia-14m | qkv | 512 | 2.0 | 2.0 |  | cf_ops: 1 not finite; "
                                   "good: 1 not finite; missing: ImportError: no module |")  # fmt: skip

    def test_the_page_adds_a_layer_s_products_up_and_says_what_is_wrong(self):
        self.assertEqual(bench_page.int4({"int4-peers": None}), ["Not recorded."])
        bench = self.bench()
        with mock.patch.object(
            int4_products, "PEERS", {"cf_ops": self.Ours, "good": self.Peer, "missing": self.Missing}
        ):
            bench.run("pythia-14m")
        report = {"commit": "abc", "gpu": "a GPU", "command": "x", "versions": {"torch": "2"}} | bench.findings()
        self.write("int4-peers.json", json.dumps(report))
        lines = bench_page.int4(bench_page.Figures(self.directory))
        self.assertEqual(lines[:4], ["| model | tokens | cf-op, us | good, us |", "|---|---:|---:|---:|",
                                     "| Pythia-14M | 1 | 8.0 | 8.0 (1.00x) |",
                                     "| Pythia-14M | 512 | 8.0 | 8.0 (1.00x) |"])  # fmt: skip
        of_512 = ", ".join(f"pythia-14m {name} of 512 tokens" for name in ("qkv", "dense", "up", "down"))
        said = f"the largest error is 0.001 of the outputs' root mean square; beyond roundings: {of_512}."
        self.assertEqual(lines[-3:], [f"- cf_ops: {said}", f"- good: {said}",
                                      "- missing: failed 8 times: ImportError: no module."])  # fmt: skip

    @unittest.skipUnless(HAS_TORCH, "needs torch")
    def test_a_weight_is_dequantised_as_gptq_says_and_errors_are_seen(self):
        import torch

        product = int4_products.Product("qkv", 64, 256)

        class Exact(int4_products.Peer):
            device = "cpu"

            def make(self, is_first):
                parts = triton_gptq.random_gptq(64, 256, "cpu")
                if is_first:
                    self.weight = int4_products.dequantised(parts)
                    self.parts = parts
                return int4_products.dequantised(parts)

            def multiply(self, x, form):
                return (x.double() @ form.T).half()

        with mock.patch.object(int4_products, "sets_beyond_l2", lambda set_bytes: 3):
            exact = Exact(product)
        self.assertEqual(len(exact.forms), 3)
        parts = {name: part.numpy() for name, part in exact.parts.items()}
        expected = gptq.dequantise(parts | {"g_idx": np.arange(256) // 128}, 4, True)
        self.assertEqual(float((exact.weight - torch.from_numpy(expected)).abs().max()), 0)
        x = exact.activations(5)
        self.assertLess(exact.errors(x)["of_bound"], 1)
        exact.multiply = lambda x, form: (x.double() @ form.T * 1.01).half().index_fill(0, torch.tensor([2]), torch.nan)
        found = exact.errors(x)
        self.assertGreater(found["of_bound"], 1)
        self.assertEqual(found["non_finite"], 64)


class Refusals(Files):
    def check(self, script, words, *argv):
        code, out, error = run(script, *argv)
        self.assertEqual((code, out), (2, ""))
        self.assertEqual(error.count("\n"), 1, error)
        self.assertIn(words, error)

    def test_bench_peers(self):
        program = self.write("program", "#!/bin/sh\n", True)
        programs = ("--cf-layer", program, "--cf-op", program)
        self.check(bench_peers, "--preset must be of pythia-14m, ", "--preset", "pythia-3b")
        self.check(bench_peers, "--preset must be of pythia-14m, ", "--preset", "llama-3.2-1b")
        self.check(bench_peers, "--peers must be of torch_ops, ", "--peers", "torch_ops,vllm")
        self.check(bench_peers, "expected a positive integer", "--batch", "0")
        self.check(bench_peers, "--kv-len must be 2 to 2048, got 1 to 128", "--kv-len", "1,128")
        self.check(bench_peers, "--kv-len must be 2 to 2048, got 128 to 4096", "--kv-len", "128,4096")
        self.check(bench_peers, "nowhere: no such program", "--cf-layer", "nowhere")
        self.check(bench_peers, "/nowhere: no such directory", *programs, "--json", "/nowhere/x.json")
        self.check(bench_peers, "--slots: expected with --what model", "--slots", "1")
        self.check(bench_peers, "--tokens: expected with --what int4", "--tokens", "1")
        self.check(bench_peers, "--peers must be of cf_ops, humming, ", "--what", "int4", "--peers", "linear")
        self.check(bench_peers, "nowhere: no such program; scripts/test builds it, --cf-op names it",
                   "--what", "int4", "--cf-op", "nowhere")  # fmt: skip

    def test_bench_peers_of_models(self):
        check = functools.partial(self.check, bench_peers)
        check("--peers must be of hf_generate, ", "--what", "model", "--peers", "torch_ops")
        check("--kv-len: expected with --what layers", "--what", "model", "--kv-len", "128")
        check("--prompt-len must be at most 2048, got 4096", "--what", "model", "--prompt-len", "16,4096")
        check("--agreement-preset must be auto, none or of pythia-14m, ",
              "--what", "model", "--agreement-preset", "opt-125m")  # fmt: skip
        check("must be at most 2048, got 4096", "--what", "model", "--preset", "llama-3.2-1b,llama-2.8b-shape",
              "--prompt-len", "4096")  # fmt: skip
        check("nowhere: no such program", "--what", "model", "--preset", "llama-2-7b", "--prompt-len", "4096",
              "--cf-model", "nowhere")  # fmt: skip
        check("nowhere: no such program", "--what", "model", "--cf-model", "nowhere")

    def test_bench_python(self):
        check = functools.partial(self.check, bench_python)
        program = self.write("program", "#!/bin/sh\n", True)
        check("--parts must be of model, ops, clusterfusion, got 'layers'", "--parts", "ops,layers")
        check("--step-impl must be of graph, unfused, got 'layer'", "--step-impl", "graph,layer")
        check("must be at most 2048 together", "--prompt-len", "1024", "--new-tokens", "1025")
        check("--kv-len must be at least 2, got 1", "--kv-len", "1,128")
        check("expected --preset of pythia-2.8b, pythia-6.9b", "--parts", "clusterfusion", "--preset", "pythia-1b")
        check("nowhere: no such program", "--cf-model", "nowhere")
        check("/nowhere: no such directory", "--cf-model", program, "--json", "/nowhere/x.json")
        if not HAS_TORCH:
            check("torch, transformers and cf_ops are needed", "--cf-model", program)

    def test_plot_bench(self):
        both = [self.write(name, json.dumps(PYTHON)) for name in ("a.json", "b.json")]
        self.check(plot_bench, "--hero: expected one file of bench_peers.py", "--hero", "hero.svg", *both)
        self.check(plot_bench, "nowhere.json: No such file", "nowhere.json")
        self.check(plot_bench, "expected JSON", self.write("a.json", "{"))
        cpu = json.dumps(LAYER | {"gpu": None} | {"program": "cf-op"})
        for text in ("[]", "{}", cpu):
            self.check(plot_bench, "expected a file of bench_peers.py or of cf-layer", self.write("a.json", text))
        other = self.write("other.json", json.dumps(LAYER | {"program": "cf-op"}))
        self.check(plot_bench, "other.json: expected a file of bench_peers.py", "--tables", other)


class Tables(Files):
    def test_ways_to_run_a_stack_stand_beside_each_other(self):
        report = LAYER | {"commit": "abc", "command": "cf-layer"}
        code, out, error = run(plot_bench, "--tables", self.write("r.json", json.dumps(report)))
        self.assertEqual((code, error), (0, ""))
        lines = out.splitlines()
        self.assertEqual(lines[0], "a GPU, commit abc: `cf-layer`")
        impl = LAYER["configurations"][0]["impl"]
        self.assertEqual(lines[2], f"| pythia-2.8b [ms] | batch | kv_len | cf-layer {impl} |")
        self.assertEqual(len(lines), 6)
        self.assertTrue(lines[4].startswith("| pythia-2.8b | 1 | 128 | 1.600 ("), lines[4])

    def test_growth_is_a_line_with_its_largest_residual(self):
        lines = plot_bench.tables(self.write("r.json", json.dumps(GROWTH)))
        self.assertEqual([line for line in lines if "us a" in line], [
            "pythia-2.8b, batch 1, persistent, kv_len 128: "
            "10.0 us + 40 us a layer, largest residual 0.0 us (0.00 % of the longest)",
            "pythia-2.8b, batch 1, persistent, 4 layers: "
            "169.4 us + 0.01 us a cache entry, largest residual 1.3 us (0.78 % of the longest)",
        ])  # fmt: skip
        rows = [line for line in lines if line.startswith("| pythia-2.8b |")]
        self.assertEqual(len(rows), 3, "a row for each kv_len, of whole models alone")

    def test_a_share_above_100_percent_has_its_cause(self):
        row = peer("cf-op", 128, median_us=10.0, floor_us=12.3, limit_note="fits the L2")
        self.assertEqual(plot_bench.cell(row, "linear", None), "10.00 (123 %: fits the L2)")
        del row["limit_note"]
        self.assertEqual(plot_bench.cell(row, "linear", None), "10.00 (no share)")
        row["floor_us"] = 10.0
        self.assertEqual(plot_bench.cell(row, "linear", None), "10.00 (100 %)")
        site = {"site": "rope", "percent_of_read": 130.0, "limit_note": "fits the L2"}
        report = LAYER | {"configurations": [configuration(128, 50.0, sites=[site])]}
        ((_, sites),) = plot_bench.shares([report])
        self.assertEqual(sites[0], ("rope: fits the L2", 130.0))
        early = {"results": {"rope": [row | {"floor_us": 12.3}]}, "programs": [LAYER, {"copy_best_gb_per_s": 2767.8}]}
        self.assertEqual(bench_page.no_share(early)[0], "No share: the op was faster than the copy that this early run "
                                                        "took for the memory's speed, 2768 GB/s.")  # fmt: skip
        early["results"]["rope"][0]["limit_note"] = "fits the L2"
        self.assertEqual(bench_page.no_share(early), [])
        times = {"median_us": 1.0, "p10_us": 1.0, "p99_us": 1.0, "bytes": 8, "cold": True, "floor_us": 2.0}
        result = {"site": "rope", "batch": 1, "kv_len": 1, "limit": "read", "limit_note": "fits the L2"} | times
        (of_op,) = programs.op_rows({"op": "rope", "results": [result]}, "pythia-2.8b")
        self.assertEqual(plot_bench.cell(of_op, "rope", None), "1.00 (200 %: fits the L2)")

    def test_an_invariant_model_stands_beside_the_same_without(self):
        self.assertEqual(bench_page.same_bits(bench_page.Figures(self.directory)), ["Not recorded."])
        row = {"slots": 8, "prompt_len": 128, "ttft_ms": 10.0, "tpot_ms": 2.0}
        report = {"gpu": "a GPU", "commit": "abc", "command": "cf-model bench", "results": [row]}
        others = [row | {"ttft_ms": 12.5, "tpot_ms": 3.0}, row | {"slots": 9}]
        self.write("model-pythia-2.8b-invariant-off.json", json.dumps(report))
        self.write("model-pythia-2.8b-invariant.json", json.dumps(report | {"results": others}))
        lines = bench_page.same_bits(bench_page.Figures(self.directory))
        self.assertEqual(lines[2:], [
            "| pythia-2.8b | 8 | 128 | 10.00 | 12.50 (1.25x) | 2.00 | 3.00 (1.50x) |",
            "",
            "[`model-pythia-2.8b-invariant.json`](model-pythia-2.8b-invariant.json); "
            "[`model-pythia-2.8b-invariant-off.json`](model-pythia-2.8b-invariant-off.json).",
        ])  # fmt: skip

    def test_a_line_is_that_of_least_squares(self):
        self.assertEqual(plot_bench.line_of([(1, 3.0), (2, 5.0), (3, 7.0)]), (2.0, 1.0, 0.0))
        slope, intercept, farthest = plot_bench.line_of([(0, 0.0), (1, 3.0), (2, 0.0)])
        self.assertEqual((slope, intercept, farthest), (0.0, 1.0, 2.0))

    def test_times_stand_beside_their_floor_and_peers_beside_ours(self):
        stack = programs.layer_rows(LAYER, "pythia-2.8b")
        stack += [peer("torch_graph", 128, median_us=110.0), peer("hf_compile", 128, error="TimeoutError: no")]
        linear = [peer("cf-op", 1, median_us=40.0, floor_us=34.0), peer("cuBLAS in a graph", 1, median_us=52.0)]
        results = {"stack": stack, "linear": linear, "attention": []}
        report = {"gpu": "a GPU", "versions": {"torch": "2"}, "commit": "abc", "command": "bench_peers.py"}
        report |= {"results": results, "ratios": table.ratios(results), "programs": [LAYER]}
        code, out, error = run(plot_bench, "--tables", self.write("r.json", json.dumps(report)))
        self.assertEqual((code, error), (0, ""))
        self.assertEqual(out.splitlines(), [
            "a GPU, torch 2, commit abc: `bench_peers.py`",
            "",
            "| stack [ms] | batch | kv_len | cf-layer graph | torch_graph | hf_compile |",
            "|---|---:|---:|---:|---:|---:|",
            "| pythia-2.8b | 1 | 128 | 1.600 (79 %) | 3.520 (2.20x) | - |",
            "| pythia-2.8b | 1 | 2048 | 1.920 (66 %) |  |  |",
            "",
            "| linear [us] | batch | kv_len | cf-op | cuBLAS in a graph |",
            "|---|---:|---:|---:|---:|",
            "| pythia-2.8b | 1 | 1 | 40.00 (85 %) | 52.00 (1.30x) |",
        ])  # fmt: skip

    def test_lines_of_code_stand_behind_the_times(self):
        row = peer("cf-op", 1, median_us=40.0, floor_us=34.0, code_lines=1969)
        self.assertEqual(plot_bench.cell(row, "gptq_linear", None), "40.00 (85 %), 1969 lines")
        row = peer("Triton in a graph", 1, median_us=52.0, code_lines=40)
        self.assertEqual(plot_bench.cell(row, "gptq_linear", 1.3), "52.00 (1.30x), 40 lines")


class Records(Files):
    def test_a_record_has_its_gpu_and_commit_and_no_sites_of_whole_models(self):
        whole = {"sites": SITES, "step": {"median_us": 1.0}}
        report = {"device": "a GPU", "programs": [{"commit": "abc", "configurations": [whole]}], "figures": "±"}
        path = self.write("quality-a.json", json.dumps(report, indent=1))
        self.assertEqual(run(bench_record, path), (0, "", ""))
        with open(path, encoding="utf-8") as file:
            text = file.read()
        self.assertNotIn(" ", text.replace("a GPU", ""))
        self.assertIn('"±"', text)
        slim = [{"commit": "abc", "configurations": [whole | {"sites": []}]}]
        expected = report | {"programs": slim, "gpu": "a GPU", "commit": "abc"}
        self.assertEqual(json.loads(text), expected)
        # Where no program of ours ended, one of the same build says the commit.
        with mock.patch.object(programs, "commit_of", lambda program: program):
            for commit in ("unknown", "abc"):
                kept = bench_record.record({"commit": commit, "results": {}}, None, "def")
                self.assertEqual(kept["commit"], {"unknown": "def"}.get(commit, commit))
        # How long a measurement took is kept, a fault stays the last thing that a record says.
        self.assertEqual(run(bench_record, path, "--took-s", "17", "--fault", "exit 1"), (0, "", ""))
        with open(path, encoding="utf-8") as file:
            self.assertEqual(list(json.load(file).items())[-2:], [("took_s", 17), ("error", "exit 1")])
        # A layer by itself keeps its sites, a record of the CPU has no GPU, and a record of a record is the same.
        for kept in (LAYER | {"commit": "abc"}, {"cpu": "a CPU", "commit": "abc"}, expected):
            self.assertEqual(bench_record.record(kept), kept)

    def test_a_record_s_paths_say_something_on_every_machine(self):
        program, text = os.path.join(bench_record.ROOT, "build", "release", "apps", "cf-model"), "data/held_out.npy"
        passing = os.path.join(tempfile.gettempdir(), "a1", "b2")
        beside = [f"{passing}/one.json", f"{passing}/two.json"]
        command = (
            f"{program} eval --tokens {bench_record.ROOT}/{text} --beside {','.join(beside)} --json {passing}/r.json"
        )
        kept = bench_record.record({"commit": "abc", "programs": [{"command": command, "us": 2.5}], "gpu": "a/b, 1/2"})
        expected = f"build/release/apps/cf-model eval --tokens {text} --beside one.json,two.json --json r.json"
        self.assertEqual(kept["programs"], [{"command": expected, "us": 2.5}])
        self.assertEqual((bench_record.record(kept), kept["gpu"]), (kept, "a/b, 1/2"))

    def test_a_fault_is_kept_beside_what_was_measured(self):
        path = os.path.join(self.directory, "stack-a.json")
        code, out, error = run(bench_record, path)
        self.assertEqual((code, out, error.count("\n")), (1, "", 1))
        self.assertIn("stack-a.json: no such file", error)
        for content, expected in ((None, {}), ({"commit": "abc"}, {"commit": "abc"})):
            if content:
                self.write("stack-a.json", json.dumps(content))
            self.assertEqual(run(bench_record, path, "--fault", "exit 3")[0], 0)
            with open(path, encoding="utf-8") as file:
                self.assertEqual(json.load(file), expected | {"error": "exit 3"})
        figures = bench_page.Figures(self.directory)
        self.assertEqual(figures["stack-a"], {"commit": "abc", "error": "exit 3"})
        self.write("stack-a.json", "{")
        code, out, error = run(bench_record, path)
        self.assertEqual((code, out, error.count("\n")), (2, "", 1))
        self.assertIn("stack-a.json", error)


class Page(Files):
    def recorded(self, **fields):
        """A directory that holds one recorded step of Pythia-2.8B."""
        configurations = [step(4, 128, 1600.0) | fields]
        configurations[0]["step"] |= {"percent_of_read": 80.0}
        report = LAYER | {"commit": "abc", "command": "cf-layer", "configurations": configurations}
        report |= {"gpu": "NVIDIA H200"}
        return os.path.dirname(self.write("stack-pythia-2.8b.json", json.dumps(report)))

    FRONT = "before\n{}\nold\n{}\nbetween\n{}\nold\n{}\nafter\n".format(
        *bench_page.marks("result"), *bench_page.marks("headline")
    )

    def peers(self, gpu, *rows):
        """A record of a model beside others: the rows of one sequence behind the prompt that the front page shows."""
        shape = {"preset": "pythia-2.8b", "slots": 1, "prompt_len": model_peers.SHOWN_PROMPT_LEN, "new_tokens": 32}
        about = {"gpu": gpu, "versions": {"torch": "2"}, "dtype": "float16", "commit": "abc"}
        return about | {"command": "bench_peers.py", "results": {"model": [shape | row for row in rows]}}

    OURS = {"system": "cf-model persistent", "tpot_ms": 1.5, "decode_percent_of_read": 85.4}

    def test_the_page_and_the_headline_are_made_of_what_is_recorded(self):
        directory = self.recorded()
        others = {"system": "hf_generate", "tpot_ms": 15.15}, {"system": "torch_graph", "tpot_ms": 3.0}
        graph = self.OURS | {"system": "cf-model graph", "tpot_ms": 2.0}
        unmeasured = {"system": "hf_static_compile", "error": "E: no"}
        times = dict.fromkeys(("ttft_ms", "total_ms", "tokens_per_s"), 1.0)
        timed = [times | row for row in (self.OURS, graph, *others)]
        self.write("model-peers-pythia-2.8b.json", json.dumps(self.peers("NVIDIA H200", *timed, unmeasured)))
        readme = self.write("front.md", self.FRONT)
        code, out, error = run(bench_page, directory, readme)
        self.assertEqual((code, error), (0, ""))
        self.assertEqual(out.split(), [os.path.join(directory, "README.md"), readme])
        with open(readme, encoding="utf-8") as file:
            front = file.read()
        result, headline = bench_page.marks("result"), bench_page.marks("headline")
        text = "**Pythia-2.8B: 1.50 ms a token on an NVIDIA H200, 85 % of the memory's speed, "
        text += "2.0x torch in CUDA graphs, 10.1x"
        table = ["| on one NVIDIA H200 | ms a token | of the memory's speed | torch in CUDA graphs | `generate()` |",
                 "|---|---:|---:|---:|---:|", "| Pythia-2.8B | 1.50 | 85\u00a0% | 2.0x | 10.1x |"]  # fmt: skip
        self.assertEqual(front.splitlines(), ["before", result[0], text, "`generate()` of transformers.**", result[1],
                                              "between", headline[0], *table, headline[1], "after"])  # fmt: skip
        with open(os.path.join(directory, "README.md"), encoding="utf-8") as file:
            page = file.read()
        self.assertIn("| pythia-2.8b | 128 | - | - | - | - | 1.600\u00a0(80\u00a0%) |", page)
        self.assertIn("[`stack-pythia-2.8b.json`](stack-pythia-2.8b.json).", page)
        self.assertIn("\n```sh\nbuild/release/apps/cf-layer\napps/bench_peers.py\n```\n", page)
        self.assertIn("\n- [How a step's time grows](#how-a-steps-time-grows)\n", page)
        self.assertNotIn("E: no", page)

    def test_the_headline_names_another_gpu_and_what_else_is_recorded(self):
        directory = self.recorded()
        for name, gpu, peer in (("llama-3.1-8b", "NVIDIA H200", "hf_static_compile"),
                                ("qwen2.5-7b", "NVIDIA H100 80GB HBM3", "hf_generate")):  # fmt: skip
            report = self.peers(gpu, self.OURS, {"system": peer, "tpot_ms": 3.75})
            self.write(f"model-peers-{name}.json", json.dumps(report))
        behind_another_prompt = self.peers("NVIDIA H200", self.OURS | {"prompt_len": 16})
        self.write("model-peers-pythia-6.9b.json", json.dumps(behind_another_prompt))
        four_bits = {"slots": 1, "prompt_len": 512, "tpot_ms": 0.678}
        for model in ("pythia-2.8b", "llama-3.1-8b"):
            self.write(f"model-{model}-gptq.json", json.dumps({"results": [four_bits | {"prompt_len": 16}, four_bits]}))
        slots = [{"slots": n, "prompt_len": 128, "new_tokens": 32, "tokens_per_s": 100.4 * n} for n in (1, 64)]
        self.write("model-pythia-2.8b-slots.json", json.dumps({"results": slots}))
        lines = bench_page.headline(bench_page.Figures(directory))
        self.assertEqual(lines[:5], [
            "| on one NVIDIA H200 | ms a token | of the memory's speed | torch.compile | `generate()` |",
            "|---|---:|---:|---:|---:|",
            "| Qwen2.5-7B, NVIDIA H100 80GB HBM3 | 1.50 | 85\u00a0% | - | 2.5x |",
            "| Llama-3.1-8B | 1.50 | 85\u00a0% | 2.5x | - |",
            "",
        ])  # fmt: skip
        self.assertEqual(" ".join(lines[5:]),
                         "With weights of 4 bits (GPTQ) a token takes Pythia-2.8B 0.68 ms and Llama-3.1-8B 0.68 ms. With "
                         "64 prompts of 128 ids at once Pythia-2.8B makes 6,426 tokens a second.")  # fmt: skip

    def test_without_a_record_the_front_page_says_how_to_make_one(self):
        directory = self.recorded()
        self.assertIn("scripts/bench_gpu --only peers", bench_page.result(bench_page.Figures(directory))[0])
        self.assertEqual(bench_page.headline(bench_page.Figures(directory)), [])

    def test_the_server_and_what_researchers_ask_have_a_table_each(self):
        self.assertEqual(bench_page.users(bench_page.Figures(self.directory)), ["Not recorded."])
        serve = {
            "decoder": {"ids_per_s": 16000.4, "ttft_ms_p50": 20.0, "ttft_ms_p99": 40.0},
            "http": {"ids_per_s": 14400.4, "ttft_ms_p50": 24.5, "ttft_ms_p99": 52.25},
            "kill": {"all_ended_s": 0.61, "next_answer_s": 7.04},
            "ids_per_s_over_decoder": 0.9,
            "ttft_ms_more": [4.5, 12.25],
        }
        research = {
            "memorize": {"slots": 1024, "sequences_per_s": 1234.5, "over_decoder_alone": 0.97},
            "swap": {"swap_s": [1.21, 1.19], "copy_s": [0.3, 0.25], "fresh_load_s": 2.5},
            "taps": {"taps": 33, "ids_per_s": 61000.0, "over_prefill": 0.61, "one_tap_over_prefill": 0.9},
        }
        about = {"gpu": "NVIDIA H200", "commit": "abc"}
        for name, report in (("serve", serve), ("research", research)):
            command = {"command": f"bench_{name}.py --json /root/x.json"}
            self.write(f"{name}-pythia-2.8b.json", json.dumps(about | command | report))
        figures = bench_page.Figures(self.directory)
        self.assertEqual(bench_page.users(figures), [
            "| 64 at once | decoder alone | over HTTP | beside it |",
            "|---|---:|---:|---:|",
            "| ids a second | 16,000 | 14,400 | 90 % |",
            "| ms to the first id, median | 20.0 | 24.5 | + 4.5 |",
            "| ms to the first id, 99 % | 40.0 | 52.2 | + 12.2 |",
            "",
            "A worker that was killed under this load: its requests had all ended after 0.6 s, and the next answer came "
            "after 7.0 s.",
            "",
            "| what | figure | beside |",
            "|---|---:|---:|",
            "| sequences a second, 32 ids in and 32 out, 1,024 at once | 1,234 | 97 % of the decoder's alone |",
            "| s to swap to weights in the page cache | 1.19 | 0.25 where they were read meanwhile; a fresh load 2.50 |",
            "| ids a second, 33 residuals of each to a file, 16 bits | 61,000 | 61 % of the prefill's; one residual 90 % |",
            "",
            "[`serve-pythia-2.8b.json`](serve-pythia-2.8b.json); [`research-pythia-2.8b.json`](research-pythia-2.8b.json).",
        ])  # fmt: skip
        typed = [f"apps/bench_{name}.py --json data/bench/{name}-pythia-2.8b.json" for name in ("serve", "research")]
        self.assertEqual(bench_page.commands(figures), ["```sh", *typed, "```"])

    def test_a_command_can_be_typed(self):
        for recorded, lines in (
            ("b/cf-layer --json /root/x.json --impl graph",
             ["build/release/apps/cf-layer --json data/bench/name.json --impl graph"]),
            ("bench_peers.py --cf-model b/h/cf-model --preset a --json x", [
                "apps/bench_peers.py --preset a --json data/bench/name.json"]),
            ("cf-model generate --model pythia-2.8b --prompt-ids 1,2", [
                "golden/tools/make_checkpoints.py --preset pythia-2.8b --out pythia-2.8b",
                "build/release/apps/cf-model generate --model pythia-2.8b --prompt-ids 1,2"]),
        ):  # fmt: skip
            self.assertEqual(bench_page.typed("name", recorded), lines)
        directory = os.path.dirname(self.write("model-a.json", json.dumps(
            {"gpu": "a GPU", "commit": "abc", "command": "cf-model bench --preset a"})))  # fmt: skip
        figures = bench_page.Figures(directory)
        self.assertEqual(bench_page.commands(figures), ["Not recorded."])
        figures.source("model-a")
        self.assertEqual(bench_page.commands(figures),
                         ["```sh", "build/release/apps/cf-model bench --preset a", "```"])  # fmt: skip

    def test_a_commit_that_all_figures_have_stands_once(self):
        report = {"gpu": "a GPU", "commit": "abc", "command": "cf-model bench"}
        directory = os.path.dirname(self.write("model-a.json", json.dumps(report)))
        self.write("quality-b.json", json.dumps({"device": "a GPU", "programs": [{"commit": "abc"}]}))
        self.write("cpu-c.json", json.dumps({"cpu": "a CPU", "commit": "def"}))
        figures = bench_page.Figures(directory)
        self.assertTrue(bench_page.commits(figures).startswith("The commit is abc, "))
        self.assertEqual(figures.sources(["model-a", "quality-b", "cpu-c"]),
                         "[`model-a.json`](model-a.json); [`quality-b.json`](quality-b.json); "
                         "[`cpu-c.json`](cpu-c.json), commit def.")  # fmt: skip
        bench_page.refuse_mixed(figures)
        self.write("model-c.json", json.dumps(report | {"commit": "def"}))
        figures = bench_page.Figures(directory)
        self.assertIn("Each table names the commit", bench_page.commits(figures))
        self.assertEqual(figures.sources(["model-a", "model-c"]),
                         "[`model-a.json`](model-a.json), commit abc; [`model-c.json`](model-c.json), commit def.")  # fmt: skip
        with self.assertRaisesRegex(console.Refusal, r"one commit, got abc \(model-a.json\) and def \(model-c.json\)"):
            bench_page.refuse_mixed(figures)
        self.write("model-c.json", json.dumps(report | {"gpu": "another"}))
        with self.assertRaisesRegex(
            console.Refusal, r"one GPU, got a GPU \(model-a.json\) and another \(model-c.json\)"
        ):
            bench_page.refuse_mixed(bench_page.Figures(directory))

    def test_new_records_take_the_place_of_all_of_a_gpu(self):
        report = {"gpu": "NVIDIA H200", "commit": "abc", "command": "cf-model bench", "results": []}
        old, new = (os.path.join(self.directory, name) for name in ("old", "new"))
        for folder, files in (
            (old, {"stack-a": report, "cpu-b": {"cpu": "a CPU", "commit": "def"}, "model-c": {"error": "exit 1"}}),
            (new, {"stack-d": report | {"commit": "ghi"}, "model-e": {"error": "stopped after 60 s"}}),
        ):
            os.mkdir(folder)
            for name, content in files.items():
                self.write(os.path.join(folder, name + ".json"), json.dumps(content))
        front = self.write("front.md", self.FRONT)
        recorded = lambda: sorted(name for name in os.listdir(old) if name.endswith(".json"))
        # Records of two commits, a page without marks and a folder without records change nothing.
        before = recorded()
        self.write(os.path.join(new, "stack-f.json"), json.dumps(report))
        for source, page, refusal in (
            (new, front, "expected records of one commit, got ghi (stack-d.json) and abc (stack-f.json)"),
            (new, self.write("empty.md", ""), "empty.md: expected one"),
            (self.directory, front, "expected records of a GPU, got none"),
            ("nowhere", front, "nowhere: no such directory"),
        ):
            code, out, error = run(bench_page, "--records", source, old, page)
            self.assertEqual((code, out, error.count("\n")), (2, "", 1))
            self.assertIn(refusal, error)
            self.assertEqual(recorded(), before)
        os.remove(os.path.join(new, "stack-f.json"))
        for _ in range(2):  # the second time from the folder itself
            self.assertEqual(run(bench_page, "--records", new, old, front)[0], 0)
            self.assertEqual(recorded(), ["cpu-b.json", "model-e.json", "stack-d.json"])
            new = old
        with open(os.path.join(old, "README.md"), encoding="utf-8") as file:
            page = file.read()
        self.assertIn("The GPU is an NVIDIA H200 where no other is named. The commit is ghi, and", page)
        self.assertIn("\n- `model-e`: stopped after 60 s\n", page)

    def test_cells_do_not_break_between_a_number_and_its_share(self):
        lines = ["| a b | 1.5 (34 %) | 6.00 ms (bfloat16) | 2.0x (3 lines) |", "1.5 (34 %)"]
        self.assertEqual(bench_page.unbroken(lines), [
            "| a b | 1.5\u00a0(34\u00a0%) | 6.00\u00a0ms (bfloat16) | 2.0x\u00a0(3 lines) |", "1.5 (34 %)"
        ])  # fmt: skip

    def test_tokens_of_whole_models_have_one_table(self):
        result = {"impl": "persistent", "prompt_len": 16, "new_tokens": 32, "slots": 1, "ttft_ms": 3.456}
        result |= {"tpot_ms": 1.5, "inter_token_p99_ms": 1.625, "tokens_per_s": 612.34, "decode_percent_of_read": 85.4}
        report = {"model": "pythia-2.8b", "gpu": "a GPU", "activation_dtype": "float16", "results": [result]}
        report |= {"commit": "abc", "command": "cf-model bench"}
        directory = self.recorded()
        self.assertEqual(bench_page.gpu_model(bench_page.Figures(directory)), ["Not recorded."])
        models = ("pythia-2.8b", "pythia-2.8b-gptq", "qwen2.5-7b", "pythia-2.8b-slots")
        report |= {"gpu": "NVIDIA H200"}
        for name in models:
            self.write(f"model-{name}.json", json.dumps(report | {"model": name.split("-gptq")[0].split("-slots")[0]}))
        head = ["| model | dtype | impl | prompt | new | slots | TTFT ms | TPOT ms | p99 ms | tokens/s | "
                "decode, of the streaming read |", "|---|" + "---:|" * 10]  # fmt: skip
        rest = " | persistent | 16 | 32 | 1 | 3.46 | 1.50 | 1.62 | 612.3 | 85 % |"
        sources = [f"[`model-{name}.json`](model-{name}.json)" for name in models]
        lines = bench_page.gpu_model(bench_page.Figures(directory))
        self.assertEqual(lines, [
            *head,
            "| Pythia-2.8B | float16" + rest,
            "| Pythia-2.8B | float16, weights of 4 bits" + rest,
            "| Qwen2.5-7B | float16" + rest,
            "",
            "; ".join(sources[:3]) + ".",
            "",
            *head,
            "| Pythia-2.8B | float16" + rest,
            "",
            sources[3] + ".",
        ])  # fmt: skip
        # Many sequences at once: scores have columns of their own.
        self.assertEqual(bench_page.many(bench_page.Figures(directory)), ["Not recorded."])
        score = {"prompt_len": 128, "scored": 16, "slots": 64, "texts": 32, "score_ms": 6.54, "prefill_ms": 6.08}
        scores = dict(report, results=[score | {"percent_of_prefill": 92.96}])
        self.write("model-pythia-2.8b-prompts.json", json.dumps(report))
        self.write("model-pythia-2.8b-score.json", json.dumps(scores))
        lines = bench_page.many(bench_page.Figures(directory))
        self.assertEqual(
            [line for line in lines if line.startswith("| 128")], ["| 128 | 16 | 64 | 32 | 6.5 | 6.1 | 93.0 % |"]
        )
        self.assertEqual(len([line for line in lines if line.startswith("| persistent | 16 | 32")]), 1)
        self.assertIn("[`model-pythia-2.8b-score.json`](model-pythia-2.8b-score.json).", lines)
        # How long a prompt that joins stops the others, where a row has it.
        joined = bench_page.model_table([result | {"stall_ms": 5.625, "joiner_ttft_ms": 31.5}, result])
        self.assertTrue(joined[0].endswith("decode, of the streaming read | stall ms | joiner TTFT ms |"))
        self.assertTrue(joined[2].endswith("| 85 % | 5.62 | 31.50 |"))
        self.assertTrue(joined[3].endswith("| 85 % | - | - |"))

    def test_a_llama_s_stack_stands_among_the_ways_to_step(self):
        directory = self.recorded()
        before = bench_page.ways_to_step(bench_page.Figures(directory))
        with open(os.path.join(directory, "stack-pythia-2.8b.json"), encoding="utf-8") as file:
            report = json.load(file)
        self.write("stack-llama-3.2-1b.json", json.dumps(report | {"model": "llama-3.2-1b"}))
        after = bench_page.ways_to_step(bench_page.Figures(directory))
        row = "| llama-3.2-1b | 128 | - | - | - | - | 1.600 (80 %) |"
        self.assertEqual([line for line in after if "llama" not in line], before[:-1])
        self.assertIn(row, after)

    def test_both_fast_ways_stand_beside_each_other(self):
        directory = self.recorded()
        figures = bench_page.Figures(directory)
        self.assertEqual(bench_page.both_ways(figures, "int4 [ms]", "gptq-persistent", ["pythia-410m"]), [])
        report = figures["stack-pythia-2.8b"] | {"gpu": "another GPU"}
        self.write("stack-pythia-410m-gptq-persistent.json", json.dumps(report))
        figures = bench_page.Figures(directory)
        self.assertEqual(bench_page.both_ways(figures, "int4 [ms]", "gptq-persistent", ["pythia-410m"]), [
            "",
            "| int4 [ms] | kv_len | `graph` | `persistent` |",
            "|---|---:|---:|---:|",
            "| pythia-410m | 128 | - | 1.600 (80 %) |",
            "",
            "[`stack-pythia-410m-gptq-persistent.json`](stack-pythia-410m-gptq-persistent.json), another GPU.",
        ])  # fmt: skip

    def test_distances_from_float64_have_a_table_where_they_are_recorded(self):
        directory = self.recorded()
        self.assertEqual(bench_page.quality(bench_page.Figures(directory)), ["Not recorded."])
        mean = {"mean": 2.5e-6, "error": 2e-8}
        figures = {
            "kl": mean,
            "kl_p99_9": 2.6e-5,
            "perplexity": {"mean": 11.01},
            "reference_perplexity": {"mean": 11.0},
        }
        figures |= {"logits_rel_l2": 5.9e-4}
        report = {"command": "eval_hf.py", "figures": {"float16:eager": figures}, "beside": {"graph.json": figures}}
        report |= {"programs": [{"impl": "graph", "commit": "abc"}]}
        self.write("quality-stdlib-4m.json", json.dumps(report))
        rest = " | 2.5e-06 ± 2e-08 | 2.6e-05 | 11.0100 | +0.091 % | 5.90e-04 |"
        self.assertEqual(bench_page.quality(bench_page.Figures(directory))[2:], [
            "| stdlib-4m | Hugging Face, float16:eager" + rest,
            "| stdlib-4m | `graph`" + rest,
            "",
            "[`quality-stdlib-4m.json`](quality-stdlib-4m.json).",
        ])  # fmt: skip

    def test_a_report_without_a_program_s_run_names_the_commit_it_was_built_from(self):
        program = self.write("cf-model", '#!/bin/sh\nfor last; do :; done\necho \'{"commit": "abc"}\' > "$last"\n')
        os.chmod(program, 0o755)
        self.assertEqual(programs.commit_of(program), "abc")
        self.write("cf-model", "#!/bin/sh\nexit 2\n")
        self.assertEqual(programs.commit_of(program), "unknown")
        self.assertEqual(programs.commit_of(program + "-2"), "unknown")

    def test_a_file_s_way_to_the_first_token_stands_among_whole_models(self):
        report = {"model": "pythia-2.8b", "gpu": "a GPU", "load_s": 2.125, "commit": "abc"}
        report |= {"command": "cf-model generate", "sequences": [{"prompt": [1, 2, 3], "first_token_s": 0.0625}]}
        directory = os.path.dirname(self.write("load-pythia-2.8b.json", json.dumps(report)))
        self.assertEqual(bench_page.gpu_model(bench_page.Figures(directory)), [
            "Pythia-2.8B from files in the page cache, a prompt of 3 ids: opened in 2.12 s, first id 62.5 ms after that. "
            "[`load-pythia-2.8b.json`](load-pythia-2.8b.json).",
        ])  # fmt: skip

    def test_peers_of_whole_models_have_one_table(self):
        report = {"gpu": "a GPU", "versions": {"torch": "2"}, "commit": "abc", "command": "bench_peers.py --what model"}
        report |= {"results": {"model": model_peers.with_ratios(MODEL_ROWS)}, "dtype": "float16"}
        directory = os.path.dirname(self.write("model-peers-pythia-2.8b.json", json.dumps(report)))
        lines = bench_page.gpu_model(bench_page.Figures(directory))
        self.assertEqual(lines[:2], [bench_page.BESIDE_OTHERS, ""])
        rows = model_peers.table(bench_page.measured(report)["results"]["model"])
        source = "[`model-peers-{0}.json`](model-peers-{0}.json)"
        first = source.format("pythia-2.8b")
        self.assertEqual(lines[2:], [*rows, "", f"With torch 2: {first}."])
        self.assertEqual(len(rows), len(MODEL_ROWS) + 1, "what was not measured has no row")
        self.write("model-peers-llama-3.1-8b.json", json.dumps(report | {"versions": {"torch": "3"}}))
        other = source.format("llama-3.1-8b")
        self.assertEqual(bench_page.gpu_model(bench_page.Figures(directory))[2:],
                         [*rows, *rows[2:], "", f"With torch 2: {first}. With torch 3: {other}."])  # fmt: skip
        code, out, error = run(plot_bench, "--tables", os.path.join(directory, "model-peers-pythia-2.8b.json"))
        self.assertEqual((code, error), (0, ""))
        self.assertEqual(out.splitlines()[2:], model_peers.table(report["results"]["model"]))

    def test_kernels_lines_are_explained_where_they_are_recorded(self):
        rows = [peer("cf-op", 1, median_us=40.0, floor_us=34.0), peer("Triton in a graph", 1, median_us=52.0),
                peer("torch int4pack, bfloat16, in a graph", 1, error="AttributeError: no such op")]  # fmt: skip
        report = {"gpu": "a GPU", "versions": {"triton": "3"}, "commit": "abc", "command": "bench_peers.py"}
        results = {"gptq_linear": rows}
        report |= {"results": results, "ratios": table.ratios(results), "programs": [LAYER]}
        directory = os.path.dirname(self.write("pythia-2.8b.json", json.dumps(report)))
        self.assertNotIn(bench_page.PEERS_OF_KERNELS, bench_page.peers(bench_page.Figures(directory)))
        for row, lines in zip(rows, (1969, 40)):
            row["code_lines"] = lines
        self.write("pythia-2.8b.json", json.dumps(report))
        lines = bench_page.peers(bench_page.Figures(directory))
        self.assertEqual(lines[2:], [
            "| gptq_linear [us] | batch | kv_len | cf-op | Triton in a graph | torch int4pack, bfloat16, in a graph |",
            "|---|---:|---:|---:|---:|---:|",
            "| pythia-2.8b | 1 | 1 | 40.00 (85 %), 1969 lines | 52.00 (1.30x), 40 lines | - |",
            "",
            "triton 3. [`pythia-2.8b.json`](pythia-2.8b.json).",
            "",
            bench_page.PEERS_OF_KERNELS,
            "",
            "![A layer's time](pythia-2.8b-layer.svg)",
            "",
        ])  # fmt: skip
        # Where a later run has timed the kernels alone, the page shows that run and no other.
        self.write("kernel-peers-pythia-2.8b.json", json.dumps(report))
        stack = {"stack": [peer("cf-layer graph", 128, median_us=50.0, bytes=158_000_000, read_best_gb_per_s=4000.0)]}
        report |= {"results": results | stack, "ratios": table.ratios(results | stack)}
        self.write("pythia-2.8b.json", json.dumps(report))
        both = bench_page.peers(bench_page.Figures(directory))
        self.assertEqual(both[:7], ["### Pythia-2.8B", "", "| stack [ms] | batch | kv_len | cf-layer graph |",
                                    "|---|---:|---:|---:|", "| pythia-2.8b | 1 | 128 | 1.600 (79 %) |", "", lines[6]])  # fmt: skip
        expected = ["### Pythia-2.8B, kernels", *lines[1:-2]]
        expected[6] = expected[6].replace("pythia-2.8b.json", "kernel-peers-pythia-2.8b.json")
        self.assertEqual(both[both.index(expected[0]) :], expected)

    def test_a_front_page_without_marks_is_refused_and_nothing_is_written(self):
        directory = self.recorded()
        for arguments, refusal in (
            ((directory, self.write("front.md", "no marks")), "front.md: expected one"),
            (("nowhere", "front.md"), "nowhere: no such directory"),
        ):
            code, out, error = run(bench_page, *arguments)
            self.assertEqual((code, out, error.count("\n")), (2, "", 1))
            self.assertIn(refusal, error)
        self.assertFalse(os.path.exists(os.path.join(directory, "README.md")))

    def test_the_project_s_own_headline_is_of_its_recorded_figures(self):
        root = os.path.join(APPS, os.pardir)
        with open(os.path.join(root, "README.md"), encoding="utf-8") as file:
            front = file.read()
        figures = bench_page.Figures(os.path.join(root, "data", "bench"))
        with open(os.path.join(root, "README.md"), encoding="utf-8") as file:
            front = file.read()
        self.assertEqual(bench_page.updated(os.path.join(root, "README.md"), bench_page.front(figures)), front)
        with open(os.path.join(root, "data", "bench", "README.md"), encoding="utf-8") as file:
            page = file.read()
        self.assertEqual(bench_page.page(figures), page)
        self.assertEqual([name for name in figures.names if name not in page], [], "the page shows every record")
        (token,) = [rows for model, _, rows in bench_page.shown(figures) if model == "pythia-2.8b"]
        with open(os.path.join(root, "data", "bench", "hero.svg"), encoding="utf-8") as file:
            self.assertIn(
                f"{token['ours']['tpot_ms']:.2f} ms a token", file.read(), "the picture's figure is the table's"
            )
        with open(os.path.join(root, "python", "README.md"), encoding="utf-8") as file:
            package = file.read()
        lines = bench_page.python_headline(figures, os.path.join(root, "python"))
        self.assertEqual(bench_page.with_block(package, "headline", lines), package)

    def test_the_package_s_headline_is_of_its_recorded_figures(self):
        directory = self.recorded()
        front = self.write("front.md", self.FRONT)
        package = self.write("package.md", "{}\nold\n{}\n".format(*bench_page.marks("headline")))
        self.assertEqual(run(bench_page, directory, front, package)[0], 0)
        with open(package, encoding="utf-8") as file:
            self.assertIn("Not recorded yet", file.read())
        self.write("python-pythia-2.8b.json", json.dumps(PYTHON | {"ratios": bench_python.ratios(PYTHON_ROWS)}))
        self.assertEqual(run(bench_page, directory, front, package)[0], 0)
        with open(package, encoding="utf-8") as file:
            words = " ".join(file.read().split())
        self.assertIn("](./python-pythia-2.8b.svg) On one a GPU, greedy, in one run: pythia-2.8b, 1 at once", words)
        self.assertIn("Hugging Face takes 9.52 times speed_up's time a token", words)


class Pictures(Files):
    def recorded(self):
        rows = programs.layer_rows(LAYER, "pythia-2.8b")
        rows += [peer("torch_graph", 128, median_us=110.0), peer("hf_eager", 128, error="no")]
        return self.write("h200.json", json.dumps({"results": {"stack": rows}, "programs": [LAYER]}))

    def test_curves_have_a_floor(self):
        rows, _, gpu = plot_bench.read_report(self.recorded())
        self.assertEqual(gpu, "a GPU")
        self.assertEqual(plot_bench.curves(rows), {("pythia-2.8b", 1): {
            "cf-layer graph": [(128, 50.0), (2048, 60.0)], "floor": [(128, 39.5), (2048, 39.5)],
            "torch_graph": [(128, 110.0)]}})  # fmt: skip

    def test_rows_of_a_program_s_own_report_are_its_stacks(self):
        rows, layers, gpu = plot_bench.read_report(self.write("g.json", json.dumps(GROWTH)))
        self.assertEqual((layers, gpu), ([GROWTH], "a GPU"))
        self.assertEqual(rows, programs.layer_rows(GROWTH, "pythia-2.8b"))
        self.assertGreater(len(rows), 0)

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "needs matplotlib")
    def test_growth_is_drawn_alone(self):
        code, out, error = run(plot_bench, self.write("g.json", json.dumps(GROWTH)))
        self.assertEqual((code, error), (0, ""))
        self.assertEqual(out.split(), [os.path.join(self.directory, "g.svg")])

    def test_token_times_begin_with_the_slowest(self):
        self.assertEqual(plot_bench.token_times(PYTHON), [
            ("pythia-2.8b, 1 prompt of 16, 3 new tokens",
             [("hf_generate", 30.0), ("speed_up", 8.4 * 3 / 8), ("cf-model persistent", 3.0)])
        ])  # fmt: skip

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "needs matplotlib")
    def test_token_times_are_drawn_beside_other_files(self):
        code, out, error = run(plot_bench, self.write("p.json", json.dumps(PYTHON)), self.recorded())
        self.assertEqual((code, error), (0, ""))
        self.assertEqual(os.path.basename(out.split()[0]), "p.svg")
        self.assertEqual(len(out.split()), 3)
        with open(out.split()[0], encoding="utf-8") as file:
            picture = file.read()
        for text in ("speed_up", "hf_generate", "cf-model persistent", "30.00 ms", "commit abc"):
            self.assertIn(text, picture)

    def test_a_bar_that_would_dwarf_the_others_is_cut(self):
        rows = {"hf_generate": {"tpot_ms": 15.0}, "other": {"tpot_ms": 9.0}, "torch_graph": {"tpot_ms": 3.0},
                "ours": {"tpot_ms": 1.5}}  # fmt: skip
        bars, end = plot_bench.hero_bars(rows)
        self.assertEqual(bars, [("transformers, generate()", 15.0, "15.00 ms, 10.0x"),
                                ("torch in a CUDA graph", 3.0, "3.00 ms, 2.0x"), ("cf-ops", 1.5, "1.50 ms")])  # fmt: skip
        self.assertEqual(end, 4.5)
        self.assertEqual(plot_bench.hero_bars({"torch_graph": {"tpot_ms": 3.0}, "ours": {"tpot_ms": 2.0}})[1], 3.75)
        self.assertEqual(plot_bench.hero_bars({"ours": {"tpot_ms": 2.0}})[1], 2.5)

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "needs matplotlib")
    def test_the_first_picture_has_words_and_a_bar_a_system(self):
        shape = {"preset": "pythia-2.8b", "slots": 1, "prompt_len": model_peers.SHOWN_PROMPT_LEN}
        rows = [shape | {"system": "cf-model graph", "tpot_ms": 1.5, "decode_percent_of_read": 80.0},
                shape | {"system": "hf_generate", "tpot_ms": 15.0}]  # fmt: skip
        report = {"gpu": "a GPU", "dtype": "float16", "results": {"model": rows}}
        svg = os.path.join(self.directory, "hero.svg")
        code, out, error = run(plot_bench, "--hero", svg, self.write("m.json", json.dumps(report)))
        self.assertEqual((code, out, error), (0, svg + "\n", ""))
        with open(svg, encoding="utf-8") as file:
            picture = file.read()
        for text in ("Pythia-2.8B on an a GPU: 1.50 ms a token, of which the memory needs 1.20 ms", "15.00 ms, 10.0x",
                     "transformers, generate()", "cf-ops"):  # fmt: skip
            self.assertIn(text, picture)

    def test_shares_are_those_of_the_longest_sequence(self):
        ((heading, sites),) = plot_bench.shares([LAYER])
        self.assertEqual(heading, "pythia-2.8b, batch 1, graph, kv_len 2048")
        self.assertEqual(sites, [("input_layernorm", 1.5), ("attention.dense", 60.0), ("total", 80.0)])

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "needs matplotlib")
    def test_the_same_figures_give_the_same_pictures(self):
        path = self.recorded()
        pictures = []
        for _ in range(2):
            code, out, error = run(plot_bench, path)
            self.assertEqual((code, error), (0, ""))
            names = [os.path.join(self.directory, f"h200-{what}.svg") for what in ("layer", "sites")]
            self.assertEqual(out.split(), names)
            for name in names:
                with open(name, encoding="utf-8") as file:
                    pictures.append(file.read())
        self.assertEqual(pictures[:2], pictures[2:])
        self.assertLess(sum(map(len, pictures[:2])), 200_000)


if __name__ == "__main__":
    unittest.main()
