"""How much is sealed that a consumer has not reached: the bound past which nothing more is fed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from taphouse.errors import StoreError
from taphouse.ledger import Ledger
from taphouse.store import Store
from taphouse_extractor.consumers import registered

__all__ = ["Backlog"]

COUNTED_AT_ONCE = 5000
RECOUNT_EVERY_S = 10.0


class Backlog:
    """Bytes of the shards past the lowest cursor of the registered consumers; all while there is none.

    `max_bytes` 0 bounds nothing, and then nothing is counted. One shard alone is never too much: a consumer
    may be in the middle of it. Entries are counted once each as they land; when they are too many, all are
    counted anew from time to time, since shards may have been taken away.
    """

    def __init__(
        self, store: Store, ledger: Ledger, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._ledger, self._max_bytes, self._clock = store, ledger, max_bytes, clock
        self._lock = threading.Lock()
        self._low, self._at, self._bytes = 0, 0, 0
        self._sizes = deque[tuple[int, int]]()
        self._counted_at = clock()

    def problem(self) -> str | None:
        """Why nothing may be fed now, or None. Raises the ledger's errors."""
        if not self._max_bytes:
            return None
        try:
            cursors = {consumer.name: consumer.cursor or 0 for consumer in registered(self._store)}
        except StoreError as error:
            return f"how far consumers are can't be read: {error.message}"
        low, head = min(cursors.values(), default=0), self._ledger.head()
        with self._lock:
            self._count(low, head)
            if self._over() and self._clock() - self._counted_at >= RECOUNT_EVERY_S:
                self._forget(low)
                self._count(low, head)
            if self._at < head:
                return f"counting unconsumed shards: entry {self._at} of {head}"
            if not self._over():
                return None
            slowest = ", ".join(name for name, cursor in sorted(cursors.items()) if cursor == low)
            whose = f"that consumer {slowest} has not reached" if slowest else "and no consumer is registered"
            return (
                f"{len(self._sizes)} shards of {self._bytes} bytes are sealed {whose}; "
                f"the bound is {self._max_bytes}"
            )

    def _over(self) -> bool:
        return len(self._sizes) > 1 and self._bytes >= self._max_bytes

    def _forget(self, low: int) -> None:
        self._low, self._at, self._bytes, self._counted_at = low, low, 0, self._clock()
        self._sizes.clear()

    def _count(self, low: int, head: int) -> None:
        """Bring the count to `low` and, by a bounded number of entries, towards `head`."""
        if low < self._low or head < self._at:
            self._forget(min(low, head))
        self._low = low
        while self._sizes and self._sizes[0][0] <= low:
            self._bytes -= self._sizes.popleft()[1]
        self._at = max(self._at, min(low, head))
        for seq in range(self._at + 1, min(head, self._at + COUNTED_AT_ONCE) + 1):
            entry = self._ledger.entry(seq)
            if entry is not None and entry.gone is None:
                self._sizes.append((seq, entry.bytes))
                self._bytes += entry.bytes
            self._at = seq
