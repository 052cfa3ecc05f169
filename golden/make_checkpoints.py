#!/usr/bin/env python3
"""Writes the small GPT-NeoX checkpoints of data/checkpoints with Hugging Face's save_pretrained.

Their weights are random. Biases and LayerNorm parameters differ from 0 and 1, attention is peaked, and each matrix
keeps the scale of its inputs. provenance.json in each directory says how it was made. The GPTQ checkpoints are
quantised from one such model, which is not kept.

Needs torch, transformers, safetensors, numpy and h5py.
"""

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass

from console import Parser, Refusal, progress, require, require_numpy

NAME = "make_checkpoints.py"
require_numpy(NAME)

import gptq
from golden_file import current_umask
from neox import Model
from neox_hf import PACKAGES, default_dtype, versions
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
    with open(os.path.join(temporary, "provenance.json"), "w", encoding="utf-8") as file:
        about = {
            "command": command,
            "seed": seed,
            "weights": "random: golden/make_checkpoints.py fill()",
            "versions": versions(),
        }
        json.dump(about, file, indent=2)
        file.write("\n")
    for name in os.listdir(temporary):
        os.chmod(os.path.join(temporary, name), 0o666 & ~current_umask())  # safetensors lets the owner alone read
    shutil.rmtree(path, ignore_errors=True)
    os.replace(temporary, path)
    return path


def main(argv):
    parser = Parser(prog=NAME, description=__doc__)
    parser.add_argument("--out", metavar="DIR", default="data/checkpoints", help="default: data/checkpoints")
    try:
        args = parser.parse_args(argv)
        require(*PACKAGES)
        os.makedirs(args.out, exist_ok=True)
        for spec in [*SPECS, TIED]:
            progress(spec.name)
            write(spec, args.out, COMMAND)
        with tempfile.TemporaryDirectory() as directory:
            source = write(GPTQ_SOURCE, directory, COMMAND)
            for name, recipe in GPTQ_RECIPES.items():
                quantise_checkpoint(source, os.path.join(args.out, name), recipe, COMMAND, seed=1)
        progress("")
    except (Refusal, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
