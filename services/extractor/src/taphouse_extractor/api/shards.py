"""Routes of sealed shards: the ledger, and the files."""

from __future__ import annotations

import re
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import FileResponse

from taphouse.ledger import LedgerEntry
from taphouse.wire import ShardInfo, ShardList
from taphouse_extractor.api.context import Here
from taphouse_extractor.errors import NotFound

__all__ = ["router"]

router = APIRouter(tags=["shards"])
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,180}\.safetensors")


@router.get("/v1/shards")
def list_shards(
    here: Here,
    after: Annotated[int, Query(ge=0, description="A cursor: the last sequence number seen.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> ShardList:
    """Ledger entries after a cursor, in order. Ask again with `after=next_after`."""
    head = here.ledger.head()
    entries = islice(here.ledger.entries(after), limit) if after < head else iter(())
    shards = [_info(entry) for entry in entries]
    return ShardList(shards=shards, next_after=shards[-1].seq if shards else after, head=head)


@router.get("/v1/shards/{name}", response_class=FileResponse)
def download(here: Here, name: str) -> FileResponse:
    """The file of a shard. `Range` is honoured; X-Taphouse-SHA256 is that of the whole file."""
    entry = here.ledger.find(name) if SHARD_NAME.fullmatch(name) else None
    if entry is None or not here.store.exists(entry.path):
        raise NotFound(f"there is no shard {name!r:.120}", param="name")
    return FileResponse(
        here.store.local_path(entry.path),
        media_type="application/octet-stream",
        filename=name,
        headers={"X-Taphouse-SHA256": entry.sha256},
    )


def _info(entry: LedgerEntry) -> ShardInfo:
    return ShardInfo.model_validate(entry.model_dump())
