"""How far jobs are, read from the store a little at a time.

Outcomes never change, so each is read once and only counted: a process remembers numbers, never rows. A look
costs what is new: jobs at their end aren't looked at again, and of the others only directories that changed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from taphouse.errors import NotInStore, StoreError
from taphouse.store import Listing
from taphouse.wire import RowFailure
from taphouse_extractor.errors import NotFound
from taphouse_extractor.finished import Finished
from taphouse_extractor.fitting import Needs
from taphouse_extractor.job_files import JobFiles
from taphouse_extractor.moves import Move, Moves, Retried, Rows
from taphouse_extractor.recent import Recent
from taphouse_extractor.records import BatchRef, JobRecord, Outcome, Pin, Records, job_ids_in
from taphouse_extractor.states import Standing
from taphouse_extractor.tally import Tally

__all__ = ["JobProgress", "Progress"]

log = logging.getLogger(__name__)
KEEP_FAILURES = 20
CANCELLED_SETTLES_S = 7200.0


@dataclass(slots=True)
class JobProgress:
    """What is known of one job."""

    record: JobRecord
    pin: Pin | None = None
    cancelled_at: float | None = None
    paused: bool = False
    moves: list[Move] = field(default_factory=list)
    finished: Finished = field(default_factory=Finished)
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
    recent: Recent = field(default_factory=Recent)
    changes: int = 0
    """Counted after each change, so that what was worked out in the middle of one is not believed."""
    at_rest: tuple[int, Standing] | None = None
    """Where it was after so many changes, while Redis held nothing of it."""

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
        return Needs(self.record.options, self.pin)

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
            for batch in self.finished.missing(self.batches):
                yield BatchRef(job_id=self.record.id, batch=batch)

    def move(self, move: Move, rows: Callable[[], Rows]) -> None:
        """Rows that had failed are tried again; which ones is asked only where that shows."""
        retried = move.of is None
        again = set(rows().tolist()) if retried and self.failures else set[int]()
        self.moves.append(move)
        if retried:
            self.failed -= move.rows
            self.failures = [f for f in self.failures if f.skipped or f.row not in again]
        self.changes += 1

    def knows_of(self, outcome: Outcome) -> bool:
        """Whether the moves before an outcome are known: what made its batch, and where its rows went."""
        made = outcome.batch < self.batches
        return made and (not outcome.moved or any(move.of == outcome.batch for move in reversed(self.moves)))

    def count(self, outcome: Outcome, now: float, retried: Callable[[int, int], bool]) -> None:
        """Add one batch's outcome. `retried`: whether a row that failed in a batch is tried again since.

        It is finished at last: who looks meanwhile sees no job at its end whose rows are not all counted.
        """
        room = max(0, KEEP_FAILURES - len(self.failures))
        stands = list(islice((f for f in outcome.failures if not retried(f.row, outcome.batch)), room))
        skipped = sum(failure.skipped for failure in outcome.failures)
        self.succeeded += outcome.succeeded
        self.skipped += skipped
        self.failed += len(outcome.failures) - skipped
        self.tokens += outcome.tokens
        self.shards += outcome.shard is not None
        self.bytes += outcome.bytes
        self.raw_bytes += outcome.raw_bytes
        self.fingerprint_id = self.fingerprint_id or outcome.fingerprint_id
        self.finished_at = max(self.finished_at or 0.0, outcome.finished_at)
        self.failures += stands
        self.recent.add(outcome, now)
        self.finished.add(outcome.batch)
        self.changes += 1


class Progress:
    """All jobs of a store. `refresh` brings it up to date; safe to share between threads."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.tally = Tally()
        self._jobs: dict[str, JobProgress] = {}
        self._open: dict[str, JobFiles] = {}
        """Files of the jobs that aren't at their end."""
        self._ids = Listing(records.store, "jobs")
        self._moves, self._moving = Moves(records.store), Listing(records.store, "moves")
        self._moved: dict[str, Listing] = {}
        """Moves of the jobs that have any."""
        self._unreadable: set[str] = set()
        self._lock = threading.Lock()

    def refresh(self) -> list[JobProgress]:
        """Look at the store; return all jobs, oldest first. Raises `StoreError`s."""
        with self._lock:
            names = self._ids.news()
            if names is not None:
                self._take(job_ids_in(names))
            self._look_for_moves()
            for job_id in [*self._open, *(self._moved.keys() - self._open.keys())]:
                self._look_past(job_id)
            if names is not None:
                self._jobs = dict(sorted(self._jobs.items()))
            now, jobs = time.time(), list(self._jobs.values())
            for job in jobs:
                job.recent.forget(now)
            return jobs

    def refresh_one(self, job_id: str) -> JobProgress:
        """Look at one job; raises `NotFound`."""
        with self._lock:
            self._look_for_moves()
            if job_id not in self._jobs:
                self._records.job(job_id)
                self._open.setdefault(job_id, JobFiles(self._records, job_id))
            self._look_at(job_id)
            if job_id not in self._jobs:
                raise NotFound(f"there is no job {job_id!r:.80}", param="job_id")
            return self._jobs[job_id]

    def _take(self, ids: list[str]) -> None:
        """These jobs there are, and no others. Raises `NotInStore` when all that were known went away."""
        known = {job_id for job_id, job in self._jobs.items() if job.record.spooled}
        if known and known.isdisjoint(ids):
            self._ids = Listing(self._records.store, "jobs")
            raise NotInStore(
                f"none of the {len(known)} jobs that were in the store is there any more",
                advice="Was its disk unmounted? If they were removed, restart the API",
            )
        for job_id in {*self._jobs, *self._open} - set(ids):
            self._jobs.pop(job_id, None)
            self._open.pop(job_id, None)
        for job_id in ids:
            if job_id not in self._jobs and job_id not in self._open:
                self._open[job_id] = JobFiles(self._records, job_id)

    def _look_for_moves(self) -> None:
        for job_id in job_ids_in(self._moving.news() or []):
            if job_id not in self._moved:
                self._moved[job_id] = Listing(self._records.store, f"moves/{job_id}")

    def _look_past(self, job_id: str) -> None:
        """Look at a job; one whose records can't be read is said once, and doesn't hide the others."""
        try:
            self._look_at(job_id)
        except StoreError as error:
            if job_id not in self._unreadable:
                log.error("job %s can't be read, and is left alone: %s", job_id, error)
                self._unreadable.add(job_id)

    def _look_at(self, job_id: str) -> None:
        """What was news and could not be read is news again the next time."""
        try:
            job = self._known(job_id)
            if job is None or not job.record.spooled:
                return
            if job_id in self._moved and self._moved[job_id].news() is not None:
                self._read_moves(job)
            if not job.complete and job_id not in self._open and job.cancelled_at is None:
                self._open[job_id] = JobFiles(self._records, job_id)
                self._known(job_id)
            self._count(job)
        except BaseException:
            self._open[job_id] = JobFiles(self._records, job_id)
            if job_id in self._moved:
                self._moved[job_id] = Listing(self._records.store, f"moves/{job_id}")
            raise

    def _known(self, job_id: str) -> JobProgress | None:
        """The job, with its marks; None when it was dropped."""
        job, files = self._jobs.get(job_id), self._open.get(job_id)
        names = files.names() if files is not None else None
        if names is None:
            return job
        if job is None or not job.record.spooled:
            try:
                job = JobProgress(self._records.job(job_id))
            except NotFound:
                self._jobs.pop(job_id, None)
                return None
            self._jobs[job_id] = job
        job.paused = "paused" in names
        if "engine.json" in names and job.pin is None:
            job.pin = self._records.pinned(job_id)
        if "cancelled" in names and job.cancelled_at is None:
            job.cancelled_at = self._records.cancelled_at(job_id)
        job.changes += 1
        return job

    def _read_moves(self, job: JobProgress) -> None:
        for move in self._moves.of(job.record.id, after=len(job.moves)):
            job.move(move, partial(self._moves.rows, job.record.id, move))

    def _count(self, job: JobProgress) -> None:
        """Count what was finished since, and close a job's files at its end."""
        now, job_id = time.time(), job.record.id
        files = self._open.get(job_id)
        if files is None:
            return
        retried = Retried(self._moves, job_id, job.moves)
        for batch in files.batches(job.finished):
            outcome = self._records.outcome(BatchRef(job_id=job_id, batch=batch))
            if outcome is None:
                raise StoreError(f"the outcome of batch {batch} of job {job_id} went away")
            if not job.knows_of(outcome):  # moves are written first: without them the job might look done
                self._read_moves(job)
                retried = Retried(self._moves, job_id, job.moves)
            job.count(outcome, now, retried)
            self.tally.add(outcome)
        if job.complete or _long_ago(job.cancelled_at, now):
            del self._open[job_id]


def _long_ago(cancelled_at: float | None, now: float) -> bool:
    """A batch that ran while its job was cancelled has ended by now."""
    return cancelled_at is not None and cancelled_at < now - CANCELLED_SETTLES_S
