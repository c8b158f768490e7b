"""Routes of sealed shards: the ledger, the files, and what waits for a consumer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import FileResponse

from taphouse.ledger import LedgerEntry
from taphouse.wire import Consumer, Pruned, PruneRequest, ShardInfo, ShardList
from taphouse_extractor import consumers
from taphouse_extractor.api.audit import Notes
from taphouse_extractor.api.context import Context, Here
from taphouse_extractor.api.door import Asking, sees_job
from taphouse_extractor.api.threads import on_its_own
from taphouse_extractor.errors import NotFound
from taphouse_extractor.tokens import Caller

__all__ = ["router"]

router = APIRouter(tags=["shards"])
LOOKED_AT = 10_000


@router.get("/v1/shards")
def list_shards(
    here: Here,
    who: Asking,
    after: Annotated[int, Query(ge=0, description="A cursor: the last sequence number seen.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> ShardList:
    """Ledger entries after a cursor, in order. Ask again with `after=next_after`.

    A tenant's token gets those of its tenant; there may be more while `next_after` is below `head`.
    """
    head = here.ledger.head()
    entries = here.ledger.entries(after) if after < head else iter(())
    if who.tenant is None:
        shards = [_info(entry) for entry in islice(entries, limit)]
        return ShardList(shards=shards, next_after=shards[-1].seq if shards else after, head=head)
    shards, after = _own(here, who, entries, limit, after)
    return ShardList(shards=shards, next_after=after, head=head)


def _own(
    here: Context, who: Caller, entries: Iterator[LedgerEntry], limit: int, after: int
) -> tuple[list[ShardInfo], int]:
    """At most `limit` of the caller's tenant among the next entries, and the last number looked at."""
    sees = cache(lambda job_id: job_id is not None and sees_job(here, who, job_id))
    found: list[ShardInfo] = []
    for entry in islice(entries, LOOKED_AT):
        after = entry.seq
        if sees(entry.job_id):
            found.append(_info(entry))
        if len(found) == limit:
            break
    return found, after


@router.get("/v1/shards/{name}", response_class=FileResponse)
def download(here: Here, name: str) -> FileResponse:
    """The file of a shard. `Range` is honoured; X-Taphouse-SHA256 is that of the whole file."""
    entry = here.shard(name)
    if entry is None or entry.gone or not here.store.exists(entry.path):
        why = f" any more: {entry.gone}" if entry is not None and entry.gone else ""
        raise NotFound(f"there is no shard {name!r:.120}{why}", param="name")
    return FileResponse(
        here.store.local_path(entry.path),
        media_type="application/octet-stream",
        filename=name,
        headers={"X-Taphouse-SHA256": entry.sha256},
    )


@router.post("/v1/shards/prune")
@on_its_own("long")
def prune(here: Here, request: PruneRequest, notes: Notes) -> Pruned:
    """Take away shards that all consumers have acknowledged, or more by force. Their entries say so."""
    notes |= request.model_dump(exclude_none=True)
    pruned = here.retention.prune(request)
    notes["shards"] = pruned.shards
    return pruned


@router.post("/v1/consumers/{consumer}/forget")
@on_its_own("long")
def forget(here: Here, consumer: str) -> Consumer:
    """Forget a consumer that will not go on: feeding and retention wait for it no more.

    409 while it runs. One that comes back is registered again.
    """
    return consumers.forget(here.store, consumer)


def _info(entry: LedgerEntry) -> ShardInfo:
    return ShardInfo.model_validate(entry.model_dump())
