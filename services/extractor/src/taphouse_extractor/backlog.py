"""How much is sealed that a consumer has not reached: the bound past which nothing more is fed."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable

from taphouse.errors import StoreError, TaphouseError
from taphouse.ledger import Ledger
from taphouse.store import Store
from taphouse.wire import Consumer, Unconsumed
from taphouse_extractor.consumers import named, registered
from taphouse_extractor.trouble import Trouble

__all__ = ["Backlog"]

log = logging.getLogger(__name__)
COUNTED_AT_ONCE = 200
COUNTED_BY_THREAD = 2000
LOOK_EVERY_S = 2.0
RECOUNT_OVER_S, RECOUNT_S = 10.0, 600.0


class Backlog:
    """Bytes of the shards past the lowest cursor of the registered consumers; all while there is none.

    `max_bytes` 0 bounds nothing. One shard alone is never too much: a consumer may be in the middle of it.
    Entries are counted once each as they land, few at a time; all are counted anew from time to time (soon
    when they are too many), since shards may have been taken away. Safe to share between threads.
    """

    def __init__(
        self, store: Store, ledger: Ledger, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._ledger, self._max_bytes, self._clock = store, ledger, max_bytes, clock
        self._lock = threading.Lock()
        self._low = 0
        self._sizes = array("Q")  # of the entries after `low`, 0 for one that is gone
        self._bytes, self._shards, self._recounting = 0, 0, False
        self._counted_at = clock()
        self._shown: Unconsumed | None = None

    def run(self, stop: threading.Event) -> None:
        """Keep the count up to date until `stop` is set."""
        trouble = Trouble(log, "backlog")
        while not stop.is_set():
            try:
                counted = self.look(COUNTED_BY_THREAD).counted
                trouble.over()
            except TaphouseError as error:
                trouble.met(error)
                counted = True
            stop.wait(LOOK_EVERY_S if counted else 0.01)

    def shown(self) -> Unconsumed | None:
        """The count as it stands; None where it can't be told."""
        try:
            return self.look()
        except TaphouseError:
            return None

    def look(self, at_most: int | None = None) -> Unconsumed:
        """Count what landed, `at_most` entries of it. Raises `StoreError`s and the ledger's errors."""
        return self._look(COUNTED_AT_ONCE if at_most is None else at_most)[0]

    def problem(self) -> str | None:
        """Why nothing may be fed now, or None. Raises the ledger's errors."""
        if not self._max_bytes:
            return None
        try:
            found, consumers = self._look(COUNTED_AT_ONCE)
        except StoreError as error:
            return f"how far consumers are can't be read: {error.message}"
        if not found.counted:
            return f"unconsumed shards are being counted: {found.shards} so far"
        if not self._over(found.shards, found.bytes):
            return None
        slowest = named([consumer for consumer in consumers if consumer.name in found.slowest], time.time())
        whose = f"that consumer {slowest} has not reached" if slowest else "and no consumer is registered"
        return (
            f"{found.shards} shards of {found.bytes} bytes are sealed {whose}; the bound is {self._max_bytes}"
        )

    def _over(self, shards: int, size: int) -> bool:
        return bool(self._max_bytes) and shards > 1 and size >= self._max_bytes

    def _look(self, at_most: int) -> tuple[Unconsumed, list[Consumer]]:
        """The count, and the consumers by which it was made."""
        with self._lock:  # what is read outside may be older than what was counted: it would be counted anew
            consumers, head = registered(self._store), self._ledger.head()
            low = min((consumer.cursor or 0 for consumer in consumers), default=0)
            slowest = sorted(consumer.name for consumer in consumers if (consumer.cursor or 0) == low)
            self._count(min(low, head), head, at_most)
            age = self._clock() - self._counted_at
            if self._shards and age >= (
                RECOUNT_OVER_S if self._over(self._shards, self._bytes) else RECOUNT_S
            ):
                self._forget(self._low)
                self._recounting = True
                self._count(self._low, head, at_most)
            counted = self._low + len(self._sizes) >= head
            self._recounting = self._recounting and not counted
            if self._recounting and self._shown is not None:
                return self._shown, consumers  # what was counted in full before
            self._shown = Unconsumed(
                shards=self._shards,
                bytes=self._bytes,
                bound_bytes=self._max_bytes or None,
                slowest=slowest,
                counted=counted,
            )
            return self._shown, consumers

    def _forget(self, low: int) -> None:
        self._low, self._bytes, self._shards, self._counted_at = low, 0, 0, self._clock()
        self._sizes = array("Q")

    def _count(self, low: int, head: int, at_most: int) -> None:
        """Bring the count to `low` and, by `at_most` entries, towards `head`."""
        if low < self._low or head < self._low + len(self._sizes):
            self._forget(low)
        passed = self._sizes[: low - self._low]
        self._bytes -= sum(passed)
        self._shards -= sum(map(bool, passed))
        del self._sizes[: len(passed)]
        self._low = low
        first = low + len(self._sizes) + 1
        for seq in range(first, min(head, first + at_most - 1) + 1):
            entry = self._ledger.entry(seq)
            size = entry.bytes if entry is not None and entry.gone is None else 0
            self._sizes.append(size)
            self._bytes += size
            self._shards += size > 0
