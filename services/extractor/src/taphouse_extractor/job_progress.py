"""What is counted of one job."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from taphouse.wire import RowFailure
from taphouse_extractor.counts import Counts
from taphouse_extractor.finished import Finished
from taphouse_extractor.fitting import Needs
from taphouse_extractor.moves import Move, Rows
from taphouse_extractor.recent import Recent
from taphouse_extractor.records import BatchRef, JobRecord, Outcome, Pin
from taphouse_extractor.states import Standing

__all__ = ["JobProgress"]

KEEP_FAILURES = 20


@dataclass(slots=True)
class JobProgress(Counts):
    """What is known of one job."""

    record: JobRecord = field(kw_only=True)
    pin: Pin | None = None
    cancelled_at: float | None = None
    paused: bool = False
    moves: int = 0
    """How many of its moves are known."""
    end: int = 0
    """The number after the last batch that those made; 0 while there are none."""
    retries: list[Move] = field(default_factory=list)
    """Those of them that moved failed rows."""
    finished: Finished = field(default_factory=Finished)
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
        return self.end or self.record.batches

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
    def ended_early(self) -> bool:
        """It was cancelled or stopped, and batches are left that have no outcome."""
        return self.record.spooled and not self.complete and (self.cancelled or self.stopped)

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
        if move.of is None:
            again = set(rows().tolist()) if self.failures else set[int]()
            self.failed -= move.rows
            self.failures = [f for f in self.failures if f.skipped or f.row not in again]
            self.retries.append(move)
        self.moves, self.end = self.moves + 1, move.end
        self.changes += 1

    def mark(self, *, paused: bool, cancelled_at: float | None) -> None:
        """What an operator said last."""
        self.paused, self.cancelled_at = paused, cancelled_at
        self.changes += 1

    def after_moves(self, outcome: Outcome) -> bool:
        """Whether moves were written before an outcome: what made its batch, or where its rows went."""
        return outcome.batch >= self.record.batches or outcome.moved > 0

    def room(self) -> int:
        """How many more failures are kept."""
        return max(0, KEEP_FAILURES - len(self.failures))

    def count(self, outcome: Outcome, now: float, retried: Callable[[int, int], bool]) -> None:
        """Add one batch's outcome. `retried`: whether a row that failed in a batch is tried again since.

        It is finished at last: who looks meanwhile sees no job at its end whose rows are not all counted.
        """
        stands = (f for f in outcome.failures if not retried(f.row, outcome.batch))
        self.failures += list(islice(stands, self.room()))
        self.take(outcome)
        self.recent.add(outcome, now)
        self.finished.add(outcome.batch)
        self.changes += 1

    def count_all(self, batches: Iterable[int], counts: Counts, failures: Iterable[RowFailure]) -> None:
        """Add what outcomes of some time ago add up to, and as many of the rows that failed as are kept."""
        self.failures += list(islice(failures, self.room()))
        self.merge(counts)
        for batch in batches:
            self.finished.add(batch)
        self.changes += 1
