"""Random schedules of a decoder: sequences come, fork, share steps, wait for pages and leave, and each is given what it
has alone, bit for bit. Hypothesis draws the schedules, and shrinks one that has a fault."""

from __future__ import annotations

import functools
import math
import pathlib
from collections import Counter
from typing import Any, ClassVar

import pytest

import cf_ops

pytest.importorskip("hypothesis", reason="hypothesis is missing")

from hypothesis import settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    rule,
    run_state_machine_as_test,
)

DIRECTORY = pathlib.Path(__file__).resolve().parents[2] / "data" / "checkpoints" / "neox-d80"
CAPACITY, MOST_NEW = 32, 8
# The same schedules at each run.
SETTINGS = settings(max_examples=120, stateful_step_count=30, deadline=None, database=None, derandomize=True)
Prompt = tuple[int, ...]


@functools.cache
def model_of(**options: Any) -> cf_ops.Model:
    return cf_ops.load(DIRECTORY, invariant=True, **options)


def options_of(id: int, count: int) -> dict[str, Any]:
    """How a sequence is continued: the first ones greedily, the others by random numbers of their own."""
    return {"id": id, "max_new_tokens": count, "temperature": 1.2 if id else 0.0, "seed": 5, "logprobs": 1}


@functools.cache
def alone(prompt: Prompt, id: int) -> tuple[list[int], Any]:
    """The ids of a sequence that has a decoder to itself, and their log-probabilities."""
    decoder = model_of(step_tokens=0).decoder(1, CAPACITY)
    sequence = decoder.add(prompt, **options_of(id, MOST_NEW))
    while decoder.active:
        decoder.decode(MOST_NEW)
    return decoder.ids(sequence), decoder.logprobs(sequence)


class Schedule(RuleBasedStateMachine):
    """A decoder, its sequences that were not dropped, and what it told of them."""

    seen: ClassVar[Counter[str]] = Counter()  # what happened in all schedules
    sequences = Bundle("sequences")
    ids, counts = st.integers(0, 2), st.integers(1, MOST_NEW)

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[int, tuple[Prompt, int, int]] = {}
        self.told: dict[int, list[int]] = {}

    @initialize(
        slots=st.integers(1, 5),
        step_tokens=st.none() | st.integers(0, 24),
        page_entries=st.none() | st.integers(1, 8),  # None: a contiguous cache
        more_pages=st.integers(0, 3),  # than one full sequence has
        share_prefixes=st.booleans(),
    )
    def begin(
        self, slots: int, step_tokens: int | None, page_entries: int | None, more_pages: int, share_prefixes: bool
    ) -> None:
        options: dict[str, Any] = {"step_tokens": step_tokens}
        if page_entries is not None:
            pages = math.ceil(CAPACITY / page_entries) + more_pages
            options |= {"pages": pages, "page_entries": page_entries, "share_prefixes": share_prefixes}
        self.decoder = model_of(**options).decoder(slots, CAPACITY)

    def added(self, prompt: Prompt, id: int, count: int, **more: Any) -> int:
        sequence = self.decoder.add(prompt, **options_of(id, count), **more)
        self.living[sequence], self.told[sequence] = (prompt, id, count), []
        return sequence

    @rule(target=sequences, length=st.integers(1, 23), first=st.integers(0, 1), id=ids, count=counts)
    def add(self, length: int, first: int, id: int, count: int) -> int:
        # One of two prompts; those of other lengths begin with the same ids.
        return self.added(tuple((11 * first + i * i + 3) % 31 for i in range(length)), id, count)

    @rule(target=sequences, of=sequences, id=ids, count=counts)
    def fork(self, of: int, id: int, count: int) -> int:
        self.seen["forks"] += 1
        return self.added(self.living[of][0], id, count, same_prompt=of)

    @rule()
    def prefill(self) -> None:
        self.hear(self.decoder.prefill())

    @rule(steps=st.integers(1, 6))
    def decode(self, steps: int) -> None:
        self.hear(self.decoder.decode(steps))

    @rule(sequence=consumes(sequences))
    def drop(self, sequence: int) -> None:
        self.check(sequence)
        self.decoder.drop(sequence)
        del self.living[sequence]

    def hear(self, pairs: list[tuple[int, int]]) -> None:
        for sequence, id in pairs:
            self.told[sequence].append(id)
        for sequence in self.living:
            status = self.decoder.status(sequence)
            if status is None:
                continue
            # Out of pages: the sequence goes on later.
            assert "pages: expected free ones" in status
            assert self.decoder.finish(sequence) == "running"
            self.seen["given up"] += 1
            self.seen["resumed"] += bool(self.told[sequence])

    def check(self, sequence: int) -> None:
        """A sequence has its first ids, with their log-probabilities, and ends with the last."""
        (prompt, id, count), told = self.living[sequence], self.told[sequence]
        ids, logprobs = alone(prompt, id)
        assert self.decoder.ids(sequence) == told == ids[: len(told)]
        assert self.decoder.logprobs(sequence) == logprobs[: len(told)]
        assert len(told) <= count
        assert self.decoder.finish(sequence) == ("length" if len(told) == count else "running")

    def teardown(self) -> None:
        """All sequences end."""
        for _ in range(1000):
            if not self.living or not self.decoder.active:
                break
            self.hear(self.decoder.decode())
        for sequence, (_, _, count) in self.living.items():
            self.check(sequence)
            assert len(self.told[sequence]) == count


def test_in_random_schedules_every_sequence_gets_what_it_has_alone() -> None:
    Schedule.seen.clear()
    run_state_machine_as_test(Schedule, settings=SETTINGS)
    assert Schedule.seen["forks"] > 50
    assert Schedule.seen["given up"] > 10
    assert Schedule.seen["resumed"] > 5


class Faulty(Schedule):
    """Forks are given what another sequence's random numbers give."""

    operations: ClassVar[list[str]] = []  # those of the last schedule

    def __init__(self) -> None:
        super().__init__()
        self.operations.clear()

    def added(self, prompt: Prompt, id: int, count: int, **more: Any) -> int:
        self.operations.append("fork" if more else "add")
        sequence = super().added(prompt, id + len(more), count, **more)
        self.living[sequence] = (prompt, id, count)
        return sequence


def test_a_fault_is_found_and_its_schedule_shrunk() -> None:
    few = settings(SETTINGS, stateful_step_count=4, report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Faulty, settings=few)
    assert Faulty.operations == ["add", "fork"]
