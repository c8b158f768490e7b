"""The queue as a whole: depth, rates, workers, engines, consumers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from taphouse.wire.base import Answer
from taphouse.wire.engines import Engine, Governor
from taphouse.wire.jobs import Batches, JobState

__all__ = ["Consumer", "QueueStatus", "Rate", "Retention", "Unconsumed", "Worker"]


class Rate(Answer):
    """What was sealed in the last `window_s` seconds, a second."""

    window_s: float
    samples: float = 0.0
    tokens: float = 0.0
    bytes: float = 0.0
    raw_bytes: float = 0.0
    batches: float = 0.0


class Worker(Answer):
    """A worker process that was heard of lately. `batch` is `<job id>:<batch>` while it runs one."""

    name: str
    state: str
    batch: str | None = None
    last_heartbeat: float | None = None


class Consumer(BaseModel):
    """What a consumer of the ledger (a trainer) says of itself."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    cursor: int | None = Field(default=None, ge=0)
    acknowledged: int | None = Field(
        default=None, ge=0, description="Ledger entries that it will not read again, however it goes on."
    )
    lag: int | None = Field(default=None, description="Ledger entries it has not reached.")
    epoch: float | None = None
    step: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    phase: str | None = Field(default=None, description="What it does, such as `counting tokens`.")
    refused: int = Field(default=0, ge=0, description="Shards that it left out.")
    ended: str | None = Field(default=None, description="Why it ended, when it ended as it was meant to.")
    updated_at: float | None = None


class Unconsumed(Answer):
    """Sealed shards that the slowest registered consumer has not reached; all while none is registered."""

    shards: int = 0
    bytes: int = 0
    bound_bytes: int | None = Field(default=None, description="Extraction waits at so many; None: never.")
    slowest: list[str] = Field(default=[], description="Consumers that all of it waits for.")
    counted: bool = Field(default=True, description="False while older entries are still to be counted.")


class Retention(Answer):
    """When sealed shards are deleted, and what holds the next one."""

    mode: Literal["keep", "consumed", "age"]
    age_s: float | None = None
    held: str | None = Field(default=None, description="Why no more are deleted; None at the ledger's end.")
    held_by: list[str] = Field(default=[], description="Consumers that still need the next one.")


class QueueStatus(Answer):
    """`GET /v1/queue`: all that a person watching wants to know, in one answer."""

    depth: Batches
    jobs: dict[JobState, int] = Field(description="Number of jobs in each state.")
    rows_left: int = Field(description="Rows of unfinished jobs without an outcome.")
    rates: list[Rate] = Field(description="Over the last one and five minutes.")
    eta_s: float | None = Field(default=None, description="rows_left at the rate of the last minutes.")
    paused: str | None = Field(default=None, description="Why no batch is fed at present.")
    unfit_jobs: int = Field(default=0, description="Jobs that wait for an engine that can serve them.")
    unfit: str | None = Field(default=None, description="Why the oldest of these waits.")
    workers: list[Worker]
    engines: list[Engine]
    governor: Governor | None = Field(default=None, description="None without a governor.")
    consumers: list[Consumer]
    unconsumed: Unconsumed | None = Field(default=None, description="None where it can't be counted.")
    retention: Retention | None = Field(default=None, description="None where it can't be told.")
    ledger_head: int = Field(description="Sequence number of the newest ledger entry, 0 when empty.")
    updated_at: float
