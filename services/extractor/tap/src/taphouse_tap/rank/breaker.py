"""The breaker: the first error of ours turns capture off on this rank, for good, and says where and why."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm.taphouse")


class Breaker:
    """Trips once. `tripped` is read on the engine's hot path; listeners run in the tripping thread."""

    def __init__(self) -> None:
        self.tripped = False
        self.reason: str | None = None
        self.trip_record: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def on_trip(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the breaker trips."""
        self._listeners.append(listener)

    def refuse(self, reason: str) -> None:
        """Turn capture off because it can't be right here: no error, and no `breaker` entry in the record."""
        self._open(reason, None)

    def trip(self, where: str, error: BaseException) -> None:
        """Turn capture off because of an error of ours in `where`. Never raises."""
        told = f"{type(error).__name__}: {error}"
        if self._open(f"error in {where}: {told}", {"where": where, "error": told, "at": time.time()}):
            logger.error("Taphouse capture is off, serving goes on: error in %s", where, exc_info=error)

    def _open(self, reason: str, record: dict[str, Any] | None) -> bool:
        with self._lock:
            if self.tripped:
                return False
            self.reason, self.trip_record, self.tripped = reason, record, True
        if record is None:
            logger.warning("Taphouse capture is off, serving goes on: %s", reason)
        for listener in self._listeners:
            try:
                listener()
            except Exception:
                logger.exception("Taphouse could not tell everyone that capture is off")
        return True
