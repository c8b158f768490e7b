"""Whether new work may begin: one place that says no, and why."""

from __future__ import annotations

from collections.abc import Callable

from taphouse.store import Store
from taphouse_extractor.errors import NotAccepting
from taphouse_extractor.monitor import Monitors

__all__ = ["Gate"]


class Gate:
    """Looks at the store's free disk (at least `min_free_bytes` must be left), the engines and the operator.

    `stopped` says why the operator stopped extraction, `backlog` why consumers must catch up first, or None.
    """

    def __init__(
        self,
        store: Store,
        monitors: Monitors,
        min_free_bytes: int,
        stopped: Callable[[], str | None] = lambda: None,
        backlog: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._store, self._monitors, self._min_free_bytes = store, monitors, min_free_bytes
        self._stopped, self._backlog = stopped, backlog

    def disk_problem(self) -> str | None:
        """Why nothing may be written now, or None."""
        free = self._store.free_bytes()
        if free >= self._min_free_bytes:
            return None
        return f"the store has {free} bytes free, under the floor of {self._min_free_bytes}: free some space"

    def paused(self) -> str | None:
        """Why no batch may be queued now, or None."""
        return self.disk_problem() or self._monitors.problem() or self._stopped() or self._backlog()

    def admit(self) -> None:
        """Raise `NotAccepting` when no new dataset or extraction may be taken."""
        problem = self.disk_problem()
        if problem:
            raise NotAccepting(problem)
