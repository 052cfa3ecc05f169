"""The cache that a patched model returns: transformers sees its lengths, the runner holds its keys and values."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Protocol

import torch  # type: ignore[import-not-found, unused-ignore]
from transformers.cache_utils import Cache  # type: ignore[import-not-found, unused-ignore]

from cf_ops.hf._runner import Runner, Tensor

if TYPE_CHECKING:
    from cf_ops.hf._loaded import Loaded

_SPARE_ENTRIES = 64  # room beside a prompt, where no one says how many tokens follow
_MOST_SPARE_ENTRIES = 1024  # room that a cache takes at once for tokens that may follow

# In crop(n) a positive n is the length that is left, a negative one the places that go. What 0 means has changed.
_CROPS_TO_LENGTH = "tokens_to_remove" not in inspect.signature(Cache.crop).parameters

_NO_TENSORS = "a cache of cf_ops holds no keys and values of torch: expected the model that made it, with speed_up"


def cache_field(output: type) -> str:
    """The field of an output class of transformers that has the cache: past_key_values, and cache from 5.24 on."""
    names = (field.name for field in dataclasses.fields(output) if "Cache" in str(field.type))
    return next(names, "past_key_values")  # 4.56 annotates generate()'s output as a tuple: no field is found


@functools.cache
def cache_parameter(forward: Any) -> str:
    """The parameter of a forward of transformers that takes the cache."""
    parameters = inspect.signature(forward).parameters
    return next(name for name, parameter in parameters.items() if "Cache" in str(parameter.annotation))


class Owner(Protocol):
    """What a cache asks of the model that it belongs to."""

    @property
    def num_layers(self) -> int: ...

    def adopt(self, cache: RunnerCache) -> None:
        """Counts a cache among those that end with restore()."""


class _Layer:
    """A layer of a cache whose keys and values the runner has."""

    @property
    def keys(self) -> Tensor:
        raise ValueError(_NO_TENSORS)

    values = keys


class RunnerCache(Cache):  # type: ignore[misc, unused-ignore]
    """The sequences of a batch, and a runner with a slot for each.

    The ids are kept beside the runner. From them its entries are made again where the runner cannot serve: a longer
    cache, other rows after beam search, a copy, weights that were loaded again, a GPU's slots that went to another
    cache, Hugging Face's path.
    """

    is_compileable = False
    is_croppable = True
    is_initialized = True
    to_legacy_cache = None

    def __init__(self, patch: Owner, spare_entries: int | None) -> None:
        self.layers: list[Any] = [_Layer()] * patch.num_layers
        self.lock = threading.Lock()
        self.patch: Owner | None = patch
        self.ids: list[list[int]] = []  # by sequence, without padding
        self.pads: list[int] = []  # by sequence: masked places before its ids
        self.revision = 0  # counts changes of the entries by other calls than forward()
        self.theirs: Any = None  # on Hugging Face's path: the cache that replaces this one
        self._spare_entries = _SPARE_ENTRIES if spare_entries is None else min(spare_entries, _MOST_SPARE_ENTRIES)
        self._runner: Runner | None = None
        self._loaded: Loaded | None = None
        self._capacity = 0
        self._left_out: set[int] = set()  # sequences that choose() left out: their slots lack entries

    @property
    def cache_bytes(self) -> int:
        runner = self._runner
        return 0 if runner is None else runner.cache_bytes

    def free(self) -> None:
        """Gives the runner's memory back, and what the backend has. The next `forward` makes the entries again."""
        self._runner = None
        self._loaded = None
        self._left_out = set()

    def end(self) -> None:
        """free(), whoever holds the runner still, such as an exception's traceback; what a GPU runs ahead ends."""
        with self.lock:
            self._end()

    def _end(self) -> None:
        runner = self._runner
        self.free()
        if runner is not None:
            with contextlib.suppress(RuntimeError, ValueError):  # the backend may have ended before
                runner.close()

    def forward(self, loaded: Loaded, ids: list[list[int]], pads: list[int], rows: int) -> Tensor:
        """Appends ids to each sequence; the logits (batch, rows, vocab) of the last places, zero at padding. Where it
        raises, the cache holds what it held."""
        with self.lock:
            before = self.ids if self.ids else [[] for _ in ids]
            if self._left_out:
                self.free()
            try:
                runner = self._ready(loaded, before, max(len(a) + len(b) for a, b in zip(before, ids)))
                if rows == 1 and all(len(new) == 1 for new in ids):
                    steps = [(slot, new[0], len(before[slot])) for slot, new in enumerate(ids)]
                    logits = runner.step(steps)[:, None]
                else:
                    logits = logits_of(runner, [len(sequence) for sequence in before], ids, rows)
            except BaseException:
                self.free()
                raise
            for sequence, new in zip(before, ids):
                sequence.extend(new)
            self.ids, self.pads = before, pads
            return logits

    def choose(self, loaded: Loaded, ids: list[int], running: list[int], left: int, stop: list[int]) -> list[int]:
        """Appends an id to each sequence, and returns the ids of the highest logits behind those of `running`, which
        may get `left` more, but none behind an id of `stop`. The other sequences have ended: they get entries when
        `forward` needs them. Where it raises, the cache holds what it held."""
        with self.lock:
            left_out = set(range(len(ids))) - set(running)
            try:
                runner = self._ready(loaded, self.ids, max(map(len, self.ids)) + 1, left_out)
                for slot in sorted(left_out - self._left_out):
                    runner.release(slot)
                self._left_out = left_out
                chosen = runner.choose([(slot, ids[slot], len(self.ids[slot])) for slot in running], left, stop)
            except BaseException:
                self._end()
                raise
            for sequence, new in zip(self.ids, ids):
                sequence.append(new)
            return chosen

    def choose_run(self, loaded: Loaded, ids: list[int]) -> list[int]:
        """Of a cache of one sequence: appends an id and a draft of what follows it, and returns the ids of the highest
        logits behind each, up to the first that the draft does not have. The draft's ids from there on are forgotten.
        Where it raises, the cache holds what it held."""
        with self.lock:
            try:
                runner = self._ready(loaded, self.ids, len(self.ids[0]) + len(ids))
                chosen = runner.choose_run(0, len(self.ids[0]), ids)
            except BaseException:
                self._end()
                raise
            kept = 1
            while kept < len(ids) and chosen[kept - 1] == ids[kept]:
                kept += 1
            self.ids[0].extend(ids[:kept])
            return chosen[:kept]

    def exact_run_tokens(self) -> int:
        """The most ids that choose_run() takes; below 2 where it gives not exactly what choose() does."""
        runner = self._runner
        return 0 if runner is None or len(self.ids) != 1 else runner.exact_run_tokens

    def take_back(self) -> None:
        """Forgets the id that the last `forward` has appended to each sequence."""
        with self.lock:
            for sequence in self.ids:
                sequence.pop()

    def _ready(
        self, loaded: Loaded, before: list[list[int]], entries: int, left_out: AbstractSet[int] = frozenset()
    ) -> Runner:
        if self._runner is not None and self._loaded is loaded and entries <= self._capacity and self._runner.is_open:
            return self._runner
        if loaded.backend is None:
            raise ValueError("a cache needs a backend")
        grown = 2 * self._capacity if self._loaded is loaded and entries > self._capacity else 0
        self.free()
        self._capacity = max(entries + self._spare_entries, grown)
        self._loaded = loaded
        runner = loaded.backend.runner(len(before), self._capacity)
        if not loaded.backend.is_bounded:
            self._capacity = sys.maxsize
        for slot, ids in enumerate(before):
            if ids and slot not in left_out:
                runner.forward(slot, 0, ids, runner.new_logits(0))
        self._runner = runner
        self._left_out = set(left_out)
        return runner

    # What transformers asks of a cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The places of each sequence, padding included."""
        if self.theirs is not None:
            return int(self.theirs.get_seq_length())
        return self.pads[0] + len(self.ids[0]) if self.ids else 0

    def get_max_length(self, layer_idx: int | None = None) -> Any:
        return None if _CROPS_TO_LENGTH else -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.get_seq_length() + new, 0

    @property
    def max_batch_size(self) -> int:
        return len(self.ids)

    batch_size = max_batch_size

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self)

    is_linear = is_dummy = is_sliding

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError(_NO_TENSORS)

    def reset(self) -> None:
        self._select([])

    def crop(self, places: int) -> None:
        """Keeps or removes places at the end, as transformers of this version does."""
        if self.theirs is not None:
            self.theirs.crop(places)
            return
        length = self.get_seq_length()
        is_length = places > 0 or (places == 0 and _CROPS_TO_LENGTH)
        left = min(places, length) if is_length else max(length + places, 0)
        with self.lock:
            self.revision += 1
            self.ids = [ids[: max(left - pads, 0)] for ids, pads in zip(self.ids, self.pads)]
            self.pads = [min(pads, left) for pads in self.pads]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.theirs is not None:
            self.theirs.batch_select_indices(indices)
            return
        self._select([int(i) for i in torch.arange(len(self.ids))[indices.cpu()]])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.theirs is not None:
            self.theirs.batch_repeat_interleave(repeats)
            return
        self._select([row for row in range(len(self.ids)) for _ in range(repeats)])

    def activate_past_recording(self) -> None:
        """Nothing to do: the ids of all entries are kept, so that any past state can be made again."""

    def _select(self, rows: list[int]) -> None:
        with self.lock:
            self.revision += 1
            self.free()
            self.ids = [list(self.ids[row]) for row in rows]
            self.pads = [self.pads[row] for row in rows]

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        raise ValueError(_NO_TENSORS)

    def __repr__(self) -> str:
        return f"RunnerCache(sequences={len(self.ids)}, length={self.get_seq_length()})"

    def __deepcopy__(self, memo: dict[int, Any]) -> RunnerCache:
        if self.patch is None:
            raise ValueError("a cache of cf_ops ended with restore(): expected a living one to copy")
        with self.lock:
            copied = RunnerCache(self.patch, self._spare_entries)
            copied.ids, copied.pads = [list(ids) for ids in self.ids], list(self.pads)
            copied.theirs = None if self.theirs is None else copy.deepcopy(self.theirs, memo)
        self.patch.adopt(copied)
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> Any:
        raise TypeError("a cache of cf_ops cannot be pickled: its entries lie with the runner")


def logits_of(runner: Runner, first: list[int], ids: list[list[int]], rows: int, has_slots: bool = True) -> Tensor:
    """Gives each sequence the entries of its `ids` from position `first` on, in a slot of its own, or one after the
    other in slot 0; the logits (batch, rows, vocab) of the last rows, zero where a sequence has fewer."""
    logits = runner.new_logits(len(ids), rows)
    for row, new in enumerate(ids):
        padding = max(rows - len(new), 0)
        logits[row, :padding] = 0
        runner.forward(row if has_slots else 0, first[row], new, logits[row, padding:])
    return logits
