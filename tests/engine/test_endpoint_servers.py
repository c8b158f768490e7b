"""Two API servers before one engine, and the middleware in place of the plugin."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.capturing import metric
from tests.engine.checkpoints import tiny_llama
from tests.engine.launch import Engine, launch

from taphouse import slices

pytestmark = pytest.mark.engine

OWN_KEY, CUSTOMER_KEY = "tap-key", "customer-key"
URL = "/v1/hidden_states"
SERVERS = 2


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """``vllm serve`` with two API servers and ``--middleware``; the plugin stays out."""
    with launch(
        tiny_llama(),
        layers=[0, 2, 5],
        args=[
            *("--api-server-count", str(SERVERS), "--api-key", CUSTOMER_KEY, "--max-model-len", "512"),
            *("--middleware", "taphouse_tap.middleware.HiddenStatesMiddleware"),
        ],
        env={"TAPHOUSE_TAP_API_KEY": OWN_KEY, "TAPHOUSE_TAP_SLICE_DIR_LIMIT_BYTES": "2000000"},
        plugin=False,
        serve=True,
    ) as running:
        yield running


def request(engine: Engine, method: str, path: str, key: str = OWN_KEY, **more: Any) -> httpx.Response:
    """One request on a connection of its own: the kernel spreads connections over the servers."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.request(method, engine.url + path, headers=headers, timeout=60, **more)


def every_server(engine: Engine) -> list[dict[str, Any]]:
    """The status of each API server, told apart by their own counters' owner."""
    found: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + 60
    while len(found) < SERVERS:
        assert time.monotonic() < deadline, f"only {len(found)} of {SERVERS} API servers answered"
        status = request(engine, "GET", f"{URL}/status").json()
        if status["capture"] == "on":
            found[status["pid"]] = status
        else:
            time.sleep(0.1)
    return list(found.values())


def test_all_api_servers_find_the_one_start_and_share_its_room(engine: Engine) -> None:
    statuses = every_server(engine)
    assert len({status["start_id"] for status in statuses}) == 1
    assert all(status["canary"]["state"] == "passed" for status in statuses)
    answers = [request(engine, "POST", URL, json={"prompt": [7] * 300}) for _ in range(24)]
    codes = [answer.status_code for answer in answers]
    assert codes.count(200) == 2 and codes.count(429) == 22
    counted = [status["counters"]["endpoint"]["requests"] for status in every_server(engine)]
    assert sum(counted) == 24 and all(counted), "every server took some of the requests"
    for answer in answers[:2]:
        (item,) = answer.json()["data"]
        paths = [file["path"] for file in item["slices"]]
        assert slices.join_slices(paths, item["token_ids"][: item["rows"]]).shape == (300, 3, 256)
        slices.release(Path(paths[0]).parent, item["tag"])
    assert request(engine, "POST", URL, json={"prompt": [7] * 300}).status_code == 200


def test_every_server_tells_the_latency_of_all_of_them(engine: Engine) -> None:
    def finished() -> list[int]:
        return [status["latency"]["production"]["finished"] for status in every_server(engine)]

    before = max(finished())
    body = {"model": engine.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    for _ in range(12):
        assert request(engine, "POST", "/v1/chat/completions", CUSTOMER_KEY, json=body).status_code == 200
    deadline = time.monotonic() + 60
    while finished() != [before + 12] * SERVERS:
        assert time.monotonic() < deadline, f"{before} and 12 more, but {finished()}"
        time.sleep(0.1)
    files = [json.loads(path.read_text()) for path in engine.slice_dir.glob("start-*/latency-*.json")]
    assert len(files) == SERVERS and sum(file["production"]["finished"] for file in files) == before + 12
    name = 'taphouse_requests_finished_total{class="production",outcome="finished"}'
    while metric(engine, name) != before + 12:
        assert time.monotonic() < deadline, "the sum over both servers never came to /metrics"
        time.sleep(0.1)


def test_the_middleware_guards_its_routes_and_leaves_the_others_alone(engine: Engine) -> None:
    for path in (URL, "/hidden_states"):
        assert request(engine, "POST", path, CUSTOMER_KEY, json={"prompt": [7]}).status_code == 401
    body = {"model": engine.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert request(engine, "POST", "/v1/chat/completions", CUSTOMER_KEY, json=body).status_code == 200
    assert request(engine, "POST", "/v1/chat/completions", OWN_KEY, json=body).status_code == 401
