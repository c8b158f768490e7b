"""Two APIs and eight workers on one store and one Redis: one feeds, all work, nothing is done twice."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

from tests.queue.conftest import TOKEN, Cluster, free_port, wait_for

from taphouse.client import Taphouse
from taphouse.errors import TaphouseError
from taphouse.wire import Job, JobOptions

LINES = [b'{"id":"row-%d","prompt":"the same for all %d"}\n' % (n, n) for n in range(32)]


def enqueue_with_key(client: Taphouse) -> Job:
    """Again and again, as a script does, until it is acknowledged."""
    while True:
        try:
            return client.enqueue(LINES, JobOptions(batch_size=8), key="one for all")
        except TaphouseError as error:
            assert "under way" in str(error)


def test_two_apis_and_eight_workers(cluster: Cluster) -> None:
    cluster.settings = {"TAPHOUSE_EXTRACTOR_LEASE_TTL_S": "2", "TAPHOUSE_EXTRACTOR_FEEDER_INTERVAL_S": "0.2"}
    cluster.start(workers=8, delay_s=0.1)
    port = free_port()
    cluster.start_api(wait=False, TAPHOUSE_EXTRACTOR_PORT=str(port))
    with Taphouse(f"http://127.0.0.1:{port}", token=TOKEN) as second:
        wait_for("the second API and all workers", lambda: _workers(second) == 8)
        callers = [cluster.client, second] * 3
        with ThreadPoolExecutor(len(callers)) as pool:
            same = {job.id for job in pool.map(enqueue_with_key, callers)}
        assert len(same) == 1
        jobs = [*same, cluster.enqueue(64, batch_size=4).id]
        wait_for("they work", lambda: cluster.ledger.head() >= 2)
        cluster.stop(cluster.processes[2], signal.SIGKILL)  # it began first, and feeds
        cluster.client.close()
        cluster.client = second
        for job_id in jobs:
            cluster.check_whole(cluster.wait_done(job_id))
        assert cluster.ledger.head() == 4 + 16
        assert len(second.jobs()) == len(jobs)


def _workers(client: Taphouse) -> int:
    try:
        return len(client.queue().workers)
    except TaphouseError:
        return 0
