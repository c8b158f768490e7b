"""The governor on a real engine with the two-class scheduler, beside production that streams."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.engine.checkpoints import tiny_llama
from tests.queue.conftest import Cluster, wait_for
from tests.queue.test_queue_engine import capturing, vllm

from taphouse.wire import Governor, GovernorMode

pytestmark = [pytest.mark.engine, pytest.mark.slow]
STREAMS = 4


@contextmanager
def production(cluster: Cluster) -> Iterator[list[str]]:
    """Streams of completions, one after the other; yields the errors that they met."""
    stop, errors = threading.Event(), list[str]()
    url = f"http://127.0.0.1:{cluster.engine_port}/v1/completions"

    def serve(seed: int) -> None:
        with httpx.Client(timeout=60) as client:
            while not stop.is_set():
                seed += STREAMS
                body = {
                    "model": str(tiny_llama()),
                    "prompt": [10 + (seed * 31 + i * 7) % 900 for i in range(40)],
                    "max_tokens": 60,
                    "ignore_eos": True,
                    "stream": True,
                }
                with client.stream("POST", url, json=body) as answer:
                    if answer.status_code != 200:
                        errors.append(f"{answer.status_code} {answer.read()!r:.200}")
                    for _ in answer.iter_lines():
                        pass

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def isolation(cluster: Cluster) -> dict[str, Any]:
    answer = httpx.get(f"http://127.0.0.1:{cluster.engine_port}/v1/hidden_states/status", timeout=30)
    found: dict[str, Any] = answer.json()["isolation"]
    return found


def governed(cluster: Cluster) -> Governor:
    view = cluster.client.queue().governor
    assert view is not None
    return view


def test_it_learns_judges_and_stops_on_a_real_engine(cluster: Cluster) -> None:
    cluster.settings["TAPHOUSE_EXTRACTOR_GOVERNOR_TRIP_FACTOR"] = "50"  # this machine's cores are shared
    cluster.start_redis()
    with vllm(cluster):
        api = cluster.start_api()
        cluster.start_worker()
        wait_for("the engine captures", lambda: capturing(cluster), 300)
        wait_for("the quota is the governor's", lambda: "governor" in isolation(cluster)["quota"]["note"], 10)
        with production(cluster) as errors:
            wait_for("production's own latency", lambda: governed(cluster).itl_p95_baseline_s, 30)
            engine = cluster.client.queue().engines[0]
            assert engine.latency is not None and engine.latency.requests == "production"
            prompts = (
                b'{"id":"row-%d","prompt":"a prompt of some length, number %d"}\n' % (n, n)
                for n in range(600)
            )
            job = cluster.client.enqueue(prompts)
            seen = wait_for("it judges", lambda: (g := governed(cluster)).slowdown and g, 60)
            assert seen.mode is GovernorMode.AUTO and seen.busy_ms is not None
            assert isolation(cluster)["steps"]["extraction_tokens"] > 0

            cluster.client.govern(GovernorMode.STOPPED)
            wait_for("the engine is stopped", lambda: isolation(cluster)["quota"]["stopped"], 5)
            wait_for("nothing of it runs", lambda: isolation(cluster)["running"] == 0, 10)
            cluster.client.govern(GovernorMode.AUTO)
            wait_for("it runs again", lambda: not governed(cluster).stopped, 5)
            assert errors == []
        done = cluster.wait_done(job.id, 200)
        assert (done.succeeded, done.failed) == (600, 0)
        checks = {check.check: check for check in cluster.client.doctor()}
        assert checks["scheduler"].ok and checks["governor"].ok
        cluster.stop(api, signal.SIGKILL)
        wait_for("its quota ends", lambda: isolation(cluster)["quota"]["note"] == "the engine's settings", 15)
