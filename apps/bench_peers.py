#!/usr/bin/env python3
"""Times decoding on a GPU beside what others make of the same work: torch op by op, the same in a CUDA graph, Hugging
Face eager, Hugging Face with a static cache and torch.compile, cuBLAS's products, torch's sdpa and layer_norm, torch's
products with int4 weights and two kernels in Triton, against cf-layer and cf-op, which are called as programs in the
same run. A row of an op that Triton has too says how many lines of code its kernel has.

Weights are random, of Hugging Face's own initial scale, in float16. All layers are resident, so that each layer finds
its weights cold. A step of the stack is the layers alone, without embedding and head; it sees kv_len cache entries, the
new token's with them. A peer that fails is recorded with its reason, and the others go on.

With --what model whole models run instead, of Pythia, Llama or Qwen2 and in the preset's own dtype, from a prompt's ids
to new ids on the host: cf-model bench beside Hugging Face's generate(), the same with a static cache and compiled
steps, and torch's operators in CUDA graphs, one for every step (torch_graph) or one for each kv_len (torch_graphs).
torch runs the products that checkpoints store, so Llama's q, k and v one by one. Times are the host's: TTFT is the time
to the first id, TPOT that between ids after it. Ours takes several prompts one after the other, the peers as one batch.
The greedy ids of one prompt are compared with hf_generate's: cf-model's with the same procedural weights of
--agreement-preset, the peers' with the random weights that they are timed with.

Prints a markdown table. Needs torch and transformers, and the programs built with the CUDA backend.
"""

import contextlib
import gc
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, "golden", "tools"))

import numpy as np

import console
import dump_hf
import golden_file
import hf_model
import kernel_peers
import model_config
import model_peers

NAME = os.path.basename(__file__)
STACK_PEERS = ("torch_ops", "torch_graph", "hf_eager", "hf_compile")
NORM_PEERS = ("layernorm_residual", "residual_layernorm")
OP_PEERS = ("linear", "attention", *NORM_PEERS, "gptq_linear")
COMPILE_MODES = ("reduce-overhead", "max-autotune-no-cudagraphs")
NORM_TOKENS = (1, 4096)
# A small preset of each family, whose weights are made in seconds.
AGREEMENT_PRESETS = ("pythia-160m", "llama-3.2-1b")
BUILD = os.path.join(os.path.dirname(HERE), "build", "release", "apps")
# What is timed, and the options that are about it alone or have a default of its own.
DEFAULTS = {
    "layers": {
        "preset": "pythia-2.8b,pythia-6.9b",
        "peers": ",".join((*STACK_PEERS, *OP_PEERS)),
        "impl": "graph,persistent",
        "runs": 30,
        "warmup": 5,
        "batch": [1, 4, 16],
        "kv_len": [128, 512, 1024, 2048],
        "compile_modes": COMPILE_MODES[0],
        "cf_layer": os.path.join(BUILD, "cf-layer"),
        "cf_op": os.path.join(BUILD, "cf-op"),
    },
    "model": {
        "preset": "pythia-2.8b",
        "peers": ",".join(model_peers.PEERS),
        "impl": "auto",
        "runs": 5,
        "warmup": 2,
        "prompt_len": [16, 128, 512, 2048],
        "new_tokens": [32],
        "slots": [1],
        "agreement_preset": "auto",
        "cf_model": os.path.join(BUILD, "cf-model"),
    },
}


# --- what needs no torch ---


def spread(times_us, per=1):
    """Median and percentiles of a series in microseconds, each divided by `per`."""
    p10, median, p99 = (float(x) / per for x in np.percentile(times_us, (10, 50, 99)))
    return {"median_us": median, "p10_us": p10, "p99_us": p99}


def one_line(error):
    """An exception's kind and its first line. One that a time limit has led to is that limit's: a compiler wraps it."""
    cause = error
    while cause is not None and not isinstance(cause, TimeoutError):
        cause = cause.__cause__ or getattr(cause, "inner_exception", None)
    error = error if cause is None else cause
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A first line that ends in a colon says nothing by itself.
    first = " ".join(text[:2]) if text and text[0].endswith(":") else text[0] if text else "no message"
    return f"{type(error).__name__}: {first}"[:300]


def run_program(command, timeout_s):
    """What a program of this repository wrote with --json FILE; raises with its one line on stderr."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "report.json")
        done = subprocess.run([*command, "--json", path], capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip() or 'nothing on stderr'}")
        with open(path, encoding="utf-8") as file:
            return json.load(file)


def impl_of(configuration):
    """The --impl of a configuration of cf-layer's JSON; earlier files name two of them otherwise."""
    impl = configuration["impl"]
    return {"fused": "layer", "stack": "persistent"}.get(impl, impl)


def kv_len_of(configuration):
    """A configuration's kv_len. Earlier files say seq_len."""
    return configuration["kv_len" if "kv_len" in configuration else "seq_len"]


def step_of(configuration):
    """The times of a configuration's step through many layers; None where it has one layer. Earlier files say stack."""
    return configuration.get("step", configuration.get("stack"))


def layer_rows(report, preset):
    """cf-layer's layers and whole stacks as rows of this report; times are a layer's."""
    return [
        {"preset": preset, "batch": c["batch"], "kv_len": kv_len_of(c), "system": "cf-layer " + impl_of(c)}
        | {key: c["total"][key] for key in ("median_us", "p10_us", "p99_us")}
        | {"bytes": c["total"]["bytes"], "read_best_gb_per_s": c["read_best_gb_per_s"]}
        | {key: c["total"][key] for key in ("limit_note",) if key in c["total"]}
        for c in report["configurations"]
        if c.get("step_layers", c.get("resident_layers")) == c.get("resident_layers")
    ]


def op_rows(report, preset):
    """cf-op's results as rows of this report. Of the layer's products only the row of all four counts."""
    return [
        {"preset": preset, "batch": r["batch"], "kv_len": r["kv_len"], "system": "cf-op"}
        | {key: r[key] for key in ("median_us", "p10_us", "p99_us", "bytes", "cold", "floor_us", "limit")}
        | {key: r[key] for key in ("limit_note",) if key in r}
        for r in report["results"]
        if report["op"] != "linear" or r["site"] == "layer"
    ]


def work(row):
    """The work that a row was timed on. Only rows of the same work are compared."""
    return row["preset"], row["batch"], row["kv_len"]


def ratios(results):
    """Each peer's time over ours on the same work: {what: [{preset, batch, kv_len, peer, ours, ratio}]}."""
    found = {}
    for what, rows in results.items():
        timed = [r for r in rows if "median_us" in r]
        ours = {}
        for r in sorted(timed, key=lambda r: r["median_us"], reverse=True):
            if r["system"].startswith("cf-"):
                ours[work(r)] = r
        found[what] = [
            dict(zip(("preset", "batch", "kv_len"), work(r)))
            | {"peer": r["system"], "ours": ours[work(r)]["system"]}
            | {"ratio": r["median_us"] / ours[work(r)]["median_us"]}
            for r in timed
            if not r["system"].startswith("cf-") and work(r) in ours
        ]
    return found


def print_table(results):
    print("| what | preset | batch | kv_len | system | median us | of ours | lines of code |")
    print("|-|-|-:|-:|-|-:|-:|-:|")
    of_ours = {(what, *work(r), r["peer"]): r["ratio"] for what, rows in ratios(results).items() for r in rows}
    for what, rows in results.items():
        for r in sorted(rows, key=work):
            who = (*work(r), r["system"])
            time, ratio = r.get("median_us"), of_ours.get((what, *who))
            cells = (what, *who, r["error"] if time is None else f"{time:.2f}", f"{ratio:.2f}" if ratio else "")
            cells += (r.get("code_lines", ""),)
            print("| " + " | ".join(str(cell) for cell in cells) + " |")


@contextlib.contextmanager
def time_limit(seconds):
    """Raises TimeoutError within the block when the block takes longer."""

    def stop(*_):
        raise TimeoutError(f"stopped after {seconds} s")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


# --- torch ---


class Timer:
    """Times work on the current stream with events: `runs` times after `warmup`."""

    def __init__(self, runs, warmup):
        self.runs, self.warmup = runs, warmup

    def eager(self, step, before=lambda: None):
        """The series of step's times. `before` runs before each step and is not timed."""
        import torch

        series = []
        for _ in range(self.warmup + self.runs):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            begin.record()
            step()
            end.record()
            end.synchronize()
            series.append(begin.elapsed_time(end) * 1e3)
        return series[self.warmup :]

    def graph(self, step, before=lambda: None):
        """The same for replays of a graph that holds one step."""
        return self.eager(captured(step, before).replay, before)


def captured(step, before=lambda: None):
    """A CUDA graph of one step. The step first runs on a side stream, as torch asks."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            before()
            step()
    torch.cuda.current_stream().wait_stream(side)
    before()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def build_model(preset, device="cuda"):
    """Hugging Face's model of the preset with random float16 weights, sdpa, and a vocabulary that no step reads."""
    from dataclasses import replace

    import torch
    from transformers import GPTNeoXConfig, GPTNeoXModel

    model = replace(model_config.PYTHIA_PRESETS[preset], vocab_size=8)
    config = GPTNeoXConfig(**model.hf_fields(), bos_token_id=0, eos_token_id=0, attn_implementation="sdpa")
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device(device):
            return GPTNeoXModel(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


class Step:
    """One decode step's inputs: the hidden state, its position, each layer's old cache entries."""

    def __init__(self, hf, batch, kv_len):
        import torch

        c, parameter = hf.config, next(hf.parameters())
        self.kv_len, self.batch = kv_len, batch
        self.heads, self.head_dim = c.num_attention_heads, c.hidden_size // c.num_attention_heads
        kind = {"device": parameter.device, "dtype": parameter.dtype}
        self.hidden = torch.randn(batch, 1, c.hidden_size, **kind)
        self.position = torch.full((batch, 1), kv_len - 1, device=parameter.device)
        shape = (batch, self.heads, kv_len - 1, self.head_dim)
        self.past = [(torch.randn(shape, **kind), torch.randn(shape, **kind)) for _ in hf.layers]


def torch_stack(hf, step):
    """A callable that runs all layers op by op, and returns what leaves the last one."""
    import torch.nn.functional as F

    cos, sin = (t.unsqueeze(1) for t in hf.rotary_emb(step.hidden, position_ids=step.position))
    last, model = step.kv_len - 1, model_peers.model_of(hf)
    layers = [model_peers.TorchLayer(model, layer) for layer in hf.layers]
    shape = (step.batch, step.heads, step.kv_len, step.head_dim)
    caches = []
    for old_k, old_v in step.past:
        k, v = old_k.new_empty(shape), old_v.new_empty(shape)
        k[:, :, :last], v[:, :, :last] = old_k, old_v
        caches.append((k, v))

    def run():
        x = step.hidden
        for layer, (k_cache, v_cache) in zip(layers, caches):

            def attend(q, k, v):
                k_cache[:, :, last:], v_cache[:, :, last:] = k, v
                return F.scaled_dot_product_attention(q, k_cache, v_cache)

            x = layer(x, cos, sin, attend)
        return x

    return run


def hf_stack(hf, step, cache_class):
    """A callable that runs Hugging Face's model for the step, and a callable that takes the step out of its cache."""
    import torch
    from transformers import DynamicCache, StaticCache

    static = cache_class is StaticCache
    cache = StaticCache(hf.config, max_cache_len=step.kv_len) if static else DynamicCache(config=hf.config)
    for n, (k, v) in enumerate(step.past):
        cache.update(k, v, n)
    last = step.kv_len - 1

    def back():
        if static:
            torch._foreach_copy_([layer.cumulative_length for layer in cache.layers], filled)
        elif cache.get_seq_length() > last:
            cache.crop(-1)

    filled = [torch.full_like(layer.cumulative_length, last) for layer in cache.layers] if static else None
    kept = {hf_model.cache_name(getattr(hf, "_orig_mod", hf)): cache}  # _orig_mod: what torch.compile made it of

    def run():
        with torch.no_grad():
            out = hf(inputs_embeds=step.hidden, position_ids=step.position, **kept, use_cache=True)
        return out.last_hidden_state

    return run, back


def relative_l2(got, reference):
    return float((got.double() - reference.double()).norm() / reference.double().norm())


def check_same(hf, step):
    """Refuses to time two stacks that do not compute the same."""
    import torch
    from transformers import DynamicCache

    run, _ = hf_stack(hf, step, DynamicCache)
    with torch.no_grad():
        mine = hf.final_layer_norm(torch_stack(hf, step)())
    error = relative_l2(mine, run())
    if not error < 2e-2:
        raise RuntimeError(f"torch op by op differs from Hugging Face by {error:.1e} relative L2, expected below 2e-2")


def time_stack(peer, hf, step, timer, compile_modes):
    """The series of a peer's steps, and a note on it. Of torch.compile's modes the best one counts."""
    import torch
    from transformers import DynamicCache, StaticCache

    if peer == "torch_ops":
        return timer.eager(torch_stack(hf, step)), {}
    if peer == "torch_graph":
        return timer.graph(torch_stack(hf, step)), {}
    if peer == "hf_eager":
        return timer.eager(*hf_stack(hf, step, DynamicCache)), {}
    best, tried = None, {}
    for mode in compile_modes:
        torch._dynamo.reset()
        run, back = hf_stack(torch.compile(hf, mode=mode, fullgraph=True, dynamic=False), step, StaticCache)
        try:
            for _ in range(3):
                back()
                run()
            series = timer.eager(run, back) if mode == "reduce-overhead" else timer.graph(run, back)
        except Exception as error:  # the other mode may work
            if isinstance(error, TimeoutError) and best is None:
                raise
            tried[mode] = one_line(error)
            continue
        tried[mode] = spread(series)["median_us"] / len(hf.layers)
        if best is None or statistics.median(series) < statistics.median(best):
            best = series
    if best is None:
        raise RuntimeError("; ".join(f"{mode}: {why}" for mode, why in tried.items()))
    return best, {"modes": tried}


def four_products(hf, batch):
    """A callable that runs the four products of every layer, by cuBLAS."""
    import torch
    import torch.nn.functional as F

    h = hf.config.hidden_size
    narrow, wide = (torch.randn(batch, n, device="cuda", dtype=torch.float16) for n in (h, hf.config.intermediate_size))

    def run():
        for layer in hf.layers:
            for module in (layer.attention.query_key_value, layer.attention.dense, layer.mlp.dense_h_to_4h):
                F.linear(narrow, module.weight, module.bias)
            F.linear(wide, layer.mlp.dense_4h_to_h.weight, layer.mlp.dense_4h_to_h.bias)

    return run


def sets_beyond_l2(set_bytes):
    """How many sets of tensors hold four times the L2, as cf-op takes them."""
    import torch

    return min(1024, 4 * torch.cuda.get_device_properties(0).L2_cache_size // set_bytes + 1)


def sdpa(model, batch, kv_len):
    """A callable that runs sdpa over many layers' caches, and their number."""
    import torch
    import torch.nn.functional as F

    shape = (batch, model.num_attention_heads, kv_len, model.head_dim)
    count = sets_beyond_l2(4 * batch * kv_len * model.hidden_size)
    kind = {"device": "cuda", "dtype": torch.float16}
    caches = [(torch.randn(shape, **kind), torch.randn(shape, **kind)) for _ in range(count)]
    q = torch.randn(batch, model.num_attention_heads, 1, model.head_dim, **kind)
    return lambda: [F.scaled_dot_product_attention(q, k, v) for k, v in caches], count


def norm_inputs(model, tokens, inputs, tensors):
    """gamma and beta, and many sets of a norm's inputs; a set's op reads or writes so many tensors."""
    import torch

    shape, kind = (tokens, model.hidden_size), {"device": "cuda", "dtype": torch.float16}
    count = sets_beyond_l2(tensors * 2 * tokens * model.hidden_size)
    weights = [torch.randn(shape[1:], **kind) for _ in range(2)]
    return weights, [[torch.randn(shape, **kind) for _ in range(inputs)] for _ in range(count)]


def norm_and_add(op, model, tokens):
    """A callable that runs an op of NORM_PEERS as torch's layer_norm and additions over many sets, and their number."""
    import torch.nn.functional as F

    norm = lambda x: F.layer_norm(x, gamma.shape, gamma, beta)

    def layernorm_residual(x, residual):
        return norm(x) + residual

    def residual_layernorm(x, a, b):
        h = x + a + b
        return h, norm(h)

    step, inputs, tensors = {
        "layernorm_residual": (layernorm_residual, 2, 3),
        "residual_layernorm": (residual_layernorm, 3, 5),
    }[op]
    (gamma, beta), sets = norm_inputs(model, tokens, inputs, tensors)
    return lambda: [step(*one) for one in sets], len(sets)


def triton_norm(model, tokens):
    """A callable that runs layernorm_residual in Triton over many sets, and their number."""
    import triton_kernels

    (gamma, beta), sets = norm_inputs(model, tokens, inputs=2, tensors=3)
    step = lambda x, residual: triton_kernels.layernorm_residual(x, residual, gamma, beta, model.layer_norm_eps)
    kernel_peers.check_layernorm_residual(*sets[0], gamma, beta, model.layer_norm_eps, step(*sets[0]))
    return lambda: [step(*one) for one in sets], len(sets)


def time_torch_int4(model, timer):
    """The fields of torch's four products of every layer with int4 weights. Of its layouts the best one counts."""
    found = {}
    for inner_k_tiles in kernel_peers.INNER_K_TILES:
        run, layers = kernel_peers.torch_int4_linears(model, inner_k_tiles)
        found[inner_k_tiles] = spread(timer.graph(run), layers)
    best = min(found, key=lambda tiles: found[tiles]["median_us"])
    tried = {str(tiles): fields["median_us"] for tiles, fields in found.items()}
    return found[best] | {"layers": layers, "inner_k_tiles": tried}


def time_triton_int4(model, timer):
    """The same of Triton's kernel, and what autotuning chose."""
    run, layers, chosen = kernel_peers.triton_gptq_linears(model)
    fields = spread(timer.graph(run), layers) | {"layers": layers, "chosen": chosen}
    return fields | kernel_peers.triton_lines("gptq_linear")


def commit_of(program):
    """The commit that a cf-model was built from, which its reports hold; "unknown" where it does not run."""
    with tempfile.TemporaryDirectory() as directory:
        report = os.path.join(directory, "smallest.json")
        smallest = "bench --backend cpu --preset pythia-14m --prompt-len 1 --new-tokens 1 --runs 1 --warmup 0 --json"
        try:
            subprocess.run([program, *smallest.split(), report], check=True, capture_output=True, timeout=60)
            with open(report, encoding="utf-8") as file:
                return json.load(file)["commit"]
        except (OSError, subprocess.SubprocessError, ValueError, KeyError):
            return "unknown"


class Bench:
    """Collects rows; a peer that fails leaves its reason in its row. The file, headed by `about`, is written anew after
    each of them, so that what was measured is there whatever ends the run."""

    WHAT = "decode on one GPU, times a layer, weights cold: this library beside others in one run"
    KINDS = ("stack", *OP_PEERS)
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
            "gptq_linear": ["--batch", "1", "--layers", layers, "--quant", "gptq", "--group", str(kernel_peers.GROUP)],
        } | {op: ["--tokens", ",".join(map(str, NORM_TOKENS))] for op in NORM_PEERS}
        for op in OP_PEERS:
            if op in args.peers:
                rows = lambda report, preset: [r | kernel_peers.our_lines(op) for r in op_rows(report, preset)]
                command = [args.cf_op, op.removeprefix("gptq_"), "--preset", preset, *shapes[op], *counts]
                self.program(op, preset, command, rows)

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
        for op in NORM_PEERS:
            for tokens in NORM_TOKENS if op in self.args.peers else ():
                measured = lambda: over_sets(norm_and_add(op, model, tokens))
                self.measure(op, (preset, tokens, 1), "torch layer_norm + add in a graph", measured)
                if op == "layernorm_residual":
                    measured = lambda: over_sets(triton_norm(model, tokens)) | kernel_peers.triton_lines(op)
                    self.measure(op, (preset, tokens, 1), "Triton in a graph", measured)
        if "gptq_linear" in self.args.peers:
            for system, timed in (
                ("torch int4pack, bfloat16, in a graph", time_torch_int4),
                ("Triton in a graph", time_triton_int4),
            ):
                self.measure("gptq_linear", (preset, 1, 1), system, lambda: timed(model, self.timer))


def program_model(preset):
    """The options of cf-model for a preset in its own dtype, in which the peers run too."""
    return ["--backend", "cuda", "--preset", preset, "--dtype", model_config.PRESET_DTYPES[preset]]


class ModelBench(Bench):
    """The same of whole models."""

    WHAT = "tokens of whole models on one GPU: this library beside others in one run"
    KINDS = ("model",)
    SIZES = model_peers.SIZES

    def __init__(self, args, about):
        super().__init__(args, about)
        self.agreements = {}  # (agreement preset, impl as asked for, prompt_len) -> fields

    def findings(self):
        return {"results": {"model": model_peers.with_ratios(self.results["model"])}}

    def print(self):
        print("\n".join(model_peers.table(model_peers.with_ratios(self.results["model"]))))

    def loads(self):
        args = self.args
        return [model_peers.Load(*sizes) for sizes in itertools.product(args.slots, args.prompt_len, args.new_tokens)]

    def agreement_preset(self, preset):
        """The preset whose ids stand in a preset's rows, or None."""
        asked, presets = self.args.agreement_preset, model_config.PRESETS
        if asked != "auto":
            return asked
        return next(name for name in AGREEMENT_PRESETS if presets[name].names == presets[preset].names)

    def run(self, preset):
        chosen = self.agreement_preset(preset)
        if chosen and 1 in self.args.slots and not any(chosen == known for known, *_ in self.agreements):
            self.run_agreement(chosen)
        self.run_programs(preset)
        self.run_peers(preset)

    def run_agreement(self, preset):
        """Fills in how far cf-model's ids are hf_generate's, with the same weights and one prompt of each length."""
        args, new_tokens = self.args, max(self.args.new_tokens)
        loads = [model_peers.Load(1, prompt_len, new_tokens) for prompt_len in args.prompt_len]
        vocab_size = model_config.PRESETS[preset].vocab_size
        console.progress(f"agreement: hf_generate, {preset}")
        hf = None
        try:
            with time_limit(self.seconds()):
                hf = model_peers.procedural_model(preset)
                theirs = [model_peers.timed("hf_generate", hf, load, captured, 1, 0)[1] for load in loads]
        except Exception as error:  # the times are measured all the same
            theirs = one_line(error)
        prompts = ";".join(",".join(map(str, load.prompts(vocab_size)[0])) for load in loads)
        model = [*program_model(preset), "--weights-seed", str(model_peers.WEIGHTS_SEED)]
        generate = ["--prompt-ids", prompts, "--max-new-tokens", str(new_tokens), "--slots", "1", "--stop", "none"]
        for impl in args.impl.split(","):
            console.progress(f"agreement: cf-model {impl}, {preset}")
            found = {"preset": preset, "weights": "procedural", "with": "hf_generate"}
            try:
                if isinstance(theirs, str):
                    raise RuntimeError(f"hf_generate: {theirs}")
                command = [args.cf_model, "generate", *model, "--impl", impl, *generate]
                report = run_program(command, self.seconds())
                ours = [sequence["ids"] for sequence in report["sequences"]]
                for load, mine, ids in zip(loads, ours, theirs, strict=True):
                    same = model_peers.margin(hf, load.prompts(vocab_size)[0], mine, ids)
                    self.agreements[preset, impl, load.prompt_len] = found | {"impl": report["impl"]} | same
            except Exception as error:
                for load in loads:
                    self.agreements[preset, impl, load.prompt_len] = found | {"error": one_line(error)}
        hf = None
        self.free()
        console.progress("")

    def run_programs(self, preset):
        args = self.args
        sizes = {option: ",".join(map(str, getattr(args, option))) for option in ("prompt_len", "new_tokens")}
        # One program each: one that refuses its slots is recorded, and the others go on.
        for impl, slots in itertools.product(args.impl.split(","), args.slots):

            def rows(report, preset):
                found = model_peers.program_rows(report, preset)
                for row in found:
                    key = self.agreement_preset(preset), impl, row["prompt_len"]
                    if row["slots"] == 1 and key in self.agreements:
                        row["agreement"] = self.agreements[key]
                return found

            command = [args.cf_model, "bench", *program_model(preset), "--impl", impl]
            command += ["--prompt-len", sizes["prompt_len"], "--new-tokens", sizes["new_tokens"]]
            command += ["--slots", str(slots), "--runs", str(args.runs), "--warmup", str(args.warmup)]
            self.program("model", preset, command, rows, {"slots": slots, "system": f"cf-model {impl}"})

    def run_peers(self, preset):
        args, hf, reference = self.args, None, {}
        vocab_size = model_config.PRESETS[preset].vocab_size
        for peer, load in itertools.product([p for p in model_peers.PEERS if p in args.peers], self.loads()):

            def measured():
                nonlocal hf
                hf = hf or model_peers.random_model(preset)
                row, ids = model_peers.timed(peer, hf, load, captured, args.runs, args.warmup)
                if peer == "hf_generate":
                    reference[load] = ids
                elif load in reference:
                    same = model_peers.margin(hf, load.prompts(vocab_size)[0], ids, reference[load])
                    row["agreement"] = {"preset": preset, "weights": "random", "with": "hf_generate"} | same
                return row

            shape = (preset, *(getattr(load, size) for size in self.SIZES))
            self.measure("model", shape, peer, measured)


def default_text(attribute):
    """An option's default in its help, of each --what that takes it."""
    found = {what: defaults[attribute] for what, defaults in DEFAULTS.items() if attribute in defaults}
    texts = [",".join(map(str, value)) if isinstance(value, list) else str(value) for value in found.values()]
    if len(texts) == 1:
        return "default " + texts[0]
    return "default " + ", ".join(f"{text} ({what})" for what, text in zip(found, texts))


def parse_arguments(argv):
    count = console.integer(1, 1 << 20)
    parser = console.Parser(prog=NAME, description=__doc__)
    parser.add_argument("--what", choices=list(DEFAULTS), default="layers", help="what is timed (default layers)")
    parser.add_argument("--preset", metavar="NAME[,NAME...]", help=default_text("preset"))
    parser.add_argument("--peers", metavar="NAME[,NAME...]", help="some of these; " + default_text("peers"))
    parser.add_argument("--impl", metavar="NAME[,NAME...]", help="the programs' --impl; " + default_text("impl"))
    parser.add_argument("--runs", type=count, help="timed steps, or runs of a model; " + default_text("runs"))
    parser.add_argument("--warmup", type=count, help="steps or runs before them; " + default_text("warmup"))
    parser.add_argument(
        "--peer-timeout-s", type=count, default=600, metavar="N",
        help="seconds that one measurement may take (default 600)",
    )  # fmt: skip
    parser.add_argument(
        "--time-limit-s", type=count, default=7200, metavar="N",
        help="seconds after which nothing more is measured; what is left out says so (default 7200)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write everything there, anew after each measurement")
    layers = parser.add_argument_group("--what layers")
    layers.add_argument("--batch", type=dump_hf.lengths, metavar="N[,N...]", help=default_text("batch"))
    layers.add_argument(
        "--kv-len", type=dump_hf.lengths, metavar="N[,N...]",
        help="cache entries after the append; " + default_text("kv_len"),
    )  # fmt: skip
    layers.add_argument(
        "--compile-modes", metavar="NAME[,NAME...]",
        help=f"torch.compile's modes, some of {','.join(COMPILE_MODES)}; the second compiles for minutes; "
        + default_text("compile_modes"),
    )  # fmt: skip
    layers.add_argument("--cf-layer", metavar="FILE", help="the program")
    layers.add_argument("--cf-op", metavar="FILE", help="the program")
    model = parser.add_argument_group("--what model")
    model.add_argument(
        "--prompt-len", type=dump_hf.lengths, metavar="N[,N...]", help="a prompt's ids; " + default_text("prompt_len")
    )
    model.add_argument(
        "--new-tokens", type=dump_hf.lengths, metavar="N[,N...]", help="of a prompt; " + default_text("new_tokens")
    )
    model.add_argument(
        "--slots", type=dump_hf.lengths, metavar="N[,N...]", help="prompts at once; " + default_text("slots")
    )
    model.add_argument(
        "--agreement-preset", metavar="NAME",
        help="whose ids are compared where one prompt runs, none, or auto: "
        + f"{' or '.join(AGREEMENT_PRESETS)}, by the family; a large one's weights take minutes to make; "
        + default_text("agreement_preset"),
    )  # fmt: skip
    model.add_argument("--cf-model", metavar="FILE", help="the program")
    args = parser.parse_args(argv)
    for what, defaults in DEFAULTS.items():
        for attribute, default in defaults.items():
            if what == args.what and getattr(args, attribute) is None:
                setattr(args, attribute, default)
            elif attribute not in DEFAULTS[args.what] and getattr(args, attribute) is not None:
                raise console.Refusal(f"--{attribute.replace('_', '-')}: expected with --what {what}")
    peers = {"layers": (*STACK_PEERS, *OP_PEERS), "model": tuple(model_peers.PEERS)}[args.what]
    presets = {"layers": model_config.PYTHIA_PRESETS, "model": model_config.PRESETS}[args.what]
    known = {"preset": tuple(presets), "peers": peers, "compile_modes": COMPILE_MODES}
    for attribute in (name for name in known if name in DEFAULTS[args.what]):
        values = getattr(args, attribute).split(",")
        for value in values:
            if value not in known[attribute]:
                option = attribute.replace("_", "-")
                raise console.Refusal(f"--{option} must be of {', '.join(known[attribute])}, got {value!r}")
        setattr(args, attribute, values)
    longest = min(presets[preset].max_position_embeddings for preset in args.preset)
    if args.what == "layers":
        if min(args.kv_len) < 2 or max(args.kv_len) > longest:
            raise console.Refusal(f"--kv-len must be 2 to {longest}, got {min(args.kv_len)} to {max(args.kv_len)}")
        programs = (args.cf_layer, args.cf_op)
    else:
        if max(args.prompt_len) > longest:
            raise console.Refusal(f"--prompt-len must be at most {longest}, got {max(args.prompt_len)}")
        if args.agreement_preset not in ("auto", "none", *presets):
            raise console.Refusal(
                f"--agreement-preset must be auto, none or of {', '.join(presets)}, got {args.agreement_preset!r}"
            )
        args.agreement_preset = None if args.agreement_preset == "none" else args.agreement_preset
        programs = (args.cf_model,)
    for program in programs:
        if not os.access(program, os.X_OK):
            named = "--cf-model names" if args.what == "model" else "--cf-layer and --cf-op name"
            raise console.Refusal(f"{program}: no such program; scripts/test builds it, {named} it")
    if args.json:
        golden_file.check_writable(args.json)
    return args


def main(argv):
    try:
        args = parse_arguments(argv)
        import torch
        import transformers

        if not torch.cuda.is_available():
            raise console.Refusal("torch finds no GPU")
        transformers.logging.set_verbosity_error()
    except console.Refusal as refusal:
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"{NAME}: {error}; torch and transformers are needed", file=sys.stderr)
        return 2

    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__}
    with contextlib.suppress(ImportError):  # its rows say that it is missing
        import triton

        versions["triton"] = triton.__version__
    kind = {"layers": Bench, "model": ModelBench}[args.what]
    about = {
        "what": kind.WHAT,
        "command": shlex.join([NAME, *argv]),
        "gpu": torch.cuda.get_device_name(0),
        "versions": versions,
        "dtype": ", ".join(dict.fromkeys(model_config.PRESET_DTYPES[preset] for preset in args.preset)),
        "runs": args.runs,
        "warmup": args.warmup,
    }
    bench = kind(args, about)
    for preset in args.preset:
        bench.run(preset)
        bench.free()
    bench.print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
