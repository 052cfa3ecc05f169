#!/usr/bin/env python3
"""Writes the small GPT-NeoX checkpoints of data/checkpoints with Hugging Face's save_pretrained, or a full-size one.

The small ones' weights are random. Biases and LayerNorm parameters differ from 0 and 1, attention is peaked, and each
matrix keeps the scale of its inputs. provenance.json in each directory says how it was made. The GPTQ checkpoints are
quantised from one such model, which is not kept.

With --preset the weights of a Pythia model are made from a hash (core/procedural.hpp) and written one tensor at a time,
dense or as GPTQ weights, into a new directory.

Needs torch, transformers, safetensors, numpy and h5py; with --preset numpy alone.
"""

import argparse
import os
import re
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace

from console import Parser, Refusal, integer, progress, require, require_numpy

NAME = "make_checkpoints.py"
require_numpy(NAME)

import gptq
import procedural
from golden_file import current_umask, write_json
from neox import PRESETS, Model
from neox_hf import PACKAGES, default_dtype, versions
from preset_checkpoint import write_checkpoint
from quantize_gptq import Recipe, quantise_checkpoint

COMMAND = "python3 golden/make_checkpoints.py"


@dataclass(frozen=True)
class Spec:
    """A checkpoint: its directory's name, shape and dtype, and how save_pretrained splits it."""

    name: str
    dtype: str
    model: Model
    max_shard_size: str = "1GB"


def shape(hidden, layers, heads, intermediate, **rest):
    return Model(hidden, layers, heads, intermediate, vocab_size=128, max_position_embeddings=512, **rest)


SPECS = [
    Spec("neox-d80", "float16", shape(160, 2, 2, 640)),
    Spec("neox-d128", "float16", shape(256, 1, 2, 512)),
    Spec("neox-d64-sharded", "float16", shape(128, 3, 2, 512), max_shard_size="500KB"),
    Spec("neox-d64-sequential", "float16", shape(128, 2, 2, 512, use_parallel_residual=False)),
    Spec("neox-bf16", "bfloat16", shape(128, 2, 4, 512)),
    Spec(
        "neox-tanh",
        "float32",
        shape(
            64,
            2,
            4,
            256,
            hidden_act="gelu_pytorch_tanh",
            rotary_pct=0.5,
            rope_theta=25000.0,
            layer_norm_eps=1e-6,
            attention_bias=False,
        ),
    ),
]


# Its golden file is a whole model's alone.
TIED = Spec("neox-tied", "float16", shape(64, 2, 2, 256, tie_word_embeddings=True))

GPTQ_SOURCE = Spec("neox-gptq-source", "float16", shape(64, 2, 2, 128))
GPTQ_RECIPES = {
    "neox-gptq-asym": Recipe(group_size=32, sym=False),
    "neox-gptq-sym": Recipe(group_size=64),
    "neox-gptq-desc-act": Recipe(group_size=32, sym=False, desc_act=True),
    "neox-gptq-v2": Recipe(group_size=-1, sym=False, checkpoint_format="gptq_v2"),
    "neox-gptq-8bit": Recipe(bits=8, group_size=32, desc_act=True, checkpoint_format="gptq_v2"),
    "neox-gptq-mixed": Recipe(
        group_size=32,
        sym=False,
        round_to_nearest=True,
        modules=tuple(m for m in gptq.LINEARS if m != "attention.dense"),
    ),
}


def fill(parameters, seed):
    """Fills a model's parameters with seeded normal values, each rounded once to its dtype."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in parameters:
        x = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if name.endswith("norm.weight"):
            x = 1 + 0.1 * x
        elif name.endswith("bias"):
            x = 0.1 * x
        elif "embed" not in name and "lm_head" not in name:
            # Attention's scores get a standard deviation of 2.
            x = x * ((2 if "query_key_value" in name else 1) / parameter.shape[1]) ** 0.5
        parameter.copy_(x)


def write(spec, directory, command, seed=1):
    """Writes the checkpoint into directory/<name>, whole or not at all, and returns that path."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, logging

    logging.disable_progress_bar()
    path = os.path.join(directory, spec.name)
    temporary = path + ".tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    with default_dtype(spec.dtype), torch.no_grad():
        hf = GPTNeoXForCausalLM(GPTNeoXConfig(**spec.model.hf_fields(), bos_token_id=0, eos_token_id=0))
        fill(hf.named_parameters(), seed)
    hf.save_pretrained(temporary, max_shard_size=spec.max_shard_size, safe_serialization=True)
    about = {
        "command": command,
        "seed": seed,
        "weights": "random: golden/make_checkpoints.py fill()",
        "versions": versions(),
    }
    write_json(os.path.join(temporary, "provenance.json"), about)
    for name in os.listdir(temporary):
        os.chmod(os.path.join(temporary, name), 0o666 & ~current_umask())  # safetensors lets the owner alone read
    shutil.rmtree(path, ignore_errors=True)
    os.replace(temporary, path)
    return path


EXAMPLES = """
examples
  the small checkpoints of this repository:
    make_checkpoints.py --out data/checkpoints
  5.6 GB of weights in the shape of Pythia-2.8B:
    make_checkpoints.py --preset pythia-2.8b --out pythia-2.8b
  the same in 4 bits:
    make_checkpoints.py --preset pythia-2.8b --gptq 4 --group-size 128 --out pythia-2.8b-int4
Exit status: 0 when all is written, 2 when it is refused: bad arguments, a directory that is there, too small a disk.
"""

# What --preset alone takes, and its default. None stands for what the preset decides.
PRESET_OPTIONS = {"layers": None, "dtype": "float16", "seed": 0, "shard_size": 4 * 10**9, "gptq": 0, "group_size": None}
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def byte_count(text):
    """The type of an argument such as 4GB or 500MB."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})(B|KB|MB|GB)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected a number of B, KB, MB or GB, such as 4GB, got {text!r}")
    return int(match[1]) * UNITS[match[2]]


def parse_arguments(argv):
    parser = Parser(prog=NAME, description=__doc__, epilog=EXAMPLES)
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="where the small ones lie (default: data/checkpoints), or the directory of a preset's",
    )
    preset = parser.add_argument_group("a full-size checkpoint")
    preset.add_argument("--preset", metavar="NAME", help=f"its shape: {', '.join(PRESETS)}")
    preset.add_argument(
        "--layers", type=integer(1, 1 << 16), metavar="N", help="the first N layers of the preset (default: all)"
    )
    preset.add_argument("--dtype", choices=list(procedural.DTYPES), help="of the dense weights (default float16)")
    preset.add_argument("--seed", type=integer(0, procedural.MASK), help="of the weights (default 0)")
    preset.add_argument(
        "--shard-size", type=byte_count, metavar="BYTES", help="at most, of a file of several tensors (default 4GB)"
    )
    preset.add_argument("--gptq", type=int, choices=[4, 8], help="quantised Linears with codes of so many bits")
    preset.add_argument(
        "--group-size",
        type=integer(-1, 1 << 22),
        metavar="N",
        help="inputs that share a scale, -1 for all (default 128)",
    )
    args = parser.parse_args(argv)
    if not args.preset:
        for name in PRESET_OPTIONS:
            if getattr(args, name) is not None:
                raise Refusal(f"--{name.replace('_', '-')} needs --preset")
        args.out = args.out or "data/checkpoints"
        return args
    if args.preset not in PRESETS:
        raise Refusal(f"--preset must be one of {', '.join(PRESETS)}, got {args.preset!r}")
    if not args.out:
        raise Refusal("--out is required with --preset")
    if args.group_size == 0:
        raise Refusal("--group-size must be -1 or at least 1, got 0")
    if args.group_size is not None and not args.gptq:
        raise Refusal("--group-size needs --gptq")
    for name, default in PRESET_OPTIONS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.layers and args.layers > PRESETS[args.preset].num_hidden_layers:
        raise Refusal(f"--layers must be at most {PRESETS[args.preset].num_hidden_layers}, got {args.layers}")
    return args


def write_preset(args, command):
    model = PRESETS[args.preset]
    if args.layers:
        model = replace(model, num_hidden_layers=args.layers)
    write_checkpoint(
        args.out, model, args.dtype, args.seed, args.shard_size, command, args.gptq, args.group_size or 128
    )


def write_small(out):
    """Writes the checkpoints of data/checkpoints into a directory."""
    require(*PACKAGES)
    os.makedirs(out, exist_ok=True)
    for spec in [*SPECS, TIED]:
        progress(spec.name)
        write(spec, out, COMMAND)
    with tempfile.TemporaryDirectory() as directory:
        source = write(GPTQ_SOURCE, directory, COMMAND)
        for name, recipe in GPTQ_RECIPES.items():
            quantise_checkpoint(source, os.path.join(out, name), recipe, COMMAND, seed=1)
    progress("")


def main(argv):
    try:
        args = parse_arguments(argv)
        if args.preset:
            write_preset(args, shlex.join([NAME, *argv]))
        else:
            write_small(args.out)
    except (Refusal, OSError) as error:
        progress("")
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
