"""Latency of the engine's recent requests: production's own from the tap's status, else of all from vLLM.

vLLM labels its histograms in `/metrics` by model and engine only, so production's requests and extraction's
are in them together; they serve engines whose tap does not time the classes apart.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from taphouse.wire import Latency
from taphouse_extractor.governor.histograms import Counts, Scale, grown, pooled
from taphouse_extractor.governor.report import LatencySection

__all__ = ["LatencyWindow", "ProductionWindow", "Scrape", "parse_metrics", "quantile"]

ITL = "vllm:inter_token_latency_seconds"
TTFT = "vllm:time_to_first_token_seconds"
GAUGES = {"vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting"}


@dataclass(frozen=True)
class Scrape:
    """One look: cumulative counts by upper bound in seconds for both histograms, and the two gauges."""

    at: float
    itl: dict[float, float]
    ttft: dict[float, float]
    running: float | None
    waiting: float | None


def parse_metrics(text: str, at: float) -> Scrape:
    """Read a scrape, summed over models and engines. Raises ValueError when it isn't Prometheus text."""
    buckets: dict[str, dict[float, float]] = {ITL: {}, TTFT: {}}
    gauges: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removesuffix("_bucket")
            if name in buckets and "le" in sample.labels:
                bound = float(sample.labels["le"])
                buckets[name][bound] = buckets[name].get(bound, 0.0) + sample.value
            elif sample.name in GAUGES:
                gauge = GAUGES[sample.name]
                gauges[gauge] = gauges.get(gauge, 0.0) + sample.value
    return Scrape(at, buckets[ITL], buckets[TTFT], gauges.get("running"), gauges.get("waiting"))


def quantile(counts: dict[float, float], q: float) -> float | None:
    """The `q` quantile in seconds of a histogram (count by upper bound, cumulative); None when it is empty.

    Interpolates within a bucket, as Prometheus does; a value past the last finite bound is given as that
    bound.
    """
    bounds = sorted(counts)
    total = counts[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    low, below = 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= q * total:
            if math.isinf(bound):
                return low
            inside = counts[bound] - below
            return low + (bound - low) * ((q * total - below) / inside if inside else 1.0)
        low, below = bound, counts[bound]
    return low


class LatencyWindow:
    """Differences between scrapes, over the last `window_s` seconds."""

    def __init__(self, window_s: float = 60.0) -> None:
        self._window_s = window_s
        self._scrapes: deque[Scrape] = deque()

    def add(self, text: str) -> Latency:
        """Add a scrape and return the window's quantiles. Raises ValueError for text that can't be read."""
        scrape = parse_metrics(text, time.monotonic())
        if self._scrapes and _total(scrape.ttft) < _total(self._scrapes[-1].ttft):
            self._scrapes.clear()  # the engine was restarted
        self._scrapes.append(scrape)
        while len(self._scrapes) > 2 and self._scrapes[1].at <= scrape.at - self._window_s:
            self._scrapes.popleft()
        first = self._scrapes[0]
        itl, ttft = _difference(scrape.itl, first.itl), _difference(scrape.ttft, first.ttft)
        return Latency(
            window_s=scrape.at - first.at,
            ttft_p50=quantile(ttft, 0.5),
            ttft_p95=quantile(ttft, 0.95),
            itl_p50=quantile(itl, 0.5),
            itl_p95=quantile(itl, 0.95),
            requests_running=scrape.running,
            requests_waiting=scrape.waiting,
        )


def _total(counts: dict[float, float]) -> float:
    return max(counts.values(), default=0.0)


def _difference(now: dict[float, float], before: dict[float, float]) -> dict[float, float]:
    return {bound: count - before.get(bound, 0.0) for bound, count in now.items()}


class ProductionWindow:
    """Production's own latency over the last `window_s` seconds, from what the tap counts since its start."""

    def __init__(self, window_s: float = 60.0) -> None:
        self._window_s = window_s
        self._looks: deque[tuple[float, str | None, LatencySection]] = deque()

    def add(self, section: LatencySection, start_id: str | None) -> Latency:
        """Add a look and return the window's quantiles; an engine that was restarted begins anew."""
        at = time.monotonic()
        if self._looks and (self._looks[-1][1], self._looks[-1][2].scale) != (start_id, section.scale):
            self._looks.clear()
        self._looks.append((at, start_id, section))
        while len(self._looks) > 2 and self._looks[1][0] <= at - self._window_s:
            self._looks.popleft()
        first = self._looks[0][2].production
        itl = grown(section.production.itl, first.itl)
        ttft = grown(section.production.ttft, first.ttft)
        if itl is None or ttft is None:
            self._looks.clear()
            return self.add(section, start_id)
        return _quantiles(section, pooled(itl), pooled(ttft), at - self._looks[0][0])


def _quantiles(section: LatencySection, itl: Counts, ttft: Counts, window_s: float) -> Latency:
    scale: Scale = section.scale
    return Latency(
        window_s=window_s,
        requests="production",
        ttft_p50=scale.quantile(ttft, 0.5),
        ttft_p95=scale.quantile(ttft, 0.95),
        itl_p50=scale.quantile(itl, 0.5),
        itl_p95=scale.quantile(itl, 0.95),
        requests_running=float(section.production.running),
    )
