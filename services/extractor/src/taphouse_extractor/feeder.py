"""Keeps a bounded number of batches queued, by comparing the store with Redis again and again.

A batch that has no outcome, and is neither queued nor run by anybody, is queued. There is no other rule: a
killed worker, a lost queue, a wiped Redis and a restarted API are all the same case.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis

from taphouse.errors import StoreBusy, TaphouseError
from taphouse.ledger import Ledger
from taphouse.shards import SHARD_DIRECTORY
from taphouse_extractor.errors import ExtractorError
from taphouse_extractor.fitting import Needs
from taphouse_extractor.job_progress import JobProgress
from taphouse_extractor.jobs import BatchQueue, QueueView
from taphouse_extractor.leases import Leases, Tries
from taphouse_extractor.progress import Progress
from taphouse_extractor.records import BatchRef, JobRecord, Records
from taphouse_extractor.spooling import drop_abandoned
from taphouse_extractor.trouble import Trouble

__all__ = ["Feeder", "FeederLimits"]

log = logging.getLogger(__name__)
RECONCILE_EVERY_S = 60.0
RECONCILE_RESTS = 100.0
"""It goes through all shards: where that takes long it is done less often, in 1 % of the time at most."""
MOVED_ATTEMPTS = 3
"""Bad runs of a part of a batch that was given up, or of rows that are retried."""
SHARD = re.compile(r"(?:.*-)?(j[0-9]{14}-[0-9a-f]{8})-([0-9]{6})\.safetensors")
"""Name of a shard as its batch made it (`shard_name`)."""


@dataclass(frozen=True)
class FeederLimits:
    """Batches queued at once; bad runs of one batch; seconds from taking a batch to its lease."""

    max_queued: int
    max_attempts: int
    start_grace_s: float


class Feeder:
    """One of possibly many; only the leader feeds. `paused` says why nothing may be fed now, or None.

    `unfit` says why no engine can serve what a job needs: its batches wait here, not in Redis.
    `check` raises where the store is not the service's.
    `give_up` ends a batch whose runs crash, `close` one that nobody may run any more (`Pipeline`).
    """

    def __init__(
        self,
        *,
        records: Records,
        progress: Progress,
        ledger: Ledger,
        queue: BatchQueue,
        leases: Leases,
        limits: FeederLimits,
        give_up: Callable[[JobRecord, BatchRef, str], object],
        close: Callable[[JobRecord, BatchRef], object],
        paused: Callable[[], str | None],
        unfit: Callable[[Needs], str | None] = lambda _: None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._records, self._progress, self._ledger = records, progress, ledger
        self._queue, self._leases, self._limits = queue, leases, limits
        self._give_up, self._close = give_up, close
        self._paused, self._unfit, self._check = paused, unfit, check
        self._name = f"{socket.gethostname()}:{os.getpid()}:{id(self):x}"
        self._silent_since: dict[str, float] = {}
        self._lost = set[int]()
        self._leading, self._reconcile_at = False, 0.0

    def run(self, stop: threading.Event, every_s: float) -> None:
        """Feed until `stop` is set. Whatever is away (Redis, the store) is waited for."""
        trouble = Trouble(log, "feeder")
        while not stop.is_set():
            try:
                self.step()
                trouble.over()
            except (redis.RedisError, TaphouseError, ExtractorError, OSError) as error:
                trouble.met(error)
            except Exception as error:
                trouble.unexpected(error)
            stop.wait(every_s)
        if self._leading:
            try:
                self._leases.stop_leading(self._name)
            except redis.RedisError as error:
                log.warning("feeder could not hand over: %s", error)

    def step(self) -> int:
        """One round; returns how many batches were queued. Raises Redis's and the store's errors."""
        self._check()  # first: one with the wrong store leaves feeding to others
        led, self._leading = self._leading, self._leases.lead(self._name)
        if not self._leading:
            return 0
        if not led:
            self._records.store.sweep_temporaries()  # of writers that were killed
        due = not led or time.monotonic() > self._reconcile_at
        if due:
            self._reconcile()
        if self._leases.was_wiped() and any(not job.complete for job in self._progress.refresh()):
            log.warning("Redis is new or was wiped: the queue is rebuilt from the store")
            time.sleep(2 * self._leases.renew_every_s)  # who runs a batch now says so within this time
        # Redis is read before the store: a batch that ends in between has its outcome, and isn't queued again
        view, running = self._queue.view(), self._leases.running()
        taken = self._alive(view, running)
        tries = self._leases.tries()
        jobs = self._progress.refresh()
        busy = set(view.queued.values()) | taken | running.keys()
        waiting = self._leases.waiting(tries)
        if due:
            self._close_sealed(jobs, busy)
        self._drop_unwanted(view, {job.record.id for job in jobs if not job.held})
        if self._paused() is not None:
            return 0
        room, fed = self._limits.max_queued - len(view.queued), 0
        for job in sorted(jobs, key=lambda job: -job.record.options.job_priority):
            if not job.complete and self._unfit(job.needs) is not None:
                continue
            for ref in job.pending():
                if fed >= room:
                    return fed
                if ref not in busy and self._may_run(job.record, ref, tries.get(ref), ref in waiting):
                    self._queue.enqueue(ref)
                    fed += 1
        return fed

    def _alive(self, view: QueueView, running: dict[BatchRef, str]) -> set[BatchRef]:
        """Batches that workers took, without those whose worker gave no sign of life in time.

        Those are forgotten here, so that RQ does not call them abandoned later.
        """
        alive, now = set(), time.monotonic()
        self._silent_since = {
            rq_id: self._silent_since.get(rq_id, now)
            for rq_id, ref in view.taken.items()
            if ref not in running
        }
        for rq_id, ref in view.taken.items():
            if now - self._silent_since.get(rq_id, now) <= self._limits.start_grace_s:
                alive.add(ref)
            else:
                self._queue.discard(rq_id)
                if self._records.outcome(ref) is None:  # else it ended, and only RQ was not told
                    log.warning("batch %s was taken by a worker that is gone", ref)
                    self._leases.count_bad(ref, "its worker is gone")
        return alive

    def _may_run(self, job: JobRecord, ref: BatchRef, tries: Tries | None, waits: bool) -> bool:
        if tries is None:
            return True
        most = job.options.max_attempts or self._limits.max_attempts
        if tries.bad >= (most if ref.batch < job.batches else min(most, MOVED_ATTEMPTS)):
            reason = f"given up after {tries.bad} runs; the last: {tries.reason}"
            log.error("batch %s: %s", ref, reason)
            try:
                self._give_up(job, ref, reason)
            except (
                TaphouseError,
                ExtractorError,
            ) as error:  # it is tried again; the others don't wait for it
                log.error("batch %s can't be given up: %s", ref, error)
            else:
                self._leases.forget(ref)
            return False
        return not waits

    def _drop_unwanted(self, view: QueueView, wanted: set[str]) -> None:
        """Take batches from the queue that may not run, or are of no job of this store."""
        for rq_id, ref in view.queued.items():
            if ref.job_id not in wanted:
                self._queue.discard(rq_id)

    def _reconcile(self) -> None:
        """Give sealed shards that a crash left without an entry theirs, and clear spoolings nobody ended."""
        began = time.monotonic()
        result = self._ledger.reconcile()
        for entry in result.added:
            log.warning(
                "shard %s was sealed without a ledger entry: it has number %d now", entry.shard, entry.seq
            )
        for name, reason in result.refused:
            log.error("%s is no whole shard and gets no ledger entry: %s", name, reason)
        for entry in result.missing:
            if entry.seq not in self._lost:
                log.error("the shard %s of ledger entry %d is not there: restore it", entry.path, entry.seq)
        self._lost = {entry.seq for entry in result.missing}
        for job in self._progress.refresh():
            if not job.record.spooled and drop_abandoned(self._records, job.record.id):
                log.warning("job %s was never spooled to its end: dropped", job.record.id)
        now = time.monotonic()
        self._reconcile_at = now + max(RECONCILE_EVERY_S, RECONCILE_RESTS * (now - began))

    def _close_sealed(self, jobs: list[JobProgress], busy: set[BatchRef]) -> None:
        """Make the outcomes of sealed shards whose jobs were cancelled or stopped: nobody runs them again."""
        ended = {job.record.id: job for job in jobs if job.ended_early}
        for name in self._records.store.scan(SHARD_DIRECTORY) if ended else ():
            found = SHARD.fullmatch(name)
            job = ended.get(found[1]) if found else None
            if job is None or found is None or int(found[2]) in job.finished:
                continue
            ref = BatchRef(job_id=job.record.id, batch=int(found[2]))
            if ref in busy or job.record.shard_of(ref.batch) != name:
                continue
            try:
                self._close(job.record, ref)
            except StoreBusy:  # somebody seals, after all: the next time
                continue
            except TaphouseError as error:
                log.error("batch %s is sealed, and its outcome can't be made: %s", ref, error)
            else:
                log.warning("batch %s was sealed without an outcome: it has one now", ref)
                self._progress.look_again(ref.job_id)
