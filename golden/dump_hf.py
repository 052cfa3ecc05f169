#!/usr/bin/env python3
"""Dumps one step of one GPT-NeoX layer from Hugging Face into a golden file.

The layer runs in float64, the reference, and in the stored dtype with eager and sdpa attention, each on the same stored
bits. The file holds the inputs and the output of every step of the layer ("taps"), in the schema of golden_file.hpp.
Before it is written, the float64 taps are compared with an independent layer in numpy, which finds a hook at the wrong
place, a wrong mask or a lossy conversion.

Needs torch, transformers (4.40 to 5.x), safetensors, numpy and h5py.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile

from console import Parser, Refusal, integer, progress, require, require_numpy

NAME = "dump_hf.py"
require_numpy(NAME)

import numpy as np

import procedural
from golden_file import SCHEMA_VERSION, check_writable, read_sealed, write_golden
from gptq import LINEARS
from neox import PRESETS, check_rope, check_taps, layer_shapes, made_step, preset_config, reference_layer
from neox_hf import Checkpoint, attention_implementations, device_name, prefill_step, run_variant, versions

EXAMPLES = """
examples
  a layer of your own model, with its weights in the file:
    dump_hf.py --model path/to/checkpoint --layer 3 --kv-len 17 --out mine.h5
  three sequences of different lengths, the weights left in the checkpoint:
    dump_hf.py --model path/to/checkpoint --layer 3 --kv-len 17,5,12 --weights checkpoint --out mine.h5
  a prefill of 7 tokens that ends at position 22:
    dump_hf.py --model path/to/checkpoint --kv-len 23 --q-len 7 --out prefill.h5
  a full-size layer without a download, its weights and cache made from a hash:
    dump_hf.py --preset pythia-2.8b --layer 3 --kv-len 2048 --seed 1 --out pythia.h5

The checkpoint is a directory with config.json and safetensors files, as save_pretrained writes it:
    python3 -c "from transformers import AutoModelForCausalLM as M; \\
      M.from_pretrained('NAME', torch_dtype='auto').save_pretrained('DIR', safe_serialization=True)"
Exit status: 0 when the file is written, 2 when the arguments or the input are refused.
"""

MAX_ERROR = 1e-10  # relative L2 between Hugging Face's float64 taps and numpy's
PACKAGES = ("torch", "transformers", "safetensors", "h5py")


def lengths(text):
    """A comma list of positive integers."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer or a comma list of them, got {text!r}")
    return values


def parse_arguments(argv):
    parser = Parser(prog=NAME, description=__doc__, epilog=EXAMPLES)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="a checkpoint directory: config.json beside safetensors files")
    source.add_argument("--preset", metavar="NAME", help=f"a shape with procedural weights: {', '.join(PRESETS)}")
    parser.add_argument("--layer", type=integer(0, 1 << 16), default=0, help="the layer's index, from 0 (default 0)")
    parser.add_argument(
        "--kv-len",
        type=lengths,
        default=[17],
        metavar="N[,N...]",
        help="valid cache entries after the new tokens are appended, one for all sequences or one each (default 17)",
    )
    parser.add_argument("--batch", type=integer(1, 1 << 16), help="sequences (default: as many as --kv-len names)")
    parser.add_argument(
        "--q-len",
        type=integer(1, 1 << 16),
        default=1,
        metavar="N",
        help="new tokens of each sequence: 1 is a decode step, more a prefill (default 1)",
    )
    parser.add_argument(
        "--cache",
        choices=["prefill", "random", "procedural"],
        help="the old cache entries and the hidden state: from the model's own run over random tokens "
        "(prefill, the default with --model), normally distributed beside a procedural hidden "
        "state, or both procedural and the cache not stored (the default with --preset)",
    )
    parser.add_argument(
        "--weights",
        choices=["stored", "checkpoint", "procedural"],
        help="where a reader finds the weights: in the file (the default with --model), in the "
        "checkpoint's directory (the default where it is a GPTQ one, whose weights no file holds), or made from the "
        "seed (the default with --preset)",
    )
    parser.add_argument(
        "--dtype",
        choices=list(procedural.DTYPES),
        help="of hidden, cache and weights (default: the checkpoint's; float16 with --preset)",
    )
    parser.add_argument(
        "--seed", type=integer(0, procedural.MASK), default=0, help="of all that is random or procedural (default 0)"
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where Hugging Face runs (default: the GPU where torch has one)",
    )
    parser.add_argument("--out", metavar="FILE", help="the golden file to write")
    parser.add_argument(
        "--selfcheck",
        action="store_true",
        help="dump tiny models through every path into a temporary directory and print OK",
    )
    args = parser.parse_args(argv)
    if args.selfcheck:
        return args
    if not args.model and not args.preset:
        raise Refusal("one of --model and --preset is required")
    if not args.out:
        raise Refusal("--out is required")
    if args.preset and args.preset not in PRESETS:
        raise Refusal(f"--preset must be one of {', '.join(PRESETS)}, got {args.preset!r}")
    args.batch = args.batch or len(args.kv_len)
    if len(args.kv_len) == 1:
        args.kv_len *= args.batch
    args.cache = args.cache or ("prefill" if args.model else "procedural")
    return args


def check_arguments(args, model, is_quantised):
    """Refuses arguments that contradict each other or the model."""
    if len(args.kv_len) != args.batch:
        raise Refusal(f"--kv-len must name 1 or --batch {args.batch} lengths, got {len(args.kv_len)}")
    if args.layer >= model.num_hidden_layers:
        raise Refusal(f"--layer must be 0 to {model.num_hidden_layers - 1}, got {args.layer}")
    if max(args.kv_len) > model.max_position_embeddings:
        raise Refusal(
            f"--kv-len must be at most max_position_embeddings {model.max_position_embeddings}, got {max(args.kv_len)}"
        )
    if min(args.kv_len) < args.q_len:
        raise Refusal(f"--kv-len must be at least --q-len {args.q_len}, got {min(args.kv_len)}")
    if args.weights == "stored" and is_quantised:
        raise Refusal("--weights must be checkpoint or procedural with a GPTQ checkpoint, got stored")
    if args.preset and args.weights == "checkpoint":
        raise Refusal("--weights checkpoint needs --model, got --preset")
    if args.cache == "prefill" and (args.preset or args.weights == "procedural"):
        raise Refusal("--cache prefill needs the weights of a --model, got procedural ones")


def dump(args, command):
    """Writes the golden file that the arguments ask for."""
    checkpoint = Checkpoint(args.model) if args.model else None
    model = checkpoint.model if checkpoint else PRESETS[args.preset]
    is_quantised = bool(checkpoint and checkpoint.gptq)
    args.weights = args.weights or ("procedural" if args.preset else "checkpoint" if is_quantised else "stored")
    check_arguments(args, model, is_quantised)
    check_writable(args.out)
    require(*PACKAGES)

    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device cuda: torch finds no GPU")

    progress("weights")
    dtype = args.dtype or "float16"
    quantised = []
    if checkpoint and args.weights != "procedural":
        stored, weights, stored_dtype = checkpoint.layer(args.layer)
        if args.dtype not in (None, stored_dtype):
            raise Refusal(f"--dtype must be the checkpoint's {stored_dtype}, got {args.dtype}")
        dtype = stored_dtype
        quantised = [f"{name}.weight" for name in LINEARS if f"{name}.weight" not in stored]
    else:
        stored = weights = procedural.layer_weights(layer_shapes(model), args.layer, args.seed, dtype)

    progress("inputs")
    if args.cache == "prefill":
        step = prefill_step(checkpoint, args.layer, args.q_len, args.kv_len, args.seed, device)
    else:
        step = made_step(model, dtype, args.q_len, args.kv_len, args.cache, args.seed)
    if step.k_cache.size == 0:
        step.cache = "none"

    variants = {}
    implementations = attention_implementations()
    progress(f"float64 {implementations[-1]}")
    taps, tables = run_variant(model, weights, step, "float64", implementations[-1], device)
    dequantised = {name: weights[name].astype(np.float64) for name in quantised}
    variants["float64"] = (about("float64", implementations[-1], device), taps | dequantised, "float64")
    check_rope(model, step, tables["cos"], tables["sin"])
    progress("float64 numpy")
    check_taps("float64", taps, reference_layer(model, weights, step, tables["cos"], tables["sin"]), MAX_ERROR)
    # Rounding alone stays far below this bound; a wrong formula does not.
    rough = 64 * {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[dtype]
    for implementation in implementations:
        progress(f"{dtype} {implementation}")
        low, _ = run_variant(model, weights, step, dtype, implementation, device)
        name = f"{dtype}_{implementation}"
        check_taps(name, {tap: procedural.widen(array, dtype) for tap, array in low.items()}, taps, rough)
        # Module outputs that are not taps of the layer are kept in the reference only.
        low = {tap: array for tap, array in low.items() if not tap.startswith("hf.")}
        variants[name] = (about(dtype, implementation, device), low, dtype)

    inputs = {
        "hidden": (step.hidden, dtype),
        "kv_len": (np.array(step.kv_len, np.int32), "int32"),
        "positions": (step.all_positions().astype(np.int32), "int32"),
        **{name: (table.astype(np.float32), "float32") for name, table in tables.items()},
    }
    if step.cache in ("prefill", "random"):
        inputs |= {"k_cache": (step.k_cache, dtype), "v_cache": (step.v_cache, dtype)}
    groups = {"inputs": inputs}
    attributes = {
        "schema": "cf-golden",
        "schema_version": np.int64(SCHEMA_VERSION),
        "producer": "golden/dump_hf.py",
        "command": command,
        "versions": json.dumps(versions()),
        "config": checkpoint.config_text if checkpoint else preset_config(args.preset),
        "model": os.path.basename(os.path.abspath(args.model)) if checkpoint else args.preset,
        "layer": np.int64(args.layer),
        "dtype": dtype,
        "seed": np.uint64(args.seed),
        "batch": np.int64(args.batch),
        "q_len": np.int64(args.q_len),
        "cache": step.cache,
        "weights": args.weights,
        "weights_checksum": np.uint64(procedural.weights_checksum(stored)),
    }
    if step.cache == "procedural":
        sums = [procedural.checksum(cache) for cache in (step.k_cache, step.v_cache)]
        attributes["cache_checksum"] = np.uint64((sums[0] + 3 * sums[1]) & procedural.MASK)
    if args.weights == "checkpoint":
        attributes["weights_checkpoint"] = os.path.relpath(args.model, os.path.dirname(args.out) or ".")
    if args.weights == "stored":
        groups["weights"] = {name: (array, dtype) for name, array in weights.items()}
    progress("writing")
    write_golden(args.out, attributes, groups, variants)
    progress("")


def about(dtype, implementation, device):
    return {"dtype": dtype, "attn_implementation": implementation, "device": device_name(device)}


def selfcheck():
    """Dumps tiny models through every path and reads the files back."""
    require(*PACKAGES)
    import make_checkpoints

    steps = [
        "--kv-len 1",
        "--kv-len 17 --batch 2",
        "--kv-len 17,5,12 --cache random --weights checkpoint",
        "--kv-len 23,7 --q-len 7 --weights checkpoint",
        "--kv-len 9 --q-len 9",
        "--kv-len 33,2,8 --q-len 2 --cache procedural --weights procedural",
    ]
    with tempfile.TemporaryDirectory() as directory:
        out = os.path.join(directory, "x.h5")
        commands = [f"--preset pythia-14m --layer 5 {steps[5]} --dtype {dtype}" for dtype in procedural.DTYPES]
        for spec in make_checkpoints.SPECS:
            path = make_checkpoints.write(spec, directory, "selfcheck")
            commands += [f"--model {shlex.quote(path)} --layer {spec.model.num_hidden_layers - 1} {s}" for s in steps]
        for command in commands:
            argv = [*shlex.split(command), "--out", out]
            args = parse_arguments(argv)
            dump(args, shlex.join(argv))
            with read_sealed(out) as file:
                tokens = args.batch * args.q_len
                for variant in file["taps"].values():
                    if len(variant["output"]) != tokens:
                        raise Refusal(f"{command}: expected {tokens} tokens in the file")
                if ("weights" in file) != (args.weights == "stored"):
                    raise Refusal(f"{command}: the weights must be in the file when they are stored and only then")
            os.unlink(out)
    print(f"OK: {len(commands)} dumps, {json.dumps(versions())}")


def main(argv):
    try:
        args = parse_arguments(argv)
        if args.selfcheck:
            selfcheck()
        else:
            dump(args, shlex.join([NAME, *argv]))
    except Refusal as refusal:
        progress("")
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
