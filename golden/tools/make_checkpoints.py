#!/usr/bin/env python3
"""Writes the small checkpoints of data/checkpoints with Hugging Face's save_pretrained, or a full-size one.

The small ones' weights are random. Biases and LayerNorm parameters differ from 0 and 1, attention is peaked, and each
matrix keeps the scale of its inputs. provenance.json in each directory says how it was made. The GPTQ checkpoints are
quantised from such models, which are not kept.

With --preset the weights of a Pythia model are made from a hash (core/procedural.hpp) and written one tensor at a time,
dense or as GPTQ weights, into a new directory.

Needs torch, transformers, safetensors, numpy and h5py; with --preset numpy alone.
"""

import argparse
import json
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
from hf_model import PACKAGES, class_of, default_dtype, transformers_config, versions
from model_config import PYTHIA_PRESETS, Model
from preset_checkpoint import write_checkpoint
from quantize_gptq import Recipe, quantise_checkpoint

COMMAND = "python3 golden/tools/make_checkpoints.py"


@dataclass(frozen=True)
class Spec:
    """A checkpoint: its directory's name, shape and dtype, and how save_pretrained splits it."""

    name: str
    dtype: str
    model: Model
    max_shard_size: str = "1GB"
    config_of: int = 5  # the generation of transformers whose names config.json has


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
            rotary_fraction=0.5,
            rope_theta=25000.0,
            layer_norm_eps=1e-6,
            attention_bias=False,
        ),
    ),
]


def gated(name, dtype, model_type, sizes, max_shard_size="1GB", config_of=5, **rest):
    """The checkpoint of a model of another family. The sizes are hidden, layers, heads, kv heads, head_dim and
    intermediate."""
    names = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size".split()
    sizes = dict(zip(names, sizes), vocab_size=128, max_position_embeddings=512)
    model = Model(model_type=model_type, **sizes, **rest)
    return Spec(name, dtype, model, max_shard_size, config_of)


# Every number of query heads for a kv head: 1, 3, 4, 7 and 8.
LLAMA_SPECS = [
    gated("llama-gqa1-biases", "bfloat16", "llama", (64, 1, 1, 1, 64, 96), attention_bias=True, mlp_bias=True),
    gated(
        "llama-gqa3-scaled",
        "float16",
        "llama",
        (48, 2, 6, 2, 64, 64),
        tie_word_embeddings=True,
        config_of=4,
        rope_theta=10000.0,
        rope_scaling=(8.0, 1.0, 4.0, 64),
        layer_norm_eps=1e-5,
    ),
    gated("mistral-gqa4-sharded", "float16", "mistral", (32, 2, 4, 1, 128, 40), "100KB", rope_theta=1e6),
    gated("qwen2-gqa7", "float16", "qwen2", (56, 1, 7, 1, 64, 80), config_of=4, rope_theta=1e6),
    gated("llama-gqa8", "float32", "llama", (32, 1, 8, 1, 64, 48)),
    gated("qwen3-gqa2", "bfloat16", "qwen3", (48, 2, 4, 2, 32, 64), rope_theta=1e6),
    gated("qwen3-gqa5-tied", "float16", "qwen3", (40, 1, 5, 1, 64, 56), tie_word_embeddings=True, rope_theta=1e6),
]


def learned(name, dtype, *sizes):
    """The checkpoint of a GPT-2. The sizes are hidden, layers, heads and intermediate."""
    return Spec(name, dtype, Model(*sizes, vocab_size=128, max_position_embeddings=320, model_type="gpt2"))


GPT2_SPECS = [learned("gpt2-d64", "float16", 128, 2, 2, 192), learned("gpt2-d16", "bfloat16", 48, 1, 3, 80)]
QWEN3_GPTQ_SOURCE = gated("qwen3-gptq-source", "float16", "qwen3", (32, 1, 4, 2, 32, 48))
LLAMA_GPTQ_SOURCE = gated("llama-gptq-source", "float16", "llama", (32, 2, 4, 2, 16, 48))
QWEN2_GPTQ_SOURCE = gated("qwen2-gptq-source", "float16", "qwen2", (32, 1, 3, 1, 32, 32))
LLAMA_GPTQ_RECIPES = {
    "llama-gptq-desc-act": (LLAMA_GPTQ_SOURCE, Recipe(group_size=16, sym=False, desc_act=True)),
    "qwen3-gptq-sym": (QWEN3_GPTQ_SOURCE, Recipe(group_size=16)),
    "qwen2-gptq-8bit": (QWEN2_GPTQ_SOURCE, Recipe(bits=8, group_size=-1, checkpoint_format="gptq_v2")),
}

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
        if x.ndim == 1 and name.endswith("weight"):  # of a norm
            x = 1 + 0.1 * x
        elif name.endswith("bias"):
            x = 0.1 * x
        elif not any(part in name for part in ("embed", "lm_head", "wte", "wpe")):
            # Attention's scores get a standard deviation of 2.
            makes_scores = any(part in name for part in ("query_key_value", "q_proj", "k_proj", "v_proj", "c_attn"))
            inputs = parameter.shape[0 if ".c_" in name else 1]  # a Conv1D's weight is (in, out)
            x = x * ((2 if makes_scores else 1) / inputs) ** 0.5
        parameter.copy_(x)


def write_old_config(path, model):
    """Gives a config.json the names of transformers 4.x."""
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    config.pop("rope_parameters", None)
    config["torch_dtype"] = config.pop("dtype", config.get("torch_dtype"))
    config |= {"rope_scaling": None, **model.hf_fields()}
    write_json(path, dict(sorted(config.items())))


def write(spec, directory, command, seed=1):
    """Writes the checkpoint into directory/<name>, whole or not at all, and returns that path."""
    import torch
    from transformers import logging

    logging.disable_progress_bar()
    path = os.path.join(directory, spec.name)
    temporary = path + ".tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    with default_dtype(spec.dtype), torch.no_grad():
        hf = class_of(spec.model, "ForCausalLM")(transformers_config(spec.model, "sdpa"))
        fill(hf.named_parameters(), seed)
    hf.save_pretrained(temporary, max_shard_size=spec.max_shard_size, safe_serialization=True)
    if spec.config_of == 4:
        write_old_config(os.path.join(temporary, "config.json"), spec.model)
    about = {
        "command": command,
        "seed": seed,
        "weights": "random: golden/tools/make_checkpoints.py fill()",
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
    preset.add_argument("--preset", metavar="NAME", help=f"its shape: {', '.join(PYTHIA_PRESETS)}")
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
    if args.preset not in PYTHIA_PRESETS:
        raise Refusal(f"--preset must be one of {', '.join(PYTHIA_PRESETS)}, got {args.preset!r}")
    if not args.out:
        raise Refusal("--out is required with --preset")
    if args.group_size == 0:
        raise Refusal("--group-size must be -1 or at least 1, got 0")
    if args.group_size is not None and not args.gptq:
        raise Refusal("--group-size needs --gptq")
    for name, default in PRESET_OPTIONS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.layers and args.layers > PYTHIA_PRESETS[args.preset].num_hidden_layers:
        raise Refusal(f"--layers must be at most {PYTHIA_PRESETS[args.preset].num_hidden_layers}, got {args.layers}")
    return args


def write_preset(args, command):
    model = PYTHIA_PRESETS[args.preset]
    if args.layers:
        model = replace(model, num_hidden_layers=args.layers)
    write_checkpoint(
        args.out, model, args.dtype, args.seed, args.shard_size, command, args.gptq, args.group_size or 128
    )


def write_small(out, only=None):
    """Writes the checkpoints of data/checkpoints into a directory, or the one that `only` names."""
    require(*PACKAGES)
    os.makedirs(out, exist_ok=True)
    for spec in [*SPECS, TIED, *LLAMA_SPECS, *GPT2_SPECS]:
        if only in (None, spec.name):
            progress(spec.name)
            write(spec, out, COMMAND)
    recipes = {name: (GPTQ_SOURCE, recipe) for name, recipe in GPTQ_RECIPES.items()} | LLAMA_GPTQ_RECIPES
    with tempfile.TemporaryDirectory() as directory:
        for name, (spec, recipe) in recipes.items():
            if only in (None, name):
                source = write(spec, directory, COMMAND)
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
