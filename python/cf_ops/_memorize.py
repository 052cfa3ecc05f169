"""Memorisation: how much of its training data a model continues word for word."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cf_ops._arguments import integer, path_of
from cf_ops._progress import Progress
from cf_ops._results import check_same, replacing, write_json
from cf_ops._token_files import check_rows, map_rows
from cf_ops.model import USUAL_SLOTS, Model

__all__ = ["Memorized", "memorize"]

_FLUSH = 1024  # results that are written at once
_STEPS = 8  # of the model, between two looks at what has ended
_SEEN = 1024  # sequences whose ids tell one token file from another
_RECORD = np.dtype([("index", "<i8"), ("accuracy", "<f4"), ("equal", "<i4"), ("prefix", "<i4")])


@dataclass
class Memorized:
    """How a model continues sequences; entry i of each array is sequence first + i.

    equal: ids of the continuation that are the sequence's own at their place; -1 where the continuation was not made to
    its end. prefix: equal ids before the first that differs. continuation: ids that were made of each.
    """

    first: int
    continuation: int
    equal: NDArray[np.int32]
    prefix: NDArray[np.int32]

    @property
    def accuracy(self) -> NDArray[np.float32]:
        """The memorisation score, equal / continuation; NaN where `equal` is not known."""
        score = self.equal.astype(np.float32) / np.float32(self.continuation)
        return np.where(self.equal < 0, np.float32(np.nan), score).astype(np.float32)

    @property
    def exact(self) -> NDArray[np.bool_]:
        """Whether all ids are equal: the sequence is memorised."""
        return np.asarray(self.prefix == self.continuation)

    def __repr__(self) -> str:
        return f"Memorized({self.exact.sum()} of {self.exact.size} sequences are memorised)"


def memorize(
    model: Model,
    tokens: Any,
    *,
    context: int = 32,
    continuation: int = 32,
    row: int | None = None,
    dtype: str = "uint16",
    first: int = 0,
    count: int | None = None,
    slots: int | None = None,
    exact_only: bool = False,
    never: Iterable[int] | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Memorized:
    """Continues the first `context` ids of each sequence greedily, and compares with the `continuation` that follows.

    The score is that of EleutherAI/pythia, predictable-memorization/eval_memorization.py, score(): the share of the
    continuation's ids that are equal, position by position. As there (min_length), ids of `never` are not chosen: the
    checkpoint's eos_token_id, where it is None.

    tokens: (sequences, at least context + continuation ids), an array or a file. A .npy file is mapped; any other file
    holds bare ids of `dtype`, `row` of them a sequence, such as 2049 of Pythia's training data. `count` sequences from
    `first` on are taken, all where it is None. `slots` run at once: up to 64 on the CPU, those that are free on a GPU,
    where it is None. exact_only: a sequence ends at the first id that differs; `equal` is known of memorised ones.

    out: a file for the results, index, accuracy, equal and prefix of each sequence. One named .csv grows as sequences
    end, in their order; any other is a .npy file of records, in which `prefix` is -1 where a sequence is still to come.
    Settings lie beside it, in OUT.json. The same call goes on where an earlier one was interrupted.

    Raises ValueError for tokens of another shape or outside the vocabulary, and for results of another call in `out`;
    CfError where a sequence fails, such as by logits that are NaN; and what :func:`Model.generate` raises.
    """
    context = integer("context", context, 1, 2**31 - 1)
    continuation = integer("continuation", continuation, 1, 2**31 - 1)
    length = context + continuation
    rows = _rows_of(tokens, row, dtype)
    if rows.shape[1] < length:
        raise ValueError(f"tokens: expected sequences of at least {length} ids, got {rows.shape[1]}")
    if rows.shape[0] == 0:
        raise ValueError("tokens: expected at least one sequence, got none")
    first = integer("first", first, 0, rows.shape[0] - 1)
    count = rows.shape[0] - first if count is None else integer("count", count, 1, rows.shape[0] - first)
    if slots is not None:
        slots = integer("slots", slots, 1, 2**20)
    rows = rows[first : first + count, :length]
    most = model.config["vocab_size"] - 1
    banned = sorted({integer("never", id, 0, most) for id in (model.eos_token_ids if never is None else never)})
    if out is None:
        results = _Results(first, continuation, count)
    else:
        settings = _settings(model, rows, first, context, continuation, exact_only, banned)
        results = _open_results(path_of("out", out), settings, first, continuation, count)
    try:
        if results.done < count:
            work = _Work(model, rows, context, results, exact_only, banned)
            work.run(min(slots or _slots_for(model, count), count - results.done))
    finally:
        results.flush()
    return Memorized(first, continuation, results.equal, results.prefix)


class _Results:
    """Results in the order of the sequences, whichever end first."""

    def __init__(self, first: int, continuation: int, count: int) -> None:
        self.first, self.continuation = first, continuation
        self.equal = np.full(count, -1, np.int32)
        self.prefix = np.full(count, -1, np.int32)
        self.done = 0  # those at the head that are known
        self._flushed = 0

    def put(self, place: int, equal: int, prefix: int) -> None:
        self.equal[place], self.prefix[place] = equal, prefix
        while self.done < self.prefix.size and self.prefix[self.done] >= 0:
            self.done += 1
        if self.done - self._flushed >= _FLUSH:
            self.flush()

    def flush(self) -> None:
        """Writes what is known and was not written."""
        begin, self._flushed = self._flushed, self.done
        if begin < self.done:
            self.write(begin, self.done)

    def write(self, begin: int, end: int) -> None:
        """Writes the results from `begin` to `end`; in memory there is nothing to do."""

    def take(self, records: NDArray[Any]) -> None:
        """Takes the results of an earlier call."""
        self.done = self._flushed = records.size
        self.equal[: records.size], self.prefix[: records.size] = records["equal"], records["prefix"]

    def records(self, begin: int, end: int) -> NDArray[Any]:
        records = np.empty(end - begin, _RECORD)
        part = Memorized(self.first + begin, self.continuation, self.equal[begin:end], self.prefix[begin:end])
        records["index"] = np.arange(self.first + begin, self.first + end)
        for name in ("accuracy", "equal", "prefix"):
            records[name] = getattr(part, name)
        return records


class _CsvResults(_Results):
    """A line each, after a header."""

    _HEADER = ",".join(_RECORD.names or ()) + "\n"

    def __init__(self, path: str, goes_on: bool, *sizes: int) -> None:
        super().__init__(*sizes)
        self._path = path
        if not goes_on or not os.path.exists(path):
            with replacing(path) as temporary, open(temporary, "w", encoding="ascii") as file:
                file.write(self._HEADER)
            return
        with open(path, "rb") as file:
            whole, newline, _ = file.read().rpartition(b"\n")  # without a line that was cut
        lines = whole.decode("ascii", "replace").splitlines()
        try:
            found = np.array([tuple(line.split(",")) for line in lines[1:]], _RECORD)
        except ValueError:
            found = np.zeros(self.prefix.size + 1, _RECORD)
        is_ours = lines[:1] == [self._HEADER.strip()] and found.size <= self.prefix.size
        if not is_ours or (found["index"] != self.first + np.arange(found.size)).any():
            raise ValueError(f"{path}: expected the results of sequences from {self.first} on, a line each in order")
        os.truncate(path, len(whole + newline))
        self.take(found)

    def write(self, begin: int, end: int) -> None:
        with open(self._path, "a", encoding="ascii") as file:
            file.writelines(
                f"{r['index']},{r['accuracy']},{r['equal']},{r['prefix']}\n" for r in self.records(begin, end)
            )


class _NpyResults(_Results):
    """An array of records, mapped."""

    def __init__(self, path: str, goes_on: bool, *sizes: int) -> None:
        super().__init__(*sizes)
        count = self.prefix.size
        if not goes_on or not os.path.exists(path):
            with replacing(path) as temporary:
                file = np.lib.format.open_memmap(temporary, "w+", _RECORD, (count,))
                file["prefix"] = -1
                file.flush()
        self._file = np.load(path, mmap_mode="r+", allow_pickle=False)
        if self._file.dtype != _RECORD or self._file.shape != (count,):
            raise ValueError(
                f"{path}: expected the results of {count} sequences, got {self._file.shape} of other records"
            )
        missing = np.flatnonzero(self._file["prefix"] < 0)
        self.take(self._file[: missing[0] if missing.size else count])

    def write(self, begin: int, end: int) -> None:
        self._file[begin:end] = self.records(begin, end)
        self._file.flush()


def _open_results(path: str, settings: dict[str, Any], first: int, continuation: int, count: int) -> _Results:
    kind = _CsvResults if path.endswith(".csv") else _NpyResults
    if not path.endswith((".csv", ".npy")):
        raise ValueError(f"out: expected a file named .csv or .npy, got {path!r}")
    beside = path + ".json"
    goes_on = check_same(beside, settings)
    if not goes_on and os.path.exists(path):
        raise ValueError(f"out: expected a new file, or results with their settings in {beside!r}, got {path!r}")
    if not goes_on:
        write_json(beside, settings)
    return kind(path, goes_on, first, continuation, count)


class _Work:
    """Sequences in the slots of a memorizer. One that ends gives its slot to the next."""

    def __init__(
        self,
        model: Model,
        rows: NDArray[Any],
        context: int,
        results: _Results,
        exact_only: bool,
        banned: list[int],
    ) -> None:
        self._model, self._rows, self._context, self._results = model, rows, context, results
        self._exact_only, self._banned = exact_only, banned

    def run(self, slots: int) -> None:
        count, length = self._rows.shape
        place, first = self._results.done, self._results.first
        memorizer = self._model.memorizer(slots, length)
        try:
            memorizer.begin(
                context=self._context,
                continuation=length - self._context,
                exact_only=self._exact_only,
                never=self._banned,
            )
            with Progress("memorisation") as progress:
                while place < count or memorizer.running:
                    # As many wait as there are slots, so that one is there wherever a sequence ends.
                    if (room := min(2 * slots - memorizer.running, count - place)) > 0:
                        memorizer.add(first + place, self._ids(place, place + room))
                        place += room
                    for number, equal, prefix in memorizer.step(_STEPS):
                        self._results.put(number - first, equal, prefix)
                    progress.set(self._results.done, count)
        finally:
            memorizer.close()

    def _ids(self, begin: int, end: int) -> NDArray[np.int32]:
        ids = self._rows[begin:end]
        vocab_size = self._model.config["vocab_size"]
        outside = np.flatnonzero((ids < 0).any(1) | (ids >= vocab_size).any(1))
        if outside.size:
            row, where = ids[outside[0]], f"sequence {self._results.first + begin + outside[0]}"
            raise ValueError(f"{where}: expected ids of 0 to {vocab_size - 1}, got {row.min()} to {row.max()}")
        return np.ascontiguousarray(ids, np.int32)


def _rows_of(tokens: Any, row: int | None, dtype: str) -> NDArray[Any]:
    if isinstance(tokens, (str, os.PathLike)):
        return map_rows(path_of("tokens", tokens), row, dtype)
    try:
        return check_rows("tokens", np.asarray(tokens))
    except ValueError as error:
        raise ValueError(str(error) if "tokens" in str(error) else f"tokens: expected equal lengths: {error}") from None


def _slots_for(model: Model, count: int) -> int:
    return model.slots_for(count) if model.device != "cpu" else min(USUAL_SLOTS, count)


def _settings(
    model: Model,
    rows: NDArray[Any],
    first: int,
    context: int,
    continuation: int,
    exact_only: bool,
    banned: list[int],
) -> dict[str, Any]:
    """What makes the results what they are."""
    seen = np.ascontiguousarray(rows[:_SEEN].astype("<i8"))
    return {
        "model": os.path.realpath(model.directory) if os.path.isdir(model.directory) else model.directory,
        "activation": model.activation,
        "first": first,
        "count": rows.shape[0],
        "context": context,
        "continuation": continuation,
        "exact_only": exact_only,
        "never": banned,
        "sha256_of_first_sequences": hashlib.sha256(seen.tobytes()).hexdigest(),
    }
