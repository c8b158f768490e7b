"""The governor on a real Redis and in real API processes: what it knows outlives every one of them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from tests.queue.conftest import TOKEN, Cluster, free_port, wait_for
from tests.queue.fake_tap import FakeTap
from tests.unit.extractor.governed import Clock, ModelledEngine
from tests.unit.extractor.governing import Production

from taphouse.client import Taphouse
from taphouse.wire import GovernorMode
from taphouse_extractor.governor.loop import Governor
from taphouse_extractor.governor.memory import Memory
from taphouse_extractor.governor.verdicts import Bounds
from taphouse_extractor.leases import connect


def quota(cluster: Cluster) -> dict[str, Any]:
    """What is in force in the engine."""
    status = httpx.get(f"http://127.0.0.1:{cluster.engine_port}/v1/hidden_states/status").json()
    found: dict[str, Any] = status["isolation"]["quota"]
    return found


def second_api(cluster: Cluster) -> tuple[subprocess.Popen[bytes], Taphouse]:
    port = free_port()
    process = cluster.spawn(
        "api2", [sys.executable, "-m", "taphouse_extractor.main", "api", "--port", str(port)]
    )
    client = Taphouse(f"http://127.0.0.1:{port}", token=TOKEN)
    wait_for("the second API", lambda: _answers(client))
    return process, client


def _answers(client: Taphouse) -> bool:
    try:
        return client.health().status == "ok"
    except Exception:
        return False


def test_the_state_survives_its_leader(cluster: Cluster, tmp_path: Path) -> None:
    """The law's whole state through a real Redis, and the lease's own time."""
    cluster.start_redis()
    client, clock = connect(f"redis://127.0.0.1:{cluster.redis_port}/0"), Clock()
    engine = ModelledEngine(Production(a=0.01), FakeTap(tmp_path / "slices"))

    def governor(name: str) -> Governor:
        memory = Memory(client, prefix="taphouse:taphouse", ttl_s=1.0, now=clock)
        return Governor(
            engines=[engine],
            memory=memory,
            bounds=Bounds(),
            ttl_s=10.0,
            name=name,
            monotonic=clock,
            now=clock,
        )

    def run(one: Governor, ticks: int) -> int:
        acted = 0
        for _ in range(ticks):
            clock.now += 0.5
            acted += one.step()
        return acted

    first, second = governor("first"), governor("second")
    engine.production.wanted = False
    assert run(first, 40) == 40
    engine.production.wanted = True
    run(first, 120)
    memory = Memory(client, prefix="taphouse:taphouse", ttl_s=1.0, now=clock)
    before = memory.view()
    assert before is not None and before.busy_ms is not None and before.busy_ms > 2
    assert not second.step() and memory.leader() == "first"
    wait_for("the lease of the first ends", lambda: memory.leader() is None)
    assert second.step()
    after = memory.view()
    assert after is not None and after.busy_ms == before.busy_ms
    engine.production.failing = 1
    run(second, 2)
    wait_for("the lease of the second ends", lambda: memory.leader() is None)
    third = governor("third")
    assert third.step()
    tripped = memory.view()
    assert tripped is not None and tripped.stopped and "failed while extraction ran" in tripped.reason
    client.flushall()  # wiped: the leader goes on with what it knows, and Redis has it again
    assert third.step()
    again = memory.view()
    assert again is not None and again.stopped


def test_an_order_outlives_the_api_and_the_quota_does_not(cluster: Cluster) -> None:
    cluster.settings["TAPHOUSE_EXTRACTOR_GOVERNOR_TTL_S"] = "3"
    cluster.start_redis()
    cluster.start_engine()
    api = cluster.start_api()
    wait_for("a governor leads", lambda: cluster.client.governor().updated_at)
    cluster.client.govern(GovernorMode.PINNED, 7.0)
    wait_for("the engine was told", lambda: quota(cluster)["busy_ms"] == 7.0)
    cluster.stop(api, signal.SIGKILL)
    wait_for("the quota ended by itself", lambda: quota(cluster)["note"] == "the engine's settings")
    cluster.start_api()
    wait_for("the order is followed again", lambda: quota(cluster)["busy_ms"] == 7.0)
    view = cluster.client.queue().governor
    assert view is not None and (view.mode, view.busy_ms) == (GovernorMode.PINNED, 7.0)


def test_a_stop_stands_while_no_api_and_another_engine_runs(cluster: Cluster) -> None:
    """Batches that are queued already wait, in the engine that was told and in one that was not."""
    cluster.settings["TAPHOUSE_EXTRACTOR_GOVERNOR_TTL_S"] = "3"
    cluster.start(workers=1, delay_s=0.05)
    engine = next(p for p in cluster.processes if "tests.queue.stand_in" in p.args)
    api = next(p for p in cluster.processes if p.args[-1] == "api")
    job = cluster.enqueue(200, batch_size=4)
    wait_for("a first shard", lambda: cluster.ledger.head() >= 1)
    cluster.client.govern(GovernorMode.STOPPED)
    wait_for("the engine was told", lambda: quota(cluster)["stopped"])
    cluster.stop(api, signal.SIGKILL)
    assert quota(cluster)["expires_at"] is None
    cluster.stop(engine, signal.SIGKILL)
    cluster.start_engine()
    wait_for("a batch waits", lambda: "stopped by the operator" in cluster.log("worker"))
    head = cluster.ledger.head()
    time.sleep(2)  # four batches' time and more
    assert cluster.ledger.head() == head
    cluster.start_api()
    cluster.client.govern(GovernorMode.AUTO)
    cluster.check_whole(cluster.wait_done(job.id))


def test_of_two_apis_the_one_with_the_last_order_governs_until_it_dies(cluster: Cluster) -> None:
    cluster.settings["TAPHOUSE_EXTRACTOR_GOVERNOR_TTL_S"] = "20"
    cluster.start_redis()
    cluster.start_engine()
    first = cluster.start_api()
    leader = str(wait_for("one leads", lambda: cluster.redis.get("taphouse:taphouse:governor-leader")))
    second, other = second_api(cluster)
    assert f":{first.pid}:" in leader
    assert str(cluster.redis.get("taphouse:taphouse:governor-leader")) == leader
    other.govern(GovernorMode.PINNED, 3.0)  # any of them takes orders
    wait_for("the engine was told", lambda: quota(cluster)["busy_ms"] == 3.0)
    assert f":{second.pid}:" in str(cluster.redis.get("taphouse:taphouse:governor-leader"))
    cluster.client.govern(GovernorMode.PINNED, 3.0)
    assert str(cluster.redis.get("taphouse:taphouse:governor-leader")) == leader
    cluster.stop(first, signal.SIGKILL)
    wait_for(
        "the other leads",
        lambda: f":{second.pid}:" in str(cluster.redis.get("taphouse:taphouse:governor-leader")),
    )
    assert quota(cluster)["busy_ms"] == 3.0  # it never ended in between
    checks = {check.check: check for check in other.doctor()}
    assert checks["governor"].ok and "pinned at 3 ms" in checks["governor"].detail
    other.close()


def test_a_stop_stops_extraction_and_auto_lets_it_run(cluster: Cluster) -> None:
    cluster.settings["TAPHOUSE_EXTRACTOR_FEEDER_INTERVAL_S"] = "0.2"
    cluster.start()
    wait_for("a governor leads", lambda: cluster.client.governor().updated_at)
    cluster.client.govern(GovernorMode.STOPPED)
    wait_for("the engine was told", lambda: quota(cluster)["stopped"])
    cluster.redis.flushall()  # the order is the store's
    job = cluster.enqueue(8)
    wait_for("a governor leads again", lambda: cluster.client.governor().updated_at)
    time.sleep(1)  # some rounds of the feeder
    assert quota(cluster)["stopped"] and cluster.client.governor().mode is GovernorMode.STOPPED
    assert cluster.client.job(job.id).succeeded == 0
    assert "stopped by the operator" in (cluster.client.queue().paused or "")
    cluster.client.govern(GovernorMode.AUTO)
    assert cluster.wait_done(job.id).succeeded == 8
