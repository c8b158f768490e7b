"""A job's whole life over a real store, in any order of what operators, feeders and workers may do."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from taphouse.store import LocalStore
from taphouse.wire import JobOptions, JobState, RowFailure
from taphouse_extractor.errors import Conflict
from taphouse_extractor.moves import Moves, in_halves
from taphouse_extractor.overview import describe
from taphouse_extractor.progress import Progress
from taphouse_extractor.records import BatchRef, JobRecord, Outcome, Records
from taphouse_extractor.retries import Retries
from taphouse_extractor.standing import Live
from taphouse_extractor.states import Action, refusal
from taphouse_extractor.sums import Sums, whole_segments


class JobLife(RuleBasedStateMachine):
    """Batches end in any way, halves are tried apart, failed rows again; processes begin anew at any time."""

    @initialize(rows=st.integers(1, 9), size=st.integers(1, 4), stops=st.booleans())
    def begin(self, rows: int, size: int, stops: bool) -> None:
        self._place = tempfile.TemporaryDirectory()
        self.records = Records(LocalStore(Path(self._place.name)))
        self.moves, self.retries = Moves(self.records.store), Retries(self.records)
        self.sums = Sums(self.records)
        options = JobOptions(batch_size=size, on_error="fail" if stops else "skip")
        self.job = JobRecord(
            id="j20260101000000-0123abcd", options=options, rows=rows, spooled=True, created_at=1.0
        )
        self.records.put_job(self.job)
        self.progress = Progress(self.records)
        self.truth: dict[int, str] = dict.fromkeys(range(rows), "left")

    def teardown(self) -> None:
        if hasattr(self, "_place"):
            self._place.cleanup()

    @property
    def shown(self):
        return describe(self.progress.refresh_one(self.job.id), Live())

    def rows_of(self, batch: int) -> list[int]:
        if batch < self.job.batches:
            return list(self.job.rows_of(batch))
        return self.moves.batch(self.job.id, batch)

    @precondition(lambda self: not self.shown.state.final and self.shown.state is not JobState.PAUSED)
    @rule(data=st.data())
    def a_batch_ends(self, data: st.DataObject) -> None:
        job = self.progress.refresh_one(self.job.id)
        ref = data.draw(st.sampled_from(list(job.pending())))
        rows = self.rows_of(ref.batch)
        fates = [data.draw(st.sampled_from(["succeeded", "failed", "skipped"])) for _ in rows]
        failures = tuple(
            RowFailure(row=row, reason="because", skipped=fate == "skipped")
            for row, fate in zip(rows, fates, strict=True)
            if fate != "succeeded"
        )
        self._record(ref, rows, failures)
        self.truth.update(zip(rows, fates, strict=True))

    @precondition(lambda self: not self.shown.state.final and self.shown.state is not JobState.PAUSED)
    @rule(data=st.data(), crash=st.booleans())
    def a_batch_is_given_up(self, data: st.DataObject, crash: bool) -> None:
        job = self.progress.refresh_one(self.job.id)
        ref = data.draw(st.sampled_from(list(job.pending())))
        rows = self.rows_of(ref.batch)
        if len(rows) > 1:
            first = self.moves.add(self.job, ref.batch, rows, in_halves(len(rows)))
            if crash:  # between the move and the outcome: it is given up again
                assert self.moves.add(self.job, ref.batch, rows, in_halves(len(rows))) == first
            self._record(ref, rows, (), moved=len(rows))

    @rule(action=st.sampled_from(Action))
    def an_operator_acts(self, action: Action) -> None:
        shown = self.shown
        if refusal(action, shown.state, shown.failed):
            return
        if action is Action.RETRY:
            self.retries.retry(self.job)
            self.truth = {row: "left" if fate == "failed" else fate for row, fate in self.truth.items()}
        else:
            getattr(self.records, action.value)(self.job.id)

    @rule()
    def a_process_begins_anew(self) -> None:
        self.progress = Progress(self.records)

    @precondition(lambda self: self.shown.state in (JobState.DONE, JobState.FAILED))
    @rule()
    def its_outcomes_are_summed(self) -> None:
        time.sleep(0.02)  # over a tick of the file system's clock
        for segment, _ in whole_segments(self.progress.refresh_one(self.job.id)):
            stamp = self.records.store.stamp(self.records.segment(self.job.id, segment))
            assert stamp is not None and self.sums.make(self.job.id, segment, stamp, lambda: False)

    def _record(
        self,
        ref: BatchRef,
        rows: list[int],
        failures: tuple[RowFailure, ...],
        *,
        moved: int = 0,
    ) -> None:
        succeeded = len(rows) - len(failures) - moved
        self.records.put_outcome(
            Outcome(
                job_id=ref.job_id,
                batch=ref.batch,
                rows=len(rows),
                succeeded=succeeded,
                failures=failures,
                moved=moved,
                finished_at=2.0,
            )
        )

    @invariant()
    def every_row_is_counted_once(self) -> None:
        shown, job = self.shown, self.progress.refresh_one(self.job.id)
        fates = list(self.truth.values())
        assert (shown.succeeded, shown.failed) == (fates.count("succeeded"), fates.count("failed"))
        assert job.skipped == fates.count("skipped")
        if shown.state.final:
            assert shown.succeeded + shown.failed + shown.skipped == shown.rows
        elif shown.state is not JobState.PAUSED:
            assert list(job.pending())
        listed = {failure.row for failure in self.retries.failures(self.job.id)}
        assert listed == {row for row, fate in self.truth.items() if fate in ("failed", "skipped")}
        if not shown.failed:
            try:
                self.retries.retry(self.job)
            except Conflict:
                return
            raise AssertionError("nothing had failed")


TestJobLife = JobLife.TestCase
TestJobLife.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
