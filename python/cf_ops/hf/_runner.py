"""The one seam between Hugging Face's models and a device: what makes runners, and what a runner does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch  # type: ignore[import-not-found, unused-ignore]

from cf_ops import _core
from cf_ops._device import current_stream, device_model, prepare_ops
from cf_ops._gptq import GPTQ_PARTS
from cf_ops._tensors import torch_name
from cf_ops.model import USUAL_SLOTS

Tensor = Any
Described = tuple[int, str, tuple[int, ...]]
"""A tensor's address, the name of its dtype, its shape."""
RopeTable = Callable[[int], tuple[Tensor, Tensor]]
"""cos and sin of the first positions, as many as asked for: (positions, rotary_dim / 2) each, float32."""


@dataclass(frozen=True)
class Stream:
    """What a token of a stream sees: the newest `window` tokens, its own among them, and the first `sinks`."""

    window: int
    sinks: int


@dataclass(frozen=True)
class Source:
    """What a backend makes a model of."""

    config: str  # config.json's text
    tensors: Mapping[str, Tensor]  # by the library's names, contiguous; they keep their memory
    rope_table: RopeTable
    copied_bytes: int = 0  # of the copies of parameters among the tensors
    gptq: str | None = None  # quantize_config.json's text
    stream: Stream | None = None


_CHUNK = 512  # tokens of a prompt that go through the model at once
_ENTRIES = 256  # a GPU's cache has a multiple of so many entries a slot, so that few calls need a larger one


class Runner(Protocol):
    """A model with a cache of `slots` sequences on one device. Logits are tensors there: float32 on a CPU, and on a GPU
    of the parameters' dtype, behind what torch's current stream has to do."""

    @property
    def cache_bytes(self) -> int: ...

    @property
    def is_open(self) -> bool:
        """Whether the runner still has its cache. A backend may take it away for another runner."""

    def new_logits(self, *shape: int) -> Tensor:
        """Memory for logits, (*shape, vocab), without values."""

    def forward(self, slot: int, first: int, ids: list[int], logits: Tensor) -> None:
        """Gives a slot the entries of `ids` from position `first` on. `logits`, a part of what new_logits() made, gets
        those of the last ids, as many as it has rows."""

    def step(self, tokens: list[tuple[int, int, int]]) -> Tensor:
        """Appends (slot, id, position) to each slot in one pass; the logits (tokens, vocab)."""

    def choose(self, tokens: list[tuple[int, int, int]], left: int, stop: list[int]) -> list[int]:
        """Does what `step` does; the ids of the highest logits in the parameters' dtype, of equal ones the lowest.
        Each slot may get `left` more tokens, but none behind an id of `stop`: a GPU begins to make them before it is
        asked."""

    @property
    def exact_run_tokens(self) -> int:
        """The most ids of which choose_run() gives what `choose` gives one by one; below 2 where there are none."""

    def choose_run(self, slot: int, first: int, ids: list[int]) -> list[int]:
        """What `choose` returns behind each of `ids`, appended to a slot from position `first` on."""

    def release(self, slot: int) -> None:
        """Forgets a slot's entries."""

    def close(self) -> None:
        """Gives the slots back, and ends what a GPU makes for them. Every other call is refused then."""

    def run(self, slot: int, first: int, ids: list[int], logits: Tensor, taps: list[str]) -> dict[str, Tensor]:
        """What `forward` does; the taps (ids, ...) by name, in the memory of the host."""


class Backend(Protocol):
    """A model's weights on one device."""

    weights: _core.Weights

    @property
    def weight_bytes(self) -> int: ...

    @property
    def copied_bytes(self) -> int:
        """The bytes of the copies of parameters that runners read."""

    @property
    def is_bounded(self) -> bool:
        """Whether a runner's sequences have no more entries than it was asked for; those of streams have no bound."""

    @property
    def is_checked_again(self) -> bool:
        """Whether an in-place change of a value makes another backend necessary. It does where runners read a copy of
        the value, or of what was made from it."""

    def runner(self, slots: int, capacity: int) -> Runner: ...


def check_device(device: Any) -> None:
    """Refuses a torch device that there is no backend for."""
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"model: expected parameters on a CPU or a CUDA device, got the device '{device}'")


def backend_for(device: Any, source: Source) -> Backend:
    """The backend of a torch device that check_device() takes."""
    return _CpuBackend(source) if device.type == "cpu" else _CudaBackend(device, source)


class _CpuBackend:
    def __init__(self, source: Source) -> None:
        tensors = source.tensors
        self.weights = _core.Weights.from_tensors(
            source.config, _described(tensors), list(tensors.values()), gptq=source.gptq
        )
        self._rope_table = source.rope_table
        self._stream = source.stream
        _check_stream(self.weights, source)
        self.copied_bytes = source.copied_bytes + self.weights.copied_bytes
        self.is_checked_again = self.copied_bytes > 0 or source.gptq is not None

    @property
    def weight_bytes(self) -> int:
        return self.weights.bytes

    @property
    def is_bounded(self) -> bool:
        return self._stream is None

    def runner(self, slots: int, capacity: int) -> Runner:
        if self._stream is not None:
            window, sinks = self._stream.window, self._stream.sinks
            runner = _core.Runner(self.weights, slots=slots, chunk=_CHUNK, window=window, sinks=sinks)
            return _CpuRunner(runner, self.weights.dtype, int(self.weights.config["vocab_size"]))
        runner = _core.Runner(self.weights, slots=slots, capacity=capacity, chunk=min(_CHUNK, capacity))
        cos, sin = self._rope_table(capacity)
        if cos.numel() > 0:
            runner.set_rope_table(cos.numpy(), sin.numpy())
        return _CpuRunner(runner, self.weights.dtype, int(self.weights.config["vocab_size"]))


class _CudaBackend:
    """A model on a GPU, whose slots the runners share. It reads the parameters where torch keeps them, in the layout
    that they have there. A parameter that begins where kernels cannot read it has a copy, and what is quantised a
    packed form."""

    def __init__(self, device: Any, source: Source) -> None:
        _core.check_cuda_device(device.index)
        quantised = {name: tensor.cpu() for name, tensor in source.tensors.items() if _is_quantised(name)}
        dense = {name: tensor for name, tensor in source.tensors.items() if name not in quantised}
        for name, tensor in dense.items():
            # aminmax() keeps NaN, and needs no memory beside the tensor.
            if not bool(torch.stack(torch.aminmax(tensor)).isfinite().all()):
                count = int((~torch.isfinite(tensor)).sum())
                raise ValueError(f"tensor '{name}': expected finite values, got {count} that are not")
        self._device = device
        dense, copied = aligned(dense)
        self.copied_bytes = source.copied_bytes + copied
        self.is_checked_again = self.copied_bytes > 0 or source.gptq is not None
        tensors = {**dense, **quantised}
        owner = list(tensors.values())
        self.weights = _core.Weights.from_tensors(
            source.config, _described(tensors), owner, gptq=source.gptq, on_device=True
        )
        self.weight_bytes = self.weights.bytes
        if quantised:
            self.copied_bytes += self._pack(list(dense.values()))
        self._vocab_size = int(self.weights.config["vocab_size"])
        self._rope_table = source.rope_table
        self._stream = source.stream
        _check_stream(self.weights, source)
        self._lock = threading.Lock()
        self._model: _core.DeviceModel | None = None
        self._checked_positions = 0

    def _pack(self, dense: list[Tensor]) -> int:
        """Packs what is quantised, once for all models; the bytes of that form. The modules keep their own."""
        before = int(sum(tensor.nbytes for tensor in dense))
        index = self._device.index
        self.weights.pack(index, current_stream(index), prepare_ops(index), dense)
        return self.weights.bytes - before

    @property
    def is_bounded(self) -> bool:
        return self._stream is None

    def runner(self, slots: int, capacity: int) -> Runner:
        with self._lock:
            entries = -(-capacity // _ENTRIES) * _ENTRIES if self.is_bounded else 1
            self._check_rope_table(max(entries, _ENTRIES))
            model = self._model_for(slots, entries)
            return _CudaRunner(_core.Runner(model, slots=slots), self._device, model.activation, self._vocab_size)

    def _model_for(self, slots: int, capacity: int) -> _core.DeviceModel:
        """A model that has so many free slots. While no other runner lives it has no more of them, so that the bits of a
        call do not depend on the calls before."""
        model, held = self._model, 0
        if model is not None:
            held = model.slots - model.free_slots
            if model.capacity >= capacity and (model.free_slots >= slots if held else model.slots == slots):
                return model
            # The other runners make their entries again when they go on.
            model.close()
            self._model = None
        shared = (held + slots, capacity if model is None else max(capacity, model.capacity))
        try:
            self._model = self._make(*(shared if held and shared[0] <= USUAL_SLOTS else (slots, capacity)))
        except MemoryError:
            torch.cuda.empty_cache()  # memory that torch caches for later tensors
            self._model = self._make(slots, capacity)
        return self._model

    def _make(self, slots: int, capacity: int) -> _core.DeviceModel:
        index = self._device.index
        if self._stream is None:
            return device_model(self.weights, index, slots, capacity, min(_CHUNK, capacity))
        window, sinks = self._stream.window, self._stream.sinks
        return device_model(self.weights, index, slots, capacity, _CHUNK, window=window, sinks=sinks)

    def _check_rope_table(self, positions: int) -> None:
        if positions > self._checked_positions:
            check_rope_table(self.weights, self._rope_table, positions)
            self._checked_positions = positions


def _check_stream(weights: _core.Weights, source: Source) -> None:
    """Refuses streams of a model without RoPE, or with another table than the library's."""
    if source.stream is None:
        return
    if source.rope_table(1)[0].numel() == 0:
        raise ValueError("window, sinks: expected a model with RoPE, got one without")
    check_rope_table(weights, source.rope_table, _ENTRIES)


def check_rope_table(weights: _core.Weights, rope_table: RopeTable, positions: int) -> None:
    """Refuses a model whose table is not the library's own, which a GPU and streams compute with.

    Both are made in float32: frequencies are off by a power of two units in the last place and a division, the
    angle by a product, and its cosine by two units in the last place. In roundoffs that is 4 + 1 and 1 of the angle
    and 4 of the cosine, for each of the two tables. With llama3's scaling of the frequencies s has the frequency's
    5 roundoffs and three more of a ratio of at most high_freq_factor, divided by the factors' difference, and 3 of
    its own; the scaled frequency has 4 more. All are at most roundoffs of the unscaled angle.
    """
    theirs = [table.numpy() for table in rope_table(positions)]
    if theirs[0].size == 0:  # without RoPE
        return
    ours = weights.rope_table(positions)
    config = weights.config
    rotary_dim, theta = 2 * theirs[0].shape[1], config.get("rope_theta", config.get("rotary_emb_base"))
    frequencies = theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = np.arange(positions)[:, None] * frequencies
    roundoffs = 6.0
    if scaling := config.get("rope_scaling"):
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        roundoffs += 7 + 8 * high / (high - low)
    allowed = 2.0**-24 * (2 * roundoffs * angles + 2 * 4)
    if any((np.abs(a.astype(np.float64) - b) > allowed).any() for a, b in zip(theirs, ours)):
        raise NotImplementedError(
            "RoPE's table is not the config's in float32, which a GPU and streams compute with: model.half() and "
            "model.to(dtype) round it, loading in the dtype does not"
        )


def _is_quantised(name: str) -> bool:
    """Whether a tensor of that name is a part of a quantised Linear's weight."""
    return name.rpartition(".")[2] in GPTQ_PARTS


def aligned(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """The same tensors, with a copy of each that begins where a GPU's kernels cannot read it, such as a slice of a
    larger tensor; and the bytes of the copies. What torch allocates by itself begins at a multiple of 512 bytes."""
    kept, copied = dict(tensors), 0
    for name, tensor in tensors.items():
        if tensor.data_ptr() % _core.WEIGHT_ALIGNMENT:
            kept[name] = tensor.clone()
            copied += tensor.numel() * tensor.element_size()
    return kept, copied


def _described(tensors: Mapping[str, Tensor]) -> dict[str, Described]:
    return {name: _one_described(tensor) for name, tensor in tensors.items()}


def _one_described(tensor: Tensor) -> Described:
    assert tensor.is_contiguous()
    return tensor.data_ptr(), torch_name(tensor.dtype), tuple(tensor.shape)


class _CoreRunner:
    """A runner of the compiled part."""

    def __init__(self, runner: _core.Runner) -> None:
        self._runner = runner

    @property
    def cache_bytes(self) -> int:
        return self._runner.cache_bytes

    @property
    def is_open(self) -> bool:
        return self._runner.is_open

    def release(self, slot: int) -> None:
        self._runner.release(slot)

    def close(self) -> None:
        if self._runner.is_open:
            for slot in range(self._runner.slots):
                self._runner.release(slot)
        self._runner.close()


class _CpuRunner(_CoreRunner):
    def __init__(self, runner: _core.Runner, dtype: str, vocab_size: int) -> None:
        super().__init__(runner)
        self._dtype = getattr(torch, dtype)
        self._vocab_size = vocab_size

    def new_logits(self, *shape: int) -> Tensor:
        return torch.empty(*shape, self._vocab_size)

    def forward(self, slot: int, first: int, ids: list[int], logits: Tensor) -> None:
        logits.copy_(torch.from_numpy(self._runner.forward(slot, first, ids, len(logits))))

    def step(self, tokens: list[tuple[int, int, int]]) -> Tensor:
        self._runner.step(tokens)
        return torch.stack([torch.from_numpy(self._runner.logits(slot)) for slot, _, _ in tokens])

    def choose(self, tokens: list[tuple[int, int, int]], left: int, stop: list[int]) -> list[int]:
        return self._highest(self.step(tokens))

    @property
    def exact_run_tokens(self) -> int:
        return self._runner.exact_run_tokens

    def choose_run(self, slot: int, first: int, ids: list[int]) -> list[int]:
        logits = self.new_logits(len(ids))
        self.forward(slot, first, ids, logits)
        return self._highest(logits)

    def _highest(self, logits: Tensor) -> list[int]:
        chosen: list[int] = logits.to(self._dtype).float().argmax(-1).tolist()
        return chosen

    def run(self, slot: int, first: int, ids: list[int], logits: Tensor, taps: list[str]) -> dict[str, Tensor]:
        made, tapped = self._runner.run(slot, first, ids, len(logits), taps)
        logits.copy_(torch.from_numpy(made))
        return {name: torch.from_numpy(tap) for name, tap in tapped.items()}


class _CudaRunner(_CoreRunner):
    """Logits stay on the device: the compiled part copies them there into tensors of torch's, in order with torch's
    current stream. No call waits for them."""

    def __init__(self, runner: _core.Runner, device: Any, dtype: str, vocab_size: int) -> None:
        super().__init__(runner)
        self._device = device
        self._dtype = getattr(torch, dtype)
        self._vocab_size = vocab_size

    def new_logits(self, *shape: int) -> Tensor:
        return torch.empty(*shape, self._vocab_size, dtype=self._dtype, device=self._device)

    def forward(self, slot: int, first: int, ids: list[int], logits: Tensor) -> None:
        self._runner.forward_on_device(slot, first, ids, _one_described(logits), self._stream)

    def step(self, tokens: list[tuple[int, int, int]]) -> Tensor:
        logits = self.new_logits(len(tokens))
        self._runner.step_on_device(tokens, _one_described(logits), self._stream)
        return logits

    def choose(self, tokens: list[tuple[int, int, int]], left: int, stop: list[int]) -> list[int]:
        self._runner.step(tokens)
        return self._runner.choose([(slot, position + 1, left) for slot, _, position in tokens], stop)

    exact_run_tokens = 0  # its model is not `invariant`, whose steps are slower

    def choose_run(self, slot: int, first: int, ids: list[int]) -> list[int]:
        raise NotImplementedError("a run's ids are not exactly those of steps on a GPU")

    def run(self, slot: int, first: int, ids: list[int], logits: Tensor, taps: list[str]) -> dict[str, Tensor]:
        made = self._runner.forward_on_device(slot, first, ids, _one_described(logits), self._stream, taps)
        return {name: torch.from_numpy(tap) for name, tap in made.items()}

    @property
    def _stream(self) -> int:
        return current_stream(self._device.index)
