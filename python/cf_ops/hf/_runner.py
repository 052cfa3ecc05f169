"""The one seam between Hugging Face's models and a device: what makes runners, and what a runner does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch  # type: ignore[import-not-found, unused-ignore]

from cf_ops import _core

Tensor = Any
Described = tuple[int, str, tuple[int, ...]]
"""A tensor's address, the name of its dtype, its shape."""
RopeTable = Callable[[int], tuple[Tensor, Tensor]]
"""cos and sin of the first positions, as many as asked for: (positions, rotary_dim / 2) each, float32."""

_CHUNK = 512  # tokens of a prompt that go through the model at once


class Runner(Protocol):
    """A model with a cache of `slots` sequences on one device. Logits are float32 tensors on that device."""

    @property
    def cache_bytes(self) -> int: ...

    def forward(self, slot: int, first: int, ids: list[int], rows: int) -> Tensor:
        """Gives a slot the entries of `ids` from position `first` on; the logits (rows, vocab) of the last `rows`."""

    def step(self, tokens: list[tuple[int, int, int]]) -> Tensor:
        """Appends (slot, id, position) to each slot in one pass; the logits (tokens, vocab)."""

    def run(
        self, slot: int, first: int, ids: list[int], rows: int, taps: list[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What `forward` does, and the taps (ids, ...) by name."""


class Backend(Protocol):
    """A model's weights on one device."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def reads_in_place(self) -> bool:
        """Whether runners read the parameters themselves, so that a value changed in place needs no reload."""

    def runner(self, slots: int, capacity: int) -> Runner: ...


def backend_for(
    device: Any, config: str, tensors: dict[str, Described], owner: object, rope_table: RopeTable
) -> Backend:
    """The backend of a torch device. `config` is config.json's text, `tensors` the parameters by Hugging Face's names,
    `owner` what keeps their memory."""
    if device.type != "cpu":
        raise NotImplementedError(f"model: expected parameters on a CPU, got the device '{device}'")
    return _CpuBackend(config, tensors, owner, rope_table)


class _CpuBackend:
    reads_in_place = True

    def __init__(self, config: str, tensors: dict[str, Described], owner: object, rope_table: RopeTable) -> None:
        self._weights = _core.Weights.from_tensors(config, tensors, owner)
        self._rope_table = rope_table

    @property
    def weight_bytes(self) -> int:
        return self._weights.bytes

    def runner(self, slots: int, capacity: int) -> Runner:
        runner = _core.Runner(self._weights, slots=slots, capacity=capacity, chunk=min(_CHUNK, capacity))
        cos, sin = self._rope_table(capacity)
        runner.set_rope_table(cos.numpy(), sin.numpy())
        return _CpuRunner(runner)


class _CpuRunner:
    def __init__(self, runner: _core.Runner) -> None:
        self._runner = runner

    @property
    def cache_bytes(self) -> int:
        return self._runner.cache_bytes

    def forward(self, slot: int, first: int, ids: list[int], rows: int) -> Tensor:
        return torch.from_numpy(self._runner.forward(slot, first, ids, rows))

    def step(self, tokens: list[tuple[int, int, int]]) -> Tensor:
        self._runner.step(tokens)
        return torch.stack([torch.from_numpy(self._runner.logits(slot)) for slot, _, _ in tokens])

    def run(
        self, slot: int, first: int, ids: list[int], rows: int, taps: list[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logits, made = self._runner.run(slot, first, ids, rows, taps)
        return torch.from_numpy(logits), {name: torch.from_numpy(tap) for name, tap in made.items()}
