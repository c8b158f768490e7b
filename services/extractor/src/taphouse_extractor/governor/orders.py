"""The operator's order, kept in the store: it outlives every process, and whatever Redis loses.

    governor/order.json     mode and pinned limit, as they were given last

A store that can't be read changes nothing: the last order that was known stays in force. One whose order was
never known is taken for `stopped`, since it may have been that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pydantic import ValidationError

from taphouse.errors import NotInStore, StoreError, WrongStore
from taphouse.store import Store, to_json
from taphouse.wire import GovernorMode, GovernorOrder
from taphouse_extractor.governor.state import AUTO, Order

__all__ = ["Orders"]

log = logging.getLogger(__name__)
PATH = "governor/order.json"
LOOK_EVERY_S = 0.5


class Orders:
    """Reads and writes the file above. Safe to share between threads.

    `now` never waits for the store: an order that another process took is seen by the next `look`. `wrong`
    says why the store is not the service's, or None: an order kept there would be gone when its disk is back.
    """

    def __init__(self, store: Store, wrong: Callable[[], str | None] = lambda: None) -> None:
        self._store, self._wrong = store, wrong
        self._known: Order | None = None
        self._problem: str | None = None
        self._lock = threading.Lock()
        self.look()

    def run(self, stop: threading.Event) -> None:
        """Look again and again until `stop` is set."""
        while not stop.wait(LOOK_EVERY_S):
            self.look()

    def look(self) -> Order:
        """Read the order, and return what is in force. Never raises."""
        with self._lock:
            problem = None
            try:
                self._known = _read(self._store)
            except NotInStore:  # no order is ever taken away: after one, this is a store that went away
                self._known = self._known or AUTO
            except StoreError as error:
                problem = error.message
            if problem is not None and problem != self._problem:
                log.error("the operator's order can't be read, %s: %s", self._in_force(), problem)
            self._problem = problem
            return self.now()

    def now(self) -> Order:
        """What is in force."""
        if self._known is not None:
            return self._known
        why = f"stopped, since the operator's order can't be read: {self._problem}"
        return Order(GovernorMode.STOPPED, why=why)

    def stopped(self) -> str | None:
        """Why nothing may be extracted: the operator stopped it."""
        order = self.now()
        if order.mode is not GovernorMode.STOPPED:
            return None
        return f"{order.why}: `taphouse governor auto` lets extraction run again"

    def give(self, order: GovernorOrder) -> None:
        """Follow an order from now on, once it is durable. Raises `StoreError`s: then the last one stays."""
        wrong = self._wrong()
        if wrong is not None:
            raise WrongStore(wrong, path=PATH)
        with self._lock:
            self._store.put(PATH, to_json(order.model_dump(mode="json")))
            self._known, self._problem = _order(order), None

    def _in_force(self) -> str:
        return "nothing is extracted" if self._known is None else f"{self._known.mode.value} stays in force"


def _read(store: Store) -> Order:
    """The order in the store. Raises `NotInStore`, and `StoreError` for one that nobody here gave."""
    try:
        return _order(GovernorOrder.model_validate_json(store.read(PATH)))
    except ValidationError as error:
        raise StoreError(f"{PATH} is no order ({error.error_count()} problems)", path=PATH) from error


def _order(said: GovernorOrder) -> Order:
    return Order(said.mode, said.busy_ms or 0.0)
