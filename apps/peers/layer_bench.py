"""The measurements of --what layers."""

import contextlib
import gc
import itertools
import json
import os
import shlex
import time

import console
import golden_file
import model_config
from peers import torch_int4, triton_gptq, triton_norm
from peers.cublas import four_products
from peers.flashinfer_attention import flashinfer_decode, flashinfer_prefill
from peers.lines_of_code import our_lines, triton_lines
from peers.programs import commit_of, layer_rows, op_rows, prompt_rows, run_program
from peers.sdpa import sdpa
from peers.stacks import STACK_PEERS, Step, build_model, check_same, time_stack
from peers.table import print_table, ratios
from peers.timing import Timer, one_line, spread, time_limit
from peers.torch_norm import NORM_PEERS, NORM_TOKENS, norm_and_add

OP_PEERS = ("linear", "attention", *NORM_PEERS, "gptq_linear")
PEERS = (*STACK_PEERS, *OP_PEERS, "prefill")


class Bench:
    """Collects rows; a peer that fails leaves its reason in its row. The file, headed by `about`, is written anew after
    each of them, so that what was measured is there whatever ends the run."""

    WHAT = "decode on one GPU, times a layer, weights cold: this library beside others in one run"
    KINDS = ("stack", *(peer for peer in PEERS if peer not in STACK_PEERS))
    SIZES = ("batch", "kv_len")

    def __init__(self, args, about):
        self.args, self.about, self.timer = args, about, Timer(args.runs, args.warmup)
        self.results = {what: [] for what in self.KINDS}
        self.programs, self.built_from = [], None
        self.end_s = time.monotonic() + args.time_limit_s

    def seconds(self):
        """How long the next measurement may take; raises TimeoutError when the run's time is over."""
        left = int(self.end_s - time.monotonic())
        if left < 1:
            raise TimeoutError(f"not begun: the run's {self.args.time_limit_s} s are over")
        return min(left, self.args.peer_timeout_s)

    def write(self):
        if not self.args.json:
            return
        report = self.about | {"commit": self.commit()} | self.findings() | {"programs": self.programs}
        golden_file.write_text(self.args.json, json.dumps(report, indent=1) + "\n")

    def commit(self):
        if self.programs:
            return self.programs[0]["commit"]
        if self.built_from is None:
            self.built_from = commit_of(self.args.cf_model) if getattr(self.args, "cf_model", None) else "unknown"
        return self.built_from

    def findings(self):
        return {"results": self.results, "ratios": ratios(self.results)}

    def print(self):
        print_table(self.results)

    def measure(self, what, shape, system, measured):
        """Adds a row: `measured` returns its fields."""
        row = dict(zip(("preset", *self.SIZES), shape)) | {"system": system}
        sizes = ", ".join(f"{name} {size}" for name, size in zip(self.SIZES, shape[1:]))
        console.progress(f"{what}: {system}, {shape[0]}, {sizes}")
        try:
            with time_limit(self.seconds()):
                row |= measured()
        except Exception as error:  # whatever makes a peer fail, the others are measured
            row["error"] = one_line(error)
        self.results[what].append(row)
        self.free()
        self.write()

    def free(self):
        import torch

        console.progress("")
        gc.collect()
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()

    def program(self, what, preset, command, rows, known=None):
        """Adds the rows of a program of this repository, or one of what is known and the reason why there are none."""
        console.progress(shlex.join(command))
        try:
            report = run_program(command, self.seconds())
            self.results[what] += rows(report, preset)
            self.programs.append(report)
        except Exception as error:
            row = {"preset": preset} | dict.fromkeys(self.SIZES, 0) | {"system": os.path.basename(command[0])}
            self.results[what].append(row | (known or {}) | {"error": one_line(error)})
        console.progress("")
        self.write()

    def run(self, preset):
        self.run_programs(preset)
        self.run_ops(preset)
        self.run_stacks(preset)

    def run_programs(self, preset):
        args = self.args
        batches, kv_lens = (",".join(map(str, values)) for values in (args.batch, args.kv_len))
        counts = ["--runs", str(args.runs), "--warmup", str(args.warmup)]
        if set(args.peers) & set(STACK_PEERS):
            # One program each: one that refuses a batch is recorded, and the others go on.
            for impl, batch in itertools.product(args.impl.split(","), args.batch):
                model = ["--backend", "cuda", "--preset", preset, "--impl", impl, "--whole-model", "--kv-len", kv_lens]
                self.program("stack", preset, [args.cf_layer, *model, "--batch", str(batch), *counts], layer_rows)
        layers = str(model_config.PYTHIA_PRESETS[preset].num_hidden_layers)
        shapes = {
            "linear": ["--batch", batches, "--layers", layers],
            "attention": ["--batch", batches, "--kv-len", kv_lens],
            "gptq_linear": ["--batch", "1", "--layers", layers, "--quant", "gptq", "--group", str(triton_gptq.GROUP)],
        } | {op: ["--tokens", ",".join(map(str, NORM_TOKENS))] for op in NORM_PEERS}
        for op in OP_PEERS:
            if op in args.peers:
                rows = lambda report, preset: [r | our_lines(op) for r in op_rows(report, preset)]
                command = [args.cf_op, op.removeprefix("gptq_"), "--preset", preset, *shapes[op], *counts]
                self.program(op, preset, command, rows)

        for tokens in self.args.kv_len if "prefill" in args.peers else ():
            prompt = ["--q-len", str(tokens), "--kv-len", str(tokens), "--layer", "0", "--impl", "unfused"]
            command = [args.cf_layer, "--backend", "cuda", "--preset", preset, *prompt, *counts]
            self.program("prefill", preset, command, prompt_rows)

    def run_stacks(self, preset):
        peers = [p for p in STACK_PEERS if p in self.args.peers]
        if not peers and "linear" not in self.args.peers:
            return
        hf = build_model(preset)
        layers = len(hf.layers)
        if "linear" in self.args.peers:
            for batch in self.args.batch:
                series = lambda: self.timer.graph(four_products(hf, batch))
                self.measure("linear", (preset, batch, 1), "cuBLAS in a graph", lambda: spread(series(), layers))
        # The peer that compiles for minutes comes last.
        for peer, batch, kv_len in itertools.product(peers, self.args.batch, self.args.kv_len):

            def measured():
                step = Step(hf, batch, kv_len)
                check_same(hf, step)
                series, said = time_stack(peer, hf, step, self.timer, self.args.compile_modes)
                return spread(series, layers) | said

            self.measure("stack", (preset, batch, kv_len), peer, measured)

    def run_ops(self, preset):
        model = model_config.PYTHIA_PRESETS[preset]

        def over_sets(made):
            run, count = made
            return spread(self.timer.graph(run), count) | {"layers": count}

        if "attention" in self.args.peers:
            for batch in self.args.batch:
                for kv_len in self.args.kv_len:
                    measured = lambda: over_sets(sdpa(model, batch, kv_len))
                    self.measure("attention", (preset, batch, kv_len), "torch sdpa in a graph", measured)
                    measured = lambda: over_sets(flashinfer_decode(model, batch, kv_len))
                    self.measure("attention", (preset, batch, kv_len), "FlashInfer, pages, in a graph", measured)
        for tokens in self.args.kv_len if "prefill" in self.args.peers else ():
            measured = lambda: over_sets(sdpa(model, 1, tokens, q_len=tokens))
            self.measure("prefill", (preset, 1, tokens), "torch sdpa in a graph", measured)
            measured = lambda: over_sets(flashinfer_prefill(model, tokens))
            self.measure("prefill", (preset, 1, tokens), "FlashInfer, pages, in a graph", measured)
        for op in NORM_PEERS:
            for tokens in NORM_TOKENS if op in self.args.peers else ():
                measured = lambda: over_sets(norm_and_add(op, model, tokens))
                self.measure(op, (preset, tokens, 1), "torch layer_norm + add in a graph", measured)
                if op == "layernorm_residual":
                    measured = lambda: over_sets(triton_norm.triton_norm(model, tokens)) | triton_lines(op)
                    self.measure(op, (preset, tokens, 1), "Triton in a graph", measured)
        if "gptq_linear" in self.args.peers:
            for system, timed in (
                ("torch int4pack, bfloat16, in a graph", torch_int4.time_torch_int4),
                ("Triton in a graph", triton_gptq.time_triton_int4),
            ):
                self.measure("gptq_linear", (preset, 1, 1), system, lambda: timed(model, self.timer))
