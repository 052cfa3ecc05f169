#!/usr/bin/env python3
"""Times Hugging Face's GPTNeoXLayer on the CPU: one decode step of a Pythia-shaped layer, weights cold.

The model holds several copies of the layer, each with weights of its own, more than the last-level cache takes in all;
a run goes through all copies, so that none finds its weights in a cache. Hooks around each layer take the time: what
the model does around it is not counted. Weights, hidden state and cache are procedural (golden/tools/procedural.py).

Prints a markdown table, one row a dtype. To be run beside
  cf-layer --preset pythia-2.8b --layer 3 --kv-len 128 --threads N --json FILE
on the same machine. Needs torch and transformers.
"""

import glob
import json
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "golden", "tools"))

import numpy as np

import console
import golden_file
import hf_model
import model_config
import numpy_model
import procedural

LAYER, SEED = 3, 1


def cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return "unknown"


def last_level_cache_bytes():
    """The size of all last-level caches of the machine together; 64 MiB where the system does not say."""
    units, caches = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}, {}
    for directory in glob.glob("/sys/devices/system/cpu/cpu[0-9]*/cache/index3"):
        try:
            with open(f"{directory}/shared_cpu_list", encoding="ascii") as file:
                owners = file.read().strip()
            with open(f"{directory}/size", encoding="ascii") as file:
                size = file.read().strip()
        except OSError:
            continue
        caches[owners] = int(size.rstrip("KMG")) * units.get(size[-1], 1)
    return sum(caches.values()) or 64 << 20


def layer_times_us(model, weights, dtype, kv_len, copies, runs, warmup):
    """The time of every layer call after the warm-up runs, in microseconds."""
    import torch

    h = model.hidden_size
    state = {f"layers.{n}.{name}": array for n in range(copies) for name, array in weights.items()}
    state |= {"embed_in.weight": np.zeros((8, h), np.float16)}
    state |= {f"final_layer_norm.{part}": np.zeros(h, np.float16) for part in ("weight", "bias")}
    hf = hf_model.build(model, state, "float16", dtype, hf_model.attention_implementations()[-1], "cpu", copies)
    step = numpy_model.made_step(model, "float16", 1, [kv_len], "procedural", SEED)
    compute = getattr(torch, dtype)
    hidden, k, v = (
        hf_model.to_torch(array, "float16").to(compute)
        for array in (step.hidden[None], *(p[None] for p in step.past(0)))
    )
    position = torch.from_numpy(step.positions(0))[None]

    start, times_us = [0], []
    for layer in hf.layers:
        layer.register_forward_pre_hook(lambda *_: start.__setitem__(0, time.perf_counter_ns()))
        layer.register_forward_hook(lambda *_: times_us.append((time.perf_counter_ns() - start[0]) / 1e3))
    for run in range(warmup + runs):
        console.progress(f"{dtype}: run {run + 1} of {warmup + runs}")
        hf_model.call(hf, hf_model.filled_cache([(k, v)] * copies), inputs_embeds=hidden, position_ids=position)
    console.progress("")
    return times_us[warmup * copies :]


def main(argv):
    parser = console.Parser(description=__doc__)
    count = console.integer(1, 1 << 20)
    parser.add_argument("--preset", default="pythia-2.8b", metavar="NAME", help="default: pythia-2.8b")
    parser.add_argument("--dtype", default="float16,bfloat16,float32", metavar="D[,D...]", help="default: all three")
    parser.add_argument("--kv-len", type=count, default=128, help="entries after the append (default 128)")
    parser.add_argument("--threads", type=count, default=os.cpu_count(), help="default: all")
    parser.add_argument("--runs", type=count, default=20, help="passes over all copies (default 20)")
    parser.add_argument("--warmup", type=count, default=2, help="passes before them (default 2)")
    parser.add_argument(
        "--copies", type=count, help="of the layer (default: three times the last-level caches' size, at least 4)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    try:
        args = parser.parse_args(argv)
        if args.preset not in model_config.PYTHIA_PRESETS:
            known = ", ".join(model_config.PYTHIA_PRESETS)
            raise console.Refusal(f"--preset must be one of {known}, got {args.preset!r}")
        dtypes = args.dtype.split(",")
        for dtype in dtypes:
            if dtype not in procedural.DTYPES:
                raise console.Refusal(f"--dtype must be of {', '.join(procedural.DTYPES)}, got {dtype!r}")
        model = model_config.PYTHIA_PRESETS[args.preset]
        if args.kv_len > model.max_position_embeddings:
            raise console.Refusal(f"--kv-len must be at most {model.max_position_embeddings}, got {args.kv_len}")
        if args.json:
            golden_file.check_writable(args.json)

        import torch
        import transformers

        transformers.logging.set_verbosity_error()
    except console.Refusal as refusal:
        print(f"bench_hf_cpu.py: {refusal}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"bench_hf_cpu.py: {error}; torch and transformers are needed", file=sys.stderr)
        return 2

    torch.set_num_threads(args.threads)
    weights = procedural.layer_weights(model_config.layer_shapes(model), LAYER, SEED, "float16")
    elements = sum(array.size for array in weights.values())
    # What the step must move: weights, the old cache, the new entries, the hidden state in and out.
    elements += 2 * args.kv_len * model.hidden_size + 2 * model.hidden_size
    results = []
    versions = hf_model.versions()
    print(
        f"{cpu_name()}, {args.threads} threads, torch {versions['torch']}, transformers {versions['transformers']}, "
        f"{args.preset}, procedural weights, seed {SEED}, kv_len {args.kv_len}, cold weights\n"
    )
    print("| dtype | median us | p10 us | p99 us | bytes | GB/s | copies | samples |")
    print("|-|-|-|-|-|-|-|-|")
    for dtype in dtypes:
        size_bytes = elements * (4 if dtype == "float32" else 2)
        copies = args.copies or max(4, -(-3 * last_level_cache_bytes() // size_bytes))
        times_us = layer_times_us(model, weights, dtype, args.kv_len, copies, args.runs, args.warmup)
        p10, median, p99 = (float(x) for x in np.percentile(times_us, (10, 50, 99)))
        gb_per_s = size_bytes / median / 1e3
        print(
            f"| {dtype} | {median:.1f} | {p10:.1f} | {p99:.1f} | {size_bytes} | {gb_per_s:.2f} | {copies} | "
            f"{len(times_us)} |",
            flush=True,
        )
        results.append(
            {
                "dtype": dtype,
                "median_us": median,
                "p10_us": p10,
                "p99_us": p99,
                "bytes": size_bytes,
                "gb_per_s": gb_per_s,
                "copies": copies,
                "samples": len(times_us),
            }
        )
    if args.json:
        about = {
            "what": "Hugging Face GPTNeoXLayer, one decode step on the CPU, cold weights",
            "preset": args.preset,
            "kv_len": args.kv_len,
            "batch": 1,
            "seed": SEED,
            "attn_implementation": hf_model.attention_implementations()[-1],
            "threads": args.threads,
            "cpu": cpu_name(),
            "last_level_cache_bytes": last_level_cache_bytes(),
            "versions": versions,
            "results": results,
        }
        golden_file.write_text(args.json, json.dumps(about, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
