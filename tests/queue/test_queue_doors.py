"""What a queue may make workers do, and what a job may make of its time: bounded."""

from __future__ import annotations

import time
from pathlib import Path

import redis
from rq import Callback, Queue
from rq.job import Job
from rq.registry import FailedJobRegistry
from rq.serializers import JSONSerializer
from tests.queue.conftest import Cluster, wait_for

BRISK = {"TAPHOUSE_EXTRACTOR_FEEDER_INTERVAL_S": "0.2"}
ROUNDS_S = 1.0
"""Some rounds of a feeder that is brisk."""


def planted(cluster: Cluster) -> Queue:
    return Queue("taphouse", connection=redis.Redis(port=cluster.redis_port), serializer=JSONSerializer)


def test_workers_refuse_every_other_function(cluster: Cluster) -> None:
    cluster.start()
    mark = cluster.directory / "mark"
    queue = planted(cluster)
    job = queue.enqueue_call("os.system", args=[f"touch {mark}"], failure_ttl=60)
    wait_for("it is refused", lambda: job.get_status() == "failed")
    told = job.latest_result()
    assert told is not None and "workers don't run 'os.system'" in str(told.exc_string)
    assert not mark.exists()
    done = cluster.wait_done(cluster.enqueue(4).id)
    assert done.succeeded == 4


def test_callbacks_in_a_job_are_not_imported_or_called(cluster: Cluster) -> None:
    """RQ imports a callback as soon as it looks at it."""
    cluster.start()
    package = cluster.directory / "planted"
    package.mkdir()
    mark = cluster.directory / "mark"
    (package / "sitecustom_planted.py").write_text(f"open({str(mark)!r}, 'w').close()\ndef call(*_): ...\n")
    cluster.stop(cluster.processes[-1])
    cluster.settings["PYTHONPATH"] = str(package)
    cluster.start_worker()
    queue = planted(cluster)
    name = "sitecustom_planted.call"
    for function in ("os.getcwd", "taphouse.run_batch"):
        job = queue.enqueue_call(
            function, on_failure=Callback(name), on_success=Callback(name), on_stopped=Callback(name)
        )
        wait_for("it is refused", lambda job=job: job.get_status() == "failed")
    assert not mark.exists()


def test_a_batch_over_its_time_is_stopped_and_given_up_at_last(cluster: Cluster) -> None:
    """RQ's time-out is an ordinary exception, raised anywhere: nothing on the way may swallow it."""
    cluster.settings |= {
        "TAPHOUSE_EXTRACTOR_BATCH_TIMEOUT_S": "2",
        "TAPHOUSE_EXTRACTOR_MAX_ATTEMPTS": "2",
        "TAPHOUSE_EXTRACTOR_BACKOFF_BASE_S": "0.1",
    }
    cluster.start(delay_s=60.0)
    done = cluster.wait_done(cluster.enqueue(2, batch_size=2).id)
    assert (done.state.value, done.failed, done.succeeded, done.batches.finished) == ("failed", 2, 0, 3)
    assert "given up after 2 runs" in done.failures[0].reason
    assert "JobTimeoutException" in done.failures[0].reason
    assert cluster.ledger.head() == 0


def test_cancelling_stops_what_runs_and_drops_what_waits(cluster: Cluster) -> None:
    cluster.settings |= BRISK
    cluster.start(delay_s=0.2)
    job = cluster.enqueue(160, batch_size=16)
    wait_for("a first shard", lambda: cluster.ledger.head() >= 1)
    cancelled = cluster.client.cancel(job.id)
    assert cancelled.state.value == "cancelled"
    wait_for("the queue is empty", lambda: (d := cluster.client.queue().depth).queued + d.running == 0)
    settled = cluster.client.job(job.id)
    assert settled.succeeded + settled.skipped == 160
    assert 0 < settled.succeeded < 160
    assert cluster.client.cancel(job.id).state.value == "cancelled"
    time.sleep(ROUNDS_S)
    later = cluster.client.job(job.id)
    assert (later.succeeded, later.skipped) == (settled.succeeded, settled.skipped)
    assert later.batches == settled.batches
    assert len(cluster.sample_ids()) == settled.succeeded


def test_the_queue_in_redis_is_bounded_and_leaves_nothing_behind(cluster: Cluster) -> None:
    cluster.settings |= {"TAPHOUSE_EXTRACTOR_MAX_QUEUED": "3", **BRISK}
    cluster.start_redis()
    cluster.start_engine()
    cluster.start_api()
    job = cluster.enqueue(100, batch_size=2)
    wait_for("three batches queued", lambda: cluster.client.queue().depth.queued == 3)
    time.sleep(ROUNDS_S)
    depth = cluster.client.queue().depth
    assert (depth.queued, depth.pending) == (3, 47)
    cluster.start_worker()
    cluster.wait_done(job.id)
    wait_for("nothing is queued", lambda: cluster.client.queue().depth.queued == 0)
    left = [key for key in cluster.redis.keys("rq:job:*") if cluster.redis.type(key) == b"hash"]
    assert left == []
    registry = FailedJobRegistry(queue=planted(cluster))
    assert registry.get_job_ids(cleanup=False) == []
    assert Job.exists("nothing", connection=cluster.redis) is False


def test_bad_rows_fail_alone_and_are_told(cluster: Cluster) -> None:
    cluster.start()
    lines = [b'{"id":"good","prompt":"fine"}\n', b'{"id":"refused","prompt":"REFUSE"}\n', b'{"id":"none"}\n']
    done = cluster.wait_done(cluster.client.enqueue(lines).id)
    assert (done.state.value, done.succeeded, done.failed) == ("done", 1, 2)
    assert {failure.id for failure in done.failures} == {"refused", "none"}
    assert cluster.sample_ids() == ["good"]


def test_shards_come_through_the_api_as_they_were_sealed(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start()
    cluster.wait_done(cluster.enqueue(10, batch_size=2).id)
    page = cluster.client.shards(after=0, limit=3)
    rest = cluster.client.shards(after=page.next_after)
    assert [info.seq for info in [*page.shards, *rest.shards]] == [1, 2, 3, 4, 5]
    for info in rest.shards:
        target = cluster.client.download(info.shard, tmp_path)
        assert target.read_bytes() == cluster.store.read(info.path)
    checks = {check.check: check for check in cluster.client.doctor()}
    assert {name for name, check in checks.items() if not check.ok} == set()
    assert {"store", "redis", "disk", "engine", "canary", "slices", "workers"} <= checks.keys()
