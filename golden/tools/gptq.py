"""GPTQ weights in numpy: packed as AutoGPTQ and GPTQModel store them, and dequantised.

A Linear of K inputs and N outputs with b bits and groups of g inputs is
    qweight  int32 (K * b / 32, N)          codes q(k, n), packed along K, low bits first
    qzeros   int32 (ceil(K / g), N * b / 32)  zeros, packed along N; format "gptq" (v1) stores zero - 1
    scales   float16 (ceil(K / g), N)
    g_idx    int32 (K)
and W[n, k] = scales[g_idx[k], n] * (q(k, n) - zero(g_idx[k], n)). So is a Conv1D, whose dense weight is (K, N): both
packages transpose it before they pack it.
"""

import os

import numpy as np

from console import Refusal, read_json_file

LINEARS = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
PARTS = {"qweight": "int32", "qzeros": "int32", "scales": "float16", "g_idx": "int32"}


def pack(codes, bits, axis):
    """Codes as int32 words along an axis, low bits first."""
    codes = np.moveaxis(np.asarray(codes, np.uint32), axis, 0)
    words = codes.reshape(-1, 32 // bits, *codes.shape[1:])
    shifts = (np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)).reshape(-1, *[1] * (words.ndim - 2))
    return np.ascontiguousarray(np.moveaxis((words << shifts).sum(1, dtype=np.uint32), 0, axis)).view(np.int32)


def unpack(words, bits, axis):
    """The inverse of pack()."""
    words = np.moveaxis(words.view(np.uint32), axis, 0)
    shifts = (np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)).reshape(-1, *[1] * (words.ndim - 1))
    codes = (words[:, None] >> shifts) & np.uint32((1 << bits) - 1)
    return np.moveaxis(codes.reshape(-1, *words.shape[1:]), 0, axis).astype(np.int64)


def shapes(out_features, in_features, bits, group_size):
    """Part's name -> shape."""
    groups = 1 if group_size == -1 else -(-in_features // group_size)
    return {
        "qweight": (in_features * bits // 32, out_features),
        "qzeros": (groups, out_features * bits // 32),
        "scales": (groups, out_features),
        "g_idx": (in_features,),
    }


def dequantise(parts, bits, is_v2):
    """The weight (N, K) of a Linear's parts as float32. The product is exact: a scale has 11 significant bits, a
    difference of codes at most 9."""
    group = parts["g_idx"]
    zeros = unpack(parts["qzeros"], bits, 1) + (0 if is_v2 else 1)
    codes = unpack(parts["qweight"], bits, 0)
    return (parts["scales"].astype(np.float32)[group] * (codes - zeros[group]).astype(np.float32)).T


def read_config(directory, config):
    """A checkpoint's GPTQ config, or None: from quantize_config.json, else quant_config.json, else config.json."""
    for name in ("quantize_config.json", "quant_config.json"):
        path = os.path.join(directory, name)
        if os.path.exists(path):
            return read_json_file(path)[1]
    return config.get("quantization_config")


class Format:
    """The format of a checkpoint's quantised Linears."""

    def __init__(self, config, source, linears=LINEARS, transposed=()):
        method, form = config.get("quant_method", "gptq"), config.get("checkpoint_format", "gptq")
        if method != "gptq" or form not in ("gptq", "gptq_v2") or config.get("bits") not in (4, 8):
            raise Refusal(
                f"{source}: expected quant_method gptq, checkpoint_format gptq or gptq_v2 and 4 or 8 bits, "
                f"got {method!r}, {form!r} and {config.get('bits')!r}"
            )
        self.bits, self.group_size, self.is_v2 = config["bits"], config.get("group_size", 128), form == "gptq_v2"
        modules = config.get("modules_in_block_to_quantize")
        self.modules = linears if modules is None else tuple(m for inner in modules for m in inner)
        self.transposed = tuple(transposed)  # those whose dense weights are (K, N)

    def part_shapes(self, weight_shapes):
        """Name -> shape of the stored tensors, in the order of weights_checksum(), from the dense tensors' shapes."""
        stored = {}
        for name, shape in weight_shapes.items():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and module in self.modules:
                size = shape[::-1] if module in self.transposed else shape
                parts = shapes(*size, self.bits, self.group_size)
                stored |= {f"{module}.{part}": part_shape for part, part_shape in parts.items()}
            else:
                stored[name] = shape
        return stored

    def dense(self, stored):
        """The dense weights of a layer's stored tensors, in the same order: float32 in place of the quantised ones."""
        weights = {}
        for name, array in stored.items():
            module, _, kind = name.rpartition(".")
            if kind == "qweight":
                parts = {part: stored[f"{module}.{part}"] for part in PARTS}
                weight = dequantise(parts, self.bits, self.is_v2)
                weights[f"{module}.weight"] = weight.T if module.endswith(self.transposed) else weight
            elif kind not in PARTS:
                weights[name] = array
        return weights
