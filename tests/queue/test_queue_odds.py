"""What should not be, after a crash or by somebody's hand: half of a record, a run twice or called dead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from rq import Queue
from rq.registry import FailedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer
from tests.queue.conftest import Cluster, wait_for

from taphouse.ledger import LedgerEntry
from taphouse_extractor.jobs import BatchQueue
from taphouse_extractor.records import BatchRef, Records


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("odds"))
    made.settings = {"TAPHOUSE_EXTRACTOR_START_GRACE_S": "1", "TAPHOUSE_EXTRACTOR_FEEDER_INTERVAL_S": "0.2"}
    try:
        made.start(workers=2, delay_s=0.3)
        yield made
    finally:
        made.close()


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    return running


def entry_of(cluster: Cluster, job_id: str) -> LedgerEntry:
    [entry] = [entry for entry in cluster.ledger.entries() if entry.job_id == job_id]
    return entry


def test_half_of_a_record(cluster: Cluster) -> None:
    """The API finds shards, ledger entries and outcomes without each other when it starts."""
    told = [cluster.wait_done(cluster.enqueue(8, batch_size=8).id) for _ in range(4)]
    gone, lost, unsaid, unlisted = told
    entries = {job.id: entry_of(cluster, job.id) for job in told}
    cluster.stop(cluster.processes[2])
    for job in (lost, unsaid, unlisted):
        cluster.store.delete(Records.outcome_path(BatchRef(job_id=job.id, batch=0)))
    for job in (gone, lost):
        cluster.store.delete(entries[job.id].path)
    number = entries[unlisted.id].seq
    for path in (f"{number:012d}.json", f"by-shard/{entries[unlisted.id].shard}.json", "last"):
        cluster.store.delete(f"ledger/{path}")
    cluster.processes[2] = cluster.start_api()
    for job in (lost, unsaid, unlisted):
        cluster.check_whole(cluster.wait_done(job.id))
        again = entry_of(cluster, job.id)
        assert (again.seq, again.sha256) == (entries[job.id].seq, entries[job.id].sha256)
    assert cluster.ledger.head() == number
    said = f"the shard {entries[gone.id].path} of ledger entry {entries[gone.id].seq} is not there"
    wait_for("the operator is told", lambda: said in cluster.log("api"))
    assert cluster.client.job(gone.id).state.value == "done"
    cluster.ledger.remove(entries[gone.id].seq, "lost")


def test_runs_of_one_batch_beside_each_other(cluster: Cluster) -> None:
    """Put into the queue behind the feeder's back: further runs of it, and the same run twice."""
    head = cluster.ledger.head()
    job = cluster.enqueue(16, batch_size=16)
    server = redis.Redis(port=cluster.redis_port)
    queue = BatchQueue(server, "taphouse", timeout_s=60)
    twice = [queue.enqueue(BatchRef(job_id=job.id, batch=0)) for _ in range(3)][-1]
    for _ in range(3):
        server.rpush("rq:queue:taphouse", twice)
    cluster.check_whole(cluster.wait_done(job.id))
    wait_for("the queue is empty", lambda: not any(vars(queue.view()).values()))
    assert cluster.ledger.head() == head + 1
    assert not cluster.redis.keys(f"taphouse:taphouse:*:{job.id}:0")


@pytest.mark.parametrize("finished", [False, True])
def test_a_run_that_is_called_abandoned(cluster: Cluster, finished: bool) -> None:
    server = redis.Redis(port=cluster.redis_port)
    queue = Queue("taphouse", connection=server, serializer=JSONSerializer)
    started = StartedJobRegistry(queue=queue, serializer=JSONSerializer)
    head = cluster.ledger.head()
    job = cluster.enqueue(40, batch_size=40)

    def executions() -> list[tuple[str, str]]:
        return [pair for pair in started.get_job_and_execution_ids(cleanup=False) if job.id in pair[0]]

    runs = wait_for("it runs", executions)
    key = f"rq:job:{runs[0][0]}"
    copy = {**server.hgetall(key), b"status": b"started"}  # RQ calls only those abandoned
    if finished:
        cluster.check_whole(cluster.wait_done(job.id))
        wait_for("RQ is told too", lambda: not server.exists(key))
    server.hset(key, mapping=copy)
    server.zadd(started.key, {f"{name}:{execution}": 1.0 for name, execution in runs})
    started.cleanup()
    failed = FailedJobRegistry(queue=queue, serializer=JSONSerializer)
    assert set(failed.get_job_ids(cleanup=False)) & {name for name, _ in runs}
    cluster.check_whole(cluster.wait_done(job.id))
    cluster.wait_idle(job.id)
    assert cluster.ledger.head() == head + 1
    assert not cluster.redis.keys(f"taphouse:taphouse:tries:{job.id}:*")
