"""On whose threads routes run, so that none keeps all others waiting.

Routes and dependencies that are plain functions share 40 threads, FastAPI's. What may hold one for long (a
lock, an engine, a whole dataset) runs on threads of its own kind, and waits for one of those without any.
Whether the process lives takes none at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from math import inf
from typing import Any, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

__all__ = ["Threads", "on_its_own"]

AT_ONCE = 8
T = TypeVar("T")


class Threads:
    """Of one event loop; at most so many of each kind work at once."""

    def __init__(self) -> None:
        self.long = CapacityLimiter(AT_ONCE)
        """Deletions, retries and searches."""
        self.datasets = CapacityLimiter(AT_ONCE)
        """Datasets that begin, end, or are read from a file."""
        self.looks = CapacityLimiter(AT_ONCE)
        """What only looks, and asks Redis for it."""
        self.bounded = CapacityLimiter(inf)
        """What bounds itself, and refuses more."""
        self._shared: dict[str, asyncio.Future[Any]] = {}

    async def once(self, name: str, work: Callable[[], T]) -> T:
        """Do what is named; who asks while it is being done gets the same answer, or error."""
        doing = self._shared.get(name)
        if doing is None:
            doing = asyncio.ensure_future(run_sync(work, limiter=self.bounded))
            self._shared[name] = doing
            doing.add_done_callback(partial(self._done, name))
        answer: T = await asyncio.shield(doing)
        return answer

    def _done(self, name: str, doing: asyncio.Future[Any]) -> None:
        del self._shared[name]
        if not doing.cancelled():
            doing.exception()  # where all who asked have left, nobody else looks at it


def on_its_own(kind: str) -> Callable[[Callable[..., T]], Callable[..., Awaitable[T]]]:
    """Make a route that takes `here` run on the threads of that kind, see `Threads`."""

    def decorate(route: Callable[..., T]) -> Callable[..., Awaitable[T]]:
        @wraps(route)
        async def run(**given: Any) -> T:
            limiter: CapacityLimiter = getattr(given["here"].threads, kind)
            return await run_sync(partial(route, **given), limiter=limiter)

        return run

    return decorate
