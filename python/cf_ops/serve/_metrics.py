"""A worker's numbers for Prometheus."""

from __future__ import annotations

import prometheus_client as prometheus  # type: ignore[import-not-found, unused-ignore]

_SECONDS = [0.001 * 2**n for n in range(17)]  # 1 ms to 65 s
_SECONDS_AN_ID = [0.0001 * 2**n for n in range(15)]  # 0.1 ms to 1.6 s


class Metrics:
    """What a batcher counts, in a registry of its own. pages: those of the cache, 0 where it has none."""

    def __init__(self, slots: int, pages: int = 0) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        prometheus.Gauge("cf_ops_slots", "Sequences that run at once.", registry=registry).set(slots)
        self._running = prometheus.Gauge("cf_ops_slots_used", "Sequences that run.", registry=registry)
        self._waiting = prometheus.Gauge("cf_ops_queue_length", "Sequences that wait for a slot.", registry=registry)
        self._ids = prometheus.Counter(
            "cf_ops_ids", "Ids that were made; rate() gives ids a second.", registry=registry
        )
        self._pages = pages
        self._pages_used: prometheus.Gauge | None = None
        if pages:
            prometheus.Gauge("cf_ops_pages", "Pages of the cache.", registry=registry).set(pages)
        self._first = prometheus.Histogram(
            "cf_ops_ttft_seconds",
            "From a request's arrival in the worker to its first id.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._later = prometheus.Histogram(
            "cf_ops_tpot_seconds",
            "A sequence's mean time from one id to the next.",
            buckets=_SECONDS_AN_ID,
            registry=registry,
        )

    def load(self, running: int, waiting: int) -> None:
        self._running.set(running)
        self._waiting.set(waiting)

    def pages(self, free: int) -> None:
        if self._pages_used is None:  # a decoder that does not know has no such number
            self._pages_used = prometheus.Gauge(
                "cf_ops_pages_used", "Pages that sequences have; one that several share counts once.",
                registry=self.registry,
            )  # fmt: skip
        self._pages_used.set(self._pages - free)

    def first_id(self, seconds: float) -> None:
        self._first.observe(seconds)

    def ended(self, ids: int, seconds: float) -> None:
        if ids > 1:
            self._later.observe(seconds / (ids - 1))

    def ids(self, count: int) -> None:
        self._ids.inc(count)
