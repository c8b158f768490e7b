"""Sparse histograms of durations in geometric buckets, apart by load, as the tap's status gives them.

Bucket k covers (first_s * ratio**(k-1), first_s * ratio**k] seconds, bucket 0 all up to first_s. A load bin
is the base-2 logarithm of the number of production requests in flight: 0 is one request, 1 two or three,
and so on. Nothing here changes what it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ByLoad", "Counts", "Scale", "grown", "loads_added", "pooled", "scaled", "size", "size_by_load"]

Counts = Mapping[int, float]
"""Samples by bucket; fractions where they decayed."""

ByLoad = Mapping[int, Counts]
"""Counts by load bin."""


@dataclass(frozen=True)
class Scale:
    """Where the buckets lie; `first_s` in seconds."""

    ratio: float
    first_s: float

    def quantile(self, counts: Counts, q: float) -> float | None:
        """The `q` quantile in seconds, None without samples.

        Interpolated within its bucket on the logarithm of the duration, as fits buckets of equal ratio (from
        0 and linear in bucket 0).
        """
        rank = q * size(counts)
        if rank <= 0:
            return None
        below, bucket, share = 0.0, 0, 1.0
        for bucket in sorted(counts):
            inside = counts[bucket]
            if inside > 0 and below + inside >= rank * (1 - 1e-12):
                share = min(1.0, (rank - below) / inside)
                break
            below += inside
        if bucket == 0:
            return self.first_s * share
        return float(self.first_s * self.ratio ** (bucket - 1 + share))


def size(counts: Counts) -> float:
    """How many samples."""
    return sum(counts.values())


def size_by_load(loads: ByLoad) -> float:
    """How many samples in all load bins."""
    return sum(size(counts) for counts in loads.values())


def _added(one: Counts, other: Counts) -> Counts:
    result = dict(one)
    for bucket, count in other.items():
        result[bucket] = result.get(bucket, 0.0) + count
    return result


def loads_added(one: ByLoad, other: ByLoad) -> ByLoad:
    """The samples of both."""
    result = dict(one)
    for load, counts in other.items():
        result[load] = _added(result.get(load, {}), counts)
    return result


def pooled(loads: ByLoad) -> Counts:
    """All load bins as one."""
    result: Counts = {}
    for counts in loads.values():
        result = _added(result, counts)
    return result


def scaled(loads: ByLoad, factor: float, drop_below: float) -> ByLoad:
    """Every count times `factor`; what falls below `drop_below` is left out."""
    result = {}
    for load, counts in loads.items():
        kept = {bucket: count * factor for bucket, count in counts.items() if count * factor >= drop_below}
        if kept:
            result[load] = kept
    return result


def grown(now: ByLoad, before: ByLoad) -> ByLoad | None:
    """What came between two looks at cumulative counts; None when one went down: they began anew."""
    result: dict[int, Counts] = {}
    for load, counts in before.items():
        there = now.get(load, {})
        if any(there.get(bucket, 0.0) < count for bucket, count in counts.items() if count):
            return None
    for load, counts in now.items():
        was = before.get(load, {})
        more = {b: count - was.get(b, 0.0) for b, count in counts.items() if count > was.get(b, 0.0)}
        if more:
            result[load] = more
    return result
