"""Figures over all outcomes that a process saw: stages' durations, bytes by codec, samples by engine,
rejected rows by kind."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

from taphouse_extractor.records import Outcome
from taphouse_extractor.stages import STAGES

__all__ = ["BOUNDS_S", "Durations", "Tally"]

BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
UNKNOWN = "unknown"
"""Of outcomes that were written before they said so."""


@dataclass
class Durations:
    """A histogram of seconds over `BOUNDS_S`; the last count is of what is over all of them."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for counts over other bounds."""
        if len(self.counts) != len(BOUNDS_S) + 1:
            raise ValueError("counts over other bounds")

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def merge(self, other: Durations) -> None:
        """Count those of others."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum_s += other.sum_s

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds and how many are at most that, as Prometheus has them."""
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


@dataclass
class Tally:
    """What is counted. Its size follows from the names there are, not from the number of outcomes."""

    stages: dict[str, Durations] = field(default_factory=lambda: {name: Durations() for name in STAGES})
    bytes: Counter[str] = field(default_factory=Counter)
    raw_bytes: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    engines: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        for name, seconds in outcome.stages.items():
            if name in self.stages:
                self.stages[name].add(seconds)
        if outcome.shard is not None:
            self.bytes[outcome.codec or UNKNOWN] += outcome.bytes
            self.raw_bytes[outcome.codec or UNKNOWN] += outcome.raw_bytes
            self.engines[outcome.engine or UNKNOWN] += outcome.succeeded
        self.rejected.update(failure.kind or UNKNOWN for failure in outcome.failures)

    def merge(self, other: Tally) -> None:
        """Count what others counted."""
        for name, durations in other.stages.items():
            if name in self.stages:
                self.stages[name].merge(durations)
        self.bytes.update(other.bytes)
        self.raw_bytes.update(other.raw_bytes)
        self.rejected.update(other.rejected)
        self.engines.update(other.engines)
