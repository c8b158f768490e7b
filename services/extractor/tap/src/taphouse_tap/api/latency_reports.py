"""Publishes this API server's latency, and sums up that of all API servers of the engine.

Each server keeps ``latency-<pid>.json`` in the start's directory: what it counted since the start, how many
production requests it has in flight, and when it wrote that. The file of a server that died still counts,
but what it had in flight does not. Nothing here runs on the event loop but the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taphouse import slices
from taphouse_tap.api.latency import BUCKET_RATIO, CLASSES, FIRST_BOUND_S, PRODUCTION, LatencyByClass, merge
from taphouse_tap.api.metrics import LatencyMetrics

logger = logging.getLogger("vllm.taphouse")

PUBLISH_S = 0.5
RENEW_S = 2.0
"""A server with requests in flight writes at least this often, changed or not."""

STALE_S = 10.0
"""What a server that has not written for so long had in flight is no longer counted as running."""


class LatencyReports:
    """Publishes what ``latency`` counts: to ``metrics`` always, to files once there is a start."""

    def __init__(
        self, latency: LatencyByClass, metrics: LatencyMetrics, clock: Callable[[], float] = time.time
    ) -> None:
        """``clock`` gives Unix seconds."""
        self.latency = latency
        self._metrics = metrics
        self._clock = clock
        self._start: slices.Start | None = None
        self._task: asyncio.Task[None] | None = None
        self._one_at_a_time = threading.Lock()
        self._published = -1
        self._published_at = 0.0
        self._read: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}
        self._complained = False

    def begin(self) -> None:
        """Publish in the background, until `close`. Needs a running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="taphouse-latency")

    async def close(self) -> None:
        """Stop publishing."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def connect(self, start: slices.Start) -> None:
        """The engine's start is known: requests can be told apart, and servers find each other."""
        self._start = start
        self.latency.secret = start.secret

    def section(self) -> dict[str, Any]:
        """The status's section: all servers of the engine. Reads and writes files; never raises for them."""
        total = merge([self.publish(), *self._others()])
        return {"bucket_ratio": BUCKET_RATIO, "first_bound_s": FIRST_BOUND_S, **total}

    def publish(self) -> dict[str, Any]:
        """Write what changed since the last time, and learn what the other servers have in flight.

        Returns this server's report: what another server reads from now on is never less.
        """
        with self._one_at_a_time:
            changes, now = self.latency.changes, self._clock()
            report = self.latency.report()
            running = any(report[name]["running"] for name in CLASSES)
            if changes != self._published or (running and now - self._published_at >= RENEW_S):
                self._metrics.update(self.latency)
                self._write({"pid": os.getpid(), "updated_at": now, **report})
                self._published, self._published_at = changes, now
            self.latency.elsewhere = sum(other[PRODUCTION]["running"] for other in self._others())
        return report

    def _write(self, report: dict[str, Any]) -> None:
        if self._start is None:
            return
        try:
            slices.write_atomically(self._start.directory / f"latency-{os.getpid()}.json", json.dumps(report))
        except OSError as error:  # a full file system: the next round may go well
            self._complain(f"could not be written: {error}")

    def _others(self) -> list[dict[str, Any]]:
        """The other servers' reports; nothing runs at one that has not written for long."""
        if self._start is None:
            return []
        found = []
        for path in self._start.directory.glob("latency-*.json"):
            if path.name != f"latency-{os.getpid()}.json":
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                    found.append(self._other(path))
        return found

    def _other(self, path: Path) -> dict[str, Any]:
        """One server's report; parsed again only when its file changed."""
        stat = path.stat()
        version = (stat.st_mtime_ns, stat.st_ino)
        known = self._read.get(path)
        if known is None or known[0] != version:
            report = json.loads(slices.read_text(path))
            known = self._read[path] = (version, {**merge([report]), "updated_at": report["updated_at"]})
        report = known[1]
        if self._clock() - report["updated_at"] > STALE_S:
            report = {**report, **{name: {**report[name], "running": 0} for name in CLASSES}}
        return report

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_S)
            try:
                await asyncio.to_thread(self.publish)
            except Exception as error:
                self._complain(f"could not be published: {type(error).__name__}: {error}")

    def _complain(self, what: str) -> None:
        """Once: this comes every half second."""
        if not self._complained:
            self._complained = True
            logger.warning("Taphouse: the latency of requests %s", what)
