"""A job's failed rows as they stand, and how they are tried again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from taphouse.wire import RowFailure
from taphouse_extractor.errors import Conflict
from taphouse_extractor.moves import Move, Moves, Retried, in_batches
from taphouse_extractor.records import BatchRef, JobRecord, Records

__all__ = ["Retries"]


class Retries:
    """Reads outcomes one at a time. Raises `StoreError`s."""

    def __init__(self, records: Records) -> None:
        self._records, self._moves = records, Moves(records.store)

    def failures(self, job_id: str) -> Iterator[RowFailure]:
        """Failed and skipped rows by batch, without those that are tried again or were since."""
        retried = Retried(self._moves, job_id, self._moves.of(job_id))
        for batch in self._records.finished(job_id):
            outcome = self._records.outcome(BatchRef(job_id=job_id, batch=batch))
            for failure in outcome.failures if outcome else ():
                if not retried(failure.row, batch):
                    yield failure

    def retry(self, job: JobRecord) -> Move:
        """Move the rows that failed, not those that were skipped, into new batches.

        Raises `Conflict` when there are none.
        """
        with self._records.store.lock(f"jobs/{job.id}/retry.lock"):
            tried = (failure.row for failure in self.failures(job.id) if not failure.skipped)
            failed = np.sort(np.fromiter(tried, np.uint32))
            if not len(failed):
                raise Conflict(f"none of job {job.id}'s rows has failed", param="job_id")
            return self._moves.add(job, None, failed, in_batches(len(failed), job.options.batch_size))
