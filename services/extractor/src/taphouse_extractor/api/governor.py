"""Routes of the governor: look at it, and tell it what to do."""

from __future__ import annotations

from fastapi import APIRouter

from taphouse.wire import Governor, GovernorOrder
from taphouse_extractor.api.audit import Notes
from taphouse_extractor.api.context import Here
from taphouse_extractor.api.threads import on_its_own

__all__ = ["router"]

router = APIRouter(tags=["operations"])


@router.get("/v1/governor")
@on_its_own("looks")
def look(here: Here) -> Governor:
    """What extraction may use while production is there, and why."""
    return here.governor.view()


@router.post("/v1/governor")
def order(here: Here, order: GovernorOrder, notes: Notes) -> Governor:
    """Let it govern, pin its limit, or stop extraction. Kept through restarts until the next order."""
    notes |= {"order": order.mode.value, "busy_ms": order.busy_ms}
    return here.governor.give(order)
