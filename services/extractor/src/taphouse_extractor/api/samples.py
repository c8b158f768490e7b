"""Routes of single samples: whose they are, and away with them. Ids stand in bodies, never in URLs."""

from __future__ import annotations

from fastapi import APIRouter

from taphouse.wire import SampleQuery, SamplesDeleted, SamplesFound
from taphouse_extractor.api.audit import Notes
from taphouse_extractor.api.context import Here
from taphouse_extractor.api.threads import on_its_own

__all__ = ["router"]

router = APIRouter(tags=["samples"])
_NAMED = 1000
"""Shards that one line of the audit names."""


@router.post("/v1/samples/find")
@on_its_own("long")
def find(here: Here, query: SampleQuery, notes: Notes) -> SamplesFound:
    """Rows of a person or a tenant, by id, and the shards that hold them. Reads the rows of all jobs.

    Jobs and shards that are damaged are named in `problems`; all others are searched.
    """
    notes["of"] = _whose(query)
    found = here.samples.find(query)
    notes["rows"] = found.rows
    return found


@router.post("/v1/samples/delete")
@on_its_own("long")
def delete(here: Here, query: SampleQuery, notes: Notes) -> SamplesDeleted:
    """Delete them: shards are written anew without them, and their rows are blanked. For good.

    Jobs that have some must be at their end (409 otherwise). What is damaged is left as it is, and named in
    `problems`.
    """
    notes["of"] = _whose(query)
    deleted = here.samples.delete(query)
    notes |= {"rows": deleted.rows, "samples": deleted.samples}
    notes |= {"rewritten": deleted.rewritten[:_NAMED], "removed": deleted.removed[:_NAMED]}
    if deleted.problems:
        notes["problems"] = deleted.problems[:_NAMED]
    return deleted


def _whose(query: SampleQuery) -> str:
    """What was asked for, without naming a person: the audit outlives what was deleted."""
    if query.tenant is not None:
        return f"tenant {query.tenant}"
    return "a user" if query.user is not None else f"{len(query.ids or ())} ids"
