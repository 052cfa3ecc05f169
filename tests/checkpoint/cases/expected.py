#!/usr/bin/env python3
"""Prints the mean of -log p of ids.npy by Hugging Face in float64, for each checkpoint of this folder that has one.

usage: expected.py [CASE ...]
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[2] / "golden" / "tools"))

import quantize_fp8


def dequantised(tensors, config):
    """The tensors with dense weights in place of 4-bit GPTQ of format v1, in float64."""
    shifts = torch.arange(0, 32, 4)
    dense = {name: t.double() for name, t in tensors.items() if "scales" not in name and t.is_floating_point()}
    for name, words in tensors.items():
        module, _, part = name.rpartition(".")
        if part != "qweight":
            continue
        zeros, scales = tensors[f"{module}.qzeros"], tensors[f"{module}.scales"].double()
        codes = (words[:, None, :] >> shifts[None, :, None] & 15).flatten(0, 1)
        zeros = (zeros[:, :, None] >> shifts & 15).flatten(1) + 1
        groups = torch.arange(len(codes)) // config["group_size"]
        dense[f"{module}.weight"] = (scales[groups] * (codes - zeros[groups])).T.contiguous()
    return dense


def load(case):
    config = json.loads((case / "config.json").read_text())
    tensors = load_file(next(case.glob("*.safetensors")))
    quantised = config.pop("quantization_config", {})
    if quantised.get("quant_method") == "gptq":
        tensors = dequantised(tensors, quantised)
    elif quantised:
        tensors = quantize_fp8.dequantise(tensors)
    dtype = config.pop("torch_dtype", config.pop("dtype", None)).removeprefix("torch.")  # which transformers 5 refuses
    with tempfile.TemporaryDirectory() as directory:
        save_file(tensors, Path(directory) / "model.safetensors", metadata={"format": "pt"})
        (Path(directory) / "config.json").write_text(json.dumps(config))
        dtype = getattr(torch, dtype) if all(t.dtype != torch.float64 for t in tensors.values()) else torch.float64
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).double()


def main(cases):
    transformers.logging.set_verbosity_error()
    ids = torch.from_numpy(np.load(FOLDER / "ids.npy").astype(np.int64)).reshape(-1)
    for case in cases or sorted(path.name for path in FOLDER.iterdir() if path.is_dir()):
        if case in ("truncated-many-layers", "rotary-pct-overflow"):
            continue
        with torch.no_grad():
            logits = load(FOLDER / case)(ids[None]).logits[0, :-1]
        nll = torch.nn.functional.cross_entropy(logits, ids[1:])
        print(f"{case}: {float(nll):.6f}")


if __name__ == "__main__":
    main(sys.argv[1:])
