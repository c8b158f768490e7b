"""What `GET /v1/events` and `GET /v1/history` say: the service, watched.

Events are server-sent: `hello` (once), `moment` (every second), `jobs` (when they changed), `shard` (its id
is the ledger's sequence number, for `Last-Event-ID`), `problem` (why there is no moment now). Times are
seconds since the epoch.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from taphouse.wire import JobState, QueueStatus

__all__ = ["Hello", "History", "Moment", "Point", "Problem", "TrainerPoint"]


class _Said(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class TrainerPoint(_Said):
    """What a trainer had reached. `lag` is in ledger entries."""

    name: str
    step: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    lag: int | None = None


class Point(_Said):
    """The service at a time, in numbers that can be drawn over time.

    `samples` to `raw_bytes` are a second's, over the last minute. Latencies are production's p95 (of all
    requests where `mixed`: the engine tells no classes apart), beside what they are held to.
    """

    at: float
    pending: int = 0
    queued: int = 0
    waiting: int = 0
    running: int = 0
    rows_left: int = 0
    samples: float = 0.0
    tokens: float = 0.0
    bytes: float = 0.0
    raw_bytes: float = 0.0
    itl_p95_s: float | None = None
    itl_held_to_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_held_to_s: float | None = None
    mixed: bool = False
    limit_ms: float | None = Field(
        default=None, description="What extraction may add to a step while production is there; 0: stopped."
    )
    trainers: list[TrainerPoint] = Field(default=[], description="Those heard of last, at most four.")


class History(_Said):
    """`GET /v1/history`: the last hour, oldest first, a point every `every_s` seconds."""

    every_s: float
    points: list[Point]


class Hello(_Said):
    """First event: who is asking, and what may be done to a job in each state (by its routes' names)."""

    version: str
    name: str
    role: str
    governor: bool = Field(description="Whether there is one to give orders to.")
    job_actions: dict[JobState, list[str]]


class Moment(_Said):
    """The queue's status now, and the same as a point."""

    status: QueueStatus
    point: Point


class Problem(_Said):
    """Why there is no moment now."""

    message: str
