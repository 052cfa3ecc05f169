#!/usr/bin/env python3
"""Quantises a checkpoint to GPTQ and writes it as AutoGPTQ and GPTQModel do, with its tokenizer.json where it has one.

GPTQ (Frantar et al. 2022, arXiv:2210.17323) rounds a matrix input by input. It compensates each rounding in the inputs
that are not rounded yet, by the inverse of the Hessian 2 X^T X of the Linear's inputs X. These inputs come from a run
over random tokens, or windows of a text's, layer by layer; the layers before are quantised already. Round-to-nearest
needs no run.

Needs torch, transformers, safetensors, numpy and h5py.
"""

import contextlib
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass

from console import Parser, Refusal, integer, progress, require, require_numpy

NAME = "quantize_gptq.py"
require_numpy(NAME)

import numpy as np

import gptq
from families import NAMES
from golden_file import current_umask, write_json
from hf_model import PACKAGES, Checkpoint, layers_of, one_layer, to_numpy, to_torch, versions
from model_config import layer_shapes
from tokenize_text import read_ids


@dataclass(frozen=True)
class Recipe:
    """How to quantise. The names are those of quantize_config.json."""

    bits: int = 4
    group_size: int = 128
    sym: bool = True
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    damp_percent: float = 0.01
    round_to_nearest: bool = False
    modules: tuple = ()  # all Linears where it is empty

    def config(self):
        fields = asdict(self)
        round_to_nearest, modules = fields.pop("round_to_nearest"), fields.pop("modules")
        if modules:
            fields["modules_in_block_to_quantize"] = [[module] for module in modules]
        method = "round to nearest" if round_to_nearest else "gptq"
        return fields | {
            "quant_method": "gptq",
            "pack_dtype": "int32",
            "lm_head": False,
            "meta": {"quantizer": f"golden/tools/{NAME}", "rounding": method},
        }


def grid(weight, recipe):
    """The scales (N), as stored, and the zeros (N) of one group: W's rows over the group's columns."""
    most = (1 << recipe.bits) - 1
    low, high = np.minimum(weight.min(1), 0), np.maximum(weight.max(1), 0)
    if recipe.sym:
        high = np.maximum(-low, high)
        low = -high
    flat = low == high
    low, high = np.where(flat, -1, low), np.where(flat, 1, high)
    scale = ((high - low) / most).astype(np.float16).astype(np.float64)
    scale = np.maximum(scale, 2.0**-24)
    if recipe.sym:
        return scale, np.full(len(weight), (most + 1) // 2)
    # Format v1 stores the zero minus one, which must not be negative.
    return scale, np.clip(np.round(-low / scale), 1 if recipe.checkpoint_format == "gptq" else 0, most).astype(np.int64)


def quantise(weight, hessian, recipe):
    """The parts of a Linear's weight (N, K), given in float64. Rounds to nearest where there is no Hessian (K, K)."""
    out_features, in_features = weight.shape
    group_size = in_features if recipe.group_size == -1 else recipe.group_size
    most = (1 << recipe.bits) - 1
    order = np.arange(in_features)
    upper = None
    if hessian is not None:
        hessian = hessian.copy()
        dead = np.diag(hessian) == 0
        hessian[dead, dead] = 1
        if recipe.desc_act:
            order = np.argsort(-np.diag(hessian), kind="stable")
        hessian = hessian[np.ix_(order, order)]
        hessian[np.diag_indices(in_features)] += recipe.damp_percent * np.diag(hessian).mean()
        # U^T U is the inverse. Row k of U says how the inputs after k compensate the error of input k.
        upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    weight = weight[:, order].copy()
    codes = np.empty((in_features, out_features), np.int64)
    scales, zeros = [], []
    for k in range(in_features):
        if k % group_size == 0:
            scale, zero = grid(weight[:, k : k + group_size], recipe)
            scales.append(scale)
            zeros.append(zero)
        q = np.clip(np.round(weight[:, k] / scale) + zero, 0, most)
        codes[order[k]] = q
        if upper is not None:
            error = (weight[:, k] - scale * (q - zero)) / upper[k, k]
            weight[:, k:] -= np.outer(error, upper[k, k:])
    g_idx = np.empty(in_features, np.int32)
    g_idx[order] = np.arange(in_features) // group_size
    stored_zeros = np.array(zeros) - (recipe.checkpoint_format == "gptq")
    return {
        "qweight": gptq.pack(codes, recipe.bits, 0),
        "qzeros": gptq.pack(stored_zeros, recipe.bits, 1),
        "scales": np.array(scales).astype(np.float16),
        "g_idx": g_idx,
    }


def check_sizes(model, recipe):
    """Refuses a Linear whose sizes are not multiples of the codes in a word."""
    codes = 32 // recipe.bits
    modules = recipe.modules or model.names.linears
    for name, shape in layer_shapes(model).items():
        if name.removesuffix(".weight") in modules and any(size % codes for size in shape):
            raise Refusal(f"{name}: sizes must be multiples of the {codes} codes in a word, got {shape}")


def run_layer(model, dense, stored, hidden):
    """The layer's output in float64, and the Hessian of each Linear's inputs; hidden is (samples, tokens, hidden)."""
    import torch

    hf = one_layer(model, dense, stored, "float64", "sdpa", "cpu")
    (layer,) = layers_of(hf, model)
    hessians, outputs = {}, []

    def add(name):
        def hook(module, args):
            x = args[0].reshape(-1, args[0].shape[-1])
            hessians[name] = hessians.get(name, 0) + 2 * to_numpy(x.T @ x) / len(hidden)

        return hook

    for name in model.names.linears:
        layer.get_submodule(name).register_forward_pre_hook(add(name))
    layer.register_forward_hook(
        lambda module, args, result: outputs.append(result[0] if isinstance(result, tuple) else result)
    )
    with torch.no_grad():
        hf(inputs_embeds=torch.from_numpy(hidden))
    return to_numpy(outputs[0]), hessians


def windows(path, vocab_size, samples, length):
    """`samples` windows of `length` ids (samples, length), evenly spaced over a token file."""
    ids = read_ids(path, vocab_size)
    if len(ids) < length:
        raise Refusal(f"{path}: expected at least the {length} ids of a window, got {len(ids)}")
    starts = np.linspace(0, len(ids) - length, samples).astype(np.int64)
    return ids[starts[:, None] + np.arange(length)]


def quantise_checkpoint(source, out, recipe, command, samples=16, length=64, seed=0, tokens=None):
    """Writes the checkpoint into directory `out`. After a failure the directory is as it was."""
    require(*PACKAGES)
    from safetensors import safe_open
    from safetensors.torch import save_file

    checkpoint = Checkpoint(source)
    model, names = checkpoint.model, checkpoint.model.names
    if checkpoint.gptq:
        raise Refusal(f"{source}: is quantised already")
    if names.positions and not recipe.round_to_nearest and length > model.max_position_embeddings:
        raise Refusal(f"--length must be at most the model's {model.max_position_embeddings} positions, got {length}")
    for module in recipe.modules:
        if module not in names.linears:
            raise Refusal(f"--modules must be among {', '.join(names.linears)}, got {module!r}")
    check_sizes(model, recipe)
    tensors = {}
    files = set(checkpoint.shards.values()) if checkpoint.shards else {"model.safetensors"}
    for name in sorted(files):
        with safe_open(os.path.join(source, name), framework="pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}

    hidden = None
    if not recipe.round_to_nearest:
        if tokens:
            ids = windows(tokens, model.vocab_size, samples, length)
        else:
            ids = np.random.default_rng(seed).integers(0, model.vocab_size, (samples, length))
        hidden = tensors[f"{names.embedding}.weight"].double().numpy()[ids]
        if names.positions:
            hidden = hidden + tensors[f"{names.positions}.weight"].double().numpy()[:length]
    form = gptq.Format(recipe.config(), out, names.linears, names.transposed)
    for layer in range(model.num_hidden_layers):
        progress(f"layer {layer} of {model.num_hidden_layers}")
        prefix = names.layer(layer)
        _, dense, stored_dtype = checkpoint.layer(layer)
        hessians = run_layer(model, dense, stored_dtype, hidden)[1] if hidden is not None else {}
        parts = dict(dense)
        for module in recipe.modules or names.linears:
            weight = to_torch(parts.pop(f"{module}.weight"), stored_dtype).double().numpy()
            weight = weight.T if module in names.transposed else weight
            quantised = quantise(weight, hessians.get(module), recipe)
            parts |= {f"{module}.{part}": array for part, array in quantised.items()}
            del tensors[f"{prefix}{module}.weight"]
            tensors |= {f"{prefix}{module}.{part}": to_torch(array, "int32") for part, array in quantised.items()}
        if hidden is not None:
            # The input of the next layer.
            hidden, _ = run_layer(model, form.dense(parts), stored_dtype, hidden)

    temporary = out.rstrip("/") + ".tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    path = os.path.join(temporary, "model.safetensors")
    save_file(tensors, path, {"format": "pt"})
    os.chmod(path, 0o666 & ~current_umask())
    about = {
        "command": command,
        "seed": None if tokens else seed,
        "tokens": os.path.basename(tokens) if tokens else "random",
        "from": os.path.basename(os.path.abspath(source)),
        "versions": versions(),
    }
    config = json.loads(checkpoint.config_text) | {"quantization_config": recipe.config()}
    for name, content in (("config", config), ("quantize_config", recipe.config()), ("provenance", about)):
        write_json(os.path.join(temporary, name + ".json"), content)
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(os.path.join(source, "tokenizer.json"), os.path.join(temporary, "tokenizer.json"))
    shutil.rmtree(out, ignore_errors=True)
    os.replace(temporary, out)
    progress("")


def parse_arguments(argv):
    parser = Parser(prog=NAME, description=__doc__)
    parser.add_argument(
        "--model", metavar="DIR", required=True, help="the checkpoint to quantise, as dump_hf.py takes it"
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="the checkpoint to write")
    parser.add_argument("--bits", type=int, choices=[4, 8], default=4, help="of a code (default 4)")
    parser.add_argument(
        "--group", type=integer(-1, 1 << 22), default=128, help="inputs that share a scale, -1 for all (default 128)"
    )
    parser.add_argument("--asym", action="store_true", help="a zero for each group; otherwise the middle code")
    parser.add_argument("--desc-act", action="store_true", help="round the inputs with the largest activations first")
    parser.add_argument("--format", choices=["gptq", "gptq_v2"], default="gptq", help="gptq (v1) stores zeros less one")
    parser.add_argument("--rtn", action="store_true", help="round to nearest, without a calibration run")
    parser.add_argument(
        "--damp", type=float, default=0.01, help="of the Hessian's mean diagonal, added to it (default 0.01)"
    )
    parser.add_argument("--samples", type=integer(1, 1 << 16), default=16, help="calibration sequences (default 16)")
    parser.add_argument("--length", type=integer(1, 1 << 16), default=64, help="tokens of each (default 64)")
    parser.add_argument(
        "--tokens", metavar="FILE", help="a text's ids, as tokenize_text.py writes them, to calibrate on"
    )
    parser.add_argument(
        "--seed", type=integer(0, (1 << 63) - 1), default=0, help="of the calibration tokens (default 0)"
    )
    parser.add_argument("--modules", metavar="NAME[,NAME...]", help="the Linears to quantise (default: all)")
    args = parser.parse_args(argv)
    if args.group == 0:
        raise Refusal("--group must be -1 or at least 1, got 0")
    if args.desc_act and args.rtn:
        raise Refusal("--desc-act excludes --rtn, which has no order")
    if args.tokens and args.rtn:
        raise Refusal("--tokens excludes --rtn, which has no calibration run")
    args.modules = tuple(args.modules.split(",")) if args.modules else ()
    known = [module for names in NAMES.values() for module in names.linears]
    for module in args.modules:
        if module not in known:
            raise Refusal(f"--modules must be among {', '.join(known)}, got {module!r}")
    return args


def main(argv):
    try:
        args = parse_arguments(argv)
        recipe = Recipe(
            bits=args.bits,
            group_size=args.group,
            sym=not args.asym,
            desc_act=args.desc_act,
            checkpoint_format=args.format,
            damp_percent=args.damp,
            round_to_nearest=args.rtn,
            modules=args.modules,
        )
        command = " ".join([NAME, *argv])
        quantise_checkpoint(args.model, args.out, recipe, command, args.samples, args.length, args.seed, args.tokens)
    except Refusal as refusal:
        progress("")
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
