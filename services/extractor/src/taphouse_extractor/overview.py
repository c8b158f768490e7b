"""Builds what the API says of jobs and queue, from progress (store), Redis and the engines' last looks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import redis

from taphouse.ledger import Ledger
from taphouse.store import Store
from taphouse.wire import (
    Batches,
    Governor,
    Job,
    JobState,
    QueueStatus,
    Retention,
    Unconsumed,
    Worker,
)
from taphouse_extractor import consumers
from taphouse_extractor.job_progress import JobProgress
from taphouse_extractor.jobs import BatchQueue
from taphouse_extractor.leases import Leases
from taphouse_extractor.monitor import Monitors
from taphouse_extractor.progress import Progress
from taphouse_extractor.recent import Sums, rate
from taphouse_extractor.standing import Live, stand
from taphouse_extractor.states import Standing
from taphouse_extractor.tally import Tally

__all__ = ["Figures", "Overview"]

WINDOWS_S = (60.0, 300.0)


@dataclass(frozen=True)
class Figures:
    """The queue, and over all jobs: rows by what became of them, tokens and shards; tallies of outcomes."""

    queue: QueueStatus
    succeeded: int
    failed: int
    skipped: int
    tokens: int
    shards: int
    tally: Tally


class Overview:
    """Answers for jobs and queue.

    `governor`, `unconsumed` and `retention` show those parts, or None; they never raise.
    """

    def __init__(
        self,
        *,
        progress: Progress,
        store: Store,
        ledger: Ledger,
        queue: BatchQueue,
        leases: Leases,
        monitors: Monitors,
        governor: Callable[[], Governor | None] = lambda: None,
        unconsumed: Callable[[], Unconsumed | None] = lambda: None,
        retention: Callable[[], Retention | None] = lambda: None,
    ) -> None:
        self._governor, self._unconsumed, self._retention = governor, unconsumed, retention
        self._progress, self._store, self._ledger = progress, store, ledger
        self._queue, self._leases, self._monitors = queue, leases, monitors

    def live(self) -> Live:
        """Look at Redis. Never raises: the store alone still answers for jobs."""
        try:
            view, held = self._queue.view(), self._leases.running()
            tries, present = self._leases.tries(), self._leases.workers()
        except redis.RedisError as error:
            return Live(problem=f"Redis can't be used: {error}")
        try:
            self._leases.probe()
            problem = None
        except redis.RedisError as error:
            problem = f"Redis takes no writes: {error}"
        running = frozenset(held) | frozenset(view.taken.values())
        by_worker = {worker: str(ref) for ref, worker in held.items()}
        return Live(
            queued=frozenset(view.queued.values()) - running,
            running=running,
            waiting=frozenset(self._leases.waiting(tries)) - running,
            reasons=tuple((ref, t.reason) for ref, t in tries.items()),
            workers=tuple(
                Worker(
                    name=name,
                    state="busy" if name in by_worker else "idle",
                    batch=by_worker.get(name),
                    last_heartbeat=facts.get("seen_at"),
                )
                for name, facts in sorted(present.items())
            ),
            problem=problem,
        )

    def jobs(self, limit: int, *, tenant: str | None = None) -> list[Job]:
        """The newest `limit` jobs (of one tenant, where it is given), newest first."""
        live, jobs = self.live(), self._progress.refresh()
        if tenant is not None:
            jobs = [job for job in jobs if job.record.tenant == tenant]
        return [self._describe(job, live) for job in jobs[-limit:][::-1]]

    def _describe(self, job: JobProgress, live: Live) -> Job:
        return describe(job, live, self._unfit(job))

    def _unfit(self, job: JobProgress) -> str | None:
        waits = job.record.spooled and not job.complete and not job.held
        return self._monitors.unfit(job.needs) if waits else None

    def settled(self, job_id: str) -> bool:
        """Whether nothing of a job runs or will run; not known, so not so, while Redis is away."""
        live = self.live()
        job = describe(self._progress.refresh_one(job_id), live)
        return live.problem is None and job.state.final and not job.batches.running and not job.batches.queued

    def unfinished(self, owner: str) -> int:
        """How many jobs of a token are not at their end."""
        jobs = self._progress.refresh()
        return sum(
            job.record.owner == owner and not (job.complete or job.cancelled or job.stopped) for job in jobs
        )

    def job(self, job_id: str) -> Job:
        """One job, with its first failures. Raises `NotFound`."""
        job = self._progress.refresh_one(job_id)
        return self._describe(job, self.live()).model_copy(update={"failures": list(job.failures)})

    def queue(self, paused: str | None) -> QueueStatus:
        """The whole of it. `paused` says why nothing is fed now."""
        live, jobs = self.live(), self._progress.refresh()
        return self._queue_of(live, jobs, [stand(job, live) for job in jobs], paused)

    def figures(self, paused: str | None) -> Figures:
        """The same with totals, of one look."""
        live, jobs = self.live(), self._progress.refresh()
        standing = [stand(job, live) for job in jobs]
        return Figures(
            queue=self._queue_of(live, jobs, standing, paused),
            succeeded=sum(job.succeeded for job in jobs),
            failed=sum(job.failed for job in jobs),
            skipped=sum(one.skipped for one in standing),
            tokens=sum(job.tokens for job in jobs),
            shards=sum(job.shards for job in jobs),
            tally=self._progress.tally,
        )

    def _queue_of(
        self, live: Live, jobs: list[JobProgress], standing: list[Standing], paused: str | None
    ) -> QueueStatus:
        now = time.time()
        since = min((job.record.created_at for job in jobs if job.recent), default=now)
        unfit = [why for job in jobs if (why := self._unfit(job)) is not None]
        rates = [rate([self._progress.recent], window, since=since, now=now) for window in WINDOWS_S]
        left = [job for job in jobs if job.rows_left]
        rows_left = sum(job.rows_left for job in left)
        head = self._ledger.head()
        return QueueStatus(
            depth=_sum([one.batches for one in standing]),
            jobs=dict(Counter(one.state for one in standing)),
            rows_left=rows_left,
            rates=rates,
            eta_s=_eta(rows_left, left, now),
            paused=live.problem or paused,
            unfit_jobs=len(unfit),
            unfit=unfit[0] if unfit else None,
            workers=list(live.workers),
            engines=self._monitors.views,
            governor=self._governor(),
            consumers=consumers.readable(self._store, head)[0],
            unconsumed=self._unconsumed(),
            retention=self._retention(),
            ledger_head=head,
            updated_at=now,
        )


def describe(job: JobProgress, live: Live, unfit: str | None = None) -> Job:
    """One job as the wire has it. `unfit` says why no engine can serve it now."""
    record, now, standing = job.record, time.time(), stand(job, live)
    state = standing.state
    return Job(
        id=record.id,
        name=record.name,
        state=state,
        reason=_reason(job, state, live, unfit),
        options=record.options,
        owner=record.owner,
        tenant=record.tenant,
        rows=record.rows,
        succeeded=job.succeeded,
        failed=job.failed,
        skipped=standing.skipped,
        batches=Batches(**standing.batches),
        tokens=job.tokens,
        shards=job.shards,
        bytes=job.bytes,
        raw_bytes=job.raw_bytes,
        fingerprint_id=job.fingerprint_id,
        created_at=record.created_at,
        finished_at=job.finished_at if job.complete else job.cancelled_at,
        rate=rate([job.recent], WINDOWS_S[0], since=record.created_at, now=now).samples,
        eta_s=None if state.final else _eta(job.rows_left, [job], now),
    )


def _reason(job: JobProgress, state: JobState, live: Live, unfit: str | None) -> str | None:
    if state is JobState.FAILED and job.failures:
        return f"no row made a sample; the first: {job.failures[0].reason}"
    if job.stopped and not job.complete:
        return f"a row failed: {job.failures[0].reason}" if job.failures else "a row failed"
    if state.final:
        return None
    if unfit is not None:
        return f"it waits: {unfit}"
    reasons = [reason for batch, reason in live.of(job.record.id).reasons if batch not in job.finished]
    return f"a batch waits for its next run: {reasons[0]}" if reasons else None


def _eta(rows_left: int, jobs: list[JobProgress], now: float) -> float | None:
    """Seconds for `rows_left` at the last minutes' rate of rows, failed ones too; None without one."""
    if rows_left == 0:
        return 0.0
    window = WINDOWS_S[-1]
    sums = Sums()
    for job in jobs:
        job.recent.add_to(sums, now - window)
    since = min((job.record.created_at for job in jobs), default=now)
    return rows_left * max(1.0, min(window, now - since)) / sums.rows if sums.rows else None


def _sum(batches: list[dict[str, int]]) -> Batches:
    return Batches(**{name: sum(counts[name] for counts in batches) for name in Batches.model_fields})
