"""What the extractor's API says and hears: pydantic models shared by the service and its clients.

Requests refuse unknown fields; answers ignore them, so that an older client reads a newer service.
Times are seconds since the epoch (float), durations are seconds, sizes are bytes, lengths are tokens.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

__all__ = [
    "Batches",
    "Check",
    "Consumer",
    "Engine",
    "ErrorBody",
    "ErrorDetail",
    "ExtractRequest",
    "Governor",
    "GovernorMode",
    "GovernorOrder",
    "Health",
    "Job",
    "JobList",
    "JobOptions",
    "JobRequest",
    "JobState",
    "Latency",
    "QueueStatus",
    "Rate",
    "Ready",
    "Row",
    "RowFailure",
    "ShardInfo",
    "ShardList",
    "Worker",
]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


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


class JobOptions(_Request):
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


class JobRequest(_Request):
    """`POST /v1/jobs` as JSON: a dataset (JSONL) that the service can read itself."""

    path: str = Field(
        min_length=1, max_length=4096, description="File on the service, under one of its dataset roots."
    )
    name: str | None = Field(default=None, max_length=200)
    options: JobOptions = JobOptions()


class Row(BaseModel):
    """One row of a dataset. `messages` is taken first, then `prompt`, then `text`; the rest is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)

    id: str | None = Field(default=None, max_length=256)
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    text: str | None = None

    @field_validator("id", mode="before")
    @classmethod
    def _id_as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class ExtractRequest(_Request):
    """`POST /v1/extract`: a few rows, answered at once as the bytes of one shard."""

    rows: list[Row] = Field(min_length=1)
    options: JobOptions = JobOptions()


class RowFailure(_Answer):
    """A row that made no sample: `row` counts from 0 over the whole job, blank lines left out."""

    row: int
    id: str | None = None
    reason: str
    skipped: bool = False
    kind: str | None = Field(default=None, description="The reason as a stable name, such as row_refused.")


class Batches(_Answer):
    """Batches of one job, or of all, by state.

    `pending` are not in Redis yet, `queued` wait for a worker, `waiting` wait for a retry, `running` are with
    a worker, `finished` have an outcome.
    """

    pending: int = 0
    queued: int = 0
    waiting: int = 0
    running: int = 0
    finished: int = 0


class Job(_Answer):
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


class JobList(_Answer):
    """`GET /v1/jobs`, newest first."""

    jobs: list[Job]


class Rate(_Answer):
    """What was sealed in the last `window_s` seconds, a second."""

    window_s: float
    samples: float = 0.0
    tokens: float = 0.0
    bytes: float = 0.0
    raw_bytes: float = 0.0
    batches: float = 0.0


class Worker(_Answer):
    """A worker process that was heard of lately. `batch` is `<job id>:<batch>` while it runs one."""

    name: str
    state: str
    batch: str | None = None
    last_heartbeat: float | None = None


class Latency(_Answer):
    """Latency of an engine's recent requests: production's own, or of all.

    `requests` says which: "production" where the tap times both classes apart, "all" (production's and
    extraction's together, as the engine's own histograms give them) where it does not. Seconds, over the
    requests of the last `window_s`; None while there were none.
    """

    window_s: float
    requests: str = "all"
    ttft_p50: float | None = None
    ttft_p95: float | None = None
    itl_p50: float | None = None
    itl_p95: float | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None


class Engine(_Answer):
    """One engine as the service sees it. `capture` is "on", "off" or "unreachable"; `detail` says why."""

    url: str
    capture: str
    detail: str | None = None
    layers: list[int] | None = None
    fingerprint_id: str | None = None
    in_flight: int | None = None
    latency: Latency | None = None


class GovernorMode(str, Enum):
    """`auto`: by production's latency; `pinned`: the operator's limit; `stopped`: no extraction."""

    AUTO = "auto"
    PINNED = "pinned"
    STOPPED = "stopped"


class GovernorOrder(_Request):
    """`POST /v1/governor`: what the operator wants. `busy_ms` is for `pinned`, which needs it."""

    mode: GovernorMode
    busy_ms: float | None = Field(
        default=None,
        ge=0.0,
        le=60_000.0,
        allow_inf_nan=False,
        description="Milliseconds that extraction may add to a step while production runs or waits.",
    )

    @model_validator(mode="after")
    def _limit_where_pinned(self) -> GovernorOrder:
        if (self.mode is GovernorMode.PINNED) != (self.busy_ms is not None):
            raise ValueError("busy_ms goes with mode pinned, and with no other")
        return self


class Governor(_Answer):
    """What extraction may use at present, and why. None where nothing is known.

    Latencies are production's own p95 in seconds over the last seconds, beside what they are without
    extraction at the same load (or the SLO of the settings); `slowdown` is the worse of the two ratios.
    """

    mode: GovernorMode
    busy_ms: float | None = Field(
        default=None, description="Milliseconds that extraction may add to a step while production is there."
    )
    stopped: bool = Field(default=False, description="Nothing of extraction runs.")
    reason: str
    slowdown: float | None = None
    itl_p95_s: float | None = None
    itl_p95_baseline_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_p95_baseline_s: float | None = None
    updated_at: float | None = None


class Consumer(BaseModel):
    """What a consumer of the ledger (a trainer) says of itself."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    cursor: int | None = None
    acknowledged: int | None = Field(
        default=None, description="Ledger entries that it will not read again, however it goes on."
    )
    lag: int | None = Field(default=None, description="Ledger entries it has not reached.")
    epoch: float | None = None
    step: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    ended: str | None = Field(default=None, description="Why it ended, when it ended as it was meant to.")
    updated_at: float | None = None


class QueueStatus(_Answer):
    """`GET /v1/queue`: all that a person watching wants to know, in one answer."""

    depth: Batches
    jobs: dict[JobState, int] = Field(description="Number of jobs in each state.")
    rows_left: int = Field(description="Rows of unfinished jobs without an outcome.")
    rates: list[Rate] = Field(description="Over the last one and five minutes.")
    eta_s: float | None = Field(default=None, description="rows_left at the rate of the last minutes.")
    paused: str | None = Field(default=None, description="Why no batch is fed at present.")
    workers: list[Worker]
    engines: list[Engine]
    governor: Governor | None = Field(default=None, description="None without a governor.")
    consumers: list[Consumer]
    ledger_head: int = Field(description="Sequence number of the newest ledger entry, 0 when empty.")
    updated_at: float


class ShardInfo(_Answer):
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


class ShardList(_Answer):
    """`GET /v1/shards`: entries after a cursor. Ask again with `after=next_after` for more."""

    shards: list[ShardInfo]
    next_after: int
    head: int


class Check(_Answer):
    """One link that `doctor` or `/ready` looked at."""

    check: str
    ok: bool
    detail: str
    advice: str | None = None


class Health(_Answer):
    """`GET /health`: the process answers."""

    status: str = "ok"
    version: str


class Ready(_Answer):
    """`GET /ready`: 200 when store and Redis can be used, 503 otherwise."""

    ready: bool
    checks: list[Check]


class ErrorDetail(_Answer):
    """What went wrong. `param` names the field or line, `code` is stable for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(_Answer):
    """Body of every 4xx and 5xx answer."""

    error: ErrorDetail
