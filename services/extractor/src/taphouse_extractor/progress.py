"""How far jobs are, read from the store a little at a time.

Outcomes never change, so each is read once and only counted: a process remembers numbers, never rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from taphouse.errors import StoreError
from taphouse.wire import Rate, RowFailure
from taphouse_extractor.errors import NotFound
from taphouse_extractor.fitting import Needs
from taphouse_extractor.moves import Move, Moves, superseded
from taphouse_extractor.records import BatchRef, JobRecord, Outcome, Pin, Records
from taphouse_extractor.tally import Tally

__all__ = ["Done", "JobProgress", "Progress", "rate"]

log = logging.getLogger(__name__)
KEEP_FAILURES = 20
KEEP_RECENT_S = 600.0
CANCELLED_SETTLES_S = 7200.0


@dataclass(frozen=True)
class Done:
    """One finished batch, for rates. `finished_at` is in seconds since the epoch."""

    finished_at: float
    rows: int
    samples: int
    tokens: int
    bytes: int
    raw_bytes: int


@dataclass
class JobProgress:
    """What is known of one job."""

    record: JobRecord
    pin: Pin | None = None
    cancelled_at: float | None = None
    paused: bool = False
    moves: list[Move] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    tokens: int = 0
    shards: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    fingerprint_id: str | None = None
    finished_at: float | None = None
    failures: list[RowFailure] = field(default_factory=list)
    recent: deque[Done] = field(default_factory=deque)

    @property
    def complete(self) -> bool:
        """Every batch has its outcome."""
        return self.record.spooled and len(self.finished) >= self.batches

    @property
    def batches(self) -> int:
        """Number of its batches, with those of moved rows."""
        return self.moves[-1].end if self.moves else self.record.batches

    @property
    def stopped(self) -> bool:
        """A row failed, and the job was to end then."""
        return self.record.options.on_error == "fail" and self.failed > 0

    @property
    def cancelled(self) -> bool:
        """It was cancelled, which means nothing once it is complete."""
        return self.cancelled_at is not None

    @property
    def held(self) -> bool:
        """None of its batches may begin now."""
        return self.cancelled or self.paused or self.stopped

    @property
    def needs(self) -> Needs:
        """What its batches ask of an engine."""
        return Needs(self.record.options.layers, self.pin)

    @property
    def rows_left(self) -> int:
        """Rows without an outcome; none are left of a job that was cancelled or stopped."""
        return (
            0
            if self.cancelled or self.stopped
            else self.record.rows - self.succeeded - self.failed - self.skipped
        )

    def pending(self) -> Iterable[BatchRef]:
        """Batches without an outcome, in order; none of a job that may not run."""
        if self.record.spooled and not self.held:
            for batch in range(self.batches):
                if batch not in self.finished:
                    yield BatchRef(job_id=self.record.id, batch=batch)

    def move(self, move: Move) -> None:
        """Rows that had failed are tried again."""
        self.moves.append(move)
        if move.of is None:
            self.failed -= move.rows
            self.failures = [f for f in self.failures if f.skipped or not move.has(f.row)]

    def count(self, outcome: Outcome) -> None:
        """Add one batch's outcome."""
        skipped = sum(failure.skipped for failure in outcome.failures)
        self.finished.add(outcome.batch)
        self.succeeded += outcome.succeeded
        self.skipped += skipped
        self.failed += len(outcome.failures) - skipped
        self.tokens += outcome.tokens
        self.shards += outcome.shard is not None
        self.bytes += outcome.bytes
        self.raw_bytes += outcome.raw_bytes
        self.fingerprint_id = self.fingerprint_id or outcome.fingerprint_id
        self.finished_at = max(self.finished_at or 0.0, outcome.finished_at)
        stands = (f for f in outcome.failures if not superseded(self.moves, f.row, outcome.batch))
        self.failures.extend(islice(stands, max(0, KEEP_FAILURES - len(self.failures))))
        self.recent.append(
            Done(
                outcome.finished_at,
                outcome.rows,
                outcome.succeeded,
                outcome.tokens,
                outcome.bytes,
                outcome.raw_bytes,
            )
        )


class Progress:
    """All jobs of a store. `refresh` brings it up to date; safe to share between threads."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.tally = Tally()
        self._jobs: dict[str, JobProgress] = {}
        self._moves, self._moved = Moves(records.store), frozenset[str]()
        self._unreadable: set[str] = set()
        self._lock = threading.Lock()

    def refresh(self) -> list[JobProgress]:
        """Look at the store; return all jobs, oldest first. Raises `StoreError`s."""
        with self._lock:
            ids, self._moved = self._records.job_ids(), self._moves.jobs()
            for job_id in self._jobs.keys() - set(ids):
                del self._jobs[job_id]
            for job_id in ids:
                self._look_past(job_id)
            return [self._jobs[job_id] for job_id in ids if job_id in self._jobs]

    def refresh_one(self, job_id: str) -> JobProgress:
        """Look at one job; raises `NotFound`."""
        with self._lock:
            self._moved = self._moves.jobs()
            self._look_at(job_id)
            if job_id not in self._jobs:
                raise NotFound(f"there is no job {job_id!r:.80}", param="job_id")
            return self._jobs[job_id]

    def _look_past(self, job_id: str) -> None:
        """Look at a job; one whose records can't be read is said once, and doesn't hide the others."""
        try:
            self._look_at(job_id)
        except StoreError as error:
            if job_id not in self._unreadable:
                log.error("job %s can't be read, and is left alone: %s", job_id, error)
                self._unreadable.add(job_id)

    def _look_at(self, job_id: str) -> None:
        job, now = self._jobs.get(job_id), time.time()
        if job is None or not job.record.spooled:
            try:
                job = JobProgress(self._records.job(job_id))
            except NotFound:
                self._jobs.pop(job_id, None)
                return
            self._jobs[job_id] = job
        while job.recent and job.recent[0].finished_at < now - KEEP_RECENT_S:
            job.recent.popleft()
        if not job.record.spooled:
            job.cancelled_at = self._records.cancelled_at(job_id)
            return
        if job_id in self._moved:
            for move in self._moves.of(job_id, after=len(job.moves)):
                job.move(move)
        if job.complete or _long_ago(job.cancelled_at, now):
            return
        job.paused = self._records.paused(job_id)
        job.pin = job.pin or self._records.pinned(job_id)
        if job.cancelled_at is None:
            job.cancelled_at = self._records.cancelled_at(job_id)
        for batch in self._records.finished(job_id):
            if batch not in job.finished:
                outcome = self._records.outcome(BatchRef(job_id=job_id, batch=batch))
                if outcome is None:
                    raise StoreError(f"the outcome of batch {batch} of job {job_id} went away")
                job.count(outcome)
                self.tally.add(outcome)


def _long_ago(cancelled_at: float | None, now: float) -> bool:
    """A batch that ran while its job was cancelled has ended by now."""
    return cancelled_at is not None and cancelled_at < now - CANCELLED_SETTLES_S


def rate(recent: Iterable[Done], window_s: float, *, since: float, now: float) -> Rate:
    """What was finished in the last `window_s` seconds (or since `since`, if shorter), a second."""
    inside = [done for done in recent if done.finished_at > now - window_s]
    span = max(1.0, min(window_s, now - since))
    return Rate(
        window_s=window_s,
        samples=sum(done.samples for done in inside) / span,
        tokens=sum(done.tokens for done in inside) / span,
        bytes=sum(done.bytes for done in inside) / span,
        raw_bytes=sum(done.raw_bytes for done in inside) / span,
        batches=len(inside) / span,
    )
