"""Many requests and one decoder: a thread steps it, and each id goes to the request that waits for it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

Logprob = tuple[float, list[tuple[int, float]]]  # of an id, and the likeliest ids with theirs


class Decoder(Protocol):
    """What a batcher needs of :class:`cf_ops._core.Decoder`."""

    @property
    def add(self) -> Callable[..., int]: ...
    @property
    def free_pages(self) -> int | None: ...
    def decode(self, steps: int = 1) -> list[tuple[int, int]]: ...
    def ended(self) -> list[int]: ...
    def finish(self, sequence: int) -> str: ...
    def status(self, sequence: int) -> str | None: ...
    def logprobs(self, sequence: int, first: int = 0) -> list[Logprob]: ...
    def drop(self, sequence: int) -> None: ...
    def close(self) -> None: ...


class Observer(Protocol):
    """Who counts. All calls come in the event loop's thread."""

    def load(self, running: int, waiting: int) -> None:
        """How many sequences are in slots, and how many wait for one."""

    def pages(self, free: int) -> None:
        """How many pages of the cache no sequence has; not called where the decoder does not know."""

    def first_id(self, seconds: float) -> None:
        """A sequence has its first id, so long after it was handed in."""

    def ended(self, ids: int, seconds: float) -> None:
        """A sequence has ended with so many ids, so long after its first one."""

    def ids(self, count: int) -> None:
        """So many ids were made."""


class Full(Exception):
    """As many sequences wait as may."""


class Fault(Exception):
    """The decoder has failed and serves no more."""


class Piece(NamedTuple):
    """New ids of a choice. finish: None while it runs, then "stop", "length", "refused" (before its first id) or
    "failed"; `error` says how the last two came. logprobs: of each of the ids, where they were asked for."""

    choice: int
    ids: list[int]
    finish: str | None = None
    error: str | None = None
    logprobs: list[Logprob] | None = None

    def then(self, later: Piece) -> Piece:
        """This piece of a choice that runs, and the one behind it, in one."""
        both = None if self.logprobs is None else self.logprobs + (later.logprobs or [])
        return later._replace(ids=self.ids + later.ids, logprobs=both)


@dataclasses.dataclass(eq=False)
class Job:
    """A sequence: a choice of a request. options: the arguments of Decoder.add(). pieces: the request's, where this
    sequence's come."""

    choice: int
    prompt: list[int]
    options: dict[str, Any]
    pieces: asyncio.Queue[Piece]
    handed_in: float = 0.0
    first_at: float = 0.0
    count: int = 0  # the ids that were handed out
    made: int = 0  # the ids that the decoder has made; its thread's own


class Batcher:
    """Runs jobs in a decoder of `slots` slots. At most `queue` more wait for a slot.

    Its methods are for the event loop's thread. Its own thread alone uses the decoder: a turn takes what was handed in
    and cancelled since the last one, then makes one step. `on_fault` is called once, where a step fails.
    """

    def __init__(
        self, decoder: Decoder, slots: int, queue: int, observer: Observer, on_fault: Callable[[str], None]
    ) -> None:
        self._decoder = decoder
        self._slots, self._most = slots, slots + queue
        self._observer = observer
        self._on_fault = on_fault
        self._loop = asyncio.get_running_loop()
        self._live: set[Job] = set()
        self._fault: str | None = None
        # What both threads use is used with the condition held.
        self._changed = threading.Condition()
        self._added: list[Job] = []
        self._cancelled: list[Job] = []
        self._closing = False
        self._jobs: dict[int, Job] = {}  # by the decoder's number of a sequence; the thread's own
        self._free_pages = decoder.free_pages  # that the observer knows
        if self._free_pages is not None:
            observer.pages(self._free_pages)
        self._thread = threading.Thread(target=self._run, name="cf_ops decoder", daemon=True)
        self._thread.start()

    def submit(self, jobs: list[Job]) -> None:
        """Takes the jobs of a request, all or none. Raises Full and Fault."""
        if self._fault is not None:
            raise Fault(self._fault)
        if len(self._live) + len(jobs) > self._most:
            raise Full(
                f"expected at most {self._most} sequences, of which {self._slots} run and the others wait, got "
                f"{len(jobs)} more beside {len(self._live)}"
            )
        now = time.perf_counter()
        for job in jobs:
            job.handed_in = now
        self._live.update(jobs)
        self._observe_load()
        with self._changed:
            self._added += jobs
            self._changed.notify()

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Ends those of the jobs that have not ended. Their slots are free before the next step."""
        live = [job for job in jobs if job in self._live]
        if not live:
            return
        self._live.difference_update(live)
        self._observe_load()
        with self._changed:
            self._cancelled += live
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread after its step and gives the decoder's slots back. What has not ended gets no more pieces."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _observe_load(self) -> None:
        running = min(len(self._live), self._slots)
        self._observer.load(running, len(self._live) - running)

    def _run(self) -> None:
        while (work := self._next_work()) is not None:
            try:
                made = self._turn(*work)
            except Exception as error:  # of the device: nothing can be said of any sequence
                self._loop.call_soon_threadsafe(self._fail, f"the decoder has failed: {error}")
                break
            free_pages = self._decoder.free_pages
            if made or free_pages != self._free_pages:
                self._free_pages = free_pages
                self._loop.call_soon_threadsafe(self._hand_out, made, free_pages)
        self._decoder.close()

    def _next_work(self) -> tuple[list[Job], list[Job]] | None:
        """The jobs that were handed in and cancelled since the last turn; None where the thread ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._added or self._cancelled or self._jobs)
            if self._closing:
                return None
            work = self._added, self._cancelled
            self._added, self._cancelled = [], []
            return work

    def _turn(self, added: list[Job], cancelled: list[Job]) -> list[tuple[Job, Piece]]:
        made: list[tuple[Job, Piece]] = []
        for job in added:
            try:
                self._jobs[self._decoder.add(job.prompt, **job.options)] = job
            except (ValueError, TypeError, NotImplementedError, OverflowError) as refusal:
                made.append((job, Piece(job.choice, [], "refused", str(refusal))))
        if cancelled:
            gone = {id(job) for job in cancelled}
            for sequence in [s for s, job in self._jobs.items() if id(job) in gone]:
                self._drop(sequence)
        if not self._jobs:
            return made
        new: dict[int, list[int]] = {}
        for sequence, token in self._decoder.decode(1):
            new.setdefault(sequence, []).append(token)
        for sequence in self._decoder.ended():  # also those that failed, which have no new id
            finish, error = self._decoder.finish(sequence), self._decoder.status(sequence)
            piece = self._piece(sequence, new.pop(sequence, []))
            made.append((self._drop(sequence), piece._replace(finish=finish, error=error)))
        made += [(self._jobs[sequence], self._piece(sequence, ids)) for sequence, ids in new.items()]
        return made

    def _piece(self, sequence: int, ids: list[int]) -> Piece:
        job = self._jobs[sequence]
        first, job.made = job.made, job.made + len(ids)
        asked = job.options.get("logprobs") is not None and ids
        return Piece(job.choice, ids, logprobs=self._decoder.logprobs(sequence, first) if asked else None)

    def _drop(self, sequence: int) -> Job:
        self._decoder.drop(sequence)
        return self._jobs.pop(sequence)

    def _hand_out(self, made: list[tuple[Job, Piece]], free_pages: int | None) -> None:
        if free_pages is not None:
            self._observer.pages(free_pages)
        now = time.perf_counter()
        for job, piece in made:
            if job not in self._live:  # cancelled during the step
                continue
            if piece.ids and job.count == 0:
                job.first_at = now
                self._observer.first_id(now - job.handed_in)
            job.count += len(piece.ids)
            self._observer.ids(len(piece.ids))
            if piece.finish is not None:
                self._live.remove(job)
                self._observer.ended(job.count, now - job.first_at)
            job.pieces.put_nowait(piece)
        self._observe_load()

    def _fail(self, fault: str) -> None:
        self._fault = fault
        for job in self._live:
            job.pieces.put_nowait(Piece(job.choice, [], "failed", fault))
        self._live.clear()
        self._observe_load()
        self._on_fault(fault)
