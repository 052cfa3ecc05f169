"""Writes a preset's procedural weights as a checkpoint of Hugging Face, one tensor in memory at a time."""

import json
import os
import platform
import shutil
import struct

import numpy as np

import gptq
import procedural
from console import Refusal, progress
from golden_file import new_directory, write_json
from model_config import hf_config, layer_shapes, model_shapes

# Stored dtypes as safetensors spells them, with their bytes.
SAFETENSORS = {"float16": ("F16", 2), "bfloat16": ("BF16", 2), "float32": ("F32", 4), "int32": ("I32", 4)}
SPARE_BYTES = 1 << 20  # for headers and JSON files


def stored_dtype(name, dtype):
    """The dtype of the tensor `name` of a model whose dense weights are of dtype `dtype`."""
    return gptq.PARTS.get(name.rpartition(".")[2], dtype)


def size_bytes(name, shape, dtype):
    return int(np.prod(shape, dtype=np.int64)) * SAFETENSORS[stored_dtype(name, dtype)][1]


def split(shapes, dtype, shard_bytes):
    """The tensors' names in shards of at most shard_bytes. A larger tensor has a shard of its own."""
    shards, filled = [[]], 0
    for name, shape in shapes.items():
        count = size_bytes(name, shape, dtype)
        if shards[-1] and filled + count > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += count
    return shards


def write_safetensors(path, shapes, dtype, make):
    """Writes a file of tensors, each of which make(name, shape) makes when it is its turn."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        begin, end = end, end + size_bytes(name, shape, dtype)
        spelled = SAFETENSORS[stored_dtype(name, dtype)][0]
        header[name] = {"dtype": spelled, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            file.write(make(name, shape).data)
        file.flush()
        os.fsync(file.fileno())


def write_checkpoint(out, model, dtype, seed, shard_bytes, command, bits=0, group_size=-1):
    """Writes the directory `out`, which must not be there, whole or not at all. With `bits` every Linear is a GPTQ
    weight of procedural codes. Returns the WeightsChecksum of all tensors."""
    of_layer = layer_shapes(model)
    quantisation = None
    if bits:
        quantisation = {
            "bits": bits,
            "group_size": group_size,
            "sym": False,
            "desc_act": False,
            "quant_method": "gptq",
            "checkpoint_format": "gptq_v2",
            "pack_dtype": "int32",
            "lm_head": False,
        }
        of_layer = gptq.Format(quantisation, out).part_shapes(of_layer)
    shapes = model_shapes(model, of_layer)
    total_bytes = sum(size_bytes(name, shape, dtype) for name, shape in shapes.items())
    checksum = procedural.WeightsChecksum()

    def make(name, shape):
        progress(name)
        array = procedural.weight(dtype, shape, seed, name, bits, group_size)
        checksum.add(array)
        return array

    with new_directory(out) as temporary:
        free = shutil.disk_usage(temporary).free
        if free < total_bytes + SPARE_BYTES:
            raise Refusal(f"{out}: needs {total_bytes + SPARE_BYTES} bytes, got {free} on its file system")
        shards = split(shapes, dtype, shard_bytes)
        shard_of = {}
        for i, names in enumerate(shards):
            file = "model.safetensors"
            if len(shards) > 1:
                file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            shard_of |= {name: file for name in names}
            write_safetensors(os.path.join(temporary, file), {name: shapes[name] for name in names}, dtype, make)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total_bytes}, "weight_map": shard_of}
            write_json(os.path.join(temporary, "model.safetensors.index.json"), index)
        config = {"architectures": ["GPTNeoXForCausalLM"], **hf_config(model), "torch_dtype": dtype}
        config |= {"bos_token_id": 0, "eos_token_id": 0}
        if bits:
            config["quantization_config"] = quantisation
            write_json(os.path.join(temporary, "quantize_config.json"), quantisation)
        write_json(os.path.join(temporary, "config.json"), config)
        about = {
            "command": command,
            "seed": seed,
            "weights": "procedural: golden/tools/procedural.py weight()",
            "weights_checksum": checksum.value,
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
        }
        write_json(os.path.join(temporary, "provenance.json"), about)
    progress("")
    return checksum.value
