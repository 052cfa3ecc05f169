#!/usr/bin/env python3
"""Times the Python package cf_ops on a GPU, beside Hugging Face and cf-model in the same run:
  model          generate() of Hugging Face's model as it is and with cf_ops.hf.speed_up(), greedy, and cf-model bench
                 on the same work; the ids of both are compared
  ops            a call of every op, cf_ops.ops and torch.ops.cf_ops, on small tensors: the host's time and the
                 device's
  clusterfusion  a layer of ClusterFusion's Pythia port, and a step of its graph context: the time from call to call,
                 the host's time of one, and the device's

Weights are random, in float16. TTFT and TPOT are the host's, defined as in cf-model bench. The host's time of a call
ends when the call returns: it launches and does not wait. From call to call means many calls that follow each other,
from the first one to the end of the device's work. The device's time is that of calls which all wait in its queue
before the first one starts, so that the host's time is no part of it.

Prints markdown tables. Needs torch, transformers, the package cf_ops with the CUDA backend (pip install .), and
cf-model.
"""

import functools
import itertools
import os
import shlex
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, "golden", "tools"))

import console

NAME = os.path.basename(__file__)
console.require_numpy(NAME)

import dump_hf
import golden_file
import model_config
from console import Refusal
from peers import model_bench, model_peers, programs, timing

PARTS = ("model", "ops", "clusterfusion")
# The models that ClusterFusion's port has calls for, and what the names of these calls begin with.
PORTED = {"pythia-2.8b": "pythia_2b8", "pythia-6.9b": "pythia_6b9"}
STEP_IMPLS = ("graph", "unfused")  # of a graph context, its own choice first
LEAST_DELAY_CYCLES, MOST_DELAY_CYCLES = 1 << 24, 1 << 31  # of a GPU, about 8 ms and 1 s
BLOCK = 50  # calls between two waits for the device: its queue does not fill, which would make the host wait
THEIRS, OURS = "hf_generate", "speed_up"
DEVICE_BLOCKS = 5  # blocks in which the device's time is taken


# --- what needs no torch ---


def ratios(rows):
    """How many times as long as with speed_up() Hugging Face takes for a token, and speed_up() as long as cf-model:
    [{preset, slots, prompt_len, new_tokens, hf_over_speed_up, speed_up_over_cf_model}]."""
    by_work = {}
    for row in model_peers.with_ratios(rows):
        by_work.setdefault(model_peers.work(row), {})[row["system"]] = row
    found = []
    for key, systems in by_work.items():
        if OURS not in systems or not systems[OURS].get("tpot_ms"):
            continue
        row, mine = dict(zip(("preset", *model_peers.SIZES), key)), systems[OURS]
        if systems.get(THEIRS, {}).get("tpot_ms"):
            row["hf_over_speed_up"] = systems[THEIRS]["tpot_ms"] / mine["tpot_ms"]
        if "tpot_ratio" in mine:
            row["speed_up_over_cf_model"] = mine["tpot_ratio"]
        found.append(row)
    return found


def ratio_text(row):
    """A line for each number of slots: how times a token compare."""
    text = f"{row['preset']}, {row['slots']} at once, {row['prompt_len']} + {row['new_tokens']} tokens: "
    parts = []
    if "hf_over_speed_up" in row:
        parts.append(f"Hugging Face takes {row['hf_over_speed_up']:.2f} times speed_up's time a token")
    if "speed_up_over_cf_model" in row:
        parts.append(f"speed_up takes {row['speed_up_over_cf_model']:.3f} times cf-model's")
    return text + ", ".join(parts)


def us(row, key):
    return f"{row[key]:.1f}" if key in row else ""


def with_device(rows, heading, rule):
    """The first lines of a table and the keys of its last columns: the device's time where any row has it."""
    if not any("device_us" in row for row in rows):
        return [heading, rule], ()
    return [f"{heading} device us |", f"{rule}---:|"], ("device_us",)


def host_table(rows):
    """The lines of a Markdown table of the calls' times on the host, and on the device."""
    lines, device = with_device(rows, "| call | host us, median | 10 % | 99 % |", "|---|---:|---:|---:|")
    for row in rows:
        cells = [us(row, key) for key in ("host_us", "host_p10_us", "host_p99_us", *device)]
        if "error" in row:
            cells = [row["error"], *[""] * (len(cells) - 1)]
        lines.append("| " + " | ".join([row["system"], *cells]) + " |")
    return lines


def call_table(rows):
    """The same of ClusterFusion's calls, with the time from call to call."""
    heading, rule = "| call | kv_len | us from call to call | host us, median |", "|---|---:|---:|---:|"
    lines, device = with_device(rows, heading, rule)
    for row in rows:
        cells = [us(row, key) for key in ("call_us", "host_us", *device)]
        if "error" in row:
            cells = [row["error"], *[""] * (len(cells) - 1)]
        lines.append("| " + " | ".join([row["system"], str(row.get("kv_len", "")), *cells]) + " |")
    return lines


def tables(report):
    """The lines of a report's tables."""
    results, lines = report["results"], []
    if results["model"]:
        rows = model_peers.with_ratios(results["model"])
        lines += [*model_peers.table(rows), "", *(f"- {ratio_text(row)}" for row in ratios(results["model"])), ""]
    for what, table in (("ops", host_table), ("clusterfusion", call_table)):
        if results[what]:
            lines += [*table(results[what]), ""]
    return lines[:-1]


# --- torch ---


def block_us(call, calls):
    """Calls that follow each other: the host's time of each, and the time from call to call, the end of the last one's
    work on the device included; in microseconds."""
    import torch

    times = []
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(calls):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) * 1e-3)
    torch.cuda.synchronize()
    return times, (time.perf_counter_ns() - start) * 1e-3 / calls


def device_us(call, calls, rewind=lambda: None):
    """The device's time of a call, in microseconds: that of calls which follow each other without a gap, since the host
    has launched all of them before the first one starts. None where the host does not get so far ahead."""
    import torch

    cycles = LEAST_DELAY_CYCLES
    while cycles <= MOST_DELAY_CYCLES:
        rewind()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        is_ahead = not start.query()
        end.synchronize()
        if is_ahead:
            return start.elapsed_time(end) * 1e3 / calls
        cycles *= 4
    return None


def timed_calls(call, calls, rewind=lambda: None):
    """The fields of a call: medians over blocks, each behind a rewind that is not timed. The first block warms up."""
    host, call_to_call, on_device = [], [], []
    for _ in range(1 + -(-calls // BLOCK)):
        rewind()
        block = block_us(call, BLOCK)
        host.append(block[0])
        call_to_call.append(block[1])
    for _ in range(DEVICE_BLOCKS):
        time_us = device_us(call, BLOCK, rewind)
        on_device += [] if time_us is None else [time_us]
    device = {"device_us": timing.spread(on_device)["median_us"]} if on_device else {}
    found = timing.spread([time_us for block in host[1:] for time_us in block])
    return {
        "calls": BLOCK * (len(host) - 1),
        "call_us": timing.spread(call_to_call[1:])["median_us"],
        "host_us": found["median_us"],
        "host_p10_us": found["p10_us"],
        "host_p99_us": found["p99_us"],
        **device,
    }


def op_calls(dtype="float16"):
    """{name: a call without arguments} of every op, in both of its forms, on the small tensors of the self-check.
    Before them stands torch's sum of two small tensors: what the host takes for a call that computes next to nothing.
    """
    import torch

    from cf_ops import _core, ops, selfcheck, torch_ops

    small = torch.zeros((1, 96), dtype=getattr(torch, dtype), device="cuda")
    calls = {"torch.add": functools.partial(torch.add, small, small)}
    for op in _core.ops():
        quantised = any(role == "gptq" for _, role, *_ in _core.op_example(op, 4)[0])
        for bits in (0, 4) if quantised else (0,):
            given = selfcheck.on_gpu(selfcheck.arguments(op, "float64", bits), dtype)
            name = f"ops.{op}" + (f", {bits} bits" if bits else "")
            # Names as a program's own calls have them: Python finds other texts slowly.
            calls[name] = functools.partial(getattr(ops, op), **{sys.intern(n): value for n, value in given.items()})
    for op in torch_ops.__all__:
        if op == "fused_layernorm_residual":  # a function around a registered op
            shapes = ((1, 4, 96), (1, 4, 96), (96,), (96,))
            tensors = [torch.randn(shape, device="cuda").half() for shape in shapes]
            calls[f"torch_ops.{op}"] = functools.partial(torch_ops.fused_layernorm_residual, *tensors)
            continue
        given = selfcheck.arguments("linear" if op == "linear_gptq" else op, "float64", 4 * (op == "linear_gptq"))
        given = selfcheck.on_gpu(given, dtype)
        if op == "linear_gptq":
            given |= vars(given.pop("weight"))
        call = getattr(torch_ops, op)
        names = [argument.name for argument in call.default._schema.arguments]
        calls[f"torch.ops.cf_ops.{op}"] = functools.partial(call, **{n: given[n] for n in names if n in given})
    return calls


class LayerCalls:
    """A layer of a model in ClusterFusion's layout, and the calls of the port on it."""

    ID = 1

    def __init__(self, preset, kv_len):
        import torch

        from cf_ops import clusterfusion

        model = model_config.PYTHIA_PRESETS[preset]
        hidden, half = model.hidden_size, model.head_dim // 8
        self.port, self.prefix, self.kv_len = clusterfusion, PORTED[preset], kv_len

        def random(*shape, mean=0.0):
            return (mean + 0.02 * torch.randn(shape, device="cuda")).half()

        self.matrices = {
            "weight_qkv": random(3 * hidden, hidden),
            "weight_o": random(hidden, hidden),
            "mlp_up_weight": random(4 * hidden, hidden),
            "mlp_down_weight": random(hidden, 4 * hidden),
        }
        self.caches = {name: random(kv_len + BLOCK, hidden) for name in ("k_cache", "v_cache")}
        angles, rest = torch.rand(half, device="cuda"), torch.zeros(model.head_dim - 2 * half, device="cuda")
        self.step = {
            "input": random(1, hidden),
            "cos": torch.cat([angles.cos(), angles.cos(), rest + 1]),
            "sin": torch.cat([angles.sin(), angles.sin(), rest]),
            **{name: random(hidden, mean=1.0) for name in ("ln_weight", "post_ln_weight")},
            **{name: random(hidden) for name in ("ln_bias", "post_ln_bias", "mlp_down_bias")},
            "mlp_up_bias": random(4 * hidden),
        }
        self.biases = random(3 * hidden), random(hidden)

    def call(self, name):
        return getattr(self.port, f"{self.prefix}_{name}")

    def decoder_layer(self, calls):
        """Calls at kv_len, each of which turns the rows of both caches."""
        given = self.matrices | self.caches | self.step | dict(zip(("bias_qkv", "bias_o"), self.biases))
        layer = self.call("decoder_layer")
        return timed_calls(lambda: layer(**given, current_seq_len=self.kv_len - 1), calls)

    def graph_decode_step(self, calls, impl):
        """Steps that follow each other from kv_len on; the step before them turns the rows. `impl` is the context's."""
        given = self.caches | self.step | dict(zip(("qkv_bias", "o_bias"), self.biases))
        step, length = self.call("graph_decode_step"), 0

        def one():
            nonlocal length
            step(self.ID, **given, current_seq_len=length)
            length += 1

        def rewind():
            nonlocal length
            length = self.kv_len - 2
            one()

        room = self.kv_len + BLOCK
        self.call("create_graph_context")(self.ID, **self.caches, **self.matrices, max_seq_len=room, impl=impl)
        try:
            return timed_calls(one, calls, rewind)
        finally:
            self.call("destroy_graph_context")(self.ID)


class PythonBench(model_bench.ModelBench):
    """The rows of the package's calls, beside cf-model's."""

    WHAT = "the Python package on one GPU, float16: this library beside Hugging Face in one run"
    KINDS = PARTS

    def agreement_preset(self, preset):
        """None: speed_up's ids are compared with generate()'s of the same model."""

    def findings(self):
        results = self.results | {"model": model_peers.with_ratios(self.results["model"])}
        return {"program": NAME, "results": results, "ratios": ratios(self.results["model"])}

    def print(self):
        print("\n".join(tables(self.findings())))

    def run(self, preset):
        parts = self.args.parts
        if "model" in parts:
            self.run_programs(preset)
            self.run_generate(preset)
        if "ops" in parts:
            self.run_calls()
        if "clusterfusion" in parts and preset in PORTED:
            self.run_clusterfusion(preset)

    def run_generate(self, preset):
        from cf_ops import hf as cf_hf

        args, found = self.args, {}
        for load in self.loads():
            reference = []

            def theirs():
                found["model"] = found.get("model") or model_peers.random_model(preset)
                row, ids = model_peers.timed(THEIRS, found["model"], load, None, args.runs, args.warmup)
                reference[:] = ids
                return row

            def ours():
                model = found["model"]
                cf_hf.speed_up(model)
                try:
                    row, ids = model_peers.timed(THEIRS, model, load, None, args.runs, args.warmup)
                    report = cf_hf.report(model)
                finally:
                    cf_hf.restore(model)
                if report.share < 1:
                    raise RuntimeError(f"calls ran on Hugging Face's path: {report.hugging_face}")
                prompt = load.prompts(model_config.PYTHIA_PRESETS[preset].vocab_size)[0]
                same = model_peers.margin(model, prompt, ids, reference)
                return row | {"agreement": {"preset": preset, "weights": "random", "with": THEIRS} | same}

            shape = (preset, *(getattr(load, size) for size in self.SIZES))
            self.measure("model", shape, THEIRS, theirs)
            if reference:
                self.measure("model", shape, OURS, ours)

    def run_calls(self):
        for name, call in op_calls().items():
            self.measure("ops", ("small",), name, lambda: timed_calls(call, self.args.calls))

    def run_clusterfusion(self, preset):
        calls = self.args.calls
        for kv_len in self.args.kv_len:
            measured = lambda: {"kv_len": kv_len} | LayerCalls(preset, kv_len).decoder_layer(calls)
            self.measure("clusterfusion", (preset,), f"{PORTED[preset]}_decoder_layer", measured)
        for impl, kv_len in itertools.product(self.args.step_impl, self.args.kv_len):
            name = f"{PORTED[preset]}_graph_decode_step" + (f", {impl}" if impl != STEP_IMPLS[0] else "")
            measured = lambda: {"kv_len": kv_len} | LayerCalls(preset, kv_len).graph_decode_step(calls, impl)
            self.measure("clusterfusion", (preset,), name, measured)


def parse_arguments(argv):
    count = console.integer(1, 1 << 20)
    parser = console.Parser(prog=NAME, description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAME[,NAME...]", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--preset", default="pythia-2.8b", choices=list(model_config.PYTHIA_PRESETS), metavar="NAME",
                        help="the model (default pythia-2.8b)")  # fmt: skip
    parser.add_argument("--impl", default="auto", metavar="NAME[,NAME...]", help="cf-model's --impl (default auto)")
    parser.add_argument("--slots", type=dump_hf.lengths, default=[1, 8], metavar="N[,N...]",
                        help="prompts at once (default 1,8)")  # fmt: skip
    parser.add_argument("--prompt-len", type=dump_hf.lengths, default=[16], metavar="N[,N...]",
                        help="a prompt's ids (default 16)")  # fmt: skip
    parser.add_argument("--new-tokens", type=dump_hf.lengths, default=[256], metavar="N[,N...]",
                        help="of a prompt (default 256)")  # fmt: skip
    parser.add_argument("--kv-len", type=dump_hf.lengths, default=[128], metavar="N[,N...]",
                        help="cache entries of a layer's call, and of a graph's first step (default 128)")  # fmt: skip
    parser.add_argument("--step-impl", default=STEP_IMPLS[0], metavar="NAME[,NAME...]",
                        help=f"how a graph context's steps are launched, of {', '.join(STEP_IMPLS)}: a row for each "
                             f"(default {STEP_IMPLS[0]})")  # fmt: skip
    parser.add_argument("--calls", type=count, default=1000, metavar="N", help="timed calls of an op (default 1000)")
    parser.add_argument("--runs", type=count, default=3, help="timed runs of a model (default 3)")
    parser.add_argument("--warmup", type=count, default=1, help="runs before them (default 1)")
    parser.add_argument("--peer-timeout-s", type=count, default=90, metavar="N",
                        help="seconds that one measurement may take (default 90)")  # fmt: skip
    parser.add_argument("--time-limit-s", type=count, default=400, metavar="N",
                        help="seconds after which nothing more is measured (default 400)")  # fmt: skip
    parser.add_argument("--cf-model", default=os.path.join(programs.BUILD, "cf-model"), metavar="FILE",
                        help="the program")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write everything there, anew after each measurement")
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    for part in args.parts:
        if part not in PARTS:
            raise Refusal(f"--parts must be of {', '.join(PARTS)}, got {part!r}")
    args.step_impl = args.step_impl.split(",")
    for impl in args.step_impl:
        if impl not in STEP_IMPLS:
            raise Refusal(f"--step-impl must be of {', '.join(STEP_IMPLS)}, got {impl!r}")
    longest = model_config.PYTHIA_PRESETS[args.preset].max_position_embeddings
    if max(args.prompt_len) + max(args.new_tokens) > longest:
        raise Refusal(f"--prompt-len and --new-tokens must be at most {longest} together")
    if min(args.kv_len) < 2:
        raise Refusal(f"--kv-len must be at least 2, got {min(args.kv_len)}")
    if args.parts == ["clusterfusion"] and args.preset not in PORTED:
        raise Refusal(f"--parts clusterfusion: expected --preset of {', '.join(PORTED)}, got {args.preset!r}")
    if "model" in args.parts and not os.access(args.cf_model, os.X_OK):
        raise Refusal(f"{args.cf_model}: no such program; scripts/test builds it, --cf-model names it")
    if args.json:
        golden_file.check_writable(args.json)
    return args


def main(argv):
    try:
        args = parse_arguments(argv)
        import torch
        import transformers

        import cf_ops

        if not torch.cuda.is_available():
            raise Refusal("torch finds no GPU")
        if not cf_ops.cuda_available():
            raise Refusal("cf_ops finds no GPU; python -m cf_ops says what is missing")
        transformers.logging.set_verbosity_error()
    except Refusal as refusal:
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"{NAME}: {error}; torch, transformers and cf_ops are needed", file=sys.stderr)
        return 2

    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__}
    about = {
        "what": PythonBench.WHAT,
        "command": shlex.join([NAME, *argv]),
        "gpu": torch.cuda.get_device_name(0),
        "versions": versions | {"cf_ops": cf_ops.__version__},
        "dtype": "float16",
        "runs": args.runs,
        "warmup": args.warmup,
    }
    bench = PythonBench(args, about)
    bench.run(args.preset)
    bench.print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
