"""What the API says and hears of shards that are taken away to free their space."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["PruneRequest", "Pruned"]


class PruneRequest(BaseModel):
    """Which shards: those that all registered consumers have acknowledged, unless `force`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    older_than_s: float | None = Field(
        default=None, ge=0.0, allow_inf_nan=False, description="Only those sealed so many seconds ago."
    )
    force: bool = Field(default=False, description="Also what consumers have not acknowledged.")
    dry_run: bool = Field(default=False, description="Only say what would be taken away.")


class Pruned(BaseModel):
    """`POST /v1/shards/prune`: what was taken away, or would be."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    shards: int
    bytes: int
    dry_run: bool = False
    held: str | None = Field(default=None, description="What kept the next shard, None at the ledger's end.")
