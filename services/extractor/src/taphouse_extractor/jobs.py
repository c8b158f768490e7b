"""The queue of batches, and the only file that names rq.

RQ carries references between processes and forks a work-horse for each; whether a batch is finished, and when
it runs again, is decided from the store by the feeder. So RQ retries nothing, keeps no results, and an RQ job
that it calls failed or abandoned means nothing here.

Workers run one function, by a name that is looked up in a table and never imported. Callbacks, dependencies,
webhooks and retries that somebody wrote into a job's hash are dropped when it is read.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis
from rq import Queue, Worker
from rq.exceptions import InvalidJobOperation, NoSuchJobError, StopRequested
from rq.job import Job
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer

from taphouse_extractor.errors import RefusedFunction
from taphouse_extractor.leases import Client
from taphouse_extractor.records import BatchRef
from taphouse_extractor.trouble import Trouble

__all__ = ["BatchQueue", "QueueView", "RunBatch", "run_worker"]

log = logging.getLogger(__name__)
RUN_BATCH = "taphouse.run_batch"
FAILURE_TTL_S = 3600
MONITOR_S = 10
WORKER_TTL_S = 60
RESTART_WAIT_S = 2.0
RunBatch = Callable[[BatchRef, "float | None"], None]
"""Runs a batch; the seconds that it was queued for, where that is known."""


@dataclass(frozen=True)
class QueueView:
    """What RQ holds now, by RQ id: `queued` wait for a worker, `taken` were taken by one."""

    queued: dict[str, BatchRef]
    taken: dict[str, BatchRef]


class BatchQueue:
    """Batches on their way to workers. Raises `redis.RedisError`s."""

    def __init__(self, client: Client, name: str, *, timeout_s: int) -> None:
        self._timeout_s = timeout_s
        self._queue = Queue(name, connection=client, serializer=JSONSerializer, default_timeout=timeout_s)
        self._started = StartedJobRegistry(queue=self._queue, serializer=JSONSerializer)

    def enqueue(self, ref: BatchRef) -> str:
        """Queue one run of a batch and return its RQ id, which is never used twice."""
        rq_id = f"{ref.job_id}_{ref.batch:06d}_{secrets.token_hex(4)}"
        self._queue.enqueue_call(
            RUN_BATCH,
            kwargs={"job_id": ref.job_id, "batch": ref.batch, "queued_at": time.time()},
            timeout=self._timeout_s,
            result_ttl=0,
            failure_ttl=FAILURE_TTL_S,
            job_id=rq_id,
            description=f"batch {ref}",
        )
        return rq_id

    def view(self) -> QueueView:
        """What is queued and what is taken."""
        queued = _refs(self._queue.get_job_ids())
        taken = self._queue.intermediate_queue.get_job_ids()
        taken += self._started.get_job_ids(cleanup=False)
        return QueueView(queued, _refs(taken))

    def discard(self, rq_id: str) -> None:
        """Forget a run that died, or one that waits and is wanted no more."""
        self._queue.remove(rq_id)
        self._queue.intermediate_queue.remove(rq_id)
        for job_id, execution_id in self._started.get_job_and_execution_ids(cleanup=False):
            if job_id == rq_id:
                self._queue.connection.zrem(self._started.key, f"{job_id}:{execution_id}")
        client = self._queue.connection
        try:
            Job.fetch(rq_id, connection=client, serializer=JSONSerializer).delete()
        except (NoSuchJobError, InvalidJobOperation):  # of one that was deleted a sign of life may be left
            client.delete(Job.key_for(rq_id))


def _refs(rq_ids: list[str]) -> dict[str, BatchRef]:
    found = {}
    for rq_id in rq_ids:
        job_id, _, rest = rq_id.partition("_")
        try:
            found[rq_id] = BatchRef.parse(f"{job_id}:{rest.partition('_')[0]}")
        except ValueError:
            log.warning("ignored a queue entry that nobody here made: %r", rq_id[:80])
    return found


def _allowed_job(run: RunBatch) -> type[Job]:
    """A job class that can run `run`, under the name RUN_BATCH, and nothing else."""

    def run_batch(job_id: str, batch: int, queued_at: float | None = None) -> None:
        waited_s = time.time() - queued_at if isinstance(queued_at, float) else -1.0
        run(BatchRef(job_id=job_id, batch=batch), waited_s if waited_s >= 0 else None)  # clocks are set back

    allowed = {RUN_BATCH: run_batch}

    class AllowedJob(Job):
        """Reads a job's hash, and believes only its function's name and arguments."""

        @property
        def func(self) -> Any:
            """The function of this name in the table; raises `RefusedFunction`."""
            if self.func_name not in allowed:
                raise RefusedFunction(f"workers don't run {self.func_name!r:.80}")
            return allowed[self.func_name]

        def restore(self, raw_data: Any) -> Any:
            """Drop whatever would make RQ import, call, send or repeat something."""
            super().restore(raw_data)
            self._success_callback = self._failure_callback = self._stopped_callback = None
            self._success_callback_name = self._failure_callback_name = self._stopped_callback_name = None
            self._dependency_ids: list[str] = []
            self.webhooks: list[Any] = []
            self.group_id = None
            self.retries_left = self.repeats_left = self.rate_limit_key = None

        def delete(
            self, pipeline: Any = None, remove_from_queue: bool = True, delete_dependents: bool = False
        ) -> None:
            """Remove it, and of one that Redis lost while it ran the sign of life that came after."""
            try:
                super().delete(pipeline, remove_from_queue, delete_dependents)
            except InvalidJobOperation:
                (self.connection if pipeline is None else pipeline).delete(self.key)

    return AllowedJob


class BatchWorker(Worker):
    """RQ's forking worker, patient with Redis. `trouble` is told of a Redis that is away, and back."""

    max_connection_wait_time = 5.0
    trouble = Trouble(log, "a worker")

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """Give a sign of life; in a `pipeline` it is only made ready."""
        super().heartbeat(timeout, pipeline)
        if pipeline is None:
            self.trouble.over()

    @property
    def told_to_stop(self) -> bool:
        """Whether a signal asked it to end."""
        return self._shutdown_requested_date is not None

    def maintain_heartbeats(self, job: Job, execution: Any) -> None:
        """Tell Redis that the work-horse runs; while Redis is away it runs on."""
        try:
            super().maintain_heartbeats(job, execution)
        except redis.RedisError as error:
            self.trouble.met(error)

    def register_death(self) -> None:
        """Sign off, if Redis is there."""
        try:
            super().register_death()
        except redis.RedisError as error:
            log.warning("worker %s could not sign off: %s", self.name, error)


class _Tries(logging.Filter):
    """Gives RQ's line for each try to reach Redis to a `Trouble`."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        self._trouble = trouble

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether RQ's logger says it."""
        if "could not connect to Redis" not in str(record.msg) or not isinstance(record.args, tuple):
            return True
        self._trouble.met(record.args[1])  # of the name, the error, and in how many seconds it tries again
        return False


@contextmanager
def _told_of_tries(trouble: Trouble) -> Iterator[None]:
    logger, tries = logging.getLogger("rq.worker"), _Tries(trouble)
    logger.addFilter(tries)
    try:
        yield
    finally:
        logger.removeFilter(tries)


def run_worker(
    url: str,
    queue_name: str,
    *,
    name: str,
    run: RunBatch,
    on_death: Callable[[BatchRef, str], None],
    enter: Callable[[], object] = lambda: None,
) -> None:
    """Work until SIGTERM or SIGINT (the batch at hand is finished; a second signal ends it at once).

    `run` is called in a forked work-horse, under RQ's time-out, whose exception is a plain `Exception`.
    `on_death` is called here when a work-horse was killed. A worker that lost Redis is made anew, and each
    begins with `enter`, which may raise Redis's errors; what else it raises ends this.
    """

    def killed(job: Job, _pid: int, status: int, _usage: Any) -> None:
        for ref in _refs([job.id]).values():
            on_death(ref, f"its work-horse was killed (wait status {status})")

    trouble = Trouble(log, f"worker {name}")
    with _told_of_tries(trouble):
        while True:
            try:
                enter()
                worker = BatchWorker(
                    [queue_name],
                    name=f"{name}.{secrets.token_hex(2)}",
                    connection=redis.Redis.from_url(url, socket_connect_timeout=5.0),
                    job_class=_allowed_job(run),
                    serializer=JSONSerializer,
                    worker_ttl=WORKER_TTL_S,
                    job_monitoring_interval=MONITOR_S,
                    default_result_ttl=0,
                    work_horse_killed_handler=killed,
                )
                worker.trouble = trouble
                worker.work(logging_level="WARNING")
                if worker.told_to_stop:
                    return
                time.sleep(RESTART_WAIT_S)
            except StopRequested:
                return
            except redis.RedisError as error:
                trouble.met(error)
                time.sleep(RESTART_WAIT_S)
