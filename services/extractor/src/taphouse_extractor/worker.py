"""What a worker does with one batch: hold its lease, run the pipeline, say when a failed run is repeated."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import redis

from taphouse.errors import StoreDenied, StoreFull, WrongStore
from taphouse.logs import fields
from taphouse_extractor.errors import (
    BatchBusy,
    EngineChanged,
    EngineFailing,
    EngineTimeout,
    EngineUnavailable,
    ExtractionStopped,
    JobCancelled,
)
from taphouse_extractor.leases import Leases, Tries
from taphouse_extractor.pipeline import Pipeline
from taphouse_extractor.records import BatchRef, Outcome
from taphouse_extractor.tracing import Tracer

__all__ = ["Backoff", "BatchRunner", "Links"]

log = logging.getLogger(__name__)
WAITS = (EngineUnavailable, EngineChanged, ExtractionStopped, StoreFull, StoreDenied, WrongStore)
WRONG_STORE_S = 10.0
"""A rest, for without its store a worker is done with a batch at once: it would take those of all others."""


@dataclass(frozen=True)
class Links:
    """What a work-horse needs, opened after the fork."""

    leases: Leases
    pipeline: Pipeline
    tracer: Tracer = field(default_factory=Tracer)
    check: Callable[[], object] = lambda: None
    """Raises where the store is not the service's, and while the operator stopped extraction."""


@dataclass(frozen=True)
class Backoff:
    """Seconds before the next run: `base_s` doubled for each before it, up to `cap_s`, less some chance."""

    base_s: float
    cap_s: float

    def after(self, runs: int) -> float:
        """The wait after `runs` runs before this one."""
        return min(self.cap_s, self.base_s * 2.0 ** min(runs, 30)) * random.uniform(0.75, 1.0)


class BatchRunner:
    """Runs in a work-horse. `open_links` connects; after `deadline_s` the lease isn't renewed any more.

    `sleep` takes seconds.
    """

    def __init__(
        self,
        name: str,
        open_links: Callable[[], AbstractContextManager[Links]],
        backoff: Backoff,
        deadline_s: float,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._name, self._open_links, self._sleep = name, open_links, sleep
        self._backoff, self._deadline_s = backoff, deadline_s

    def __call__(self, ref: BatchRef, waited_s: float | None = None) -> None:
        """Run a batch; when it didn't end in an outcome, Redis says when it may run again.

        `waited_s` is how long it was queued.

        A time-out of the queue is an `Exception` like any other, so nothing here catches without raising on,
        but for what is named.
        """
        with fields(job=ref.job_id, batch=ref.batch), self._open_links() as links:
            try:
                with links.leases.hold(ref, self._name, deadline_s=self._deadline_s):
                    self._run(ref, links, waited_s)
            except BatchBusy as error:
                log.info("%s", error)

    def _run(self, ref: BatchRef, links: Links, waited_s: float | None) -> None:
        try:
            links.check()
            outcome = _traced(ref, links, waited_s)
        except JobCancelled as error:
            log.info("%s", error)
        except WAITS as error:
            waits = links.leases.tries_of(ref).waits
            delay = max(getattr(error, "retry_after", None) or 0.0, self._backoff.after(waits))
            links.leases.count_wait(ref, str(error), delay_s=delay)
            log.warning("it waits %.1f s: %s", delay, error)
            if isinstance(error, WrongStore):
                self._sleep(WRONG_STORE_S)
        except (EngineTimeout, EngineFailing) as error:  # the job has the engine's words, the log hasn't
            words = f": {error.said}" if isinstance(error, EngineFailing) else ""
            reason = f"{type(error).__name__}: {error}{words}"
            self._count_bad(ref, links.leases.tries_of(ref), links.leases, reason)
            log.warning("it runs again: %s", error)
        except BaseException as error:
            self._count_bad(ref, links.leases.tries_of(ref), links.leases, f"{type(error).__name__}: {error}")
            raise
        else:
            links.leases.forget(ref)
            facts = outcome.model_dump(include={"shard", "engine", "tokens", "bytes", "stages"})
            log.info("%d of %d rows sealed", outcome.succeeded, outcome.rows, extra=facts)

    def _count_bad(self, ref: BatchRef, tries: Tries, leases: Leases, reason: str) -> None:
        leases.count_bad(ref, reason, delay_s=self._backoff.after(tries.bad))

    def died(self, ref: BatchRef, reason: str, leases: Leases) -> None:
        """In the parent: the work-horse was killed. Let go of its lease and count the run."""
        try:
            leases.drop(ref, self._name)
            self._count_bad(ref, leases.tries_of(ref), leases, reason)
        except redis.RedisError as error:
            log.warning("batch %s: %s, and Redis can't be told: %s", ref, reason, error)


def _traced(ref: BatchRef, links: Links, waited_s: float | None) -> Outcome:
    with links.tracer.span("batch", job=ref.job_id, batch=ref.batch) as note:
        outcome = links.pipeline.run(ref, waited_s=waited_s)
        note(rows=outcome.rows, succeeded=outcome.succeeded, tokens=outcome.tokens, bytes=outcome.bytes)
        note(**{f"{stage}_s": seconds for stage, seconds in outcome.stages.items()})
        return outcome
