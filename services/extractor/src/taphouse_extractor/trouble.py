"""What is in the way of a loop, in the log: each error at once, then once a minute, and when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["Trouble"]

EVERY_S = 60.0
CALM_S = 5.0
"""It is over after two rounds that went well and so long without an error."""

MOST = 10
"""Different errors a minute that are said."""


class Trouble:
    """Of `who`, and one thread at a time; `clock` gives seconds."""

    def __init__(self, log: logging.Logger, who: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._who, self._clock = log, who, clock
        self._since: float | None = None
        self._met_at = 0.0
        self._well_since: float | None = None
        self._said: dict[str, float] = {}

    def unexpected(self, error: Exception) -> None:
        """A round failed by an error that nobody foresaw: its traceback is said, too."""
        self.met(f"unexpected {type(error).__name__}: {error}", error)

    def met(self, error: object, traceback: Exception | None = None) -> None:
        """A round failed."""
        now, text = self._clock(), str(error)
        self._said = {said: at for said, at in self._said.items() if now - at < EVERY_S}
        if self._well_since is not None and now - self._well_since >= EVERY_S:
            self._since = None  # a round that takes long went well
        lasts = "" if self._since is None else f" (for {now - self._since:.0f} s)"
        self._since = now if self._since is None else self._since
        self._met_at, self._well_since = now, None
        if text not in self._said and len(self._said) < MOST:
            self._said[text] = now
            self._log.warning("%s waits%s: %s", self._who, lasts, text, exc_info=traceback)

    def over(self) -> None:
        """A round went well."""
        if self._since is None:
            return
        now = self._clock()
        if self._well_since is None:
            self._well_since = now
        elif now - self._met_at >= CALM_S:
            self._log.info("%s goes on after %.0f s", self._who, self._well_since - self._since)
            self._since, self._said = None, {}
