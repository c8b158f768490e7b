"""Two engines behind one service, as processes that die and come back: what serves which job."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter

import pytest
from tests.queue.conftest import Cluster, free_port, wait_for

DELAY_S = 0.15


@pytest.fixture
def pair(cluster: Cluster) -> tuple[Cluster, subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """A service with two engines, and both of them."""
    cluster.second_port = free_port()
    cluster.settings["TAPHOUSE_EXTRACTOR_ENGINE_POLL_S"] = "0.5"
    cluster.start_redis()
    first = cluster.start_engine(delay_s=DELAY_S)
    second = cluster.start_engine(delay_s=DELAY_S, port=cluster.second_port)
    cluster.start_api()
    for _ in range(3):
        cluster.start_worker()
    return cluster, first, second


def rows_of(cluster: Cluster, jobs: int, rows: int) -> bool:
    """Whether every row of each job is there once; the rows of each job have the same ids."""
    return Counter(cluster.sample_ids()) == {f"row-{n}": jobs for n in range(rows)}


def test_load_is_spread_one_dies_and_comes_back(
    pair: tuple[Cluster, subprocess.Popen[bytes], subprocess.Popen[bytes]],
) -> None:
    cluster, _, second = pair
    cluster.wait_done(cluster.enqueue(48, batch_size=4).id)
    both = cluster.samples_by_engine()
    assert sum(both) == 48 and min(both) >= 12

    job = cluster.enqueue(48, batch_size=4)
    wait_for("the second serves it too", lambda: cluster.samples_by_engine()[1] > both[1])
    cluster.stop(second, signal.SIGKILL)
    done = cluster.wait_done(job.id)
    assert (done.state.value, done.succeeded, done.failed) == ("done", 48, 0)
    wait_for("it shows", lambda: [e.capture for e in cluster.client.queue().engines] == ["on", "unreachable"])
    assert cluster.client.queue().paused is None
    alone = cluster.samples_by_engine()

    cluster.start_engine(delay_s=DELAY_S, port=cluster.second_port)
    wait_for("it answers", lambda: [e.capture for e in cluster.client.queue().engines] == ["on", "on"])
    done = cluster.wait_done(cluster.enqueue(48, batch_size=4).id)
    assert done.succeeded == 48 and cluster.samples_by_engine()[1] > alone[1]
    assert rows_of(cluster, 3, 48)


def test_one_that_comes_back_with_another_model_is_not_mixed_in(
    pair: tuple[Cluster, subprocess.Popen[bytes], subprocess.Popen[bytes]],
) -> None:
    cluster, first, second = pair
    job = cluster.enqueue(80, batch_size=4)
    wait_for("both serve it", lambda: min(cluster.samples_by_engine()) > 0)
    cluster.stop(second)
    cluster.start_engine(weights="second", port=cluster.second_port)
    wait_for("more is sealed", lambda: cluster.samples_by_engine()[0] >= 20)
    cluster.stop(first)
    reason = wait_for(
        "it waits and says why",
        lambda: "no engine fits" in (why := cluster.client.job(job.id).reason or "") and why,
    )
    assert "unreachable" in reason and "the job began with" in reason
    other = cluster.wait_done(cluster.enqueue(16, batch_size=4).id)
    assert (other.state.value, other.succeeded) == ("done", 16)
    waits = cluster.client.job(job.id)
    assert not waits.state.final and waits.failed == 0

    cluster.start_engine(delay_s=0.0)
    done = cluster.wait_done(job.id)
    assert (done.state.value, done.succeeded, done.failed) == ("done", 80, 0)
    made = {(entry.job_id, entry.fingerprint_id) for entry in cluster.ledger.entries()}
    assert len(made) == 2 and {name for name, _ in made} == {job.id, other.id}
    assert done.fingerprint_id != other.fingerprint_id
    assert Counter(cluster.sample_ids()) == Counter(f"row-{n}" for rows in (80, 16) for n in range(rows))


@pytest.mark.slow
def test_one_that_freezes_is_left_out_and_used_again_when_it_thaws(cluster: Cluster) -> None:
    """It takes connections and answers nothing: what it had goes to the other after the time limit."""
    cluster.second_port = free_port()
    cluster.settings |= {
        "TAPHOUSE_EXTRACTOR_ENGINE_POLL_S": "0.5",
        "TAPHOUSE_EXTRACTOR_ENGINE_TIMEOUT_S": "3",
    }
    cluster.start(workers=3, delay_s=DELAY_S)
    second = next(p for p in cluster.processes if str(cluster.second_port) in map(str, p.args))
    job = cluster.enqueue(80, batch_size=4)
    wait_for("both serve it", lambda: min(cluster.samples_by_engine()) > 0)
    second.send_signal(signal.SIGSTOP)
    done = cluster.wait_done(job.id)
    assert (done.succeeded, done.failed) == (80, 0)
    wait_for("it shows", lambda: [e.capture for e in cluster.client.queue().engines] == ["on", "unreachable"])
    before = cluster.samples_by_engine()
    second.send_signal(signal.SIGCONT)

    def used_again() -> bool:
        cluster.wait_done(cluster.enqueue(16, batch_size=4).id)
        return cluster.samples_by_engine()[1] > before[1]

    wait_for("it is used again", used_again)
    assert set(Counter(cluster.sample_ids(job=job.id)).values()) == {1}
