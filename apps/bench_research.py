#!/usr/bin/env python3
"""Times what the people who study models ask of the package cf_ops, on a GPU:
  memorize  cf_ops.memorize() of random sequences, 1,024 at once, beside the decoder alone on the same prompts
  swap      Model.swap() between two checkpoints that lie in the page cache, beside a fresh load
  taps      cf_ops.activations() of all residuals, written in 16 bits, beside a prefill of the same prompts

Weights are random, in float16. The checkpoints and the activations are written below --folder and removed at the end.
Prints a line for each part, and with --json writes them. Needs the package cf_ops (pip install .), with the CUDA backend
but for --device cpu.
"""

import json
import os
import shlex
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, os.pardir, "golden", "tools"))

import console

NAME = os.path.basename(__file__)
console.require_numpy(NAME)

import numpy as np

import golden_file
import model_config
from console import Refusal

PARTS = ("memorize", "swap", "taps")  # time_memorize() and so on
POOL = 1 << 22  # random elements, which fill every tensor


def seconds(call):
    begun = time.perf_counter()
    made = call()
    return time.perf_counter() - begun, made


def write_checkpoint(folder, model, seed):
    """A checkpoint of random weights in one file, which the page cache holds from then on."""
    from cf_ops import _safetensors

    os.makedirs(folder)
    config = model_config.hf_config(model) | {"torch_dtype": "float16", "architectures": ["GPTNeoXForCausalLM"]}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    golden_file.write_json(os.path.join(folder, "config.json"), config | ends)
    golden_file.write_json(os.path.join(folder, "generation_config.json"), ends)
    shapes = model_config.model_shapes(model, model_config.layer_shapes(model))
    pool = (np.random.default_rng(seed).standard_normal(POOL, np.float32) * 0.02).astype(np.float16)
    stored = {name: ("F16", tuple(shape)) for name, shape in shapes.items()}
    for tensor in _safetensors.create(os.path.join(folder, "model.safetensors"), stored, {"format": "pt"}).values():
        elements = tensor.reshape(-1)
        for begin in range(0, elements.size, POOL):
            part = elements[begin : begin + POOL]
            part[:] = pool[: part.size]


def checkpoint(args, folder, step):
    """The folder of a checkpoint, which is written at its first use."""
    path = os.path.join(folder, f"step{step}")
    if not os.path.exists(path):
        write_checkpoint(path, model_config.PYTHIA_PRESETS[args.preset], step)
    return path


def load(args, folder, **sizes):
    """The model, on a GPU with so many slots."""
    import cf_ops

    sizes = sizes if args.device != "cpu" else {}
    return cf_ops.load(checkpoint(args, folder, 1), device=args.device, **sizes)


def random_ids(model, rows, length):
    return np.random.default_rng(7).integers(0, model.config["vocab_size"], (rows, length), dtype=np.uint16)


def decoded(model, prompts, steps):
    """Lets the decoder alone continue prompts by so many greedy ids."""
    decoder = model.decoder(len(prompts), len(prompts[0]) + steps)
    for prompt in prompts:
        decoder.add(prompt, max_new_tokens=steps)
    decoder.decode(steps)
    decoder.close()


def time_memorize(args, folder):
    import cf_ops

    with load(args, folder, slots=args.slots, capacity=64) as model:
        rows = random_ids(model, args.waves * args.slots, 64)
        cf_ops.memorize(model, rows[: args.slots], slots=args.slots, never=())  # graphs are made
        taken, _ = seconds(lambda: cf_ops.memorize(model, rows, slots=args.slots, never=()))
        prompts = [row[:32].tolist() for row in rows[: args.slots]]
        decoded(model, prompts, 32)
        alone, _ = seconds(lambda: decoded(model, prompts, 32))
    return {
        "slots": args.slots,
        "sequences": len(rows),
        "seconds": taken,
        "sequences_per_s": len(rows) / taken,
        "decoder_alone_s_per_wave": alone,
        "over_decoder_alone": alone * args.waves / taken,
    }


def time_swap(args, folder):
    import cf_ops
    from cf_ops.model import open_weights

    paths = [checkpoint(args, folder, step) for step in (1, 2)]
    load_s, model = seconds(lambda: cf_ops.load(paths[0], device=args.device))
    swaps, reads, copies = [], [], []
    for i in range(args.runs):
        swaps.append(seconds(lambda: model.swap(paths[(i + 1) % 2]))[0])
    for i in range(args.runs):
        read_s, (weights, eos) = seconds(lambda: open_weights(paths[i % 2], for_gpu=args.device != "cpu"))
        reads.append(read_s)
        copies.append(seconds(lambda: model._take(weights, paths[i % 2], eos))[0])
    model.close()
    measured = {"fresh_load_s": load_s, "swap_s": swaps, "read_and_check_s": reads, "copy_s": copies}
    # A sweep reads the next revision while it evaluates this one. Between the two it waits only for the copy.
    text = list(range(100, 612))
    made = cf_ops.sweep(paths, {"ppl": lambda m: m.perplexity(text, context=256)}, device=args.device)
    measured["sweep_read_s"] = [row.load_s for row in made.revisions]
    measured["sweep_swap_s"] = [row.swap_s for row in made.revisions]
    return measured


def time_taps(args, folder):
    import cf_ops

    with load(args, folder, slots=16, capacity=513) as model:
        prompts = random_ids(model, args.prompts, 512)
        some = [row.tolist() for row in prompts[:16]]
        decoded(model, some, 1)
        prefill_s, _ = seconds(lambda: [decoded(model, some, 1) for _ in range(4)])
        prefill = 4 * len(some) * 512 / prefill_s
        options = {"dtype": "float16", "rows_of_file": 1 << 14}
        cf_ops.activations(model, prompts[:16], out=os.path.join(folder, "warm"), **options)
        taken, made = seconds(lambda: cf_ops.activations(model, prompts, out=os.path.join(folder, "taps"), **options))
        tap = made.taps[len(made.taps) // 2]
        one_s, _ = seconds(lambda: cf_ops.activations(model, prompts, tap, out=os.path.join(folder, "one"), **options))
    ids = prompts.size
    bytes_of_id = len(made.taps) * made.rows(made.taps[0], slice(0, 1)).nbytes
    return {
        "taps": len(made.taps),
        "ids": ids,
        "prefill_ids_per_s": prefill,
        "ids_per_s": ids / taken,
        "over_prefill": ids / taken / prefill,
        "written_gb_per_s": ids * bytes_of_id / taken * 1e-9,
        "one_tap_ids_per_s": ids / one_s,
        "one_tap_over_prefill": ids / one_s / prefill,
    }


def main(argv):
    parser = console.Parser(prog=NAME, description=__doc__)
    parser.add_argument("--preset", default="pythia-2.8b", choices=list(model_config.PYTHIA_PRESETS), help="the model")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 ... or cpu (cuda)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--slots", type=console.integer(1, 1024), default=1024, help="sequences at once (1024)")
    parser.add_argument("--waves", type=console.integer(1, 1000), default=2, help="how often so many (2)")
    parser.add_argument("--prompts", type=console.integer(1, 1 << 16), default=96, help="of 512 ids, of taps (96)")
    parser.add_argument("--runs", type=console.integer(1, 100), default=2, help="of each swap (2)")
    parser.add_argument("--folder", help="where checkpoints and activations are written (the system's)")
    parser.add_argument("--json", help="a file for the figures")
    try:
        args = parser.parse_args(argv)
        parts = args.parts.split(",")
        for part in parts:
            if part not in PARTS:
                raise Refusal(f"--parts must be of {', '.join(PARTS)}, got {part!r}")
        if args.json:
            golden_file.check_writable(args.json)
        import cf_ops

        on_gpu = args.device != "cpu"
        if on_gpu and not cf_ops.cuda_available():
            raise Refusal("cf_ops finds no GPU; python -m cf_ops says what is missing")
        report = {
            "program": NAME,
            "command": shlex.join([NAME, *argv]),
            "gpu": cf_ops._core.cuda_device(int(args.device.partition(":")[2] or 0))[0] if on_gpu else None,
            "version": cf_ops.__version__,
            "preset": args.preset,
        }
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            calls = {"memorize": time_memorize, "swap": time_swap, "taps": time_taps}
            for part in parts:
                report[part] = calls[part](args, folder)
                print(f"{part}: {json.dumps(report[part])}", flush=True)
        if args.json:
            golden_file.write_json(args.json, report)
    except (Refusal, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"{NAME}: {error}; the package cf_ops is needed", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
