"""A ring of rows: space handed out in order and given back in the same order."""

from __future__ import annotations

import threading
from collections import deque


class Ring:
    """Hands out spans of rows of one fixed buffer. Spans are contiguous; thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._spans: deque[int] = deque()
        self._head = 0
        self._used = 0

    @property
    def used(self) -> int:
        """Rows in use, including what a span skipped at the end of the buffer."""
        return self._used

    def take(self, rows: int) -> int | None:
        """Return the first row of a free span of `rows` rows, or None when there is no room."""
        with self._lock:
            if not self._used:
                self._head = 0
            wraps = self._head + rows > self.capacity
            skipped = self.capacity - self._head if wraps else 0
            if self._used + skipped + rows > self.capacity:
                return None
            first = 0 if wraps else self._head
            self._head = first + rows
            self._used += skipped + rows
            self._spans.append(skipped + rows)
            return first

    def give_back(self) -> None:
        """Free the span that was taken first of those in use."""
        with self._lock:
            self._used -= self._spans.popleft()
