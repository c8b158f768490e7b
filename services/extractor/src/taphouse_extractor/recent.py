"""What was finished in the last minutes, added up by the second: its size follows from the time alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from taphouse.wire import Rate
from taphouse_extractor.records import Outcome

__all__ = ["KEPT_S", "Recent", "Sums", "rate"]

KEPT_S = 300.0


@dataclass(slots=True)
class Sums:
    """Of finished batches; `rows` with those that made no sample, not with those that were moved."""

    batches: int = 0
    rows: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    raw_bytes: int = 0

    def add(self, other: Sums) -> None:
        """Add those of others."""
        self.batches += other.batches
        self.rows += other.rows
        self.samples += other.samples
        self.tokens += other.tokens
        self.bytes += other.bytes
        self.raw_bytes += other.raw_bytes


@dataclass(slots=True)
class Recent:
    """Sums by the second, for `KEPT_S`. Times are in seconds since the epoch."""

    _seconds: dict[int, Sums] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._seconds)

    def add(self, outcome: Outcome, now: float) -> None:
        """Count an outcome, unless its time is not near."""
        if abs(outcome.finished_at - now) < KEPT_S:
            sums = self._seconds.setdefault(math.floor(outcome.finished_at), Sums())
            o = outcome
            sums.add(Sums(1, o.rows - o.moved, o.succeeded, o.tokens, o.bytes, o.raw_bytes))

    def forget(self, now: float) -> None:
        """Let go of what is older than `KEPT_S`, or so far ahead: the clock was set back since."""
        old = [second for second in self._seconds if abs(second - now) >= KEPT_S]
        for second in old:
            del self._seconds[second]

    def add_to(self, sums: Sums, after: float) -> None:
        """Add what was finished after a time, to the second."""
        # another thread may count meanwhile: a list of the items would not be taken at once
        for second, found in self._seconds.copy().items():
            if second > after:
                sums.add(found)


def rate(recent: Iterable[Recent], window_s: float, *, since: float, now: float) -> Rate:
    """What was finished in the last `window_s` seconds (or since `since`, if shorter), a second."""
    sums, span = Sums(), max(1.0, min(window_s, now - since))
    for one in recent:
        one.add_to(sums, now - window_s)
    return Rate(
        window_s=window_s,
        samples=sums.samples / span,
        tokens=sums.tokens / span,
        bytes=sums.bytes / span,
        raw_bytes=sums.raw_bytes / span,
        batches=sums.batches / span,
    )
