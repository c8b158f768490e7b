"""The checksums of a payload's blocks, taken while it is written."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Sum:
    """crc32 of the first `covered` bytes of a block as they stand in the file; -1: it is not known."""

    covered: int
    crc: int


_NOTHING = Sum(0, 0)
_UNKNOWN = Sum(-1, 0)


class Sums:
    """What is known of each block, for any number of threads.

    A block is known while each write to it goes on where the one before ended, or begins it again.
    """

    def __init__(self) -> None:
        self._known: dict[int, Sum] = {}
        self._lock = threading.Lock()

    def before(self, block: int) -> Sum:
        """What is known of a block now."""
        return self._known.get(block, _NOTHING)

    def after(self, block: int, before: Sum, first: int, end: int, crc: int) -> None:
        """Bytes [first, end) of a block were written: with them, `crc` is of its first `end` bytes.

        `before` is what was known when the write began; the block is unknown from now on if that is no longer
        so, or if the write neither begins the block nor goes on where it ended.
        """
        with self._lock:
            same = self._known.get(block, _NOTHING) is before
            in_order = first in (0, before.covered) and before is not _UNKNOWN
            self._known[block] = Sum(end, crc) if same and in_order else _UNKNOWN
