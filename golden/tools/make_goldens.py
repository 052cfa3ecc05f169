#!/usr/bin/env python3
"""Regenerates the checkpoints and golden files of data/ from Hugging Face, in one command.

    golden/tools/make_goldens.py --out data

Layers' golden files go to golden/, those of whole models to golden_model/. The attribute "command" of each file is the
command that makes this file alone, run in the output directory.
Takes about five minutes on 16 cores and writes less than 50 MB.

Needs torch, transformers, safetensors, numpy and h5py.
"""

import os
import sys
import time

from console import Parser, Refusal, require, require_numpy

NAME = "make_goldens.py"
require_numpy(NAME)

import dump_hf
import make_checkpoints


def small_dumps(spec):
    """(file name, arguments) of a small checkpoint's golden files, each of its last layer."""
    base = f"--model checkpoints/{spec.name} --layer {spec.model.num_hidden_layers - 1} --weights checkpoint"
    # What is particular to shards is how they are read. Other checkpoints' layers are computed like theirs.
    is_sharded = "sharded" in spec.name
    for n in (1, 2, 17) if is_sharded else (1, 2, 17, 128, 300):
        # The longest caches are made from the seed instead of stored.
        cache = " --cache procedural" if n == 300 else ""
        yield f"{spec.name}-kv{n}-b1", f"{base} --kv-len {n}{cache}"
        yield f"{spec.name}-kv{n}-b3", f"{base} --kv-len {n},{max(1, n - 1)},{max(1, n // 2)}{cache}"
    yield f"{spec.name}-q7-kv23", f"{base} --kv-len 23 --q-len 7"
    if not is_sharded:
        yield f"{spec.name}-q9-kv9", f"{base} --kv-len 9 --q-len 9"
    if spec.name == "neox-d80":
        yield f"{spec.name}-random", f"{base} --kv-len 6,4 --q-len 3 --cache random"
    if spec.name in ("neox-d64-sequential", "neox-bf16", "neox-tanh"):
        yield f"{spec.name}-stored", f"{base} --kv-len 17".replace("checkpoint ", "stored ")


def gated_dumps(name, layers, is_quantised):
    """The same of a small checkpoint of another family than GPT-NeoX."""
    base = f"--model checkpoints/{name} --layer {layers - 1} --weights checkpoint"
    yield f"{name}-kv17-b2", f"{base} --kv-len 17,8"
    if not is_quantised:
        yield f"{name}-q3-kv9", f"{base} --kv-len 9 --q-len 3"
    if "scaled" in name:
        yield f"{name}-kv300-b1", f"{base} --kv-len 300 --cache procedural"
    if name in ("llama-gqa1-biases", "mistral-gqa4-sharded", "qwen2-gqa7", "qwen3-gqa2", "gpt2-d16"):
        yield f"{name}-stored", f"{base} --kv-len 17".replace("checkpoint ", "stored ")


def layer_dumps():
    """(file name, arguments) of the golden files of layers: of small checkpoints, and of full-size ones whose weights
    and caches are made from the seed."""
    for spec in make_checkpoints.SPECS:
        yield from small_dumps(spec)
    for name in make_checkpoints.GPTQ_RECIPES:
        base = f"--model checkpoints/{name} --layer 1"
        yield f"{name}-kv17-b3", f"{base} --kv-len 17,16,8"
        # The dequantised weights are in the first file.
        yield f"{name}-q7-kv23", f"{base} --kv-len 23 --q-len 7 --no-dequantised-weights"
    for spec in (*make_checkpoints.LLAMA_SPECS, *make_checkpoints.GPT2_SPECS):
        yield from gated_dumps(spec.name, spec.model.num_hidden_layers, False)
    for name, (spec, _) in make_checkpoints.LLAMA_GPTQ_RECIPES.items():
        yield from gated_dumps(name, spec.model.num_hidden_layers, True)
    for preset, n in (("pythia-2.8b", 17), ("pythia-2.8b", 2048), ("pythia-6.9b", 2048)):
        yield f"{preset}-kv{n}", f"--preset {preset} --layer 3 --kv-len {n}"


def model_dumps():
    """(file name, arguments) of the golden files of whole models: of every small checkpoint over a few positions, of
    two over all 512, and of two layers of a full-size model."""
    specs = *make_checkpoints.SPECS, make_checkpoints.TIED, *make_checkpoints.LLAMA_SPECS, *make_checkpoints.GPT2_SPECS
    for name in (*(spec.name for spec in specs), *make_checkpoints.GPTQ_RECIPES, *make_checkpoints.LLAMA_GPTQ_RECIPES):
        yield f"{name}-16", f"--whole-model --model checkpoints/{name} --prompt-len 5 --new-tokens 12"
    for name in ("neox-d80", "neox-bf16"):
        run = "--prompt-len 501 --new-tokens 12 --top 64 --taps-of none"
        yield f"{name}-512", f"--whole-model --model checkpoints/{name} {run}"
    run = "--layers 2 --prompt-len 4 --new-tokens 4 --top 64"
    yield "pythia-2.8b-2-layers-7", f"--whole-model --preset pythia-2.8b {run}"


# Folder -> its golden files.
FOLDERS = {"golden": layer_dumps, "golden_model": model_dumps}


def main(argv):
    parser = Parser(prog=NAME, description=__doc__)
    parser.add_argument(
        "--out", metavar="DIR", default="data", help="where the folders that are named below lie (default: data)"
    )
    parser.add_argument(
        "--only",
        choices=["checkpoints", *FOLDERS],
        help="make this folder alone; golden files need the checkpoints (default: all)",
    )
    try:
        args = parser.parse_args(argv)
        require(*dump_hf.PACKAGES)
        folders = [folder for folder in FOLDERS if args.only in (None, folder)]
        for folder in folders:
            os.makedirs(os.path.join(args.out, folder), exist_ok=True)
        os.chdir(args.out)
    except (Refusal, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    start = time.monotonic()
    if args.only in (None, "checkpoints"):
        if status := make_checkpoints.main(["--out", "checkpoints"]):
            return status
    made = 0
    for folder in folders:
        for name, arguments in FOLDERS[folder]():
            if status := dump_hf.main([*arguments.split(), "--seed", "1", "--out", f"{folder}/{name}.h5"]):
                print(f"{NAME}: {name} was refused", file=sys.stderr)
                return status
            made += 1
    size_bytes = sum(
        os.path.getsize(os.path.join(root, f))
        for d in ("checkpoints", *FOLDERS)
        for root, _, files in os.walk(d)
        for f in files
    )
    print(f"{made} golden files, {size_bytes / 1e6:.1f} MB with the checkpoints, {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
