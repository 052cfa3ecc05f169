#!/usr/bin/env python3
"""Quantises a checkpoint's Linears to fp8 (float8_e4m3fn) and writes it as published checkpoints are, with its
tokenizer.json where it has one. Weights are rounded to nearest, with scales by which the largest one becomes 448.

--layout says what the scales are and how they are stored:
    block    one for a block of 128 x 128, bfloat16 in weight_scale_inv, as Qwen3-FP8 has them (DeepSeek-V3's are float32)
    channel  one for a row, bfloat16 in weight_scale, as llm-compressor's FP8_DYNAMIC (compressed-tensors)
    tensor   one for a matrix, float32 in weight_scale, as llm-compressor's FP8 with dynamic activations
    fbgemm   one for a row, float32 in weight_scale, as Llama-3.1-405B-FP8 (fbgemm_fp8)

Needs torch, safetensors, numpy and h5py.
"""

import contextlib
import json
import os
import shutil
import sys

from console import Parser, Refusal, require, require_numpy

NAME = "quantize_fp8.py"
require_numpy(NAME)

from golden_file import current_umask, write_json
from hf_model import Checkpoint, versions

PACKAGES = ("torch", "safetensors", "h5py")
LAYOUTS = ("block", "channel", "tensor", "fbgemm")
BLOCK, LARGEST = 128, 448


def compressed_tensors(strategy):
    """A quantization_config as llm-compressor writes it."""
    float8 = {"type": "float", "num_bits": 8, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": float8 | {"dynamic": False, "strategy": strategy},
        "input_activations": float8 | {"dynamic": True, "strategy": "token" if strategy == "channel" else "tensor"},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def quantization_config(layout):
    if layout == "block":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    if layout == "fbgemm":
        return {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["lm_head"],
        }
    return compressed_tensors(layout)


def spread(scales, shape):
    """The scale of each element of a matrix of this shape."""
    import torch

    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(*shape)
    if scales.shape == (shape[0], 1):
        return scales.expand(*shape)
    rows = torch.arange(shape[0]) // BLOCK
    return scales[rows][:, torch.arange(shape[1]) // BLOCK]


def quantise(weight, layout):
    """The stored tensors of a weight (out, in), by their names below the module."""
    import torch

    weight = weight.float()
    if layout == "block":
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        padded = torch.zeros(rows * BLOCK, columns * BLOCK)
        padded[: weight.shape[0], : weight.shape[1]] = weight.abs()
        most = padded.reshape(rows, BLOCK, columns, BLOCK).amax((1, 3))
    elif layout == "tensor":
        most = weight.abs().amax().reshape(1)
    else:
        most = weight.abs().amax(1, keepdim=True)
    scales = torch.where(most == 0, 1.0, most / LARGEST)
    if layout in ("block", "channel"):
        scales = scales.bfloat16()  # which may be the smaller: larger codes are clamped
    codes = (weight / spread(scales.float(), weight.shape)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv" if layout == "block" else "weight_scale": scales}


def dequantise(tensors):
    """A checkpoint's tensors with dense weights in float64 in the place of fp8 ones."""
    import torch

    dense = {}
    for name, tensor in tensors.items():
        if name.endswith((".weight_scale", ".weight_scale_inv")):
            continue
        dense[name] = tensor.double() if tensor.is_floating_point() else tensor
        if tensor.dtype == torch.float8_e4m3fn:
            (scales,) = (tensors[f"{name}{end}"] for end in ("_scale", "_scale_inv") if f"{name}{end}" in tensors)
            dense[name] *= spread(scales.double(), tensor.shape)
    return dense


def quantise_checkpoint(source, out, layout, dense_modules, command):
    """Writes the checkpoint into directory `out`. After a failure the directory is as it was."""
    require(*PACKAGES)
    from safetensors import safe_open
    from safetensors.torch import save_file

    checkpoint = Checkpoint(source)
    model, names = checkpoint.model, checkpoint.model.names
    if checkpoint.gptq:
        raise Refusal(f"{source}: is quantised already")
    if names.transposed:
        raise Refusal(f"{source}: expected a family whose Linears are stored as (out, in), got one of transposed ones")
    for module in dense_modules:
        if module not in names.linears:
            raise Refusal(f"--dense must be among {', '.join(names.linears)}, got {module!r}")
    tensors = {}
    for name in sorted(set(checkpoint.shards.values()) if checkpoint.shards else {"model.safetensors"}):
        with safe_open(os.path.join(source, name), framework="pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}
    for layer in range(model.num_hidden_layers):
        for module in names.linears:
            if module in dense_modules:
                continue
            full = f"{names.layer(layer)}{module}"
            tensors |= {f"{full}.{part}": t for part, t in quantise(tensors[f"{full}.weight"], layout).items()}

    temporary = out.rstrip("/") + ".tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    path = os.path.join(temporary, "model.safetensors")
    save_file(tensors, path, {"format": "pt"})
    os.chmod(path, 0o666 & ~current_umask())
    about = {
        "command": command,
        "from": os.path.basename(os.path.abspath(source)),
        "versions": versions("torch", "safetensors", "numpy"),
    }
    config = json.loads(checkpoint.config_text) | {"quantization_config": quantization_config(layout)}
    for name, content in (("config", config), ("provenance", about)):
        write_json(os.path.join(temporary, name + ".json"), content)
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(os.path.join(source, "tokenizer.json"), os.path.join(temporary, "tokenizer.json"))
    shutil.rmtree(out, ignore_errors=True)
    os.replace(temporary, out)


def parse_arguments(argv):
    parser = Parser(prog=NAME, description=__doc__)
    parser.add_argument("--model", metavar="DIR", required=True, help="the checkpoint to quantise")
    parser.add_argument("--out", metavar="DIR", required=True, help="the checkpoint to write")
    parser.add_argument("--layout", choices=LAYOUTS, default="block", help="of scales and config (default block)")
    parser.add_argument("--dense", metavar="NAME[,NAME...]", help="the Linears to leave as they are (default: none)")
    args = parser.parse_args(argv)
    args.dense = tuple(args.dense.split(",")) if args.dense else ()
    return args


def main(argv):
    try:
        args = parse_arguments(argv)
        quantise_checkpoint(args.model, args.out, args.layout, args.dense, " ".join([NAME, *argv]))
    except (Refusal, OSError) as refusal:
        print(f"{NAME}: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
