"""The queue in front of real engines: states in sealed shards, engines that go away, two of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.engine import reference
from tests.engine.checkpoints import tiny_llama
from tests.engine.forked import Forked, Server
from tests.queue.conftest import Cluster, free_port, wait_for

from taphouse.ledger import LedgerEntry
from taphouse.shards import open_shard
from taphouse.slices import is_tag
from taphouse.wire import JobOptions
from taphouse_tap.__main__ import launch_args

pytestmark = pytest.mark.engine
LAYERS = [0, 2, 5]
ROWS = 96
FLAGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-batched-tokens", "128"]


@contextmanager
def vllm(cluster: Cluster, port: int | None = None) -> Iterator[Server]:
    """A real engine on a port of the cluster and its slice directory, killed at the end if it still runs."""
    port = port or cluster.engine_port
    settings = {
        "PYTHONPATH": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "taphouse",
        "TAPHOUSE_TAP_SLICE_DIR": str(cluster.slices_of(port)),
    }
    where = ["--model", str(tiny_llama()), "--host", "127.0.0.1", "--port", str(port)]
    arguments = [*where, *FLAGS, *launch_args(LAYERS)]
    process = Forked(arguments, {**os.environ, **settings}, cluster.directory, cluster.directory / "vllm.log")
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def capturing(cluster: Cluster) -> bool:
    engines = cluster.client.queue().engines
    return bool(engines) and all(engine.capture == "on" for engine in engines)


def check_states(cluster: Cluster, entries: Iterable[LedgerEntry]) -> None:
    """The model's own states, and 23 trained tokens of the 24 generated in each sample."""
    for entry in entries:
        with open_shard(cluster.store.local_path(entry.path)) as shard:
            for sample in shard:
                states = reference.states(tiny_llama(), sample.token_ids.tolist(), LAYERS)
                np.testing.assert_allclose(sample.hidden_states, states, rtol=0, atol=1e-4)
                assert sample.loss_mask.sum() == sample.tokens - sample.prompt_len == 23


def rows() -> Iterator[bytes]:
    for n in range(ROWS):
        prompt = [10 + (n * 31 + i * 7) % 900 for i in range(5 + n % 40)]
        yield json.dumps({"id": f"row-{n}", "prompt": prompt}).encode() + b"\n"


def test_engines_that_go_away_fail_no_row(cluster: Cluster) -> None:
    """One is told to end, the next is killed, the third finishes."""
    cluster.start_redis()
    cluster.start_api()
    for _ in range(2):
        cluster.start_worker()
    job = cluster.client.enqueue(rows(), JobOptions(batch_size=6, max_tokens=24, ignore_eos=True))
    for how in (signal.SIGTERM, signal.SIGKILL):
        head = cluster.ledger.head()
        with vllm(cluster) as engine:
            wait_for("a further shard", lambda head=head: cluster.ledger.head() > head, 300)
            os.killpg(engine.pid, how)
            engine.wait(60)
            wait_for("it pauses", lambda: "engine" in (cluster.client.queue().paused or ""))
        assert not cluster.client.job(job.id).state.final
    with vllm(cluster):
        done = cluster.wait_done(job.id, 400)
        (start,) = (cluster.directory / "slices").glob("start-*")  # the second engine swept the first one's
        wait_for(
            "no capture is left", lambda: not [f for f in start.iterdir() if is_tag(f.name.split(".")[0])]
        )
    assert (done.state.value, done.succeeded, done.failed) == ("done", ROWS, 0)
    assert sorted(cluster.sample_ids()) == sorted(f"row-{n}" for n in range(ROWS))
    assert len({entry.fingerprint_id for entry in cluster.ledger.entries()}) == 1
    assert not [path for path in (cluster.directory / "slices").rglob("*.slice") if path.stat().st_size]
    entries = list(cluster.ledger.entries())
    check_states(cluster, (entries[0], entries[-1]))


def test_two_engines_share_a_job_and_one_dies(cluster: Cluster) -> None:
    cluster.second_port = free_port()
    cluster.start_redis()
    cluster.start_api()
    for _ in range(2):
        cluster.start_worker()
    with vllm(cluster), vllm(cluster, cluster.second_port) as second:
        wait_for("both capture", lambda: capturing(cluster), 300)
        job = cluster.client.enqueue(rows(), JobOptions(batch_size=4, max_tokens=24, ignore_eos=True))
        wait_for("both serve it", lambda: all(cluster.samples_by_engine()))
        os.killpg(second.pid, signal.SIGKILL)
        second.wait(60)
        assert not cluster.client.job(job.id).state.final
        done = cluster.wait_done(job.id, 300)
    assert (done.state.value, done.succeeded, done.failed) == ("done", ROWS, 0)
    assert sorted(cluster.sample_ids()) == sorted(f"row-{n}" for n in range(ROWS))
    entries = list(cluster.ledger.entries())
    assert len({entry.fingerprint_id for entry in entries}) == 1
    check_states(cluster, (entries[0], entries[-1]))
