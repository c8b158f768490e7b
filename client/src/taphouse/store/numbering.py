"""Things that are numbered without gaps."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["last_number"]


def last_number(exists: Callable[[int], bool], known: int = 0) -> int:
    """The last number from 1 on that exists, where all before it do; 0 when there is none.

    `known` existed before. A few dozen questions answer it, however many there are.
    """
    low, step = known if known and exists(known) else 0, 1
    while exists(low + step):
        low, step = low + step, step * 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        if exists(middle):
            low = middle
        else:
            high = middle
    return low
