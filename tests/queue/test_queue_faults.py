"""What is lost or doubled when processes die: nothing. Settings are production's, but for the leases' length.

`test_queue_resources.py` has a table of all faults.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from tests.queue.conftest import Cluster, alive, children, wait_for

BRIEF = {"TAPHOUSE_EXTRACTOR_LEASE_TTL_S": "3", "TAPHOUSE_EXTRACTOR_START_GRACE_S": "2"}


def expected(rows: int) -> list[str]:
    return [f"row-{i}" for i in range(rows)]


def busy_horse(cluster: Cluster, worker: subprocess.Popen[bytes]) -> int:
    """Pid of a worker's work-horse in the middle of a batch: it holds the lease, rows are with the engine."""
    mine = f"-{worker.pid}"
    wait_for(
        "the worker holds a batch",
        lambda: any(w.batch and w.name.endswith(mine) for w in cluster.client.queue().workers),
    )
    assert cluster.ledger.head() == 0
    return int(children(worker.pid)[0])


def test_a_dataset_becomes_shards_and_a_ledger(cluster: Cluster) -> None:
    cluster.start(workers=2)
    job = cluster.wait_done(cluster.enqueue(50, batch_size=8).id)
    assert (job.state.value, job.rows, job.succeeded, job.shards) == ("done", 50, 50, 7)
    assert sorted(cluster.sample_ids(), key=lambda i: int(i[4:])) == expected(50)
    assert job.batches.finished == 7
    status = cluster.client.queue()
    assert status.depth.queued == status.depth.running == status.depth.pending == 0
    assert (status.ledger_head, status.rows_left, len(status.workers)) == (7, 0, 2)


def test_worker_and_horse_killed_in_the_middle_of_a_batch(cluster: Cluster) -> None:
    cluster.settings = BRIEF
    cluster.start(workers=2, delay_s=2.0)
    victim = cluster.processes[-1]
    job = cluster.enqueue(32, batch_size=16)
    horse = busy_horse(cluster, victim)
    os.kill(victim.pid, signal.SIGKILL)
    os.kill(horse, signal.SIGKILL)
    cluster.trouble(delay_s=0.0)
    done = cluster.wait_done(job.id)
    assert (done.state.value, done.succeeded) == ("done", 32)
    assert sorted(cluster.sample_ids(), key=lambda i: int(i[4:])) == expected(32)
    assert not alive(horse)


def test_horse_killed_alone_is_run_again_by_its_worker(cluster: Cluster) -> None:
    cluster.start(delay_s=2.0)
    job = cluster.enqueue(16, batch_size=16)
    horse = busy_horse(cluster, cluster.processes[-1])
    os.kill(horse, signal.SIGKILL)
    cluster.trouble(delay_s=0.0)
    wait_for("the reason is told", lambda: "killed" in (cluster.client.job(job.id).reason or ""))
    done = cluster.wait_done(job.id)
    assert done.succeeded == 16
    assert sorted(cluster.sample_ids(), key=lambda i: int(i[4:])) == expected(16)


def test_a_worker_told_to_stop_finishes_its_batch(cluster: Cluster) -> None:
    cluster.start(delay_s=2.0)
    worker = cluster.processes[-1]
    job = cluster.enqueue(32, batch_size=16)
    assert busy_horse(cluster, worker)
    cluster.trouble(delay_s=0.0)
    cluster.stop(worker)
    assert worker.returncode == 0
    assert cluster.ledger.head() == 1
    wait_for("it signed off", lambda: cluster.client.queue().workers == [])
    assert cluster.client.job(job.id).succeeded == 16


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_redis_restarted_with_its_log(cluster: Cluster, how: int) -> None:
    cluster.start(workers=2, delay_s=0.2)
    job = cluster.enqueue(64, batch_size=16)
    wait_for("batches run", lambda: cluster.client.queue().depth.running == 2)
    server = cluster.processes[0]
    cluster.stop(server, how)
    wait_for("the API says so", lambda: "Redis" in (cluster.client.queue().paused or ""))
    assert not cluster.client.ready().ready
    cluster.start_redis()
    done = cluster.wait_done(job.id)
    assert (done.state.value, done.succeeded) == ("done", 64)
    assert sorted(cluster.sample_ids(), key=lambda i: int(i[4:])) == expected(64)


def test_redis_wiped_is_rebuilt_from_the_store_and_cursors_stay(cluster: Cluster) -> None:
    cluster.start(workers=2, delay_s=0.2)
    job = cluster.enqueue(96, batch_size=16)
    wait_for("a first shard", lambda: cluster.ledger.head() >= 1)
    cluster.trouble(delay_s=0.5)
    wait_for("two batches run", lambda: cluster.client.queue().depth.running == 2)
    cursor = cluster.ledger.head()
    before = [entry.shard for entry in cluster.ledger.entries()][:cursor]
    cluster.redis.flushall()
    cluster.trouble(delay_s=0.05)
    done = cluster.wait_done(job.id)
    assert (done.state.value, done.succeeded) == ("done", 96)
    entries = list(cluster.ledger.entries())
    assert [entry.shard for entry in entries][:cursor] == before
    after = [entry.shard for entry in cluster.ledger.entries(after=cursor)]
    assert sorted([*before, *after]) == sorted(entry.shard for entry in entries)
    assert sorted(cluster.sample_ids(), key=lambda i: int(i[4:])) == expected(96)
    wait_for("workers show again", lambda: len(cluster.client.queue().workers) == 2)
    assert "Traceback" not in cluster.log("worker") + cluster.log("api"), "runs that Redis forgot end quietly"
    wait_for("nothing of them is left", lambda: not cluster.redis.keys("rq:job:*"))


def test_engine_stopped_and_started(cluster: Cluster) -> None:
    cluster.settings["TAPHOUSE_EXTRACTOR_ENGINE_POLL_S"] = "0.5"
    cluster.start(workers=2, delay_s=0.1)
    job = cluster.enqueue(64, batch_size=8)
    wait_for("a first shard", lambda: cluster.ledger.head() >= 1)
    cluster.stop(cluster.processes[1])
    wait_for("it pauses", lambda: "engine" in (cluster.client.queue().paused or ""))
    time.sleep(1)
    assert not cluster.client.job(job.id).state.final
    cluster.start_engine(delay_s=0.0)
    done = cluster.wait_done(job.id)
    assert (done.state.value, done.succeeded, done.failed) == ("done", 64, 0)
    assert sorted(cluster.sample_ids(), key=lambda i: int(i[4:])) == expected(64)


def test_engine_started_as_another_is_refused_until_the_first_is_back(cluster: Cluster) -> None:
    cluster.settings["TAPHOUSE_EXTRACTOR_ENGINE_POLL_S"] = "0.5"
    cluster.start(delay_s=0.1)
    job = cluster.enqueue(48, batch_size=8)
    wait_for("a first shard", lambda: cluster.ledger.head() >= 1)
    engine = cluster.processes[1]
    others = []
    for change in ({"weights": "second"}, {"layers": "1,3,4"}):
        cluster.stop(engine)
        engine = cluster.start_engine(**change)
        others.append(cluster.wait_done(cluster.enqueue(8, batch_size=8).id))
        reason = wait_for("it says why it waits", lambda: cluster.client.job(job.id).reason)
        assert "no engine fits" in reason and "the job began with" in reason
        waits = cluster.client.job(job.id)
        assert not waits.state.final and waits.failed == 0
    cluster.stop(engine)
    cluster.start_engine()
    for done in (cluster.wait_done(job.id), *others):
        cluster.check_whole(done)
    made = {(entry.job_id, entry.fingerprint_id, entry.layers) for entry in cluster.ledger.entries()}
    assert len(made) == 3, "no job has shards of two engines"
    assert len({facts[1:] for facts in made}) == 3


def test_api_killed_while_a_job_runs(cluster: Cluster) -> None:
    cluster.settings = BRIEF
    cluster.start(delay_s=0.1)
    api = cluster.processes[2]
    job = cluster.enqueue(64, batch_size=8)
    cluster.stop(api, signal.SIGKILL)
    cluster.start_api()
    done = cluster.wait_done(job.id)
    assert done.succeeded == 64
    assert sorted(cluster.sample_ids(), key=lambda i: int(i[4:])) == expected(64)
