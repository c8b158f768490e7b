"""Sealed shards, and which of them are taken away to free their space."""

from __future__ import annotations

from pydantic import Field

from taphouse.wire.base import Answer, Request

__all__ = ["PruneRequest", "Pruned", "ShardInfo", "ShardList"]


class ShardInfo(Answer):
    """A sealed shard: its ledger entry."""

    seq: int
    shard: str
    path: str
    bytes: int
    raw_bytes: int
    sha256: str
    samples: int
    tokens: int
    layers: list[int]
    num_layers: int
    hidden_size: int
    dtype: str
    fingerprint_id: str
    job_id: str | None = None
    batch: int | None = None
    created_at: float
    gone: str | None = Field(default=None, description="Why there is no such shard any more.")


class ShardList(Answer):
    """`GET /v1/shards`: entries after a cursor. Ask again with `after=next_after` for more."""

    shards: list[ShardInfo]
    next_after: int
    head: int


class PruneRequest(Request):
    """Which shards: those that all registered consumers have acknowledged, unless `force`."""

    older_than_s: float | None = Field(
        default=None, ge=0.0, allow_inf_nan=False, description="Only those sealed so many seconds ago."
    )
    force: bool = Field(default=False, description="Also what consumers have not acknowledged.")
    dry_run: bool = Field(default=False, description="Only say what would be taken away.")


class Pruned(Answer):
    """`POST /v1/shards/prune`: what was taken away, or would be."""

    shards: int
    bytes: int
    dry_run: bool = False
    held: str | None = Field(default=None, description="What kept the next shard, None at the ledger's end.")
