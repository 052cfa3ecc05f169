"""Values from a hash, as core/procedural.hpp defines them. The C++ code and this code make the same bits.

A stored array is numpy float16 or float32, or uint16 with the bits of bfloat16, as in golden files.
"""

import collections
import concurrent.futures
import os

import numpy as np

from families import NAMES

STEP = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
CHUNK = 1 << 16  # elements at a time, so that temporary arrays stay in a core's cache

DTYPES = {"float16": np.float16, "bfloat16": np.uint16, "float32": np.float32}

# The prefixes of the names of all weights but the LM head's.
BASES = {f"{names.base}." for names in NAMES.values()}

KINDS = {
    "weight": lambda n: n * 2.0**-14,
    "gain": lambda n: 1 + (n >> 3) * 2.0**-10,
    "activation": lambda n: n * 2.0**-8,
    # Of GPTQ weights with codes of 4 and of 8 bits.
    "scale_4": lambda n: KINDS["gain"](n) * 2.0**-8,
    "scale_8": lambda n: KINDS["gain"](n) * 2.0**-12,
}


def mix(x):
    """splitmix64's finaliser of each element of a uint64 array."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix(x):
    """mix() of one Python integer."""
    return int(mix(np.array([x & MASK], np.uint64))[0])


def fnv1a64(text):
    """The 64-bit FNV-1a hash of a string's UTF-8 bytes."""
    h = 0xCBF29CE484222325
    for byte in text.encode():
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return h


def _steps(first, count):
    """(i + 1) * STEP for i = first .. first + count - 1, modulo 2^64."""
    return np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(STEP)


def round_to(values, dtype):
    """Values (float32 or wider; float32 for bfloat16) as a stored array: rounded once, to nearest even."""
    if dtype != "bfloat16":
        return np.asarray(values).astype(DTYPES[dtype])
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(stored, dtype):
    """A stored array as float64, exactly. With dtype "bfloat16", uint16 arrays hold bfloat16."""
    if dtype == "bfloat16" and stored.dtype == np.uint16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def _filled(dtype, shape, seed, name, first, of_hash):
    """An array of a numpy dtype whose elements from `first` on of_hash() makes of their hashes r, a chunk at a time: on
    threads, since numpy works without Python's lock."""
    key = np.uint64(_mix(fnv1a64(name) ^ _mix(seed)))
    out = np.empty(int(np.prod(shape, dtype=np.int64)), dtype)

    def fill(start):
        count = min(CHUNK, out.size - start)
        out[start : start + count] = of_hash(mix(key + _steps(first + start, count)))

    starts = range(0, out.size, CHUNK)
    threads = min(16, len(os.sched_getaffinity(0)), len(starts) // 8)
    if threads < 2:
        for start in starts:
            fill(start)
    else:
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            collections.deque(pool.map(fill, starts), maxlen=0)  # an exception of fill() is raised here
    return out.reshape(shape)


def values(dtype, shape, kind, seed, name, first=0):
    """The elements from `first` on of tensor `name` under `seed`, as a stored array of dtype `dtype` and this shape."""
    table = round_to(KINDS[kind](np.arange(-1022, 1023)).astype(np.float32), dtype)
    field = np.uint64(511)

    def of_hash(r):
        index = r & field  # the sum of the four fields is n + 1022
        for shift in (9, 18, 27):
            index += (r >> np.uint64(shift)) & field
        return table[index.astype(np.int64)]

    return _filled(DTYPES[dtype], shape, seed, name, first, of_hash)


def checksum(data):
    """The checksum of the bytes of a C-contiguous array or of any bytes-like object."""
    raw = np.frombuffer(data, np.uint8)
    total, words = raw.size, raw.size // 8
    for start in range(0, words, CHUNK):
        count = min(CHUNK, words - start)
        w = raw[8 * start : 8 * (start + count)].view("<u8").astype(np.uint64)
        total += int(mix(w + _steps(start, count)).sum(dtype=np.uint64))
    if raw.size % 8:
        total += _mix(int.from_bytes(raw[8 * words :].tobytes(), "little") + (words + 1) * STEP)
    return total & MASK


def weight_shapes(hidden_size, intermediate_size, attention_bias=True):
    """Name below gpt_neox.layers.N -> shape of a GPT-NeoX layer's weights, in the order of weights_checksum()."""
    h, i = hidden_size, intermediate_size
    shapes = {
        "input_layernorm.weight": (h,),
        "input_layernorm.bias": (h,),
        "post_attention_layernorm.weight": (h,),
        "post_attention_layernorm.bias": (h,),
        "attention.query_key_value.weight": (3 * h, h),
        "attention.query_key_value.bias": (3 * h,),
        "attention.dense.weight": (h, h),
        "attention.dense.bias": (h,),
        "mlp.dense_h_to_4h.weight": (i, h),
        "mlp.dense_h_to_4h.bias": (i,),
        "mlp.dense_4h_to_h.weight": (h, i),
        "mlp.dense_4h_to_h.bias": (h,),
    }
    without_bias = ("attention.query_key_value.bias", "attention.dense.bias")
    return {name: shape for name, shape in shapes.items() if attention_bias or name not in without_bias}


def weight(dtype, shape, seed, name, bits=0, group_size=-1):
    """The procedural weight that is called `name` in checkpoints. A part of a GPTQ weight has codes of `bits` bits; a
    group_size of -1 is one group of all inputs."""
    for base in BASES:
        name = name.removeprefix(base)
    part = name.rpartition(".")[2]
    if part == "scales":
        return values("float16", shape, f"scale_{bits}", seed, name)
    if part == "g_idx":
        inputs = np.arange(*shape, dtype=np.int32)
        return inputs // np.int32(shape[0] if group_size == -1 else group_size)
    if part in ("qweight", "qzeros"):
        ones, below = {4: (0x11111111, 7), 8: (0x01010101, 127)}[bits]
        low = np.uint64(ones if part == "qzeros" else 0xFFFFFFFF)
        least = np.uint32(ones * below if part == "qzeros" else 0)
        words = _filled(np.uint32, shape, seed, name, 0, lambda r: (r & low).astype(np.uint32) + least)
        return words.view(np.int32)
    return values(dtype, shape, "gain" if name.endswith("norm.weight") else "weight", seed, name)


def layer_weights(shapes, layer, seed, dtype):
    """The procedural weights of layer `layer`."""
    return {name: weight(dtype, shape, seed, f"layers.{layer}.{name}") for name, shape in shapes.items()}


class WeightsChecksum:
    """The sum of the tensors' checksums, each times its place (from 1), of tensors that are added one by one: a layer's
    in the order of weight_shapes(), a model's in that of model_shapes() in model_config.py."""

    def __init__(self):
        self.value = self.place = 0

    def add(self, array):
        self.place += 1
        self.value = (self.value + checksum(array) * self.place) & MASK


def weights_checksum(weights):
    """The WeightsChecksum of a dict's arrays in the dict's order."""
    total = WeightsChecksum()
    for array in weights.values():
        total.add(array)
    return total.value
