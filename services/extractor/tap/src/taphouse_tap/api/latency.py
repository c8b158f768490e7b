"""Latency of this API server's requests, production and extraction apart: histograms and who is in flight.

Called on the server's event loop for every output of every request, so it allocates and locks nothing there;
`LatencyByClass.report` may be called from another thread. All times are of one monotonic clock, in seconds.

======  ===========================================================================================
metric  one sample
======  ===========================================================================================
ttft    a request: from its arrival to its first token
itl     a token after the first output: time since the request's last output, divided by the tokens that came
        with this one (several with speculative decoding)
queue   a request: from the engine's queue to its first step, as the engine says
e2e     a request that ended by itself: from its arrival to its end
======  ===========================================================================================
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from taphouse import slices

logger = logging.getLogger("vllm.taphouse")

PRODUCTION, EXTRACTION = CLASSES = ("production", "extraction")
METRICS = ("ttft", "itl", "queue", "e2e")
FINISHED, FAILED, ABORTED = OUTCOMES = ("finished", "failed", "aborted")
"""How requests end: by themselves; by an error or the engine's abort; by their client, who left."""

STEPS = 16
"""Buckets to a doubling."""

BUCKET_RATIO = 2 ** (1 / STEPS)
FIRST_BOUND_S = 0.00025
BOUNDS = tuple(FIRST_BOUND_S * 2 ** (k / STEPS) for k in range(24 * STEPS + 1))
"""Bucket ``k``: what is over ``BOUNDS[k - 1]`` and not over ``BOUNDS[k]``; one more, all over 70 min."""


class Histogram:
    """Counts by load and bucket; both sparse. ``seconds`` is the sum of all samples."""

    __slots__ = ("by_load", "seconds")

    def __init__(self) -> None:
        self.by_load: dict[int, dict[int, int]] = {}
        self.seconds = 0.0

    def add(self, load: int, seconds: float, count: int = 1) -> None:
        """Count ``count`` samples of ``seconds`` each."""
        counts = self.by_load.get(load)
        if counts is None:
            counts = self.by_load[load] = {}
        bucket = bisect_left(BOUNDS, seconds)
        counts[bucket] = counts.get(bucket, 0) + count
        self.seconds += seconds * count

    def counts(self) -> dict[int, int]:
        """Count by bucket, whatever the load."""
        total: dict[int, int] = {}
        for counts in list(self.by_load.values()):
            for bucket, count in list(counts.items()):
                total[bucket] = total.get(bucket, 0) + count
        return total

    def to_dict(self) -> dict[str, dict[str, int]]:
        """``{load: {bucket: count}}`` with the keys that JSON has."""
        return {
            str(load): {str(bucket): count for bucket, count in list(counts.items())}
            for load, counts in list(self.by_load.items())
        }


class ClassLatency:
    """Histograms by metric, ends by outcome, and requests in flight of one class."""

    def __init__(self) -> None:
        self.histograms = {metric: Histogram() for metric in METRICS}
        self.ttft, self.itl, self.queue, self.e2e = self.histograms.values()
        self.ended = dict.fromkeys(OUTCOMES, 0)
        self.running = 0

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the status."""
        histograms = {metric: histogram.to_dict() for metric, histogram in self.histograms.items()}
        return {**histograms, **self.ended, "running": self.running}


class _Timed:
    """A request in flight. ``last``: None until a token came; ``arrived``: None after it waited for input."""

    __slots__ = ("arrived", "last", "of")

    def __init__(self, of: ClassLatency, arrived: float) -> None:
        self.of = of
        self.arrived: float | None = arrived
        self.last: float | None = None


class LatencyByClass:
    """Times requests from arrival to end. Every sequence of a request with ``n`` > 1 counts as one.

    ``problem`` says why timing went off; ``secret`` proves whose requests are extraction; ``elsewhere`` is
    the number of production requests in flight at the engine's other API servers; ``changes`` grows with
    every call that counted.
    """

    def __init__(self) -> None:
        self.classes = {name: ClassLatency() for name in CLASSES}
        self.problem: str | None = None
        self.secret: bytes | None = None
        self.elsewhere = 0
        self.changes = 0
        self._production = self.classes[PRODUCTION]
        self._in_flight: dict[str, _Timed] = {}

    def class_of(self, extra_args: Any) -> str:
        """The class of a request with these ``SamplingParams.extra_args``: extraction by a signed opt-in.

        Request ids say nothing: callers choose them on some of vLLM's routes. Nor may anything that a caller
        wrote in the opt-in's place raise here, which would turn timing off.
        """
        if not extra_args or self.secret is None:
            return PRODUCTION
        try:
            opt_in = extra_args.get(slices.EXTRA_ARGS_KEY)
            if opt_in is not None:
                slices.verify_opt_in(self.secret, opt_in)
                return EXTRACTION
        except Exception:
            return PRODUCTION
        return PRODUCTION

    def arrived(self, request_id: str, extra_args: Any, now: float) -> None:
        """A request came, or came again: more input for one in flight changes nothing."""
        if request_id in self._in_flight:
            return
        of = self.classes[self.class_of(extra_args)]
        self._in_flight[request_id] = _Timed(of, now)
        of.running += 1
        self.changes += 1

    def tokens(self, request_id: str, count: int, now: float) -> bool:
        """An output brought ``count`` > 0 tokens. True when it was the request's first."""
        timed = self._in_flight.get(request_id)
        if timed is None:
            return False
        last, timed.last = timed.last, now
        self.changes += 1
        if last is not None:
            timed.of.itl.add(self._load(), (now - last) / count, count)
        elif timed.arrived is not None:
            timed.of.ttft.add(self._load(), now - timed.arrived)
            return True
        return False

    def queued(self, request_id: str, seconds: float) -> None:
        """The engine said how long a request had waited."""
        timed = self._in_flight.get(request_id)
        if timed is not None:
            timed.of.queue.add(self._load(), seconds)

    def waits(self, request_id: str) -> None:
        """A request waits for its client's next input: in no sample, and no ttft or e2e comes after it."""
        timed = self._in_flight.get(request_id)
        if timed is not None:
            timed.arrived = timed.last = None

    def ended(self, request_id: str, outcome: str, now: float) -> None:
        """A request ended; one that ended before changes nothing."""
        timed = self._in_flight.get(request_id)
        if timed is None:
            return
        if outcome == FINISHED and timed.arrived is not None:
            timed.of.e2e.add(self._load(), now - timed.arrived)
        del self._in_flight[request_id]
        timed.of.running -= 1
        timed.of.ended[outcome] += 1
        self.changes += 1

    def all_failed(self, now: float) -> None:
        """The engine failed, and with it everything in flight."""
        for request_id in list(self._in_flight):
            self.ended(request_id, FAILED, now)

    def turn_off(self, problem: str) -> None:
        """Time nothing from now on. What was counted stays; nothing is in flight any more."""
        logger.warning("Taphouse: requests are no longer timed: %s", problem)
        self.problem = problem
        self._in_flight.clear()
        for of in self.classes.values():
            of.running = 0
        self.changes += 1

    def report(self) -> dict[str, Any]:
        """What was counted so far, by class, and ``problem``."""
        return {"problem": self.problem, **{name: of.to_dict() for name, of in self.classes.items()}}

    def _load(self) -> int:
        """Log2 bin of the production requests in flight in the engine; none counts as one."""
        return max((self._production.running + self.elsewhere).bit_length() - 1, 0)


def merge(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of several servers' reports, in their form; the first problem there is."""
    total = LatencyByClass().report()
    for report in reports:
        total["problem"] = total["problem"] or report["problem"]
        for name in CLASSES:
            _add(total[name], report[name])
    return total


def _add(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add numbers to numbers, however deep they lie."""
    for key, value in more.items():
        if isinstance(value, Mapping):
            _add(into.setdefault(key, {}), value)
        else:
            into[key] = into.get(key, 0) + value
