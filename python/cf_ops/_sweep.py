"""A metric over the revisions of a model, in one process."""

from __future__ import annotations

import csv
import io
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from cf_ops import _core
from cf_ops._arguments import integer, is_one, kind_of, path_of, real
from cf_ops._arguments import text as text_of
from cf_ops._device import cuda_index
from cf_ops._progress import Progress
from cf_ops._results import read_json, write_json, write_text
from cf_ops._revisions import Fault, Revision, faults, identify
from cf_ops._score import surprisal
from cf_ops.model import CAPACITY, Model, find_model, on_device, open_weights

__all__ = ["Fault", "Metric", "Revision", "Sweep", "pythia_steps", "surprisal", "sweep"]

Metric = Callable[[Model], Any]  # a number, or several by name
# What a revision may raise without ending the sweep: damaged files, downloads, sizes, logits that are NaN.
_ERRORS = (ValueError, OSError, MemoryError, NotImplementedError, _core.CfError)
_MADE_FOR = "cf_ops sweep"


@dataclass
class Sweep:
    """The rows of a sweep, in the order that was asked for, and what is wrong with the revisions."""

    revisions: list[Revision] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def metrics(self) -> list[str]:
        """The names of what was measured."""
        return list(dict.fromkeys(name for r in self.revisions for name in r.metrics))

    def table(self) -> list[dict[str, Any]]:
        """A row a revision: revision, step, each metric, sha256, directory, error."""
        return [
            {"revision": r.name, "step": r.step}
            | {name: r.metrics.get(name) for name in self.metrics}
            | {"sha256": r.sha256, "directory": r.directory, "error": r.error}
            for r in self.revisions
        ]

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Sweep:
        """The rows of a file that :func:`sweep` has written as `out`, or ``cf-model sweep`` as ``--json``. Raises
        ValueError for any other file."""
        name = path_of("path", path)
        return _sweep_of(name, read_json(name))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes the table."""
        text = io.StringIO()
        rows = self.table()
        writer = csv.DictWriter(text, list(rows[0]) if rows else ["revision"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(path_of("path", path), text.getvalue())

    def plot(self, path: str | os.PathLike[str], metrics: Iterable[str] | None = None) -> None:
        """Draws each metric against the step, in the format that the file's name says; "m.error" is the bar of "m".
        Raises ImportError where matplotlib is missing."""
        try:
            from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise ImportError("a plot needs the package matplotlib, which is missing: pip install matplotlib") from None
        bars = [name for name in self.metrics if name.endswith(".error")]
        names = [name for name in self.metrics if name not in bars]
        names = names if metrics is None else [text_of("metrics", m) for m in metrics]
        unknown = [name for name in names if name not in self.metrics]
        if unknown or not names:
            raise ValueError(f"metrics: expected names among {self.metrics}, got {unknown}")
        figure = Figure(figsize=(8, 3 * len(names)), layout="constrained")
        for name, axes in zip(names, np.atleast_1d(figure.subplots(len(names), 1, sharex=True))):
            rows = sorted((r for r in self.revisions if name in r.metrics), key=lambda r: r.step)
            errors = [r.metrics.get(f"{name}.error", 0.0) for r in rows]
            axes.errorbar([r.step for r in rows], [r.metrics[name] for r in rows], errors, marker="o", markersize=3)
            axes.set_xscale("symlog", linthresh=1)  # Pythia's first steps are 0, 1, 2, 4, 8 ...
            axes.set_ylabel(name)
            axes.grid(alpha=0.3)
        axes.set_xlabel("step")
        figure.savefig(path_of("path", path))


def pythia_steps() -> list[str]:
    """The 154 revisions of each Pythia model on the hub, from step0 to step143000."""
    steps = [0, *(2**i for i in range(10)), *range(1000, 143001, 1000)]
    return [f"step{step}" for step in steps]


def sweep(
    revisions: Iterable[str | os.PathLike[str]],
    metrics: Mapping[str, Metric],
    *,
    model: str | None = None,
    out: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    device: object = "cpu",
    activation: str | None = None,
    slots: int | None = None,
    capacity: int | None = None,
    impl: str = "auto",
    then: Callable[[Revision], object] | None = None,
) -> Sweep:
    """Measures each revision of a model. The next one is downloaded, read and hashed while this one runs.

    revisions: directories; or, with `model`, a name of the hub such as "EleutherAI/pythia-70m", revisions of it such as
    "step1000". The step of a revision is the number behind "step" in its name, else the last number, else its place.
    metrics: functions of a model that return a number, or several by name (a mapping or a named tuple, such as
    :class:`Perplexity`), which are "name.theirs" in the results. A revision that cannot be loaded, or whose metric
    raises ValueError, OSError, MemoryError, NotImplementedError or CfError, has the error in its row, and the sweep
    goes on; any other exception ends it.

    Each row has the SHA-256 of every tensor with the files that it was read from. `faults` of the result names
    revisions that failed, that have another config than the first, that share matrices with another revision or another
    module, or whose weights lie far from those of the steps before and after.

    out: a JSON file for the rows, written anew after each revision. The same call goes on where an earlier one was
    interrupted: rows without an error are kept. Metrics must have the names, and `settings` (what else the results
    depend on, JSON's types) the values of the earlier call. `then` is called with each new row, before it is written.

    device, activation, slots, capacity, impl: as :func:`cf_ops.load` takes them. The weights of a revision take the place
    of those before (:meth:`Model.swap`), so that a GPU's memory and what was prepared there are kept; a metric is given
    the same model each time. A revision with another config is loaded anew.
    """
    if is_one(revisions):
        raise TypeError(f"revisions: expected several, got one {kind_of(revisions)}")
    names = [path_of("revisions", r) for r in revisions]
    if len(set(names)) < len(names):
        raise ValueError(f"revisions: expected each once, got {next(n for n in names if names.count(n) > 1)!r} twice")
    for name, metric in metrics.items():
        if not callable(metric):
            raise TypeError(f"metrics: expected functions of a model, got {kind_of(metric)} for {name!r}")
    loads = _Loads(model, device, activation, slots, capacity, impl)
    rows = [Revision(name, _core.step_of(name, place)) for place, name in enumerate(names)]
    about = {"program": _MADE_FOR, "model": model, "metrics": list(metrics), "settings": dict(settings or {})}
    path = None if out is None else path_of("out", out)
    kept = {} if path is None else _read_rows(path, about)
    made = Sweep([kept.get(row.name, row) for row in rows])
    made.faults = faults(made.revisions)
    todo = [row for row in made.revisions if row.name not in kept]
    with Progress("sweep") as progress, closing(loads):
        coming = _Read(loads, todo[0]) if todo else None
        for place, row in enumerate(todo):
            assert coming is not None
            read = coming.result()
            coming = _Read(loads, todo[place + 1]) if place + 1 < len(todo) else None
            _measure(row, read, loads, metrics)
            if then is not None:
                then(row)
            made.faults = faults(made.revisions)
            if path is not None:
                done = [r for r in made.revisions if r.sha256 or r.error is not None]
                done = [*(r for r in done if r not in todo[place + 1 :]), *(r for r in kept.values() if r not in done)]
                write_json(path, about | {"faults": list(map(str, made.faults)), "revisions": [r.json() for r in done]})
            progress.set(len(made.revisions) - len(todo) + place + 1, len(made.revisions))
    return made


class _Read:
    """A revision that a thread reads. The thread ends with the process, whatever it does."""

    def __init__(self, loads: _Loads, row: Revision) -> None:
        self._loads, self._row = loads, row
        self._read: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> Any:
        """What was read, or the error, once it is there."""
        self._thread.join()
        if isinstance(self._read, Exception) and not isinstance(self._read, _ERRORS):
            raise self._read
        return self._read

    def _run(self) -> None:
        try:
            self._read = self._loads.read(self._row)
        except Exception as error:
            self._read = error


class _Loads:
    """Reads revisions, and makes models of them on one device."""

    def __init__(
        self,
        model: str | None,
        device: object,
        activation: str | None,
        slots: int | None,
        capacity: int | None,
        impl: str,
    ) -> None:
        self._model = None if model is None else text_of("model", model)
        self._index = cuda_index(device)
        self._activation = activation
        if self._index is None:
            if (slots, capacity, impl) != (None, None, "auto"):
                raise ValueError("slots, capacity, impl: expected them with device='cuda' alone")
            if activation not in (None, "float32", "float64"):
                raise ValueError(f"activation: expected float32 or float64, got {activation!r}")
        else:
            if activation is not None:
                raise ValueError(f"activation: expected it with device='cpu' alone, got {activation!r} for a GPU")
            _core.check_cuda_device(self._index)
        self._running: Model | None = None
        self._slots = 1 if slots is None else integer("slots", slots, 1, 2**31 - 1)
        self._capacity = CAPACITY if capacity is None else integer("capacity", capacity, 1, 2**31 - 1)
        self._impl = text_of("impl", impl)

    def read(self, row: Revision) -> tuple[_core.Weights, list[int]]:
        """Downloads what is missing, takes the checksums and maps the weights, whose values are looked at."""
        begun = time.perf_counter()
        if self._model is None:
            row.directory = os.path.realpath(row.name)
        else:
            row.directory = find_model(self._model, row.name)
        identify(row)
        weights = open_weights(row.directory, for_gpu=self._index is not None, progress=False)
        row.load_s = time.perf_counter() - begun
        return weights

    def model(self, row: Revision, weights: _core.Weights, eos_token_ids: list[int]) -> Model:
        """The model with a revision's weights."""
        begun = time.perf_counter()
        if self._running is not None:
            try:
                self._running._take(weights, row.directory, eos_token_ids)
                row.swap_s = time.perf_counter() - begun
                return self._running
            except (ValueError, NotImplementedError):
                self.close()  # another config, or a call that a metric has left behind
            except BaseException:
                self.close()
                raise
        if self._index is None:
            self._running = Model(weights, row.directory, self._activation or "float32", eos_token_ids)
        else:
            self._running = on_device(
                weights,
                row.directory,
                eos_token_ids,
                self._index,
                slots=self._slots,
                capacity=self._capacity,
                impl=self._impl,
            )
            weights.drop_values()
        row.swap_s = time.perf_counter() - begun
        return self._running

    def close(self) -> None:
        """Gives the model's memory back."""
        if self._running is not None:
            self._running.close()
        self._running = None


def _measure(row: Revision, read: Any, loads: _Loads, metrics: Mapping[str, Metric]) -> None:
    """Fills a revision's row."""
    begun = time.perf_counter()
    row.error, row.metrics = None, {}
    if isinstance(read, BaseException):
        row.error = _message(read)
        return
    try:
        model = loads.model(row, *read)
        for name, metric in metrics.items():
            measured = metric(model)
            if hasattr(measured, "_asdict"):  # a Perplexity
                measured = measured._asdict()
            parts = measured if isinstance(measured, Mapping) else {"": measured}
            for part, value in parts.items():
                row.metrics[f"{name}.{part}" if part else name] = real(f"metric {name}", value)
    except _ERRORS as error:
        row.error, row.metrics = _message(error), {}
        if isinstance(error, _core.CfError):
            loads.close()  # the next revision gets a new model: what this one's device holds is not known
    row.run_s = time.perf_counter() - begun


def _message(error: BaseException) -> str:
    shown = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    return " ".join(shown.split()) or type(error).__name__


def _read_rows(path: str, about: Mapping[str, Any]) -> dict[str, Revision]:
    """The rows without an error that lie at `path`, by name."""
    if not os.path.exists(path):
        return {}
    found = read_json(path)
    for name, value in about.items():
        if found.get(name) != value:
            raise ValueError(f"{path}: expected a sweep with {name} {value!r}, to go on with, got {found.get(name)!r}")
    return {row.name: row for row in _sweep_of(path, found).revisions if row.error is None}


def _sweep_of(path: str, found: Mapping[str, Any]) -> Sweep:
    """The sweep of a file's JSON."""
    known = {f.name for f in fields(Revision)}
    try:
        rows = [Revision(**{name: value for name, value in row.items() if name in known}) for row in found["revisions"]]
        return Sweep(rows, faults(rows))
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{path}: expected the rows of a sweep") from None
