"""What the tests of models on a GPU share: the mark of those that need one, and the oracle beside a model's ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cf_ops
from cf_ops import _core

gpu = pytest.mark.skipif(not cf_ops.cuda_available(), reason="there is no GPU that this build has kernels for")

# All whose weights are of 16 bits, or quantised to fewer.
CHECKPOINTS = [
    "gpt2-d16",
    "gpt2-d64",
    "llama-gptq-desc-act",
    "llama-gqa1-biases",
    "llama-gqa3-scaled",
    "mistral-gqa4-sharded",
    "neox-bf16",
    "neox-d128",
    "neox-d64-sequential",
    "neox-d64-sharded",
    "neox-d80",
    "neox-gptq-8bit",
    "neox-gptq-asym",
    "neox-gptq-desc-act",
    "neox-gptq-mixed",
    "neox-gptq-sym",
    "neox-gptq-v2",
    "neox-tied",
    "qwen2-gptq-8bit",
    "qwen2-gqa7",
    "qwen3-gptq-sym",
    "qwen3-gqa2",
    "qwen3-gqa5-tied",
    "stdlib-4m",
    "stdlib-4m-gptq",
    "stdlib-llama-2m",
    "stdlib-llama-2m-gptq",
]


class Oracle:
    """A model's logits in float64, and how far logits of another activation dtype may be from them."""

    def __init__(self, weights: _core.Weights, ids: Sequence[int], activation: str) -> None:
        runner = _core.Runner(weights, capacity=len(ids), activation="float64")
        self.logits: NDArray[np.float64] = runner.forward(0, 0, ids, len(ids))
        self.bound, largest_error = runner.error_bound(ids, activation)
        self.allowed = largest_error * float(np.abs(self.logits).max())

    def error(self, logits: NDArray[Any]) -> float:
        """The relative L2 error of the last rows."""
        exact = self.logits[len(self.logits) - len(logits) :]
        return float(np.linalg.norm(logits - exact) / np.linalg.norm(exact))

    def check_rows(self, logits: NDArray[Any]) -> None:
        """The bounds are those of all rows together: that of each row's L2 norm is the maximum's."""
        exact = self.logits[len(self.logits) - len(logits) :]
        assert np.abs(logits - exact).max() <= self.allowed
        if len(exact) == len(self.logits):
            assert self.error(logits) <= self.bound


def check_greedy(weights: _core.Weights, prompt: Sequence[int], ids: Sequence[int], activation: str) -> float:
    """Every id has the oracle's largest logit, wherever that logit's margin exceeds twice the bound; elsewhere its logit
    is no further behind. Returns the share of ids whose margin exceeds it."""
    prompt, ids = list(prompt), list(ids)
    assert ids
    oracle = Oracle(weights, prompt + ids[:-1], activation)
    rows = oracle.logits[len(prompt) - 1 :]
    ordered = np.sort(rows, axis=1)
    behind = ordered[:, -1] - rows[np.arange(len(ids)), ids]
    decisive = ordered[:, -1] - ordered[:, -2] > 2 * oracle.allowed
    assert (behind[decisive] == 0).all(), f"another id than float64's: {prompt} {ids}"
    assert (behind <= 2 * oracle.allowed).all(), f"an id further from float64's than the bound: {prompt} {ids}"
    return float(decisive.mean())
