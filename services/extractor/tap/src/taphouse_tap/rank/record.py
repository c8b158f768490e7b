"""The rank's record: what this rank says of itself, published beside its slices. No RPC reads it."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from taphouse.slices import Start
from taphouse_tap import __version__

from .area import Word
from .breaker import Breaker

logger = logging.getLogger("vllm.taphouse")

_HEARTBEAT_S = 2.0
_LEAST_S = 1.0
_SWEEP_S = 30.0


@dataclass
class Counters:
    """What the engine's process did since its start.

    `host_s`: seconds on the engine's own thread; `host_max_s`: the most at once, before or after a step.
    """

    steps: int = 0
    forged: int = 0
    preempted: int = 0
    host_s: float = 0.0
    host_max_s: float = 0.0

    def held(self, seconds: float) -> None:
        """The engine's thread spent `seconds` on captures."""
        self.host_s += seconds
        self.host_max_s = max(self.host_max_s, seconds)


class RecordThread:
    """Publishes the record when it changed (at most once a second), and every two seconds anyway.

    `look` is called before each time.
    """

    def __init__(
        self,
        start: Start,
        breaker: Breaker,
        facts: Callable[[], dict[str, Any]],
        ttl_s: float | None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._start, self._breaker, self._facts, self._look = start, breaker, facts, look
        self._ttl_s = ttl_s
        self._changed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="taphouse-record", daemon=True)

    def start(self) -> None:
        """Publish once and start the thread; a trip publishes at once."""
        self.publish()
        self._breaker.on_trip(self.publish)
        self._thread.start()

    def changed(self) -> None:
        """Say that there is something new to publish; costs next to nothing."""
        self._changed.set()

    def publish(self) -> None:
        """Write the record now."""
        with self._lock:
            self._start.write_record(self._record())

    def _run(self) -> None:
        swept = time.monotonic()
        while True:
            try:
                self._changed.wait(_HEARTBEAT_S)
                self._changed.clear()
                self._look()
                self.publish()
                if self._ttl_s is not None and time.monotonic() - swept > _SWEEP_S:
                    swept = time.monotonic()
                    self._start.expire(self._ttl_s)
            except Exception as error:
                self._breaker.trip("record", error)
            time.sleep(_LEAST_S)

    def _record(self) -> dict[str, Any]:
        facts = self._facts()
        reason = self._breaker.reason or facts.get("paused")
        return {
            "version": 1,
            "start_id": self._start.start_id,
            "pid": os.getpid(),
            "updated_at": time.time(),
            "capture": "off" if reason else "on",
            "reason": reason,
            "breaker": self._breaker.trip_record,
            **facts,
        }


def versions(engine: str) -> dict[str, str]:
    """Return the versions that a record names."""
    return {
        "vllm": engine,
        "tap": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def counters_dict(counters: Counters, words: NDArray[np.int64] | None) -> dict[str, Any]:
    """Return the counters of this process and of the writer's (`words`; None: there is none) as shown.

    Seconds: `wait_s` for rows to arrive, `write_s` of checking, summing and writing them, of which
    `checksum_s` and `copy_s` are summed over threads, `seal_s` of sealing.
    """
    shown: dict[str, Any] = asdict(counters)
    if words is None:
        words = np.zeros(1 + max(Word), np.int64)
    for word in (Word.ROWS, Word.BYTES, Word.SEALED, Word.FAILED):
        shown[word.name.lower()] = int(words[word])
    shown["forged"] += int(words[Word.FORGED])
    for word in (Word.WAIT, Word.WRITE, Word.CHECKSUM, Word.COPY, Word.SEAL):
        shown[f"{word.name.lower()}_s"] = 1e-9 * int(words[word])
    return shown
