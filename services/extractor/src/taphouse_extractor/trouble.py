"""What is in the way of a loop, in the log: when it begins, once a minute while it lasts, when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["Trouble"]

EVERY_S = 60.0


class Trouble:
    """Of one loop, `who`, and one thread; `clock` gives seconds."""

    def __init__(self, log: logging.Logger, who: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._who, self._clock = log, who, clock
        self._since: float | None = None
        self._said_at = 0.0

    def met(self, error: Exception) -> None:
        """A round failed."""
        now = self._clock()
        if self._since is not None and now - self._said_at < EVERY_S:
            return
        lasts = "" if self._since is None else f" (for {now - self._since:.0f} s)"
        self._since, self._said_at = now if self._since is None else self._since, now
        self._log.warning("%s waits%s: %s", self._who, lasts, error)

    def over(self) -> None:
        """A round went well."""
        if self._since is not None:
            self._log.info("%s goes on after %.0f s", self._who, self._clock() - self._since)
            self._since = None
