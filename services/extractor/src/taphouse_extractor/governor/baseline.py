"""Production's latency without extraction, and how far the latest seconds are from it.

The baseline is one histogram for each load bin (`histograms.py`), of production's requests alone, from the
intervals in which no extraction ran. Counts decay with a half-life, so that it follows production's day:

    count <- count * 2**(-dt / half_life) + new samples

The slowdown compares equal loads with each other, because a busier engine is a slower one without any fault
of extraction's. With n_b samples of the latest seconds in load bin b, over the bins that have a baseline:

    slowdown = sum_b n_b * (p95_b / p95_baseline_b) / sum_b n_b

A 95th percentile of few samples is a rough estimate. `Comparison.surely` and `Comparison.by_far` are the same
figure with the quantile q in place of the latest seconds' 0.95,

    q = 0.95 - z * sqrt(0.95 * 0.05 * (1 / m + 1 / m_baseline))          z = 1 and z = 3

which are z standard errors of the difference between the ranks of two samples' order statistics, whatever the
distribution (David & Nagaraja, Order Statistics, 2003, section 7.1). m are independent samples: the tokens of
one step share its duration, so that `shared` samples count as one for each request in flight,

    m = sum_b n_b / (1.5 * 2**b - 0.5)                                   the middle of load bin b

(Kish, Survey Sampling, 1965, section 5.4: the design effect of samples that are alike within a cluster).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from taphouse_extractor.governor.histograms import (
    ByLoad,
    Scale,
    loads_added,
    pooled,
    scaled,
    size,
    size_by_load,
)

__all__ = ["NO_SCALE", "Baseline", "Comparison", "Interval", "Window", "compare", "compare_with"]

P = 0.95
NO_SCALE = Scale(2.0, 1.0)
DROP_BELOW = 0.01
"""Decayed counts below this are forgotten."""


@dataclass(frozen=True)
class Baseline:
    """Decayed counts by load bin; samples of another scale replace it."""

    scale: Scale = NO_SCALE
    itl: ByLoad = field(default_factory=dict)
    ttft: ByLoad = field(default_factory=dict)

    def aged(self, dt: float, half_life_s: float) -> Baseline:
        """As it is `dt` seconds later."""
        factor = 2.0 ** (-dt / half_life_s)
        return replace(
            self, itl=scaled(self.itl, factor, DROP_BELOW), ttft=scaled(self.ttft, factor, DROP_BELOW)
        )

    def learnt(self, itl: ByLoad, ttft: ByLoad) -> Baseline:
        """With the samples of one interval."""
        return replace(self, itl=loads_added(self.itl, itl), ttft=loads_added(self.ttft, ttft))


@dataclass(frozen=True)
class Interval:
    """Production's samples of one interval that ended at `at` (seconds of the law's own clock)."""

    at: float
    extracted: bool
    itl: ByLoad
    ttft: ByLoad


@dataclass(frozen=True)
class Window:
    """The latest intervals, oldest first."""

    intervals: tuple[Interval, ...] = ()

    def moved(self, new: Interval, keep_s: float) -> Window:
        """With one more interval, and none that is older than `keep_s`."""
        kept = (old for old in self.intervals if old.at > new.at - keep_s)
        return Window((*kept, new))

    def itl(self, since: float, *, extracted: bool) -> ByLoad:
        """Inter-token latencies since `since`; with `extracted` only those while extraction ran."""
        result: ByLoad = {}
        for interval in self.intervals:
            if interval.at > since and (interval.extracted or not extracted):
                result = loads_added(result, interval.itl)
        return result

    def ttft(self, since: float, *, extracted: bool) -> ByLoad:
        """Times to first token, likewise."""
        result: ByLoad = {}
        for interval in self.intervals:
            if interval.at > since and (interval.extracted or not extracted):
                result = loads_added(result, interval.ttft)
        return result


@dataclass(frozen=True)
class Comparison:
    """Production's p95 against what it is held to; `p95_s` and `base_s` in seconds.

    `ratio` is the slowdown, `surely` and `by_far` its lower bounds at one and three standard errors,
    `samples` how many of `total` have something to be compared with.
    """

    samples: float
    total: float
    p95_s: float
    base_s: float
    ratio: float
    surely: float
    by_far: float


SURELY, BY_FAR = 1.0, 3.0
"""Standard errors."""


def _low(z: float, *independent: float) -> float:
    """The quantile `z` standard errors below `P`, of samples of these sizes (inf: exactly known)."""
    return max(0.0, P - z * math.sqrt(P * (1 - P) * sum(1 / n for n in independent)))


def _independent(loads: ByLoad, shared: bool) -> float:
    return sum(size(counts) / (1.5 * 2**load - 0.5 if shared else 1.0) for load, counts in loads.items())


def compare(
    latest: ByLoad, baseline: ByLoad, min_baseline: float, scale: Scale, *, shared: bool = False
) -> Comparison | None:
    """The slowdown, over load bins with at least `min_baseline` samples to compare with.

    `shared`: all requests in flight share each sample. None without any sample; `samples` is 0 (and the
    ratios 1) when no bin has a baseline.
    """
    total = size_by_load(latest)
    if total <= 0:
        return None
    bases = {
        load: base
        for load, counts in baseline.items()
        if size(counts) >= min_baseline and (base := scale.quantile(counts, P)) and size(latest.get(load, {}))
    }
    n = sum(size(latest[load]) for load in bases)
    if n <= 0:
        return Comparison(0.0, total, scale.quantile(pooled(latest), P) or 0.0, 0.0, 1.0, 1.0, 1.0)
    sizes = [_independent({load: side[load] for load in bases}, shared) for side in (latest, baseline)]
    p95 = base_s = ratio = surely = by_far = 0.0
    for load, base in bases.items():
        weight = size(latest[load]) / n
        here = scale.quantile(latest[load], P) or 0.0
        p95 += weight * here
        base_s += weight * base
        ratio += weight * here / base
        surely += weight * (scale.quantile(latest[load], _low(SURELY, *sizes)) or 0.0) / base
        by_far += weight * (scale.quantile(latest[load], _low(BY_FAR, *sizes)) or 0.0) / base
    return Comparison(n, total, p95, base_s, ratio, surely, by_far)


def compare_with(
    latest: ByLoad, objective_s: float, scale: Scale, *, shared: bool = False
) -> Comparison | None:
    """All loads as one against an objective in seconds; None without any sample."""
    counts = pooled(latest)
    n = size(counts)
    if n <= 0:
        return None
    independent = _independent(latest, shared)
    p95, surely, by_far = (scale.quantile(counts, _low(z, independent)) or 0.0 for z in (0.0, SURELY, BY_FAR))
    return Comparison(n, n, p95, objective_s, p95 / objective_s, surely / objective_s, by_far / objective_s)
