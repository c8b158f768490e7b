"""That a process and its store belong together: Redis keeps the store's id beside the queue.

<prefix>:store     id of the store whose batches the queue holds

So a mount point whose disk is not there is not taken for an empty store, and two stores never share a queue.
Redis is asked before the store is looked at: whoever told it had written the store's file before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import redis

from taphouse.errors import StoreError, WrongStore
from taphouse.store import Store
from taphouse.store.identity import begin, identity
from taphouse_extractor.leases import Client

__all__ = ["Home"]

CHECK_EVERY_S = 2.0
GET_OR_SET = """
local known = redis.call('get', KEYS[1])
if known then return known end
redis.call('set', KEYS[1], ARGV[1])
return ARGV[1]
"""


class Home:
    """The store of this process, by its id and by what Redis says. Safe to share between threads."""

    def __init__(
        self, store: Store, client: Client, *, prefix: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._redis, self._key, self._clock = store, client, f"{prefix}:store", clock
        self._id: str | None = None
        self._lock = threading.Lock()
        self._said: str | None = None
        self._again_at = 0.0

    def enter(self) -> None:
        """At the start: an empty directory becomes a store, unless Redis knows of another.

        Raises `WrongStore` and other `StoreError`s, and Redis's errors.
        """
        known = self._redis.get(self._key)
        found = identity(self._store)
        if found is None and known is not None:
            raise self._other(known, "is empty")
        self._id = (found or begin(self._store)).id
        self.check()

    def enter_if_known(self) -> None:
        """As `enter`, for who can do without Redis for a while: then an empty directory may be the wrong one.

        Raises `WrongStore` and other `StoreError`s.
        """
        try:
            self.enter()
        except redis.RedisError as error:
            found = identity(self._store)
            if found is None:
                said = str(error).rstrip(".")
                raise WrongStore(
                    f"the store's directory is empty, and Redis can't be asked if it knows another: {said}",
                    advice="Mount the store's disk, or start Redis first",
                ) from error
            self._id = found.id

    def check(self) -> None:
        """Whether it is still the store of the start, and the one that Redis knows, where that knows any.

        Raises as `enter`.
        """
        here = self._here()
        known = str(self._redis.eval(GET_OR_SET, 1, self._key, here))
        if known != here:
            raise self._other(known, f"is store {here}")

    def problem(self) -> str | None:
        """Why nothing may be taken or fed; Redis is asked every 2 s, and may be away. Never raises.

        While it is away, what it said last stands.
        """
        try:
            self._here()
        except StoreError as error:
            return str(error)
        with self._lock:
            if self._clock() >= self._again_at:
                try:
                    self.check()
                    self._said = None
                except StoreError as error:
                    self._said = str(error)
                except redis.RedisError:
                    pass  # what it said last is still so
                self._again_at = self._clock() + CHECK_EVERY_S
            return self._said

    def _here(self) -> str:
        """The id of the store, still that of the start. Raises `WrongStore` and other `StoreError`s."""
        found = identity(self._store)
        if found is None or found.id != self._id:
            what = "is empty" if found is None else f"is store {found.id}"
            raise WrongStore(
                f"the store's directory {what}, and this process began with store {self._id}",
                advice="Was its disk unmounted? Bring it back; for another store, start anew",
            )
        return found.id

    def _other(self, known: str, what: str) -> WrongStore:
        return WrongStore(
            f"the store's directory {what}, and Redis holds the queue of store {known}",
            advice="Is its disk mounted? A store of its own needs a queue_name of its own; "
            f"to go on here with this one: redis-cli DEL {self._key}",
        )
