"""Whether new work may begin: one place that says no, and why."""

from __future__ import annotations

import time
from collections.abc import Callable

from taphouse.errors import StoreError
from taphouse.store import Store
from taphouse.wire import JobOptions
from taphouse_extractor.errors import InvalidRequest, NotAccepting
from taphouse_extractor.monitor import Monitors

__all__ = ["Gate", "WriteProbe"]


class WriteProbe:
    """Whether the store takes what is written, found out by writing, at most once in `every_s` seconds."""

    PATH, BLOCK = "probe", bytes(4096)

    def __init__(
        self, store: Store, every_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._every_s, self._clock = store, every_s, clock
        self._said: str | None = None
        self._again_at = 0.0

    def problem(self) -> str | None:
        """Why it doesn't, or None. Never raises."""
        if self._clock() >= self._again_at:
            try:
                self._store.put(self.PATH, self.BLOCK, durable=False)
                self._said = None
            except StoreError as error:
                self._said = f"the store takes no writes: {error.message}"
            self._again_at = self._clock() + self._every_s
        return self._said


class Gate:
    """Looks at the store (it takes writes, `min_free_bytes` are left), the engines and the operator.

    `home` says why it is not the service's store, `stopped` why the operator stopped extraction, `backlog`
    why consumers must catch up first; each may be None.
    """

    def __init__(
        self,
        store: Store,
        monitors: Monitors,
        min_free_bytes: int,
        *,
        home: Callable[[], str | None] = lambda: None,
        stopped: Callable[[], str | None] = lambda: None,
        backlog: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._store, self._monitors, self._min_free_bytes = store, monitors, min_free_bytes
        self._home, self._stopped, self._backlog = home, stopped, backlog
        self._probe = WriteProbe(store)

    def wrong_store(self) -> str | None:
        """Why the store is not the service's, or None. Never raises."""
        return self._home()

    def require_store(self) -> None:
        """Raise `NotAccepting` where the store is not the service's: what lies on it isn't here."""
        wrong = self.wrong_store()
        if wrong is not None:
            raise NotAccepting(wrong)

    def disk_problem(self) -> str | None:
        """Why nothing may be written now, or None. Never raises."""
        wrong = self.wrong_store()
        if wrong is not None:
            return wrong
        try:
            free = self._store.free_bytes()
        except StoreError as error:
            return f"the store can't be used: {error.message}"
        if free >= self._min_free_bytes:
            return self._probe.problem()
        return f"the store has {free} bytes free, under the floor of {self._min_free_bytes}: free some space"

    def paused(self) -> str | None:
        """Why no batch may be queued now, or None."""
        return self.disk_problem() or self._monitors.problem() or self._stopped() or self._backlog()

    def admit(self) -> None:
        """Raise `NotAccepting` when no new dataset or extraction may be taken."""
        problem = self.disk_problem()
        if problem:
            raise NotAccepting(problem)

    def check(self, options: JobOptions) -> int | None:
        """Raise `InvalidRequest` for options with which no engine would take any row.

        Returns the most tokens that a row's prompt may have, None while that isn't known.
        """
        refused = self._monitors.refusal(options)
        if refused is not None:
            raise InvalidRequest(f"{refused.param}: {refused.why}", param=refused.param)
        return self._monitors.longest_prompt(options)
