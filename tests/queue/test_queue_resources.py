"""What a service needs runs full, turns read-only, fails or hangs under it: it waits, says so, and goes on.

All tests share one service, so each also shows that the one before left it whole. Where faults are tested:

| fault | where |
| --- | --- |
| store full or read-only, slice directory full, Redis full, its log's disk full, Redis hangs | here |
| engine answers 500, 429 or 503, engine hangs | here |
| SIGKILL of worker, work-horse, API and feeder, Redis, engine | `test_queue_faults.py` |
| the same at random moments, and SIGSTOP; two APIs | `test_queue_soak.py`, for minutes `make soak` |
| clocks set forward and back | `test_queue_clock.py` |
| Redis stopped or wiped, engine stopped, engine of another model or other layers | `test_queue_faults.py` |
| one of several engines | `test_queue_engines.py` |
| store not mounted, another one, one of another version | `test_queue_home.py` |
| a shard without its entry, an entry without its shard or outcome | `test_queue_odds.py` |
| the same run twice in the queue, a run called abandoned while it runs and after | `test_queue_odds.py` |
| two APIs and eight workers, one key sent to both at once | `test_queue_crowd.py` |
| a poison row, a batch over its time | `test_queue_doors.py`, `tests/unit/extractor/test_halving.py` |
| a real engine that goes away | `test_queue_engine.py` |
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from tests.queue.conftest import Cluster, wait_for
from tests.queue.disks import Disks

from taphouse.errors import TaphouseError, Unavailable
from taphouse.wire import GovernorMode, Job

QUICK = {
    "TAPHOUSE_EXTRACTOR_BACKOFF_BASE_S": "0.1",
    "TAPHOUSE_EXTRACTOR_BACKOFF_CAP_S": "0.5",
    "TAPHOUSE_EXTRACTOR_FEEDER_INTERVAL_S": "0.2",
    "TAPHOUSE_EXTRACTOR_ENGINE_POLL_S": "0.3",
    "TAPHOUSE_EXTRACTOR_ENGINE_TIMEOUT_S": "1.5",
    "TAPHOUSE_EXTRACTOR_ENGINE_PATIENCE_S": "0.5",
}
ROWS = 96
QUICKLY_S, SLOWLY_S = 0.05, 0.5
"""What a capture takes: the rest of a job, and what is to be in the middle when something breaks."""


@pytest.fixture(scope="module")
def on_disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Disks]]:
    directory = tmp_path_factory.mktemp("resources")
    disks = Disks.make(directory / "disks", "store", "slices", "redis")
    made = Cluster(
        directory, settings=QUICK, places={name: disks.path(name) for name in ("store", "slices", "redis")}
    )
    try:
        made.start(workers=2, delay_s=QUICKLY_S)
        yield made, disks
    finally:
        made.close()
        disks.close()


@pytest.fixture
def cluster(on_disks: tuple[Cluster, Disks]) -> Iterator[Cluster]:
    cluster = on_disks[0]
    yield cluster
    cluster.trouble(failing=0, hanging=False, delay_s=QUICKLY_S)


@pytest.fixture
def disks(on_disks: tuple[Cluster, Disks]) -> Disks:
    return on_disks[1]


def begun(cluster: Cluster) -> Job:
    """A job in the middle: some of its shards are sealed, most are not."""
    head = cluster.ledger.head()
    cluster.trouble(delay_s=SLOWLY_S)
    job = cluster.enqueue(ROWS, batch_size=8)
    wait_for("a first shard", lambda: cluster.ledger.head() > head)
    return job


def paused(cluster: Cluster, why: str) -> None:
    wait_for(f"it says {why!r}", lambda: why in (cluster.client.queue().paused or ""))


def ends_whole(cluster: Cluster, job: Job) -> None:
    """The fault is over: every row becomes a sample, once."""
    cluster.trouble(failing=0, hanging=False, delay_s=QUICKLY_S)
    cluster.check_whole(cluster.wait_done(job.id))


def stands(cluster: Cluster, job: Job, for_s: float = 0.5) -> None:
    """The job doesn't end, and makes no failed rows, while the fault lasts."""
    time.sleep(for_s)
    now = cluster.client.job(job.id)
    assert not now.state.final
    assert now.failed == 0


def refused(cluster: Cluster) -> str:
    with pytest.raises(TaphouseError) as caught:
        cluster.enqueue(1)
    return str(caught.value)


def test_store_full(cluster: Cluster, disks: Disks) -> None:
    job = begun(cluster)
    ballast = disks.fill("store")
    paused(cluster, "No space left")
    stands(cluster, job)
    assert "No space left" in refused(cluster)
    assert not cluster.client.ready().ready
    ballast.unlink()
    ends_whole(cluster, job)


def test_store_read_only(cluster: Cluster, disks: Disks) -> None:
    job = begun(cluster)
    disks.remount("store", "ro")
    paused(cluster, "Read-only")
    stands(cluster, job)
    assert "Read-only" in refused(cluster)
    with pytest.raises(Unavailable, match=r"order can't be kept, and 'auto' stays in force: .*Read-only"):
        cluster.client.govern(GovernorMode.STOPPED)
    disks.remount("store", "rw")
    ends_whole(cluster, job)


def test_slice_directory_full(cluster: Cluster, disks: Disks) -> None:
    job = begun(cluster)
    ballast = disks.fill("slices")
    wait_for("it says why", lambda: "unreserved bytes left" in (cluster.client.job(job.id).reason or ""))
    stands(cluster, job)
    ballast.unlink()
    ends_whole(cluster, job)


@pytest.mark.slow
def test_redis_cannot_write_its_log(cluster: Cluster, disks: Disks) -> None:
    job = begun(cluster)
    ballast = disks.fill("redis")
    paused(cluster, "Redis takes no writes: MISCONF")
    stands(cluster, job)
    ballast.unlink()
    ends_whole(cluster, job)


def test_redis_full(cluster: Cluster) -> None:
    cluster.redis.config_set("maxmemory-policy", "noeviction")
    job = begun(cluster)
    cluster.redis.config_set("maxmemory", "1")
    paused(cluster, "Redis takes no writes: ")
    assert not cluster.client.ready().ready
    stands(cluster, job)
    cluster.redis.config_set("maxmemory", "0")
    ends_whole(cluster, job)
    wait_for("workers show again", lambda: len(cluster.client.queue().workers) == 2)


@pytest.mark.slow
def test_redis_hangs(cluster: Cluster) -> None:
    """Longer than a call to it waits."""
    job = begun(cluster)
    server = cluster.processes[0]
    server.send_signal(signal.SIGSTOP)
    try:
        paused(cluster, "Redis can't be used: Timeout")
        assert cluster.client.job(job.id).rows == ROWS
    finally:
        server.send_signal(signal.SIGCONT)
    ends_whole(cluster, job)


@pytest.mark.parametrize(
    "status", [500, pytest.param(429, marks=pytest.mark.slow), pytest.param(503, marks=pytest.mark.slow)]
)
def test_engine_that_answers_no(cluster: Cluster, status: int) -> None:
    """From the first row to the last of each run: a batch that is captured in part when there is a 500 fails
    the other rows. So the fault ends while none is on its way."""
    cluster.trouble(failing=status)
    job = cluster.enqueue(ROWS, batch_size=8)
    wait_for("it says why", lambda: f"engine answered {status}" in (cluster.client.job(job.id).reason or ""))
    stands(cluster, job)
    cluster.client.pause(job.id)
    cluster.wait_idle(job.id)
    cluster.trouble(failing=0)
    cluster.client.resume(job.id)
    ends_whole(cluster, job)


def test_engine_that_hangs(cluster: Cluster) -> None:
    job = begun(cluster)
    cluster.trouble(hanging=True)
    wait_for("it says why", lambda: "did not answer in time" in (cluster.client.job(job.id).reason or ""))
    stands(cluster, job)
    ends_whole(cluster, job)
