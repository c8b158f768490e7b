"""Where jobs are: what the store holds of them, together with what Redis says now."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from taphouse.wire import JobState, Worker
from taphouse_extractor.job_progress import JobProgress
from taphouse_extractor.records import BatchRef
from taphouse_extractor.states import Facts, Standing, state_of

__all__ = ["Live", "stand"]


@dataclass(slots=True)
class _Share:
    """What Redis holds of one job: numbers of batches, and why some wait."""

    queued: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    reasons: list[tuple[int, str]] = field(default_factory=list)


_NOTHING = _Share()


@dataclass(frozen=True)
class Live:
    """What Redis says now; all empty while it can't be read. `problem` says why that, or writing, fails."""

    queued: frozenset[BatchRef] = frozenset()
    running: frozenset[BatchRef] = frozenset()
    waiting: frozenset[BatchRef] = frozenset()
    reasons: tuple[tuple[BatchRef, str], ...] = ()
    workers: tuple[Worker, ...] = ()
    problem: str | None = None

    def of(self, job_id: str) -> _Share:
        """One job's share of it."""
        return self._by_job.get(job_id, _NOTHING)

    @cached_property
    def _by_job(self) -> dict[str, _Share]:
        shares: dict[str, _Share] = {}
        for name in ("queued", "running", "waiting"):
            for ref in getattr(self, name):
                getattr(shares.setdefault(ref.job_id, _Share()), name).append(ref.batch)
        for ref, reason in self.reasons:
            shares.setdefault(ref.job_id, _Share()).reasons.append((ref.batch, reason))
        return shares


def stand(job: JobProgress, live: Live) -> Standing:
    """Where one job is. While Redis holds nothing of it, it is worked out once until something changes."""
    record, share, changes = job.record, live.of(job.record.id), job.changes
    if share is _NOTHING and job.at_rest is not None and job.at_rest[0] == changes:
        return job.at_rest[1]
    queued, running, waiting = (
        sum(batch not in job.finished for batch in batches)
        for batches in (share.queued, share.running, share.waiting)
    )
    finished = len(job.finished)
    state = state_of(
        Facts(
            spooled=record.spooled,
            cancelled=job.cancelled,
            batches=job.batches,
            finished=finished,
            running=running,
            succeeded_rows=job.succeeded,
            failed_rows=job.failed,
            paused=job.paused,
            stops=record.options.on_error == "fail",
        )
    )
    skipped = job.skipped
    if state is JobState.CANCELLED or (job.stopped and not job.complete):
        skipped = record.rows - job.succeeded - job.failed
    pending = 0 if state.final else max(0, job.batches - finished - queued - running - waiting)
    counts = {"pending": pending, "queued": queued, "waiting": waiting, "running": running}
    standing = Standing(state, {**counts, "finished": finished}, skipped)
    if share is _NOTHING:
        job.at_rest = (changes, standing)
    return standing
