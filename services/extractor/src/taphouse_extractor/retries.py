"""A job's failed rows as they stand, and how they are tried again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from taphouse.errors import StoreBusy
from taphouse.wire import RowFailure
from taphouse_extractor.errors import Conflict, TooBusy
from taphouse_extractor.moves import Move, Moves, Retried
from taphouse_extractor.records import DELETING, BatchRef, JobRecord, Records

__all__ = ["Retries", "in_batches"]

_FAILED = np.dtype([("row", np.uint32), ("id", np.int64)])


class Retries:
    """Reads outcomes one at a time. Raises `StoreError`s."""

    def __init__(self, records: Records, patience_s: float = 2.0) -> None:
        self._patience_s = patience_s
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

        Raises `Conflict` when there are none, and for a job that was cancelled just before it was complete;
        `TooBusy` where a deletion or another retry takes longer than our patience.
        """
        with self._alone(DELETING), self._alone(f"jobs/{job.id}/retry.lock"):
            if self._records.cancelled(job.id):
                raise Conflict(f"job {job.id} was cancelled: enqueue its rows anew", param="job_id")
            failed = np.fromiter(self._failed(job.id), _FAILED)
            failed.sort(order="row")
            if not len(failed):
                raise Conflict(f"none of job {job.id}'s rows has failed", param="job_id")
            ends = in_batches(failed["id"].tolist(), job.options.batch_size)
            return self._moves.add(job, None, failed["row"], ends)

    @contextmanager
    def _alone(self, path: str) -> Iterator[None]:
        until = time.monotonic() + self._patience_s
        with ExitStack() as held:
            while True:
                try:
                    held.enter_context(self._records.store.lock(path, wait=False))
                    break
                except StoreBusy as error:
                    if time.monotonic() >= until:
                        why = "samples are being deleted, or rows of another request tried again"
                        raise TooBusy(f"{why}: ask again when that is done", retry_after=5) from error
                time.sleep(0.05)
            yield

    def _failed(self, job_id: str) -> Iterator[tuple[int, int]]:
        """Numbers of the rows that failed, each with a hash of its sample's id; of no id, one of its own."""
        for failure in self.failures(job_id):
            if not failure.skipped:
                yield failure.row, hash(failure.row if failure.id is None else failure.id)


def in_batches(ids: list[int], size: int) -> list[int]:
    """Where batches of at most `size` rows end, so that no two rows of one have the same id.

    Ids are distinct within a batch of the dataset only, and a shard holds each once.
    """
    ends, begin, taken = list[int](), 0, set[int]()
    for at, found in enumerate(ids):
        if found in taken or at - begin == size:
            ends.append(at)
            begin, taken = at, set()
        taken.add(found)
    return [*ends, len(ids)]
