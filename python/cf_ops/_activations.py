"""Activations of many prompts: written to mapped files, and read back in shuffled batches."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cf_ops import _core, _safetensors
from cf_ops._arguments import dtype_name, integer, is_one, kind_of, path_of
from cf_ops._arguments import text as text_of
from cf_ops._generation import Prompt
from cf_ops._progress import Progress
from cf_ops._results import check_same, read_json, replacing, write_json
from cf_ops._tap_names import Source, layers_of, resolve, sources
from cf_ops.model import Model

__all__ = ["Activations", "activations"]

_STORED = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_SETTINGS = "activations.json"
_THREADS = 8  # that write a file
_ABOUT_ROWS = ("ids", "prompt", "position")  # tensors of a file beside the taps, int32
Mask = Sequence[bool] | NDArray[np.bool_]


class Activations:
    """The activations in a folder that :func:`activations` has written. A row is a position of a prompt.

    folder: where they lie. taps: their names. dtype: that of the files. len() is the number of rows.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = path_of("folder", folder)
        settings = read_json(os.path.join(self.folder, _SETTINGS))
        self.taps: list[str] = settings["taps"]
        self.dtype: str = settings["dtype"]
        counts: list[int] = settings["rows_of_files"]
        self._begins = np.cumsum([0, *counts])
        self._files = []
        for number in range(len(counts)):
            path = os.path.join(self.folder, _file_name(number, len(counts)))
            if not os.path.exists(path):
                raise FileNotFoundError(f"{path}: no such file: the call that writes it was interrupted; repeat it")
            self._files.append(_safetensors.read(path)[0])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __repr__(self) -> str:
        return f"Activations({self.folder!r}, {len(self)} rows of {len(self.taps)} taps, {self.dtype})"

    def __reduce__(self) -> Any:
        """Processes that read batches, such as those of torch's DataLoader, map the files themselves."""
        return Activations, (os.path.abspath(self.folder),)

    def rows(self, name: str, rows: slice | Sequence[int] | NDArray[np.integer[Any]] = slice(None)) -> NDArray[Any]:
        """Rows of a tap, or of "ids", "prompt" or "position": the row's id, its prompt's number, its place in that.
        bfloat16 is widened to float32."""
        taken = self._stored_rows(name, np.arange(len(self))[rows])
        return _safetensors.from_bfloat16(taken) if self._is_bfloat16(name) else taken

    def batches(
        self,
        size: int,
        taps: str | Iterable[str] | None = None,
        *,
        seed: int | None = 0,
        epochs: int = 1,
        tensors: str = "numpy",
        drop_last: bool = False,
    ) -> Iterator[Any]:
        """Batches of `size` rows, each row once an epoch.

        A batch is an array where `taps` is one name, and a dict of arrays by name otherwise (all taps, where it is
        None). "ids", "prompt" and "position" are taken too. Every order of the rows is equally likely; it depends on
        seed and epoch alone. None keeps the order of the prompts. tensors: "numpy", where bfloat16 is widened to
        float32, or "torch". drop_last: a last batch of fewer rows is left out.
        """
        size = integer("size", size, 1, 2**31 - 1)
        names = [taps] if isinstance(taps, str) else self.taps if taps is None else [text_of("taps", t) for t in taps]
        if tensors not in ("numpy", "torch"):
            raise ValueError(f"tensors: expected numpy or torch, got {tensors!r}")
        for name in names:
            self._check_name(name)
        return self._batches(size, names, isinstance(taps, str), seed, epochs, tensors, drop_last)

    def _batches(
        self,
        size: int,
        names: list[str],
        is_one_tap: bool,
        seed: int | None,
        epochs: int,
        tensors: str,
        drop_last: bool,
    ) -> Iterator[Any]:
        for epoch in range(integer("epochs", epochs, 1, 2**31 - 1)):
            order = np.arange(len(self))
            if seed is not None:
                np.random.Generator(np.random.PCG64([integer("seed", seed, 0, 2**63 - 1), epoch])).shuffle(order)
            for begin in range(0, len(order), size):
                rows = order[begin : begin + size]
                if drop_last and rows.size < size:
                    return
                made = {name: self._given(name, self._stored_rows(name, rows), tensors) for name in names}
                yield made[names[0]] if is_one_tap else made

    def _given(self, name: str, taken: NDArray[Any], tensors: str) -> Any:
        if tensors == "numpy":
            return _safetensors.from_bfloat16(taken) if self._is_bfloat16(name) else taken
        import torch  # type: ignore[import-not-found, unused-ignore]

        if self._is_bfloat16(name):
            return torch.from_numpy(taken.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(taken)

    def _stored_rows(self, name: str, rows: NDArray[np.integer[Any]]) -> NDArray[Any]:
        """Rows as they are stored, those of each file in ascending order as a disk likes it."""
        self._check_name(name)
        first = self._files[0][name].elements()
        made = np.empty((rows.size, *first.shape[1:]), first.dtype)
        places = np.argsort(rows, kind="stable")
        ends = np.searchsorted(rows[places], self._begins)
        for number, file in enumerate(self._files):
            here = places[ends[number] : ends[number + 1]]
            if here.size:
                made[here] = file[name].elements()[rows[here] - self._begins[number]]
        return made

    def _is_bfloat16(self, name: str) -> bool:
        return self.dtype == "bfloat16" and name not in _ABOUT_ROWS

    def _check_name(self, name: str) -> None:
        if name not in self.taps and name not in _ABOUT_ROWS:
            raise ValueError(f"tap {name!r} is not in {self.folder}; there are {', '.join((*self.taps, *_ABOUT_ROWS))}")


def activations(
    model: Model,
    prompts: Iterable[Prompt] | NDArray[Any],
    taps: str | Iterable[str] | None = None,
    *,
    out: str | os.PathLike[str],
    dtype: object = None,
    stop_at_layer: int | None = None,
    positions: slice | Sequence[int] | None = None,
    masks: Iterable[Mask] | Callable[[NDArray[np.int64]], Mask] | None = None,
    rows_of_file: int = 1 << 16,
) -> Activations:
    """Writes what a model's modules make of each prompt, to files of safetensors in the folder `out`.

    taps: names of Hugging Face, "hidden_states.3" or a module's such as "gpt_neox.layers.3.mlp"; of TransformerLens,
    such as "blocks.3.hook_resid_pre", with the values of weights that it has not processed
    (from_pretrained_no_processing(), or a TransformerBridge); or those of :meth:`Model.run`. A * stands for any layer.
    None: all hidden states. An attention's or MLP's output is the difference of two residuals, so that its error is a
    rounding of those; models that compute in 16 bits refuse it.

    stop_at_layer: the first so many layers run, as in TransformerLens. Where it is None, as many as the taps need. A
    model on a GPU runs all that it was loaded with: load(..., layers=).

    dtype: that of the files, float64, float32, float16 or bfloat16; the model's own where it is None. A value beyond
    float16's range is refused.

    positions: of each prompt, a slice or places, of which negative ones count from the end. masks: instead, a row of
    booleans for each prompt, or a function of its ids that returns one. Both None: every position.

    Each file, activations-00000-of-N.safetensors, has whole prompts up to about `rows_of_file` rows: a tensor
    (rows, ...) for each tap, and ids, prompt and position of each row in int32. Memory beside the model's is that
    of three blocks of prompts: one on the CPU, on a GPU as many as have a free slot and go through it at once
    (load(..., slots=64) for short ones). The same call goes on where an earlier one was interrupted, with the first file that is missing.

    Raises ValueError for a tap that the model does not have, ids outside the vocabulary, masks of other lengths,
    positions outside a prompt, and a folder with activations of another call; NotImplementedError for a model on
    several GPUs; MemoryError and OSError.
    """
    model._check_one_gpu("taps")
    folder = path_of("out", out)
    kind = model.activation if dtype is None else dtype_name(dtype)
    if kind not in _STORED:
        raise ValueError(f"dtype: expected {', '.join(_STORED)}, got {kind!r}")
    layers = layers_of(model.config)
    stop = layers if stop_at_layer is None else integer("stop_at_layer", stop_at_layer, 1, layers)
    with model._runner(1) as runner:
        known = sources(model.config, runner.taps, model.weights.layers_left_out > 0)
    if taps is None:
        taps = [f"hidden_states.{i}" for i in range(stop + 1)]
    asked = [text_of("taps", tap) for tap in ([taps] if is_one(taps) else taps)]
    chosen = resolve(asked, known, stop)
    if not chosen:
        raise ValueError("taps: expected at least one, got none")
    for name, source in chosen.items():
        if source.less is not None and model.activation in ("float16", "bfloat16"):
            raise NotImplementedError(
                f"tap {name!r}: expected a model that computes in float32 or float64, got {model.activation}: the "
                "difference of two residuals keeps too few bits"
            )
    given = _Prompts(model, prompts, positions, masks)
    counts = given.rows_of_files(integer("rows_of_file", rows_of_file, 1, 2**31 - 1))
    settings = {
        "model": os.path.realpath(model.directory) if os.path.isdir(model.directory) else model.directory,
        "activation": model.activation,
        "taps": list(chosen),
        "dtype": kind,
        "rows_of_files": [sum(given.counts[begin:end]) for begin, end in counts],
        "sha256_of_ids_and_positions": given.sha256,
    }
    os.makedirs(folder, exist_ok=True)
    if not check_same(path := os.path.join(folder, _SETTINGS), settings):
        if any(name.endswith(".safetensors") for name in os.listdir(folder)):
            raise ValueError(f"out: expected a new folder, or activations with their {_SETTINGS}, got {folder!r}")
        write_json(path, settings)
    missing = [n for n in range(len(counts)) if not os.path.exists(os.path.join(folder, _file_name(n, len(counts))))]
    if missing:
        work = _Work(model, given, chosen, kind, max(source.layers for source in chosen.values()))
        with Progress("activations") as progress, work:
            for number in missing:
                work.write(os.path.join(folder, _file_name(number, len(counts))), *counts[number], settings, progress)
    return Activations(folder)


class _Prompts:
    """Prompts by number: their ids, and which of their positions are taken."""

    def __init__(
        self,
        model: Model,
        prompts: Iterable[Prompt] | NDArray[Any],
        positions: slice | Sequence[int] | None,
        masks: Iterable[Mask] | Callable[[NDArray[np.int64]], Mask] | None,
    ) -> None:
        if is_one(prompts):
            raise TypeError(f"prompts: expected a list of prompts, got one {kind_of(prompts)}")
        if positions is not None and masks is not None:
            raise ValueError("positions, masks: expected one of them, got both")
        self._rows: Any = prompts
        if not isinstance(prompts, np.ndarray):
            self._rows = [np.array(model.encode(prompt, f"prompt {i}"), np.int64) for i, prompt in enumerate(prompts)]
        elif prompts.ndim != 2 or prompts.dtype.kind not in "iu":
            raise ValueError(f"prompts: expected integers (prompts, ids), got {prompts.dtype} of {prompts.shape}")
        if len(self._rows) == 0:
            raise ValueError("prompts: expected at least one, got none")
        self._positions: list[NDArray[np.int32]] = []
        self.longest = 0
        digest = hashlib.sha256()
        given = iter(masks) if masks is not None and not callable(masks) else None
        vocab_size = model.config["vocab_size"]
        for number in range(len(self._rows)):
            ids = self.ids(number)
            if ids.size == 0 or ids.min() < 0 or ids.max() >= vocab_size:
                got = f"{ids.min()} to {ids.max()}" if ids.size else "none"
                raise ValueError(f"prompt {number}: expected ids of 0 to {vocab_size - 1}, got {got}")
            if masks is None:
                taken = _places(number, ids.size, positions)
            else:
                mask = masks(ids) if callable(masks) else next(given, None) if given is not None else None
                taken = _masked(number, ids.size, mask)
            if self._positions and np.array_equal(self._positions[-1], taken):
                taken = self._positions[-1]  # prompts of one length share it
            self._positions.append(taken)
            self.longest = max(self.longest, ids.size)
            digest.update(ids.astype("<i8").tobytes() + taken.astype("<i4").tobytes())
        if given is not None and next(given, None) is not None:
            raise ValueError(f"masks: expected one for each of {len(self._rows)} prompts, got more")
        self.counts = [taken.size for taken in self._positions]
        if sum(self.counts) == 0:
            raise ValueError("positions, masks: expected at least one position of a prompt, got none")
        self.sha256 = digest.hexdigest()

    def ids(self, number: int) -> NDArray[np.int64]:
        return np.asarray(self._rows[number], np.int64)

    def positions(self, number: int) -> NDArray[np.int32]:
        return self._positions[number]

    def rows_of_files(self, most: int) -> list[tuple[int, int]]:
        """The first prompt of each file, and the one behind its last."""
        files, begin, rows = [], 0, 0
        for number, count in enumerate(self.counts):
            if rows and rows + count > most:
                files.append((begin, number))
                begin, rows = number, 0
            rows += count
        return [*files, (begin, len(self.counts))]


def _places(number: int, length: int, positions: slice | Sequence[int] | None) -> NDArray[np.int32]:
    every = np.arange(length, dtype=np.int32)
    if positions is None or isinstance(positions, slice):
        return every[slice(None) if positions is None else positions]
    places = [integer("positions", p) for p in positions]
    outside = [p for p in places if not -length <= p < length]
    if outside:
        raise ValueError(f"prompt {number}: expected positions of its {length} ids, got {outside[0]}")
    return every[places]


def _masked(number: int, length: int, mask: Mask | None) -> NDArray[np.int32]:
    taken = None if mask is None else np.asarray(mask)
    if taken is None or taken.shape != (length,) or taken.dtype != np.bool_:
        got = "none" if taken is None else f"{taken.dtype} of the shape {taken.shape}"
        raise ValueError(f"prompt {number}: expected a mask of {length} booleans, got {got}")
    return np.flatnonzero(taken).astype(np.int32)


class _Block(NamedTuple):
    """Prompts that are read together, and the rows of a file that they fill."""

    values: _core.TapBlock
    prompts: list[int]
    begin: int  # of the rows
    end: int


class _Work(ExitStack):
    """Takes prompts through a model's first layers. While threads write what one block of prompts has made, a GPU reads
    the next one."""

    def __init__(self, model: Model, prompts: _Prompts, taps: dict[str, Source], dtype: str, layers: int) -> None:
        super().__init__()
        self._prompts, self._taps, self._dtype = prompts, taps, dtype
        self._kind = model.activation
        on_gpu = model.device != "cpu"
        self._slots = model.slots_for(len(prompts.counts)) if on_gpu else 1
        self._reader = self.enter_context(closing(model.tap_reader(self._slots, prompts.longest, layers)))
        self._reader.begin(sorted({tap for s in taps.values() for tap in (s.whole, s.less) if tap is not None}))
        self._ids_of_block = max(1, self._reader.pass_tokens)
        self._threads = self.enter_context(ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)))

    def write(self, path: str, begin: int, end: int, settings: dict[str, Any], progress: Progress) -> None:
        """Writes the file of the prompts from `begin` to `end`."""
        counts = self._prompts.counts
        rows = sum(counts[begin:end])
        with replacing(path) as temporary:
            made: dict[str, NDArray[Any]] = {}
            read: deque[_Block] = deque()
            writing: deque[tuple[_Block, list[Future[None]]]] = deque()

            def write_first() -> None:
                block = read.popleft()
                if not made:
                    made.update(self._create(temporary, rows, settings, block.values.arrays()))
                writing.append((block, self._write(block, made)))
                if len(writing) > 1:
                    wait_for_first()

            def wait_for_first() -> None:
                block, parts = writing.popleft()
                for part in parts:
                    part.result()
                progress.set(block.prompts[-1] + 1, len(counts))

            try:
                at = 0
                for prompts in self._blocks(begin, end):
                    count = sum(counts[number] for number in prompts)
                    read.append(_Block(self._read(prompts), prompts, at, at + count))
                    at += count
                    if len(read) > 1:
                        write_first()
                while read:
                    write_first()
                while writing:
                    wait_for_first()
            finally:
                for _, parts in writing:
                    wait(parts)  # threads write to the mapped file

    def _read(self, prompts: list[int]) -> _core.TapBlock:
        return self._reader.read([self._prompts.ids(number) for number in prompts])

    def _blocks(self, begin: int, end: int) -> Iterator[list[int]]:
        """The prompts that go through the model together."""
        block: list[int] = []
        ids = 0
        for number in range(begin, end):
            if self._prompts.counts[number] == 0:
                continue
            size = self._prompts.ids(number).size
            if block and (len(block) == self._slots or ids + size > self._ids_of_block):
                yield block
                block, ids = [], 0
            block.append(number)
            ids += size
        if block:
            yield block

    def _create(
        self, path: str, rows: int, settings: dict[str, Any], values: dict[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """Makes the file of so many rows."""
        shapes = {n: (_STORED[self._dtype], (rows, *values[s.whole].shape[1:])) for n, s in self._taps.items()}
        shapes |= {name: ("I32", (rows,)) for name in _ABOUT_ROWS}
        metadata = {key: str(settings[key]) for key in ("model", "activation", "dtype")} | {"format": "pt"}
        return _safetensors.create(path, shapes, metadata)

    def _write(self, block: _Block, made: dict[str, NDArray[Any]]) -> list[Future[None]]:
        """Lets threads write a block's rows."""
        here = slice(block.begin, block.end)
        taken = [self._prompts.positions(number) for number in block.prompts]
        sizes = [self._prompts.ids(number).size for number in block.prompts]
        begins = np.cumsum([0, *sizes])
        places = np.concatenate([begin + rows for begin, rows in zip(begins, taken)])
        are_all = places.size == begins[-1] and (places == np.arange(places.size)).all()
        for name, about in zip(_ABOUT_ROWS, self._about(block, taken)):
            made[name][here] = about
        values = block.values.arrays()

        def write(name: str, source: Source) -> None:
            whole = values[source.whole] if are_all else values[source.whole][places]
            if source.less is not None:
                whole = whole - (values[source.less] if are_all else values[source.less][places])
            made[name][here] = self._cast(name, whole)

        return [self._threads.submit(write, name, source) for name, source in self._taps.items()]

    def _about(self, block: _Block, taken: list[NDArray[np.int32]]) -> list[NDArray[Any]]:
        ids = [self._prompts.ids(number)[rows] for number, rows in zip(block.prompts, taken)]
        numbers = np.repeat(block.prompts, [rows.size for rows in taken])
        return [np.concatenate(ids), numbers, np.concatenate(taken)]

    def _cast(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Values of the model's dtype in the files'; those of bfloat16 are bits."""
        if self._kind == self._dtype:
            return values
        if self._kind == "bfloat16":
            values = _safetensors.from_bfloat16(values)
        if self._dtype == "bfloat16":
            return _safetensors.to_bfloat16(values)
        if self._dtype == "float16" and (largest := float(np.abs(values).max(initial=0))) >= 65520:
            raise ValueError(f"tap {name!r}: expected values that float16 holds, got {largest:.6g}: dtype='bfloat16'")
        return values.astype(self._dtype)


def _file_name(number: int, files: int) -> str:
    return f"activations-{number:05d}-of-{files:05d}.safetensors"
