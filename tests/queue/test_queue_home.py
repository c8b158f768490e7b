"""The store is the one that is meant, and of this version, or nothing runs: real processes and Redis."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.queue.conftest import Cluster, wait_for

from taphouse.errors import Unavailable
from taphouse.store.identity import PATH


def refused(cluster: Cluster) -> str:
    """What API and worker say when neither starts."""
    worker, api = cluster.start_worker(), cluster.start_api(wait=False)
    assert [process.wait(30) for process in (worker, api)] == [1, 1]
    last = [cluster.log(name).splitlines()[-1] for name in ("worker", "api")]
    assert last[0] == last[1] and "Traceback" not in cluster.log("api")
    return last[0]


def unmount(cluster: Cluster) -> Path:
    """An empty mount point; its disk is what is returned."""
    disk = cluster.store.root.rename(cluster.directory / "disk")
    cluster.store.root.mkdir()
    return disk


def mount(cluster: Cluster, disk: Path) -> None:
    assert list(cluster.store.root.iterdir()) == [], "nothing was written into the mount point"
    cluster.store.root.rmdir()
    disk.rename(cluster.store.root)


def test_a_store_that_is_not_there_or_another_is_not_served(cluster: Cluster) -> None:
    cluster.start_redis()
    cluster.start_engine()
    api, worker = cluster.start_api(), cluster.start_worker()
    wait_for("the worker has entered", lambda: cluster.redis.scard("rq:workers"))
    disk = unmount(cluster)  # under a service that has no job yet
    wait_for("it says so", lambda: "is empty, and this process" in (cluster.client.queue().paused or ""), 10)
    with pytest.raises(Unavailable, match="Was its disk unmounted"):
        cluster.enqueue(1)
    assert [check.check for check in cluster.client.ready().checks if not check.ok] == ["store"]
    mount(cluster, disk)
    cluster.check_whole(cluster.wait_done(_enqueued(cluster)))
    for process in (api, worker):
        cluster.stop(process)

    disk = unmount(cluster)
    assert "is empty, and Redis holds the queue of store" in refused(cluster)
    mount(cluster, disk)
    told = json.loads(cluster.store.read(PATH))
    cluster.store.put(PATH, json.dumps({**told, "version": 2}).encode())
    assert "is of version 2; this program reads version 3" in refused(cluster)
    cluster.store.put(PATH, json.dumps(told).encode())
    cluster.start_api()
    assert cluster.client.queue().paused is None and len(cluster.client.jobs()) == 1


def _enqueued(cluster: Cluster) -> str:
    def accepted() -> str | None:
        try:
            return cluster.enqueue(4).id
        except Unavailable:
            return None

    found: str = wait_for("it takes jobs again", accepted, 10)
    return found
