"""What the extractor's API says and hears: pydantic models shared by the service and its clients.

Requests refuse unknown fields; answers ignore them, so that an older client reads a newer service.
Times are seconds since the epoch (float), durations are seconds, sizes are bytes, lengths are tokens.
"""

from __future__ import annotations

from taphouse.wire.engines import (
    Engine,
    Governor,
    GovernorMode,
    GovernorOrder,
    Latency,
)
from taphouse.wire.jobs import (
    Batches,
    ExtractRequest,
    Job,
    JobList,
    JobOptions,
    JobRequest,
    JobState,
    Row,
    RowFailure,
)
from taphouse.wire.queue import Consumer, QueueStatus, Rate, Retention, Unconsumed, Worker
from taphouse.wire.samples import (
    FoundSample,
    SampleQuery,
    SamplesDeleted,
    SamplesFound,
)
from taphouse.wire.service import (
    Check,
    ErrorBody,
    ErrorDetail,
    Health,
    Ready,
)
from taphouse.wire.shards import (
    Pruned,
    PruneRequest,
    ShardInfo,
    ShardList,
)

__all__ = [
    "Batches",
    "Check",
    "Consumer",
    "Engine",
    "ErrorBody",
    "ErrorDetail",
    "ExtractRequest",
    "FoundSample",
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
    "PruneRequest",
    "Pruned",
    "QueueStatus",
    "Rate",
    "Ready",
    "Retention",
    "Row",
    "RowFailure",
    "SampleQuery",
    "SamplesDeleted",
    "SamplesFound",
    "ShardInfo",
    "ShardList",
    "Unconsumed",
    "Worker",
]
