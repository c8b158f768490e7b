"""The service watched: at most one look a second however many people watch, and the last hour in numbers."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from taphouse.errors import TaphouseError
from taphouse.live import History, Point, TrainerPoint
from taphouse.wire import Consumer, Job, QueueStatus
from taphouse_extractor.trouble import Trouble

__all__ = ["Look", "Pulse", "Watchers", "point_of"]

log = logging.getLogger(__name__)
HOUR_S = 3600.0
TRAINERS_KEPT = 4


@dataclass(frozen=True)
class Look:
    """The service at a moment: its status, its newest jobs, and the point of both."""

    status: QueueStatus
    jobs: list[Job]
    point: Point


class Pulse:
    """Looks at the service. Safe to share between threads.

    `status` and `jobs` ask for what a look is made of; they may raise `TaphouseError`s. `every_s` is the
    time between two kept points. Memory is bounded: an hour of points and one look.
    """

    def __init__(
        self,
        status: Callable[[], QueueStatus],
        jobs: Callable[[], list[Job]],
        *,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status, self._jobs, self._clock = status, jobs, clock
        self._every_s = every_s
        self._lock = threading.Lock()
        self._last: Look | None = None
        self._looked_at = 0.0
        self._points: deque[Point] = deque(maxlen=max(1, int(HOUR_S / every_s)))
        self._trouble = Trouble(log, "history")
        self.leaving = threading.Event()
        """Set when the process is about to end: streams end by themselves."""

    def look(self, max_age_s: float = 1.0) -> Look:
        """The last look, or a new one when that is older. Raises `TaphouseError`s."""
        with self._lock:
            if self._last is None or self._clock() - self._looked_at >= max_age_s:
                status = self._status()
                self._last = Look(status, self._jobs(), point_of(status))
                self._looked_at = self._clock()
            return self._last

    def keep(self) -> None:
        """Keep a point of now; when there is nothing to see, there is a gap. Never raises."""
        try:
            point = self.look().point
        except (TaphouseError, OSError) as error:
            log.debug("no point of history: %s", error)
            return
        except Exception as error:
            self._trouble.unexpected(error)
            return
        self._trouble.over()
        while self._points and self._points[-1].at > point.at:  # the clock was set back
            self._points.pop()
        if not self._points or self._points[-1].at < point.at:
            self._points.append(point)

    def run(self, stop: threading.Event) -> None:
        """Keep points until `stop` is set."""
        while not stop.is_set():
            self.keep()
            stop.wait(self._every_s)

    def history(self) -> History:
        """The last hour."""
        return History(every_s=self._every_s, points=list(self._points))


class Watchers:
    """Counts open streams: at most `most`, `each` of one name, `longest_s` seconds long.

    Of one thread, the event loop's.
    """

    def __init__(self, most: int = 64, each: int = 16, longest_s: float = 300.0) -> None:
        self._most, self._each, self.longest_s = most, each, longest_s
        self._open = Counter[str]()

    @property
    def open(self) -> int:
        """Streams that are open now."""
        return self._open.total()

    def enter(self, name: str) -> str | None:
        """Count one more of `name`, which has to `leave`; or why no more may be opened."""
        if self.open >= self._most:
            return f"{self._most} streams are open already"
        if self._open[name] >= self._each:
            return f"{self._each} streams are open already with this token"
        self._open[name] += 1
        return None

    def leave(self, name: str) -> None:
        """One less."""
        self._open[name] -= 1


def point_of(status: QueueStatus) -> Point:
    """The numbers of a status. Latencies are the governor's; without one the slowest engine's."""
    depth, minute, governor = status.depth, status.rates[0], status.governor
    told = [engine.latency for engine in status.engines if engine.latency is not None]
    itl = governor.itl_p95_s if governor else None
    ttft = governor.ttft_p95_s if governor else None
    asked_engines = itl is None and ttft is None
    if asked_engines:
        itl = max((t.itl_p95 for t in told if t.itl_p95 is not None), default=None)
        ttft = max((t.ttft_p95 for t in told if t.ttft_p95 is not None), default=None)
    return Point(
        at=status.updated_at,
        pending=depth.pending,
        queued=depth.queued,
        waiting=depth.waiting,
        running=depth.running,
        rows_left=status.rows_left,
        samples=minute.samples,
        tokens=minute.tokens,
        bytes=minute.bytes,
        raw_bytes=minute.raw_bytes,
        itl_p95_s=itl,
        itl_held_to_s=governor.itl_p95_baseline_s if governor else None,
        ttft_p95_s=ttft,
        ttft_held_to_s=governor.ttft_p95_baseline_s if governor else None,
        mixed=asked_engines and any(t.requests != "production" for t in told),
        limit_ms=(0.0 if governor.stopped else governor.busy_ms) if governor else None,
        trainers=_trainers(status.consumers),
    )


def _trainers(consumers: list[Consumer]) -> list[TrainerPoint]:
    newest = sorted(consumers, key=lambda c: c.updated_at or 0.0, reverse=True)[:TRAINERS_KEPT]
    return [
        TrainerPoint(name=c.name, step=c.step, loss=c.loss, accuracy=c.accuracy, lag=c.lag) for c in newest
    ]
