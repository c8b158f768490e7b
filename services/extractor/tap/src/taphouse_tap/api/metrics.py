"""What this API server's tap counted: in the status answer, and on vLLM's ``/metrics`` where possible.

vLLM serves prometheus_client's default registry, or with several API servers the sum over their shared
directory; counters and histograms of the default registry reach both.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from typing import Any

from taphouse_tap.api.latency import BOUNDS, CLASSES, OUTCOMES, STEPS, ClassLatency, LatencyByClass

logger = logging.getLogger("vllm.taphouse")

_HELP = {
    "requests": "Requests for hidden states",
    "refused": "Requests for hidden states answered with 4xx or 503",
    "failed": "Requests for hidden states answered with 500",
    "aborted": "Requests for hidden states whose caller left",
    "captures": "Prompts captured whole",
    "rows": "Rows (tokens) captured",
    "bytes": "Bytes of states captured, over all ranks",
    "proven": "Captures proven against the engine's own top tokens",
    "disproved": "Captures that were not what the engine computed",
    "expired": "Captures nobody consumed in time",
}

_LATENCY_HELP = {
    "ttft": "Seconds from a request's arrival to its first token",
    "itl": "Seconds between a request's tokens",
    "queue": "Seconds a request waited for its first step",
    "e2e": "Seconds from a request's arrival to its end",
}
_COARSE = range(STEPS, len(BOUNDS), STEPS)
"""The fine buckets whose bounds, a doubling apart, are those of ``/metrics``: 0.5 ms to 70 min."""


class Metrics:
    """Counters by name; `counts` is what the status route shows."""

    def __init__(self, registry: Any = None, *, publish: bool = True) -> None:
        """Register with ``registry`` (None: prometheus_client's default). Never raises."""
        self.counts = dict.fromkeys(_HELP, 0)
        self._published: dict[str, Any] = {}
        if publish:
            try:
                self._published = _register(registry)
            except Exception as error:
                logger.warning("Taphouse: no counters on /metrics: %s", error)

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""
        self.counts[name] += amount
        if name in self._published:
            self._published[name].inc(amount)


def _register(registry: Any) -> dict[str, Any]:
    import prometheus_client

    target = prometheus_client.REGISTRY if registry is None else registry
    return {
        name: prometheus_client.Counter(f"taphouse_{name}", text, registry=target)
        for name, text in _HELP.items()
    }


class LatencyMetrics:
    """Latency by class on ``/metrics``: histograms, and requests by how they ended."""

    def __init__(self, registry: Any = None, *, publish: bool = True) -> None:
        """Register with ``registry`` (None: prometheus_client's default). Never raises."""
        self._seen: dict[tuple[str, str], dict[int, int]] = {}
        self._seconds: dict[tuple[str, str], float] = {}
        self._ended: dict[tuple[str, str], int] = {}
        self._published: dict[tuple[str, str], Any] = {}
        if publish:
            try:
                self._published = _register_latency(registry)
            except Exception as error:
                logger.warning("Taphouse: no latency on /metrics: %s", error)

    def update(self, latency: LatencyByClass) -> None:
        """Add what was counted since the last call; an error takes latency off ``/metrics``, no more."""
        if not self._published:
            return
        try:
            for name, of in latency.classes.items():
                self._update(name, of)
        except Exception as error:
            self._published = {}
            logger.warning("Taphouse: latency on /metrics stands still: %s: %s", type(error).__name__, error)

    def _update(self, name: str, of: ClassLatency) -> None:
        for metric, histogram in of.histograms.items():
            key, seconds, counts = (name, metric), histogram.seconds, histogram.counts()
            seen = self._seen.get(key, {})
            more = {bucket: count - seen.get(bucket, 0) for bucket, count in counts.items()}
            _observe(self._published[key], more, seconds - self._seconds.get(key, 0.0))
            self._seen[key], self._seconds[key] = counts, seconds
        for outcome, count in list(of.ended.items()):
            key = (name, outcome)
            self._published[key].inc(count - self._ended.get(key, 0))
            self._ended[key] = count


def _observe(histogram: Any, more: dict[int, int], seconds: float) -> None:
    """`observe` many samples at once, which prometheus_client has no method for; every token is one."""
    for bucket, count in more.items():
        if count:
            histogram._buckets[bisect_left(_COARSE, bucket)].inc(count)
    histogram._sum.inc(seconds)


def _register_latency(registry: Any) -> dict[tuple[str, str], Any]:
    """What is published, by class and metric, and by class and outcome."""
    import prometheus_client

    target = prometheus_client.REGISTRY if registry is None else registry
    histograms = {
        metric: prometheus_client.Histogram(
            f"taphouse_request_{metric}_seconds",
            text,
            ["class"],
            buckets=[BOUNDS[bucket] for bucket in _COARSE],
            registry=target,
        )
        for metric, text in _LATENCY_HELP.items()
    }
    ended = prometheus_client.Counter(
        "taphouse_requests_finished", "Requests that ended, by how", ["class", "outcome"], registry=target
    )
    return {
        **{(name, metric): histograms[metric].labels(name) for name in CLASSES for metric in histograms},
        **{(name, outcome): ended.labels(name, outcome) for name in CLASSES for outcome in OUTCOMES},
    }
