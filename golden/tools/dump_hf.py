#!/usr/bin/env python3
"""Dumps one step of one layer, or a whole model's greedy run, from Hugging Face into a golden file, of any family in
core/families.

The layer runs in float64, the reference, and in the stored dtype with eager and sdpa attention, each on the same stored
bits. The file holds the inputs and the output of every step of the layer ("taps"), in the schema of golden_file.hpp.
Before it is written, the float64 taps are compared with an independent layer in numpy, which finds a hook at the wrong
place, a wrong mask or a lossy conversion. Hugging Face's RMSNorm computes in float32 in every dtype: in the reference
float64 forms take its place, an attribute of the reference says so, and the model as it is must be within 1e-6 of it.

With --whole-model the model chooses tokens after a prompt in float64, and then runs over all of them in each
arithmetic. The file holds the token ids, the logits and some layers' outputs, in the schema of model_golden.hpp. The
whole model is compared with numpy in the same way.

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
from families import join, split
from golden_file import SCHEMA, SCHEMA_VERSION, check_writable, read_sealed, write_golden
from hf_model import (
    PACKAGES,
    Checkpoint,
    about,
    attention_implementations,
    has_rms_norms,
    prefill_step,
    run_variant,
    torch_device,
    versions,
)
from model_config import PRESETS, config_json, joined_layer_shapes, layer_shapes
from model_golden import dump_model
from numpy_model import (
    MAX_ERROR,
    MAX_ERROR_FLOAT32_NORMS,
    check_rope,
    check_taps,
    made_step,
    reference_layer,
    rough_error,
)

EXAMPLES = """
examples
  a layer of your own model, with its weights in the file:
    dump_hf.py --model path/to/checkpoint --layer 3 --kv-len 17 --out mine.h5
  three sequences of different lengths, the weights left in the checkpoint:
    dump_hf.py --model path/to/checkpoint --layer 3 --kv-len 17,5,12 --weights checkpoint --out mine.h5
  a prefill of 7 tokens that ends at position 22:
    dump_hf.py --model path/to/checkpoint --kv-len 23 --q-len 7 --out prefill.h5
  a full-size layer without a download, its weights and cache made from a hash:
    dump_hf.py --preset llama-3.1-8b --layer 3 --kv-len 2048 --seed 1 --out llama.h5
  a whole model that chooses 20 tokens after the prompt:
    dump_hf.py --whole-model --model path/to/checkpoint --prompt-ids 11,48,7 --new-tokens 20 --out run.h5

The checkpoint is a directory with config.json and safetensors files, as save_pretrained writes it:
    python3 -c "from transformers import AutoModelForCausalLM as M; \\
      M.from_pretrained('NAME', torch_dtype='auto').save_pretrained('DIR', safe_serialization=True)"
Exit status: 0 when the file is written, 2 when the arguments or the input are refused.
"""

# What one kind of dump alone takes, and its default. None stands for what the model decides.
LAYER_OPTIONS = {
    "layer": 0,
    "kv_len": [17],
    "batch": None,
    "q_len": 1,
    "cache": None,
    "weights": None,
    "dequantised_weights": True,
}
MODEL_OPTIONS = {
    "layers": None,
    "prompt_ids": None,
    "prompt_len": 5,
    "new_tokens": 12,
    "top": None,
    "taps_of": None,
}


def integers(least, what):
    """The type of an argument that is a comma list of integers of at least `least`."""

    def parse(text):
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            values = []
        if not values or min(values) < least:
            raise argparse.ArgumentTypeError(f"expected {what} or a comma list of them, got {text!r}")
        return values

    return parse


lengths = integers(1, "a positive integer")


def layers_or_none(text):
    """The layers of --taps-of; an empty list for none."""
    return [] if text == "none" else integers(0, "none, a layer from 0")(text)


def parse_arguments(argv):
    parser = Parser(prog=NAME, description=__doc__, epilog=EXAMPLES)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="a checkpoint directory: config.json beside safetensors files")
    source.add_argument("--preset", metavar="NAME", help=f"a shape with procedural weights: {', '.join(PRESETS)}")
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

    layer = parser.add_argument_group("one step of one layer")
    layer.add_argument("--layer", type=integer(0, 1 << 16), help="the layer's index, from 0 (default 0)")
    layer.add_argument(
        "--kv-len",
        type=lengths,
        metavar="N[,N...]",
        help="valid cache entries after the new tokens are appended, one for all sequences or one each (default 17)",
    )
    layer.add_argument("--batch", type=integer(1, 1 << 16), help="sequences (default: as many as --kv-len names)")
    layer.add_argument(
        "--q-len",
        type=integer(1, 1 << 16),
        metavar="N",
        help="new tokens of each sequence: 1 is a decode step, more a prefill (default 1)",
    )
    layer.add_argument(
        "--cache",
        choices=["prefill", "random", "procedural"],
        help="the old cache entries and the hidden state: from the model's own run over random tokens "
        "(prefill, the default with --model), normally distributed beside a procedural hidden "
        "state, or both procedural and the cache not stored (the default with --preset)",
    )
    layer.add_argument(
        "--weights",
        choices=["stored", "checkpoint", "procedural"],
        help="where a reader finds the weights: in the file (the default with --model), in the "
        "checkpoint's directory (the default where it is a GPTQ one, whose weights no file holds), or made from the "
        "seed (the default with --preset)",
    )
    layer.add_argument(
        "--dequantised-weights",
        action=argparse.BooleanOptionalAction,
        help="keep a GPTQ checkpoint's weights, dequantised, beside the reference's taps; one file a layer is enough "
        "(default: keep them)",
    )

    whole = parser.add_argument_group("a whole model's greedy run")
    whole.add_argument("--whole-model", action="store_true", help="dump the model's run instead of a layer's step")
    whole.add_argument(
        "--layers", type=integer(1, 1 << 16), metavar="N", help="the first N layers of the preset (default: all)"
    )
    prompt = whole.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt-ids", type=integers(0, "a token id from 0"), metavar="ID[,ID...]", help="the prompt's token ids"
    )
    prompt.add_argument(
        "--prompt-len", type=integer(1, 1 << 24), metavar="N", help="random token ids of the seed (default 5)"
    )
    whole.add_argument(
        "--new-tokens", type=integer(1, 1 << 24), metavar="N", help="tokens that the model chooses (default 12)"
    )
    whole.add_argument(
        "--top",
        type=integer(0, 1 << 24),
        metavar="K",
        help="keep the K largest logits of a position, 0 for all (default: all of a vocabulary up to 4096, else 64)",
    )
    whole.add_argument(
        "--taps-of",
        type=layers_or_none,
        metavar="N[,N...]",
        help="the layers whose output is kept, beside the embedding and the final norm, or none for no taps at all "
        "(default: all of up to 2 layers, else the first and the last)",
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
    for name, default in (LAYER_OPTIONS | MODEL_OPTIONS).items():
        option = "--" + name.replace("_", "-")
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif args.whole_model and name in LAYER_OPTIONS:
            raise Refusal(f"{option} is of one layer's step, got it with --whole-model")
        elif not args.whole_model and name in MODEL_OPTIONS:
            raise Refusal(f"{option} needs --whole-model")
    if args.layers and args.model:
        raise Refusal("--layers needs --preset, got --model")
    if not args.whole_model:
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
    if not (args.dequantised_weights or is_quantised):
        raise Refusal("--no-dequantised-weights needs a GPTQ checkpoint")
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

    import transformers

    transformers.logging.set_verbosity_error()
    device = torch_device(args.device)

    progress("weights")
    dtype = args.dtype or "float16"
    wide, bits = has_rms_norms(model), checkpoint.gptq.bits if is_quantised else 0
    quantised = []
    if checkpoint and args.weights != "procedural":
        stored, weights, stored_dtype = checkpoint.layer(args.layer)
        if args.dtype not in (None, stored_dtype):
            raise Refusal(f"--dtype must be the checkpoint's {stored_dtype}, got {args.dtype}")
        dtype = stored_dtype
        stored = join(model.names, stored, bits)
        quantised = [name.replace("qweight", "weight") for name in stored if name.endswith(".qweight")]
    else:
        stored = procedural.layer_weights(
            joined_layer_shapes(model), args.layer, args.seed, dtype, model.names.layers.partition(".")[2]
        )
        weights = split(model.names, stored, layer_shapes(model))

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
    taps, tables = run_variant(model, weights, step, "float64", implementations[-1], device, wide)
    dense = join(model.names, weights)
    dequantised = {name: dense[name].astype(np.float64) for name in quantised if args.dequantised_weights}
    variants["float64"] = (about("float64", implementations[-1], device, wide), taps | dequantised, "float64")
    check_rope(model, step, **tables)
    progress("float64 numpy")
    check_taps("float64", taps, reference_layer(model, weights, step, **tables), MAX_ERROR)
    if wide:
        progress("float64 with norms in float32")
        as_it_is, _ = run_variant(model, weights, step, "float64", implementations[-1], device)
        check_taps("float64 with norms in float32", as_it_is, taps, MAX_ERROR_FLOAT32_NORMS)
    for implementation in implementations:
        progress(f"{dtype} {implementation}")
        low, _ = run_variant(model, weights, step, dtype, implementation, device)
        name = f"{dtype}_{implementation}"
        check_taps(name, {tap: procedural.widen(array, dtype) for tap, array in low.items()}, taps, rough_error(dtype))
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
        "schema": SCHEMA,
        "schema_version": np.int64(SCHEMA_VERSION),
        "producer": "golden/tools/dump_hf.py",
        "command": command,
        "versions": json.dumps(versions()),
        "config": checkpoint.config_text if checkpoint else config_json(model),
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


def check_layer_file(path, args, command):
    """Refuses a file that does not hold the step that was asked for."""
    with read_sealed(path) as file:
        tokens = args.batch * args.q_len
        for variant in file["taps"].values():
            if len(variant["output"]) != tokens:
                raise Refusal(f"{command}: expected {tokens} tokens in the file")
        if ("weights" in file) != (args.weights == "stored"):
            raise Refusal(f"{command}: the weights must be in the file when they are stored and only then")


def check_model_file(path, args, command):
    """Refuses a file that does not hold the run that was asked for."""
    with read_sealed(path) as file:
        tokens = file.attrs["prompt_len"] + args.new_tokens
        if file["ids"].shape != (tokens,):
            raise Refusal(f"{command}: expected {tokens} token ids in the file, got {file['ids'].shape}")
        if len(file["logits"]) != 1 + len(attention_implementations()):
            raise Refusal(f"{command}: expected the logits of every arithmetic, got {sorted(file['logits'])}")
        for logits in file["logits"].values():
            shape = logits["values"].shape if args.top else logits.shape
            if shape[0] != tokens - 1 or (args.top and shape[1] != args.top):
                raise Refusal(f"{command}: expected {tokens - 1} positions in the file, got {shape}")
        if ("taps" in file) != bool(args.taps_of):
            raise Refusal(f"{command}: the taps must be in the file when layers are named and only then")


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
    runs = ["--prompt-len 1 --new-tokens 1", "--prompt-ids 3,0,7 --new-tokens 9 --top 5 --taps-of none"]
    with tempfile.TemporaryDirectory() as directory:
        out = os.path.join(directory, "x.h5")
        commands = [f"--preset pythia-14m --layer 5 {steps[5]} --dtype {dtype}" for dtype in procedural.DTYPES]
        commands.append("--preset pythia-14m --whole-model --layers 3 --prompt-len 2 --new-tokens 3 --dtype bfloat16")
        for spec in [*make_checkpoints.SPECS, make_checkpoints.TIED, *make_checkpoints.LLAMA_SPECS, *make_checkpoints.GPT2_SPECS]:
            path = shlex.quote(make_checkpoints.write(spec, directory, "selfcheck"))
            commands += [f"--model {path} --layer {spec.model.num_hidden_layers - 1} {s}" for s in steps]
            commands += [f"--model {path} --whole-model {r}" for r in runs]
        for command in commands:
            argv = [*shlex.split(command), "--out", out]
            args = parse_arguments(argv)
            if args.whole_model:
                dump_model(args, shlex.join(argv))
                check_model_file(out, args, command)
            else:
                dump(args, shlex.join(argv))
                check_layer_file(out, args, command)
            os.unlink(out)
    print(f"OK: {len(commands)} dumps, {json.dumps(versions())}")


def main(argv):
    try:
        args = parse_arguments(argv)
        if args.selfcheck:
            selfcheck()
        else:
            (dump_model if args.whole_model else dump)(args, shlex.join([NAME, *argv]))
    except Refusal as refusal:
        progress("")
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
