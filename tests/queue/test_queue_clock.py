"""The wall clock of every process is set, as administrators and bad time servers do: nothing waits for it.

Clocks that only measure go on as they were, and the files' times are the kernel's, which are right.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.queue.clocks import Clock
from tests.queue.conftest import Cluster, children, wait_for

MONTH = 30 * 86400
LEASES = {"TAPHOUSE_EXTRACTOR_LEASE_TTL_S": "2", "TAPHOUSE_EXTRACTOR_START_GRACE_S": "2"}


@pytest.fixture
def clock(cluster: Cluster, tmp_path: Path) -> Iterator[Clock]:
    made = Clock(tmp_path)
    cluster.settings = {**LEASES, **made.settings}
    yield made


@pytest.mark.parametrize("jump", [pytest.param(MONTH, marks=pytest.mark.slow), -MONTH])
def test_clocks_are_set_while_a_worker_and_the_leader_die(cluster: Cluster, clock: Clock, jump: int) -> None:
    """Set back, what Redis was to keep for two seconds it keeps for a month."""
    cluster.start(workers=2, delay_s=0.6)
    api, victim = cluster.processes[2], cluster.processes[-1]
    job = cluster.enqueue(40, batch_size=8)
    wait_for("both run", lambda: cluster.client.queue().depth.running == 2)
    horses = children(victim.pid)
    for pid in (victim.pid, *horses):
        os.kill(pid, signal.SIGKILL)
    cluster.stop(api, signal.SIGKILL)
    clock.set(jump)
    cluster.start_api()
    cluster.check_whole(cluster.wait_done(job.id))
    later = cluster.wait_done(cluster.enqueue(8, batch_size=8).id)
    cluster.check_whole(later)
    status = cluster.client.queue()
    assert (status.paused, status.depth.running) == (None, 0)
    kept = {key: cluster.redis.pttl(key) for key in cluster.redis.keys("taphouse:taphouse:worker:*")}
    assert kept and max(kept.values()) <= 20_000, "who is dead is not shown as alive for a month"
