"""What a batch's time went into. A work-horse is gone when its batch is: it leaves this in the outcome.

::

    queue_wait   from being queued to being taken, by the clocks of two machines
    capture      waiting for the engine's next row
    encode       compressing samples into the shard
    seal         the shard's header, its last bytes, and the disk
    ledger       the entry
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["STAGES", "StageClock"]

STAGES = ("queue_wait", "capture", "encode", "seal", "ledger")
T = TypeVar("T")


class StageClock:
    """Adds up seconds by stage; not shared between threads."""

    def __init__(
        self, queue_wait_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}
        if queue_wait_s is not None:
            self.seconds["queue_wait"] = max(0.0, queue_wait_s)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside."""
        begun = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - begun

    def waiting(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """The same items; what each took to come is counted."""
        while True:
            with self.stage(name):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
