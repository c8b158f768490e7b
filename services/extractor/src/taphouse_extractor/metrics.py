"""Prometheus metrics, made anew from store, Redis and engine at every scrape.

Work-horses are forked for each batch, so what they count in memory is gone with them: a batch's durations and
reasons are in its outcome. Totals are over what the store holds, so they outlast every process; only refused
requests are counted in memory, by each API process its own.

Labels have few values: no ids, no prompts, no free text with numbers in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from taphouse_extractor.overview import Figures

__all__ = ["Moment", "Snapshot", "render"]

TOTALS = (
    ("samples", "succeeded", "Samples sealed"),
    ("failed_rows", "failed", "Rows that made no sample"),
    ("skipped_rows", "skipped", "Rows left out: too long, or of a cancelled job"),
    ("tokens", "tokens", "Rows of hidden states sealed"),
    ("shards", "shards", "Shards sealed"),
)
LATENCY = (
    ("itl", 0.5, "itl_p50"),
    ("itl", 0.95, "itl_p95"),
    ("ttft", 0.5, "ttft_p50"),
    ("ttft", 0.95, "ttft_p95"),
)


@dataclass(frozen=True)
class Moment:
    """What is rendered. `refused` are answers over 399 by code, `lag_s` seconds by consumer."""

    figures: Figures
    free_bytes: int
    refused: Mapping[str, int]
    lag_s: Mapping[str, float]


class Snapshot(Collector):
    """The metrics of one moment."""

    def __init__(self, moment: Moment) -> None:
        self._figures, self._queue, self._tally = moment.figures, moment.figures.queue, moment.figures.tally
        self._free_bytes, self._refused, self._lag_s = moment.free_bytes, moment.refused, moment.lag_s

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        for name, field, text in TOTALS:
            yield CounterMetricFamily(f"taphouse_{name}", text, value=getattr(self._figures, field))
        yield _labelled("taphouse_batches", "Batches by state", "state", self._queue.depth.model_dump())
        jobs = {state.value: count for state, count in self._queue.jobs.items()}
        yield _labelled("taphouse_jobs", "Jobs by state", "state", jobs)
        yield GaugeMetricFamily("taphouse_rows_left", "Rows without an outcome", value=self._queue.rows_left)
        yield GaugeMetricFamily(
            "taphouse_paused", "1 while nothing is fed", value=self._queue.paused is not None
        )
        text = "Jobs that wait for an engine that can serve them"
        yield GaugeMetricFamily("taphouse_unfit_jobs", text, value=self._queue.unfit_jobs)
        workers = {"busy": 0, "idle": 0}
        for worker in self._queue.workers:
            workers[worker.state] = workers.get(worker.state, 0) + 1
        yield _labelled("taphouse_workers", "Worker processes alive", "state", workers)
        yield GaugeMetricFamily("taphouse_ledger_head", "Newest ledger entry", value=self._queue.ledger_head)
        lags = {c.name: c.lag for c in self._queue.consumers if c.lag is not None}
        yield _labelled(
            "taphouse_consumer_lag_entries", "Ledger entries ahead of a consumer", "consumer", lags
        )
        yield from self._unconsumed()
        yield GaugeMetricFamily(
            "taphouse_store_free_bytes", "Free space of the store", value=self._free_bytes
        )
        yield _labelled(
            "taphouse_consumer_lag_seconds",
            "Age of the oldest ledger entry that a consumer has not reached",
            "consumer",
            self._lag_s,
        )
        yield from self._batches()
        yield from self._engines()
        yield from self._governor()

    def _unconsumed(self) -> Iterator[Metric]:
        found = self._queue.unconsumed
        if found is None:
            return
        yield GaugeMetricFamily(
            "taphouse_unconsumed_shards",
            "Shards that the slowest consumer has not reached",
            value=found.shards,
        )
        yield GaugeMetricFamily("taphouse_unconsumed_bytes", "Bytes of those shards", value=found.bytes)
        if found.bound_bytes is not None:
            yield GaugeMetricFamily(
                "taphouse_unconsumed_bound_bytes", "Extraction waits at so many", value=found.bound_bytes
            )

    def _batches(self) -> Iterator[Metric]:
        stages = HistogramMetricFamily(
            "taphouse_batch_stage_seconds", "What finished batches' time went into", labels=["stage"]
        )
        for name, durations in self._tally.stages.items():
            stages.add_metric([name], durations.buckets(), durations.sum_s)
        yield stages
        for name, text, label, values in (
            ("shard_bytes", "Bytes of sealed shards", "codec", self._tally.bytes),
            ("raw_bytes", "Bytes of the same states before compression", "codec", self._tally.raw_bytes),
            ("engine_samples", "Samples sealed, by the engine that made them", "engine", self._tally.engines),
            ("rejected_rows", "Rows that made no sample, by kind of reason", "reason", self._tally.rejected),
            ("refused_requests", "Requests answered with an error, by its code", "code", self._refused),
        ):
            family = CounterMetricFamily(f"taphouse_{name}", text, labels=[label])
            for key, value in sorted(values.items()):
                family.add_metric([key], value)
            yield family

    def _engines(self) -> Iterator[Metric]:
        capture = {engine.url: engine.capture == "on" for engine in self._queue.engines}
        yield _labelled("taphouse_engine_capture", "1 while the engine captures", "engine", capture)
        aside = {engine.url: engine.set_aside is not None for engine in self._queue.engines}
        text = "1 while workers prefer other engines: it failed a batch lately"
        yield _labelled("taphouse_engine_set_aside", text, "engine", aside)
        for name, text in (
            ("in_flight", "Captures in flight"),
            ("held", "Extraction's requests that its scheduler holds back for production"),
        ):
            told = {engine.url: getattr(engine, name) for engine in self._queue.engines}
            known = {url: count for url, count in told.items() if count is not None}
            yield _labelled(f"taphouse_engine_{name}", text, "engine", known)
        family = GaugeMetricFamily(
            "taphouse_engine_latency_seconds",
            "Recent latency of production's requests, or of all where the engine can't tell them apart",
            labels=["engine", "kind", "quantile", "requests"],
        )
        for engine in self._queue.engines:
            for kind, quantile, field in LATENCY:
                value = getattr(engine.latency, field) if engine.latency else None
                if engine.latency is not None and value is not None:
                    family.add_metric([engine.url, kind, str(quantile), engine.latency.requests], value)
        yield family

    def _governor(self) -> Iterator[Metric]:
        governor = self._queue.governor
        if governor is None:
            return
        yield InfoMetricFamily(
            "taphouse_governor",
            "What governs, and why; # stands for numbers",
            value={"mode": governor.mode.value, "reason": _template(governor.reason)},
        )
        if governor.busy_ms is not None:
            yield GaugeMetricFamily(
                "taphouse_governor_limit_seconds",
                "What extraction may add to a step while production is there",
                value=governor.busy_ms / 1000,
            )
        if governor.slowdown is not None:
            yield GaugeMetricFamily(
                "taphouse_governor_slowdown_ratio",
                "Production's p95 while extraction runs, over what it is held to",
                value=governor.slowdown,
            )
        yield GaugeMetricFamily(
            "taphouse_governor_stopped", "1 while extraction is stopped", value=governor.stopped
        )


def _labelled(
    name: str, text: str, label: str, values: Mapping[str, int] | Mapping[str, float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _template(reason: str) -> str:
    """A reason as one of few texts: its first part, without numbers."""
    return re.sub(r"\b\d+(\.\d+)?(e-?\d+)?\b", "#", reason.partition(";")[0])


def render(moment: Moment) -> bytes:
    """Prometheus text of one moment."""
    registry = CollectorRegistry()
    registry.register(Snapshot(moment))
    return generate_latest(registry)
