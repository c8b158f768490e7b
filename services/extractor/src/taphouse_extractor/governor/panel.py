"""The governor as the API, the gate and the doctor of any process see it: through Redis and the store."""

from __future__ import annotations

from collections.abc import Callable

import redis

from taphouse.errors import StoreError
from taphouse.wire import Check, GovernorMode, GovernorOrder
from taphouse.wire import Governor as View
from taphouse_extractor.errors import Conflict, NotAccepting
from taphouse_extractor.governor.memory import Memory
from taphouse_extractor.governor.orders import Orders

__all__ = ["Panel"]

OFF = "the governor is switched off: TAPHOUSE_EXTRACTOR_GOVERNOR=true switches it on"
NONE = "no governor leads: the engine's own defaults are in force"


class Panel:
    """Shows the governor and takes the operator's orders. `enabled` is the setting.

    `lead` has this process govern from now on: it knows the order, while one that governs elsewhere may have
    lost sight of the store. It may raise Redis's errors.
    """

    def __init__(
        self, memory: Memory, orders: Orders, *, enabled: bool, lead: Callable[[], object] = lambda: None
    ) -> None:
        self._memory, self._orders, self._enabled, self._lead = memory, orders, enabled, lead

    @property
    def enabled(self) -> bool:
        """The setting."""
        return self._enabled

    def view(self) -> View:
        """As it stands. Raises `NotAccepting` while Redis can't be used."""
        if not self._enabled:
            return View(mode=GovernorMode.AUTO, reason=OFF)
        try:
            order = self._orders.now()
            return self._memory.view(order) or View(mode=order.mode, reason=NONE)
        except redis.RedisError as error:
            raise NotAccepting(f"Redis can't be used: {error}") from error

    def shown(self) -> View | None:
        """As it stands; None when it is switched off, has never led, or Redis can't be used. Never raises."""
        try:
            return self._memory.view(self._orders.now()) if self._enabled else None
        except redis.RedisError:
            return None

    def give(self, order: GovernorOrder) -> View:
        """Follow an order from now on, and keep it in the store.

        Raises `Conflict` when it is switched off, and `NotAccepting` when it can't be kept (the last one
        stays in force), or is kept and in force only once Redis can be used again.
        """
        if not self._enabled:
            raise Conflict(OFF, param="mode")
        try:
            self._orders.give(order)
        except StoreError as error:
            stays = self._orders.now().mode.value
            raise NotAccepting(
                f"the order can't be kept, and {stays!r} stays in force: {error.message}"
            ) from error
        try:
            self._lead()
            return self.view()
        except redis.RedisError as error:
            why = f"Redis can't be used: {error}"
        except NotAccepting as error:
            why = str(error)
        raise NotAccepting(f"the order is kept, and no governor can follow it yet: {why}")

    def stopped(self) -> str | None:
        """Why no batch may be queued: the operator stopped extraction. Never raises."""
        return self._orders.stopped() if self._enabled else None

    def check(self) -> Check:
        """For `doctor`: whether a governor leads. Never raises."""
        if not self._enabled:
            return Check(check="governor", ok=True, detail="switched off: the engine's own quota is in force")
        advice = "One runs in each API process: see the API's log, and whether Redis answers"
        try:
            leader, view = self._memory.leader(), self._memory.view(self._orders.now())
        except redis.RedisError as error:
            return Check(check="governor", ok=False, detail=f"Redis can't be used: {error}", advice=advice)
        if leader is None:
            return Check(check="governor", ok=False, detail="none leads", advice=advice)
        said = f", {view.mode.value}: {view.reason}" if view is not None else ""
        return Check(check="governor", ok=True, detail=f"{leader} leads{said}")
