"""One call for each of a few items, all at once: one that hangs holds the others up no longer than itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["abreast"]

T = TypeVar("T")
R = TypeVar("R")


def abreast(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """What `work` gives for each item, in their order. A single item needs no thread."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(len(items), thread_name_prefix="abreast") as pool:
        return list(pool.map(work, items))
