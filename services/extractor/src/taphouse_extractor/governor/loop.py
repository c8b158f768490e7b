"""The governor's thread: looks at every engine, asks the law, sets the quota. Of several APIs', one leads.

A quota is set with a time to live, so that one whose governor is gone ends by itself and the engine's own
defaults are in force. What an engine can't be asked or told is said in the reason; the state stays as it was.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import redis

from taphouse.wire import GovernorMode
from taphouse_extractor.abreast import abreast
from taphouse_extractor.errors import EngineError
from taphouse_extractor.governor.law import decide, fresh, unseen
from taphouse_extractor.governor.memory import Memory
from taphouse_extractor.governor.report import Follower, Report, merged, read_report
from taphouse_extractor.governor.state import AUTO, Observation, Order, State
from taphouse_extractor.governor.verdicts import Bounds
from taphouse_extractor.governor.view import view_of
from taphouse_extractor.trouble import Trouble

__all__ = ["Governed", "Governor"]

log = logging.getLogger(__name__)
NOTE_LENGTH = 200
REFUSED_AGAIN_S = 2.0
"""An engine that took no quota is told again after so long."""

SILENT_AGAIN_S = 5.0
"""An engine that was waited for in vain is asked again after so long."""


class Governed(Protocol):
    """The engine's face here; both methods raise `EngineError`."""

    url: str

    def status(self, *, timeout_s: float = ...) -> dict[str, Any]:
        """The tap's status."""
        ...

    def set_quota(self, quota: dict[str, Any]) -> None:
        """Set what extraction may use."""
        ...


@dataclass
class _Link:
    """One engine, and what this leader knows of it."""

    engine: Governed
    trouble: Trouble
    follower: Follower = field(default_factory=Follower)
    report: Report | None = None
    problem: str | None = None
    told: dict[str, Any] | None = None
    told_at: float = 0.0
    refused: str | None = None
    silent_at: float | None = None

    def forget(self) -> None:
        self.follower, self.report, self.told, self.refused = Follower(), None, None, None


class Governor:
    """One of possibly many; only the leader acts. `ttl_s` is how long a quota stands by itself.

    `order` says what the operator wants; it never raises and waits for nothing.
    """

    def __init__(
        self,
        *,
        engines: Sequence[Governed],
        memory: Memory,
        bounds: Bounds,
        ttl_s: float,
        order: Callable[[], Order] = lambda: AUTO,
        timeout_s: float = 2.0,
        name: str | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._links = [
            _Link(engine, Trouble(log, f"governor: the quota of {engine.url}", monotonic))
            for engine in engines
        ]
        self._memory, self._bounds, self._ttl_s, self._timeout_s = memory, bounds, ttl_s, timeout_s
        self._order = order
        self._name = name or f"{socket.gethostname()}:{os.getpid()}:{id(self):x}"
        self._monotonic, self._now = monotonic, now
        self._leading, self._ticked_at = False, 0.0
        self._state = fresh(bounds)

    def run(self, stop: threading.Event, every_s: float) -> None:
        """Govern until `stop` is set. Whatever is away (Redis, an engine) is waited for."""
        trouble = Trouble(log, "governor")
        while not stop.is_set():
            began = self._monotonic()
            try:
                self.step()
                trouble.over()
            except redis.RedisError as error:
                trouble.met(error)
            except Exception as error:
                trouble.unexpected(error)
            stop.wait(max(0.05, every_s - (self._monotonic() - began)))
        if self._leading:
            try:
                self._memory.resign(self._name)
            except redis.RedisError as error:
                log.warning("governor could not hand over: %s", error)

    def take_over(self) -> None:
        """Lead from the next tick on, whoever led. Raises Redis's errors."""
        self._memory.take_over(self._name)

    def step(self) -> bool:
        """One tick; returns whether it acted. Raises Redis's errors."""
        led, self._leading = self._leading, self._memory.lead(self._name)
        if not self._leading:
            return False
        if not led:
            self._begin()
        order = self._order()
        seen = merged([found for found in abreast(self._look, self._links) if found is not None])
        before, at = self._state, self._monotonic()
        if seen is None:
            self._state = unseen(self._bounds, before, at - self._ticked_at, order)
        else:
            self._state = decide(self._bounds, before, seen, order)
        self._ticked_at = at
        self._say(before)
        view = view_of(self._bounds, self._state, order, self._problems(), self._now())
        if not self._memory.save(self._name, self._state, view):
            self._leading = False  # the lease ran out meanwhile: another may act
            return False
        production = seen is not None and seen.production
        abreast(partial(self._tell, production), self._links)
        return True

    def _begin(self) -> None:
        """Take up where the last leader was."""
        self._state = self._memory.load(self._bounds.half_life_s) or fresh(self._bounds)
        self._ticked_at = self._monotonic()
        for link in self._links:
            link.forget()
        log.info("governor: leads, limit %g ms", self._state.limit_ms)

    def _look(self, link: _Link) -> Observation | None:
        if link.silent_at is not None and self._monotonic() - link.silent_at < SILENT_AGAIN_S:
            return None  # else each tick would wait for it
        link.silent_at, began = None, self._monotonic()
        try:
            link.report = read_report(link.engine.status(timeout_s=self._timeout_s))
        except EngineError as error:
            link.report, link.problem = None, str(error)
            if self._monotonic() - began >= self._timeout_s / 2:
                link.silent_at = self._monotonic()
            return None
        lacks = link.report.lacks
        link.problem = f"{link.engine.url}: {lacks}" if lacks else None
        return link.follower.take(link.report, self._monotonic())

    def _tell(self, production: bool, link: _Link) -> None:
        """Set an engine's quota where it changed or a third of its time is over."""
        if link.report is None or (link.report.isolation is None and link.report.latency is None):
            return
        stopped = self._state.stopped
        if not link.report.scheduled and self._state.limit_ms <= 0 and production:
            stopped = True
        quota = {"busy_ms": self._state.limit_ms, "stopped": stopped}
        waited = self._monotonic() - link.told_at
        if link.refused is not None and waited < REFUSED_AGAIN_S:
            return
        if link.refused is None and quota == link.told and waited < self._ttl_s / 3:
            return
        link.told, link.told_at, link.refused = quota, self._monotonic(), None
        note = f"governor: {self._state.reason}"[:NOTE_LENGTH]
        try:
            ordered = self._state.stopped and self._state.mode is GovernorMode.STOPPED
            ttl_s = None if ordered else self._ttl_s  # a stop stands, whoever dies
            link.engine.set_quota({**quota, "note": note, "ttl_s": ttl_s})
            link.trouble.over()
        except EngineError as error:
            link.refused = f"its quota can't be set: {error}"
            link.trouble.met(error)

    def _say(self, before: State) -> None:
        now = self._state
        if (now.stopped, now.limit_ms <= 0) != (before.stopped, before.limit_ms <= 0):
            log.warning("governor: limit %g ms: %s", now.limit_ms, now.reason)

    def _problems(self) -> list[str]:
        found = (text for link in self._links for text in (link.problem, link.refused) if text)
        return list(dict.fromkeys(found))
