"""A worker's numbers for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # type: ignore[import-not-found, unused-ignore]

_SECONDS = [0.001 * 2**n for n in range(17)]  # 1 ms to 65 s
_SECONDS_AN_ID = [0.0001 * 2**n for n in range(15)]  # 0.1 ms to 1.6 s


class Metrics:
    """What a batcher counts, in a registry of its own."""

    def __init__(self, slots: int) -> None:
        self.registry = CollectorRegistry()
        Gauge("cf_ops_slots", "Sequences that run at once.", registry=self.registry).set(slots)
        self._running = Gauge("cf_ops_slots_used", "Sequences that run.", registry=self.registry)
        self._waiting = Gauge("cf_ops_queue_length", "Sequences that wait for a slot.", registry=self.registry)
        self._ids = Counter("cf_ops_ids", "Ids that were made; rate() gives ids a second.", registry=self.registry)
        self._first = Histogram(
            "cf_ops_ttft_seconds",
            "From a request's arrival in the worker to its first id.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._later = Histogram(
            "cf_ops_tpot_seconds",
            "A sequence's mean time from one id to the next.",
            buckets=_SECONDS_AN_ID,
            registry=self.registry,
        )

    def load(self, running: int, waiting: int) -> None:
        self._running.set(running)
        self._waiting.set(waiting)

    def first_id(self, seconds: float) -> None:
        self._first.observe(seconds)

    def ended(self, ids: int, seconds: float) -> None:
        if ids > 1:
            self._later.observe(seconds / (ids - 1))

    def ids(self, count: int) -> None:
        self._ids.inc(count)
