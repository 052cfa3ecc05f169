"""Checkpoints as the example programs read them, and the oracle: a model out of ops in float64. Needs numpy alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cf_ops
from cf_ops import ops

DIRECTORY = Path(__file__).resolve().parents[2] / "data" / "checkpoints"
"""The small checkpoints of the repository."""

# Buffers of old checkpoints, which are no weights.
_BUFFERS = ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq")
_DTYPES = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "I32": "<i4"}

Array = NDArray[Any]
Weights = dict[str, Any]
"""A layer's weights by Hugging Face's names below gpt_neox.layers.N: arrays, and GptqWeights."""


class Checkpoint:
    """A checkpoint directory's config, in the names of transformers 4.x, and its tensors as numpy arrays. bfloat16
    becomes float32, which is exact."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.config = cf_ops.load(directory).config
        self.heads = int(self.config["num_attention_heads"])
        self.head_dim = int(self.config["hidden_size"]) // self.heads
        self._where: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in sorted(self.directory.glob("*.safetensors")):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            self._where.update({name: (path, 8 + length, about) for name, about in header.items()})

    def rope_table(self, rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        rotary_dim = int(self.head_dim * self.config["rotary_pct"])
        return ops.rope_table(rows, rotary_dim, self.config["rotary_emb_base"])

    def tensor(self, name: str) -> Array:
        path, start, about = self._where[name]
        first, last = about["data_offsets"]
        dtype = np.dtype(_DTYPES[about["dtype"]])
        stored = np.fromfile(path, dtype, (last - first) // dtype.itemsize, offset=start + first)
        if about["dtype"] == "BF16":
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.reshape(about["shape"])

    def head(self) -> Array:
        """The matrix that makes logits."""
        return self.tensor("gpt_neox.embed_in.weight" if self.config["tie_word_embeddings"] else "embed_out.weight")

    def layer(self, number: int) -> Weights:
        if not 0 <= number < self.config["num_hidden_layers"]:
            raise ValueError(f"layer: expected 0 to {self.config['num_hidden_layers'] - 1}, got {number}")
        prefix = f"gpt_neox.layers.{number}."
        stored = {name.removeprefix(prefix): name for name in self._where if name.startswith(prefix)}
        weights: Weights = {}
        for name, full in stored.items():
            module, _, part = name.rpartition(".")
            if part == "qweight":
                weights[f"{module}.weight"] = self._gptq(prefix + module)
            elif part not in ("qzeros", "scales", "g_idx") and name not in _BUFFERS:
                weights[name] = self.tensor(full)
        return weights

    def _gptq(self, module: str) -> ops.GptqWeight[Array]:
        path = self.directory / "quantize_config.json"
        config = json.loads(path.read_text()) if path.exists() else None
        config = config or json.loads((self.directory / "config.json").read_text())["quantization_config"]
        parts = {part: self.tensor(f"{module}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")}
        group = config["group_size"]
        return ops.GptqWeight(
            **parts,
            bits=config["bits"],
            group_size=len(parts["g_idx"]) if group == -1 else group,
            zero_offset=0 if config.get("checkpoint_format") == "gptq_v2" else 1,
        )


def dequantised(weight: ops.GptqWeight[Array]) -> NDArray[np.float32]:
    """The matrix (out, in) of a GptqWeight, exact in float32."""
    codes = _unpacked(weight.qweight.T, weight.bits)
    zeros = _unpacked(weight.qzeros, weight.bits).T + weight.zero_offset
    scales = weight.scales.T.astype(np.float32)
    matrix: NDArray[np.float32] = scales[:, weight.g_idx] * (codes - zeros[:, weight.g_idx]).astype(np.float32)
    return matrix


def _unpacked(words: Array, bits: int) -> Array:
    """Codes packed along the last axis, low bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)
    return codes.reshape(len(words), -1).astype(np.int32)


def oracle(
    checkpoint: Checkpoint, ids: Sequence[int], output: str = "float32"
) -> tuple[NDArray[np.float64], ops.Budget]:
    """The float64 logits (ids, vocab) of a text, and how far a model may be from them that computes in
    float32 and stores in the dtype `output`.

    To first order each op passes on the relative error of its input and adds its own, so the bound is the sum of the
    ops' budgets.
    """
    config, n, eps = checkpoint.config, len(ids), checkpoint.config["layer_norm_eps"]
    positions, kv_len = np.arange(n, dtype=np.int32), np.array([n], np.int32)
    cos, sin = checkpoint.rope_table(n)
    table = checkpoint.tensor("gpt_neox.embed_in.weight")
    measured: Any = functools.partial(ops.budget, output=output)
    x: Any = ops.embedding(np.array(ids, np.int32), table, dtype="float64")
    budgets = []
    for number in range(config["num_hidden_layers"]):
        caches = [np.zeros((1, checkpoint.heads, n, checkpoint.head_dim)) for _ in range(2)]
        layer: Any = checkpoint.layer(number), config, x, positions, kv_len, cos, sin, *caches
        budgets.append(measured(ops.decode_layer)(*layer))
        x = ops.decode_layer(*layer).output
    gamma, beta = (checkpoint.tensor(f"gpt_neox.final_layer_norm.{part}") for part in ("weight", "bias"))
    budgets.append(measured(ops.layernorm)(x, gamma, beta, eps=eps))
    x = ops.layernorm(x, gamma, beta, eps=eps)
    budgets.append(measured(ops.linear)(x, checkpoint.head()))
    bound = ops.Budget(*(sum(values) for values in zip(*budgets)))
    return ops.linear(x, checkpoint.head()), bound


def unexplained(logits: NDArray[np.float64], ids: Sequence[int], relative: float) -> int:
    """How many ids were chosen although the float64 logits (ids, vocab) put them further below the best one than twice
    an error of `relative` times the largest logit explains."""
    chosen = logits[np.arange(len(ids)), list(ids)]
    return int(np.count_nonzero(logits.max(1) - chosen > 2 * relative * np.abs(logits).max(1)))
