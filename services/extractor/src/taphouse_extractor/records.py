"""What the store holds of jobs. The store is the truth: Redis only says what is queued and running now.
`store.json` (`taphouse.store.identity`) says of which version all of it is.

::

    jobs/<job id>/job.json     definition; written first, and again with its row count once spooled
    jobs/<job id>/spooling.lock          held while its rows come in, gone afterwards
    jobs/<job id>/rows.jsonl   its rows, as they lie in batches
    jobs/<job id>/rows.index   where each batch begins, and where the last ends: u64, little-endian
    jobs/<job id>/ids/         ids that rows keep though others were blanked (`blanked.py`)
    jobs/<job id>/engine.json  fingerprint and layers that the job began with, first batch wins
    jobs/<job id>.cancelled    mark
    jobs/<job id>.paused       mark, gone again when the job is resumed

    jobs/<job id>/outcomes/<segment>/<batch>.json  what became of a batch's rows, first outcome wins

A segment is 1,000 batches: whoever follows a job lists only those that are not full.
"""

from __future__ import annotations

import re
import secrets
import struct
import time
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from taphouse.errors import StoreError
from taphouse.shards import shard_name
from taphouse.store import Store, put_json, put_json_new, read_json
from taphouse.wire import JobOptions, RowFailure
from taphouse_extractor.errors import NotFound

__all__ = [
    "DELETING",
    "MAX_BATCHES",
    "OFFSET",
    "SEGMENT",
    "BatchRef",
    "JobRecord",
    "Outcome",
    "Pin",
    "Records",
    "batches_in",
    "job_ids_in",
    "marks_in",
    "new_job_id",
    "segments_in",
]

MAX_BATCHES = 10**6
SEGMENT = 1000
DELETING = "jobs/deleting"
"""Lock held while samples or shards are deleted, and to take up a job again that was at its end."""
OFFSET = struct.Struct("<Q")
MARKS = ("cancelled", "paused")
JOB_ID = re.compile(r"j[0-9]{14}-[0-9a-f]{8}")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class BatchRef(_Record):
    """One batch of one job."""

    job_id: str
    batch: int

    def __str__(self) -> str:
        return f"{self.job_id}:{self.batch}"

    @classmethod
    def parse(cls, text: str) -> BatchRef:
        """The reverse of `str`; raises ValueError."""
        job_id, _, batch = text.partition(":")
        if not JOB_ID.fullmatch(job_id) or not batch.isdigit():
            raise ValueError(f"{text!r} names no batch")
        return cls(job_id=job_id, batch=int(batch))


class JobRecord(_Record):
    """A job's definition. `rows` is 0 and `spooled` false until all of its rows are in the store.

    `owner` is the name of the token it came with, `tenant` that token's tenant.
    """

    id: str
    name: str | None = None
    options: JobOptions
    owner: str | None = None
    tenant: str | None = None
    rows: int = 0
    spooled: bool = False
    digest: str | None = None
    created_at: float

    @property
    def batches(self) -> int:
        """Number of batches of its dataset; moved rows stand in further ones (`moves.py`)."""
        return -(-self.rows // self.options.batch_size)

    def shard_of(self, batch: int) -> str:
        """File name of the shard that a batch makes."""
        return shard_name(self.id, batch, self.options.output_prefix)

    def rows_of(self, batch: int) -> range:
        """Row numbers of a batch."""
        size = self.options.batch_size
        return range(batch * size, min((batch + 1) * size, self.rows))


class Outcome(_Record):
    """What became of one batch: `succeeded + len(failures) + moved == rows`; skipped rows are failures.

    `stages` are the seconds that it took, by stage (`taphouse_extractor.stages`).
    `shard` is None when no row succeeded. `engine` is the URL of the one that made the shard.
    """

    job_id: str
    batch: int
    rows: int
    succeeded: int
    failures: tuple[RowFailure, ...] = ()
    moved: int = 0
    shard: str | None = None
    tokens: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    fingerprint_id: str | None = None
    codec: str | None = None
    engine: str | None = None
    stages: dict[str, float] = {}
    finished_at: float


class Pin(_Record):
    """The engine that a job began with."""

    fingerprint_id: str
    layers: tuple[int, ...]
    num_layers: int
    dtype: str

    def differs(self, other: Pin) -> str | None:
        """What differs, in words; None when nothing does."""
        for name in ("fingerprint_id", "layers", "num_layers", "dtype"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {theirs}, the job began with {mine}"
        return None


def new_job_id(now: float) -> str:
    """A job id that sorts by time."""
    return f"j{time.strftime('%Y%m%d%H%M%S', time.gmtime(now))}-{secrets.token_hex(4)}"


class Records:
    """Reads and writes the records above. Raises `StoreError`s, `NotFound` for a job that isn't there."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def job_ids(self) -> list[str]:
        """Ids of all jobs, oldest first."""
        return job_ids_in(self.store.list("jobs"))

    def job(self, job_id: str) -> JobRecord:
        """A job's definition."""
        path = f"jobs/{job_id}/job.json"
        if not JOB_ID.fullmatch(job_id) or not self.store.exists(path):
            raise NotFound(f"there is no job {job_id!r:.80}", param="job_id")
        return _load(self.store, path, JobRecord)

    def put_job(self, job: JobRecord) -> None:
        """Write a job's definition, durably."""
        put_json(self.store, f"jobs/{job.id}/job.json", job.model_dump(mode="json"))

    def put_new_job(self, job: JobRecord) -> bool:
        """Write the definition of a job that is not there yet; False when one has its id."""
        return put_json_new(self.store, f"jobs/{job.id}/job.json", job.model_dump(mode="json"))

    def drop_unspooled(self, job_id: str) -> None:
        """Remove what a spooling that never ended left behind."""
        for path in (
            f"jobs/{job_id}/job.json",
            *self.rows_paths(job_id),
            self.mark_path(job_id, "cancelled"),
        ):
            self.store.delete(path)

    def rows_paths(self, job_id: str) -> tuple[str, str]:
        """Where a job's rows lie, and their index."""
        return f"jobs/{job_id}/rows.jsonl", f"jobs/{job_id}/rows.index"

    def row_lines(self, ref: BatchRef) -> Iterator[bytes]:
        """Rows of a batch, one JSON object each."""
        rows, index = self.rows_paths(ref.job_id)
        with self.store.open(index) as file:
            file.seek(ref.batch * OFFSET.size)
            ends = file.read(2 * OFFSET.size)
        if len(ends) != 2 * OFFSET.size:
            raise StoreError(f"{index} has no batch {ref.batch}", path=index)
        at, end = (number for (number,) in OFFSET.iter_unpack(ends))
        with self.store.open(rows) as file:
            file.seek(at)
            while at < end:
                line = file.readline()
                at += len(line)
                if not line.endswith(b"\n") or at > end:
                    raise StoreError(f"{rows} is not what {index} says of batch {ref.batch}", path=rows)
                yield line.removesuffix(b"\n")

    @staticmethod
    def mark_path(job_id: str, mark: str) -> str:
        """Where a mark on a job lies: beside its directory, so that one look at `jobs/` tells all marks."""
        return f"jobs/{job_id}.{mark}"

    def cancel(self, job_id: str) -> None:
        """Mark a job cancelled. Idempotent."""
        self.store.put_new(self.mark_path(job_id, "cancelled"), b"")

    def cancelled(self, job_id: str) -> bool:
        """Whether the job was cancelled."""
        return self.store.exists(self.mark_path(job_id, "cancelled"))

    def cancelled_at(self, job_id: str) -> float | None:
        """When the job was cancelled, in seconds since the epoch; None when it wasn't."""
        path = self.mark_path(job_id, "cancelled")
        return self.store.modified(path) if self.store.exists(path) else None

    def pause(self, job_id: str) -> None:
        """Mark a job paused. Idempotent."""
        self.store.put_new(self.mark_path(job_id, "paused"), b"")

    def resume(self, job_id: str) -> None:
        """Take that mark away. Idempotent."""
        self.store.delete(self.mark_path(job_id, "paused"))

    def pin(self, job_id: str, engine: Pin) -> Pin:
        """Pin a job to its engine, and return the pin in force: the first batch's wins."""
        path = f"jobs/{job_id}/engine.json"
        if put_json_new(self.store, path, engine.model_dump(mode="json")):
            return engine
        return _load(self.store, path, Pin)

    def pinned(self, job_id: str) -> Pin | None:
        """The pin in force; None while no batch of the job has met an engine."""
        path = f"jobs/{job_id}/engine.json"
        return _load(self.store, path, Pin) if self.store.exists(path) else None

    def finished(self, job_id: str) -> Iterator[int]:
        """Numbers of the batches that have an outcome, rising; a segment at a time is held in memory."""
        for segment in segments_in(self.store.list(f"jobs/{job_id}/outcomes")):
            yield from batches_in(self.store.list(self.segment(job_id, segment)))

    @staticmethod
    def segment(job_id: str, segment: int) -> str:
        """The directory of a segment's outcomes."""
        return f"jobs/{job_id}/outcomes/{segment:03d}"

    @classmethod
    def outcome_path(cls, ref: BatchRef) -> str:
        """Where a batch's outcome lies."""
        return f"{cls.segment(ref.job_id, ref.batch // SEGMENT)}/{ref.batch:06d}.json"

    def outcome(self, ref: BatchRef) -> Outcome | None:
        """A batch's outcome, None while it has none."""
        path = self.outcome_path(ref)
        return _load(self.store, path, Outcome) if self.store.exists(path) else None

    def put_outcome(self, outcome: Outcome) -> Outcome:
        """Record a batch's outcome, durably, and return the one in force: the first wins."""
        ref = BatchRef(job_id=outcome.job_id, batch=outcome.batch)
        if put_json_new(self.store, self.outcome_path(ref), outcome.model_dump(mode="json")):
            return outcome
        return _load(self.store, self.outcome_path(ref), Outcome)

    def change_outcome(self, outcome: Outcome) -> None:
        """Put an outcome in the place of the one there is, durably."""
        ref = BatchRef(job_id=outcome.job_id, batch=outcome.batch)
        put_json(self.store, self.outcome_path(ref), outcome.model_dump(mode="json"))


def job_ids_in(names: list[str]) -> list[str]:
    """Ids of jobs, from the names in a directory."""
    return [name for name in names if JOB_ID.fullmatch(name)]


def marks_in(names: list[str]) -> set[tuple[str, str]]:
    """Marks on jobs, from the names in `jobs/`: the job's id, and the mark."""
    return {(job_id, mark) for job_id, _, mark in (name.partition(".") for name in names) if mark in MARKS}


def segments_in(names: list[str]) -> list[int]:
    """Segments, from the names in a job's outcomes."""
    return [int(name) for name in names if re.fullmatch(r"[0-9]{3}", name)]


def batches_in(names: list[str]) -> list[int]:
    """Batches, from the names in a segment."""
    return [int(name[:6]) for name in names if re.fullmatch(r"[0-9]{6}\.json", name)]


def _load(store: Store, path: str, model: type[Any]) -> Any:
    try:
        return model.model_validate(read_json(store, path))
    except ValidationError as error:
        raise StoreError(f"{path} is no record of a job ({error.error_count()} problems)") from error
