"""Golden files of layers (golden/file/golden_file.hpp) as the arguments of ops."""

import json
import struct
import sys
from functools import cached_property
from pathlib import Path

import h5py
import numpy as np

from cf_ops import ops

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "golden/tools"))
import gptq  # noqa: E402
import procedural  # noqa: E402
from families import join  # noqa: E402
from model_config import layer_shapes, parse_config  # noqa: E402

NUMPY_DTYPES = {"F16": np.float16, "BF16": np.uint16, "F32": np.float32, "I32": np.int32}


def golden_files(pattern):
    return sorted((ROOT / "data/golden").glob(pattern))


def read_safetensors(directory):
    """Every tensor of a checkpoint, bfloat16 as float32."""
    tensors = {}
    for path in Path(directory).glob("*.safetensors"):
        content = path.read_bytes()
        (size,) = struct.unpack_from("<Q", content)
        for name, about in json.loads(content[8 : 8 + size]).items():
            if name != "__metadata__":
                first, last = (8 + size + offset for offset in about["data_offsets"])
                array = np.frombuffer(content[first:last], NUMPY_DTYPES[about["dtype"]]).reshape(about["shape"])
                tensors[name] = widened(array)
    return tensors


def widened(array):
    """bfloat16, stored as uint16, becomes float32; all else stays."""
    return procedural.widen(array, "bfloat16").astype(np.float32) if array.dtype == np.uint16 else array


class GoldenLayer:
    """A golden file: its inputs, weights and float64 taps."""

    def __init__(self, path):
        with h5py.File(path) as file:
            attributes = dict(file.attrs)
            self.taps = {name: tap[()] for name, tap in file["taps/float64"].items()}
            self.inputs = {name: widened(data[()]) for name, data in file["inputs"].items()}
            self.config = attributes["config"].decode()
            self.model = parse_config(self.config, str(path))
            if attributes["weights"] == b"stored":
                stored = {name: widened(data[()]) for name, data in file["weights"].items()}
                self.stored = join(self.model.names, stored)
        self.q_len, self.batch = int(attributes["q_len"]), int(attributes["batch"])
        if attributes["cache"] == b"procedural":
            dtype, heads = attributes["dtype"].decode(), self.model.kv_heads
            shape = (self.batch, heads, self.inputs["kv_len"].max() - self.q_len, self.model.head_dim)
            for name in ("k_cache", "v_cache"):
                values = procedural.values(dtype, shape, "activation", int(attributes["seed"]), name)
                self.inputs[name] = widened(values)
        if attributes["weights"] == b"checkpoint":
            directory = path.parent / attributes["weights_checkpoint"].decode()
            prefix = self.model.names.layer(attributes["layer"])
            every = read_safetensors(directory)
            self.stored = {name.removeprefix(prefix): array for name, array in every.items() if name.startswith(prefix)}
            config = gptq.read_config(directory, json.loads(self.config))
            self.gptq = config and gptq.Format(config, directory, self.model.names.linears)
            self.stored = join(self.model.names, self.stored, self.gptq.bits if self.gptq else 0)
        else:
            self.gptq = None
        if attributes["weights"] == b"procedural":
            seed, layer = int(attributes["seed"]), attributes["layer"]
            dtype = attributes["dtype"].decode()
            self.stored = procedural.layer_weights(layer_shapes(self.model), layer, seed, dtype)

    @cached_property
    def weights(self):
        """By name below the layer; a quantised Linear's weight is a GptqWeight."""
        weights = {}
        for name, array in self.stored.items():
            module, _, part = name.rpartition(".")
            if part == "qweight":
                weights[f"{module}.weight"] = ops.GptqWeight(
                    **{part: self.stored[f"{module}.{part}"] for part in gptq.PARTS},
                    bits=self.gptq.bits,
                    group_size=(
                        len(self.stored[f"{module}.g_idx"]) if self.gptq.group_size == -1 else self.gptq.group_size
                    ),
                    zero_offset=0 if self.gptq.is_v2 else 1,
                )
            elif part not in gptq.PARTS:
                weights[name] = array
        return weights

    def table(self):
        """cos and sin with the file's rows at the tokens' positions, NaN in all others; None without RoPE."""
        if not self.model.rotary_dim:
            return None, None
        positions = self.inputs["positions"]
        tables = []
        for name in ("cos", "sin"):
            rows = self.inputs[name]
            table = np.full((positions.max() + 1, rows.shape[1]), np.nan, np.float32)
            table[positions] = rows
            tables.append(table)
        return tables

    def caches(self, dtype):
        """The caches before the append, NaN beyond the valid entries."""
        model, kv_len = self.model, self.inputs["kv_len"]
        caches = []
        for name in ("k_cache", "v_cache"):
            cache = np.full((self.batch, model.kv_heads, kv_len.max(), model.head_dim), np.nan, dtype)
            for b, n in enumerate(kv_len - self.q_len):
                if n:
                    cache[b, :, :n] = self.inputs[name][b, :, :n]
            caches.append(cache)
        return caches

    def appended(self, cache):
        """The rows that the step appended, (batch, heads, q_len, head_dim)."""
        return np.stack([cache[b, :, n - self.q_len : n] for b, n in enumerate(self.inputs["kv_len"])])
