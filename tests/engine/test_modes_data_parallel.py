"""Two data-parallel engines behind two API servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.engine.capturing import (
    LAYERS,
    assert_equals_reference,
    capture,
    capture_files,
    complete,
    prompt,
    status,
)
from tests.engine.checkpoints import tiny_llama
from tests.engine.launch import Engine, launch

pytestmark = pytest.mark.engine

SERVERS = 2
CANARY_TOKENS = 4


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    args = ["--data-parallel-size", "2", "--api-server-count", str(SERVERS), "--max-model-len", "1024"]
    with launch(tiny_llama(), layers=LAYERS, args=args, env={"OMP_NUM_THREADS": "1"}, serve=True) as running:
        servers(running)
        yield running


def servers(engine: Engine) -> dict[int, dict[str, Any]]:
    """The status of each API server, by its process id, once both capture."""
    found: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + 60
    while len(found) < SERVERS:
        assert time.monotonic() < deadline, f"{len(found)} of {SERVERS} API servers capture: {status(engine)}"
        told = status(engine)
        if told["capture"] == "on":
            found[told["pid"]] = told
        else:
            time.sleep(0.1)
    return found


def test_the_status_shows_both_engines_and_the_canary_passed_on_both(engine: Engine) -> None:
    told = list(servers(engine).values())
    assert len({one["start_id"] for one in told}) == 1
    for one in told:
        assert sorted((rank["dp_rank"], rank["tp_rank"]) for rank in one["ranks"]) == [(0, 0), (1, 0)]
        assert all(rank["capture"] == "on" for rank in one["ranks"])
        assert (one["canary"]["state"], one["canary"]["checked"]) == ("passed", 2 * CANARY_TOKENS)
    answer = httpx.post(f"{engine.url}/v1/hidden_states/canary", timeout=60)
    assert answer.status_code == 200 and answer.json()["checked"] == 2 * CANARY_TOKENS


def test_captures_on_both_engines_are_the_models_own(engine: Engine) -> None:
    """24 captures and 8 ordinary requests at once; vLLM spreads them over the engines."""
    ordinary = [prompt(30 + n, n) for n in range(8)]
    alone = [complete(engine, token_ids, max_tokens=20)["token_ids"] for token_ids in ordinary]
    with ThreadPoolExecutor(32) as pool:
        futures = [
            pool.submit(
                capture, engine, prompt=prompt(20 + 19 * n, 100 + n), max_tokens=1 + n, ignore_eos=True
            )
            for n in range(24)
        ]
        beside = [pool.submit(complete, engine, token_ids, max_tokens=20) for token_ids in ordinary]
        captures = [future.result() for future in futures]
        assert [future.result()["token_ids"] for future in beside] == alone
    for n, captured in enumerate(captures):
        assert captured.states.shape[0] == 20 + 19 * n + n
        assert_equals_reference(tiny_llama(), captured)
    by_engine = [captured.trailers[0].dp_rank for captured in captures]
    assert by_engine.count(0) >= 4 and by_engine.count(1) >= 4, by_engine
    assert capture_files(engine) == []
