"""Jobs: what is asked of one, its rows, and how it stands."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from taphouse.wire.base import Answer, Request

__all__ = [
    "Batches",
    "ExtractRequest",
    "Job",
    "JobList",
    "JobOptions",
    "JobRequest",
    "JobState",
    "Row",
    "RowFailure",
]


class JobState(str, Enum):
    """State of a job. `cancelled`, `failed` and `done` are final."""

    SPOOLING = "spooling"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    FAILED = "failed"
    DONE = "done"

    @property
    def final(self) -> bool:
        """True when nothing of the job will run any more."""
        return self in (JobState.CANCELLED, JobState.FAILED, JobState.DONE)


class JobOptions(Request):
    """How the rows of a job become samples.

    `max_tokens` 1 captures the tokens given. More generates the answer with the target and captures it in
    the same pass; a conversation's trailing assistant turn is dropped first.
    """

    max_tokens: int = Field(default=1, ge=1, le=1_000_000)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, max_length=16)
    stop_token_ids: list[int] | None = Field(default=None, max_length=64)
    ignore_eos: bool = False
    layers: list[int] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Layer ids in the order wanted; id i is the residual stream entering decoder layer i.",
    )
    batch_size: int = Field(
        default=32, ge=1, le=4096, description="Rows of one batch, which makes one shard."
    )
    max_shard_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Cut a batch where its states, uncompressed, would pass so many: the rest is another "
        "batch, with a shard of its own. One row alone may pass it.",
    )
    max_length: int | None = Field(
        default=None,
        ge=1,
        description="Rows whose prompt has more tokens are skipped, and counted as skipped.",
    )
    priority: int | None = Field(
        default=None,
        ge=-(2**31),
        lt=2**31,
        description="vLLM's priority (lower runs first); needs --scheduling-policy priority.",
    )
    chat_template_kwargs: dict[str, Any] | None = None
    job_priority: int = Field(
        default=0, ge=-1000, le=1000, description="Jobs with a higher one are fed first, then older ones."
    )
    max_attempts: int | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Runs of a batch that end in a crash before its rows are tried apart; the service's own.",
    )
    on_error: Literal["skip", "fail"] = Field(
        default="skip", description="A failed row is left out, or ends the job."
    )
    output_prefix: str = Field(
        default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$", description="Of its shards' names."
    )

    @field_validator("layers")
    @classmethod
    def _distinct(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and len(set(value)) != len(value):
            raise ValueError("layers must be distinct")
        if value is not None and min(value) < 0:
            raise ValueError("layer ids start at 0 (the embeddings)")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _is_json(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            raise ValueError("holds a number that JSON hasn't: NaN, or one that is too large") from error
        return value


class JobRequest(Request):
    """`POST /v1/jobs` as JSON: a dataset (JSONL) that the service can read itself."""

    path: str = Field(
        min_length=1, max_length=4096, description="File on the service, under one of its dataset roots."
    )
    name: str | None = Field(default=None, max_length=200)
    options: JobOptions = JobOptions()


class Row(BaseModel):
    """One row of a dataset. `messages` is taken first, then `prompt`, then `text`; the rest is ignored.

    `user` is the person it belongs to, by which its sample is found and deleted.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)

    id: str | None = Field(default=None, max_length=256)
    user: str | None = Field(default=None, max_length=256)
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    text: str | None = None

    @field_validator("id", "user", mode="before")
    @classmethod
    def _number_as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class ExtractRequest(Request):
    """`POST /v1/extract`: a few rows, answered at once as the bytes of one shard."""

    rows: list[Row] = Field(min_length=1)
    options: JobOptions = JobOptions()


class RowFailure(Answer):
    """A row that made no sample: `row` counts from 0 over the whole job, blank lines left out."""

    row: int
    id: str | None = None
    reason: str
    skipped: bool = False
    kind: str | None = Field(default=None, description="The reason as a stable name, such as row_refused.")


class Batches(Answer):
    """Batches of one job, or of all, by state.

    `pending` are not in Redis yet, `queued` wait for a worker, `waiting` wait for a retry, `running` are with
    a worker, `finished` have an outcome.
    """

    pending: int = 0
    queued: int = 0
    waiting: int = 0
    running: int = 0
    finished: int = 0


class Job(Answer):
    """A job as it stands. For a final job, `succeeded + failed + skipped == rows`."""

    id: str
    name: str | None = None
    state: JobState
    reason: str | None = Field(default=None, description="Why it failed, or what it waits for.")
    options: JobOptions
    owner: str | None = Field(default=None, description="Name of the token that it came with.")
    tenant: str | None = None
    rows: int
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    batches: Batches = Batches()
    tokens: int = 0
    shards: int = 0
    bytes: int = Field(default=0, description="Bytes of its sealed shards.")
    raw_bytes: int = Field(default=0, description="Bytes of the same hidden states before compression.")
    fingerprint_id: str | None = None
    created_at: float
    finished_at: float | None = None
    rate: float = Field(default=0.0, description="Samples a second over the last minute.")
    eta_s: float | None = None
    failures: list[RowFailure] = Field(
        default=[], description="The first failed and skipped rows; only where one job is asked for."
    )


class JobList(Answer):
    """`GET /v1/jobs`, newest first."""

    jobs: list[Job]
