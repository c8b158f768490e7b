"""How far jobs are, read from the store a little at a time.

Outcomes never change, so each is read once (or their sum, of a segment that has one) and only counted: a
process remembers numbers, never rows. A look costs what is new: jobs at their end aren't looked at again, and
of the others only directories that changed.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

from taphouse.errors import NotInStore, StoreError
from taphouse.store import Listing
from taphouse_extractor.errors import NotFound
from taphouse_extractor.job_files import JobFiles
from taphouse_extractor.job_progress import JobProgress
from taphouse_extractor.moves import Moves, Retried
from taphouse_extractor.recent import KEPT_S, Recent
from taphouse_extractor.records import BatchRef, Outcome, Records, job_ids_in, marks_in
from taphouse_extractor.sums import Sums
from taphouse_extractor.tally import Tally

__all__ = ["Progress"]

log = logging.getLogger(__name__)
CANCELLED_SETTLES_S = 7200.0


class Progress:
    """All jobs of a store. `refresh` brings it up to date; safe to share between threads."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.tally, self.recent = Tally(), Recent()
        """Over all jobs."""
        self._jobs: dict[str, JobProgress] = {}
        self._open: dict[str, JobFiles] = {}
        """Files of the jobs that aren't at their end."""
        self._ids, self._moving = Listing(records.store, "jobs"), Listing(records.store, "moves")
        self._marks: set[tuple[str, str]] = set()
        self._sorted = True
        self._sums, self._moves, self._moved = Sums(records), Moves(records.store), set[str]()
        """And the jobs that have any."""
        self._unreadable: set[str] = set()
        self._lock = threading.Lock()

    def refresh(self) -> list[JobProgress]:
        """Look at the store; return all jobs, oldest first. Raises `StoreError`s."""
        with self._lock:
            self._look_around()
            for job_id in [*self._open, *(self._moved - self._open.keys())]:
                self._look_past(job_id)
            if not self._sorted:
                self._jobs, self._sorted = dict(sorted(self._jobs.items())), True
            now, jobs = time.time(), list(self._jobs.values())
            for recent in (self.recent, *(job.recent for job in jobs)):
                recent.forget(now)
            return jobs

    def known(self) -> list[JobProgress]:
        """All jobs, as of the last look."""
        with self._lock:
            return list(self._jobs.values())

    def refresh_one(self, job_id: str) -> JobProgress:
        """Look at one job; raises `NotFound`."""
        with self._lock:
            self._look_around()
            if job_id not in self._jobs:
                self._records.job(job_id)
                self._open.setdefault(job_id, JobFiles(self._records, job_id))
            self._look_at(job_id)
            if job_id not in self._jobs:
                raise NotFound(f"there is no job {job_id!r:.80}", param="job_id")
            return self._jobs[job_id]

    def look_again(self, job_id: str) -> None:
        """A job that was at its end has news: the next look counts them."""
        with self._lock:
            self._open.setdefault(job_id, JobFiles(self._records, job_id))

    def _look_around(self) -> None:
        """Which jobs there are, how they are marked, and which have moves."""
        names = self._ids.news()
        try:
            if names is not None:
                self._take(job_ids_in(names))
                self._mark(marks_in(names))
        except BaseException:
            self._ids = Listing(self._records.store, "jobs")
            raise
        self._moved.update(job_ids_in(self._moving.news() or []))

    def _take(self, ids: list[str]) -> None:
        """These jobs there are, and no others. Raises `NotInStore` when all that were known went away."""
        known = {job_id for job_id, job in self._jobs.items() if job.record.spooled}
        if known and known.isdisjoint(ids):
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

    def _mark(self, marks: set[tuple[str, str]]) -> None:
        """These marks there are. Those of jobs that aren't known yet are seen once they are."""
        before, self._marks = self._marks, marks
        try:
            for job_id in {job_id for job_id, _ in before ^ marks}:
                if job_id in self._jobs:
                    self._mark_one(self._jobs[job_id])
        except BaseException:
            self._marks = before
            raise

    def _mark_one(self, job: JobProgress) -> None:
        job_id = job.record.id
        cancelled = (job_id, "cancelled") in self._marks
        job.mark(
            paused=(job_id, "paused") in self._marks,
            cancelled_at=self._records.cancelled_at(job_id) if cancelled else None,
        )

    def _look_past(self, job_id: str) -> None:
        """Look at a job; one whose records can't be read is said once, and doesn't hide the others."""
        try:
            if not self._quiet(job_id):
                self._look_at(job_id)
        except StoreError as error:
            if job_id not in self._unreadable:
                log.error("job %s can't be read, and is left alone: %s", job_id, error)
                self._unreadable.add(job_id)

    def _quiet(self, job_id: str) -> bool:
        """Whether a look would surely find nothing new: of jobs that run, most of the time."""
        job, files = self._jobs.get(job_id), self._open.get(job_id)
        if job is None or files is None or job_id in self._moved or job.cancelled:
            return False
        return files.quiet(job.batches)

    def _look_at(self, job_id: str) -> None:
        """What was news and could not be read is news again the next time."""
        try:
            job = self._known(job_id)
            if job is None or not job.record.spooled:
                return
            if job_id in self._moved:
                self._read_moves(job)
            if not job.complete and job_id not in self._open and job.cancelled_at is None:
                self._open[job_id] = JobFiles(self._records, job_id)
                self._known(job_id)
            self._count(job)
        except BaseException:
            self._open[job_id] = JobFiles(self._records, job_id)
            raise

    def _known(self, job_id: str) -> JobProgress | None:
        """The job; None when it was dropped."""
        job, files = self._jobs.get(job_id), self._open.get(job_id)
        names = files.names() if files is not None else None
        if names is None or files is None:
            return job
        if job is None or not job.record.spooled:
            try:
                job = JobProgress(record=self._records.job(job_id))
            except NotFound:
                self._jobs.pop(job_id, None)
                return None
            self._mark_one(job)
            self._jobs[job_id], self._sorted = job, False
        if "engine.json" in names and job.pin is None:
            job.pin = self._records.pinned(job_id)
        files.begun = job.record.spooled and job.pin is not None
        job.changes += 1
        return job

    def _read_moves(self, job: JobProgress) -> None:
        for move in self._moves.of(job.record.id, after=job.moves):
            job.move(move, partial(self._moves.rows, job.record.id, move))

    def _count(self, job: JobProgress) -> None:
        """Count what was finished since, and close a job's files at its end."""
        now, job_id = time.time(), job.record.id
        files = self._open.get(job_id)
        if files is None:
            return
        for segment in files.segments(job.finished, job.batches):
            self._count_sum(job, segment, now)
        retried = None
        for batch in files.batches(job.finished):
            outcome = self._outcome(job_id, batch)
            if job.after_moves(outcome):  # without them the job might look done
                self._read_moves(job)
            if retried is None or len(retried) != len(job.retries):
                retried = Retried(self._moves, job_id, job.retries)
            job.count(outcome, now, retried)
            self.tally.add(outcome)
            self.recent.add(outcome, now)
        if job.complete or _long_ago(job.cancelled_at, now):
            del self._open[job_id]

    def _count_sum(self, job: JobProgress, segment: int, now: float) -> None:
        """Count a segment by its sum, if it can be relied upon and none of it was counted.

        Not one of the last minutes, whose outcomes say more.
        """
        job_id = job.record.id
        found = self._sums.believed(job_id, segment)
        if found is None or found.near(now, KEPT_S) or any(batch in job.finished for batch in found.batches):
            return
        if found.moved or found.batches[-1] >= job.record.batches:
            self._read_moves(job)
        retried = Retried(self._moves, job_id, job.retries)
        failures = (
            failure
            for batch in found.failing
            for failure in self._outcome(job_id, batch).failures
            if not retried(failure.row, batch)
        )
        job.count_all(found.batches, found.counts, failures)
        self.tally.merge(found.tally)

    def _outcome(self, job_id: str, batch: int) -> Outcome:
        outcome = self._records.outcome(BatchRef(job_id=job_id, batch=batch))
        if outcome is None:
            raise StoreError(f"the outcome of batch {batch} of job {job_id} went away")
        return outcome


def _long_ago(cancelled_at: float | None, now: float) -> bool:
    """A batch that ran while its job was cancelled has ended by now."""
    return cancelled_at is not None and cancelled_at < now - CANCELLED_SETTLES_S
