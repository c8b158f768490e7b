"""Which batches of a job have their outcome: a bit each, so that a million take 125 kB."""

from __future__ import annotations

from collections.abc import Iterator

from taphouse_extractor.records import SEGMENT

__all__ = ["Finished"]

_SEGMENT_BYTES = SEGMENT // 8


class Finished:
    """A set of batch numbers that only grows. Mostly they come in order, and asking is quick then."""

    __slots__ = ("_bits", "_count", "_low")

    def __init__(self) -> None:
        self._bits, self._count = bytearray(), 0
        self._low = 0
        """All batches under this are in."""

    def __len__(self) -> int:
        return self._count

    def __contains__(self, batch: int) -> bool:
        at = batch >> 3
        return at < len(self._bits) and bool(self._bits[at] >> (batch & 7) & 1)

    def add(self, batch: int) -> None:
        """Take a batch in. Idempotent."""
        if batch in self:
            return
        at = batch >> 3
        if at >= len(self._bits):
            self._bits.extend(bytes(at + 1 - len(self._bits)))
        self._bits[at] |= 1 << (batch & 7)
        self._count += 1
        while self._low in self:
            self._low += 1

    def missing(self, end: int) -> Iterator[int]:
        """Batches under `end` that are not in, rising."""
        for batch in range(self._low, end):
            if batch not in self:
                yield batch

    def fills(self, segment: int) -> bool:
        """Whether every batch of a whole segment is in."""
        bits = self._bits[segment * _SEGMENT_BYTES : (segment + 1) * _SEGMENT_BYTES]
        return len(bits) == _SEGMENT_BYTES and bits.count(0xFF) == _SEGMENT_BYTES
