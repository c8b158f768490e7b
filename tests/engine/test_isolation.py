"""Two classes of request on a real engine whose KV cache is small: production first, extraction behind it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.capturing import (
    LAYERS,
    Captured,
    assert_equals_reference,
    capture_all,
    capture_files,
    complete,
    metric,
    post,
    prompt,
    rpc,
    status,
    until,
    until_capturing,
)
from tests.engine.checkpoints import tiny_llama
from tests.engine.launch import Engine, launch

pytestmark = pytest.mark.engine

SMALL = [
    "--max-model-len",
    "1024",
    "--max-num-seqs",
    "6",
    "--block-size",
    "32",
    "--num-gpu-blocks-override",
    "64",
]
SYSTEM = prompt(256, 99)
"""A system prompt that production's requests share: eight blocks of the 64."""


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a file breaks the scheduler."""
    return tmp_path_factory.mktemp("fault") / "now"


@pytest.fixture(scope="module")
def engine(fault: Path) -> Iterator[Engine]:
    env = {
        "TEST_SCHEDULER_FAULT": str(fault),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "VLLM_SERVER_DEV_MODE": "1",
        "TAPHOUSE_TAP_BUSY_MS": "2",
    }
    args = [*SMALL, "--scheduler-cls", "tests.engine.broken_scheduler.scheduler"]
    args += ["--worker-extension-cls", "tests.engine.faults.FaultyExtension"]
    with launch(tiny_llama(), layers=LAYERS, args=args, env=env) as running:
        until_capturing(running)
        yield running


@pytest.fixture(autouse=True)
def defaults(engine: Engine) -> Iterator[None]:
    """Every test leaves the engine's own quota and pace behind."""
    yield
    rpc(engine, "taphouse_mend")
    set_quota(engine, ttl_s=0.001)
    until(lambda: isolation(engine)["quota"]["note"] == "the engine's settings")


def set_quota(engine: Engine, **fields: Any) -> httpx.Response:
    """Set the quota; returns once every engine core has it, if it is one."""
    answer = httpx.put(f"{engine.url}/v1/hidden_states/quota", json=fields, timeout=30)
    note = fields.get("note")
    if answer.status_code == 200 and note:
        until(lambda: isolation(engine)["engines"][0]["quota"]["note"] == note)
    return answer


def isolation(engine: Engine) -> dict[str, Any]:
    found = status(engine)["isolation"]
    assert isinstance(found, dict)
    return found


def production(engine: Engine, seed: int) -> float:
    """One request with the shared prompt; returns how many of its tokens came from the prefix cache."""
    before = metric(engine, "vllm:prefix_cache_hits_total")
    complete(engine, SYSTEM + prompt(16, seed), max_tokens=4)
    return metric(engine, "vllm:prefix_cache_hits_total") - before


def captured_meanwhile(
    engine: Engine, pool: ThreadPoolExecutor, count: int, length: int
) -> Future[list[Captured]]:
    prompts = [prompt(length, 1000 + n) for n in range(count)]
    return pool.submit(capture_all, engine, prompt=prompts, max_tokens=3, ignore_eos=True)


def test_the_engine_says_that_it_has_two_classes(engine: Engine) -> None:
    said = isolation(engine)
    assert (said["scheduler"], said["reason"]) == ("on", None)
    assert said["quota"]["note"] == "the engine's settings"


def test_productions_prefix_stays_in_the_cache_whatever_is_extracted(engine: Engine) -> None:
    production(engine, 1)
    assert production(engine, 2) == 256
    for round_ in range(2):
        captured = capture_all(engine, prompt=[prompt(300, 10 * round_ + n) for n in range(12)], max_tokens=1)
        assert len(captured) == 12  # 120 blocks and more, through a cache of 64
        assert production(engine, 3 + round_) == 256


def test_captures_that_are_cut_into_tiny_pieces_and_preempted_are_whole(engine: Engine) -> None:
    """Production takes the slots and most of the blocks; what is captured is right all the same."""
    set_quota(engine, note="some", busy_ms=5.0)
    with ThreadPoolExecutor(16) as pool:
        captures = captured_meanwhile(engine, pool, 6, 200)
        served = [pool.submit(complete, engine, prompt(250, 50 + n), max_tokens=60) for n in range(12)]
        assert [len(one.result()["token_ids"]) for one in served] == [60] * 12
        for captured in captures.result():
            assert_equals_reference(tiny_llama(), captured)
    until(lambda: isolation(engine)["running"] + isolation(engine)["held"] == 0)
    steps = isolation(engine)["steps"]
    assert steps["admitted"] - steps["preempted"] <= 6 + 24 + 10  # each admission but the last was undone
    assert capture_files(engine) == []


def held_back(engine: Engine, prompt_of: Callable[[int], list[int]]) -> tuple[int, list[Captured]]:
    """Extraction waits at a quota of zero while production runs, and runs once it is gone.

    Returns how many tokens production got, and what was captured then.
    """
    set_quota(engine, note="nothing", busy_ms=0.0, ttl_s=600)
    enough = threading.Event()

    def serve() -> int:
        answered = 0
        while not enough.is_set():
            answered += len(complete(engine, prompt_of(answered), max_tokens=200)["token_ids"])
        return answered

    with ThreadPoolExecutor(2) as pool:
        served = pool.submit(serve)
        try:
            until(lambda: isolation(engine)["quiet"] is False)
            captures = captured_meanwhile(engine, pool, 3, 100)
            until(lambda: isolation(engine)["held"] == 3)
            before = isolation(engine)["steps"]
            until(
                lambda: isolation(engine)["steps"]["production_tokens"] >= before["production_tokens"] + 200
            )
            now = isolation(engine)
            assert now["steps"]["extraction_tokens"] == before["extraction_tokens"]
            assert (now["held"], now["running"], now["quiet"]) == (3, 0, False)
        finally:
            enough.set()
        return served.result(), captures.result()


def test_nothing_is_extracted_beside_production_at_a_quota_of_zero(engine: Engine) -> None:
    answered, captures = held_back(engine, lambda seed: prompt(30, seed))
    assert answered > 200
    for captured in captures:  # in the quiet that follows
        assert_equals_reference(tiny_llama(), captured)


def test_production_that_waits_takes_the_slots_of_extraction(engine: Engine) -> None:
    rpc(engine, "taphouse_break", "pace")
    set_quota(engine, note="all", busy_ms=5.0, kv_share=1.0, ttl_s=600)
    before = isolation(engine)["steps"]["preempted"]
    prompts = [prompt(20, n) for n in range(6)]
    with ThreadPoolExecutor(16) as pool:
        held = pool.submit(capture_all, engine, prompt=prompts, max_tokens=250, ignore_eos=True)
        until(lambda: sum(name.endswith(".part") for name in capture_files(engine)) == 6)
        served = [pool.submit(complete, engine, prompt(20, 90 + n), max_tokens=100) for n in range(6)]
        assert [len(one.result()["token_ids"]) for one in served] == [100] * 6
        for captured in held.result():
            assert_equals_reference(tiny_llama(), captured)
    until(lambda: isolation(engine)["steps"]["preempted"] > before)


def test_stopped_refuses_what_comes_and_ends_what_runs(engine: Engine) -> None:
    rpc(engine, "taphouse_break", "pace")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, engine, prompt=prompt(20, 1), max_tokens=900, ignore_eos=True)
        until(lambda: bool(capture_files(engine)))
        set_quota(engine, note="by hand", stopped=True)
        answer = running.result()
    assert answer.status_code == 429 and "by hand" in answer.text
    refused = post(engine, prompt=prompt(20, 1))
    assert refused.status_code == 429 and refused.headers["retry-after"] == "5"
    assert len(complete(engine, prompt(20, 1))["token_ids"]) == 12
    until(lambda: capture_files(engine) == [])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"busy_ms": -1}, "busy_ms"),
        ({"slots": 1.5}, "slots"),
        ({"kv_share": 2}, "kv_share"),
        ({"quota": 1}, "no such field"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"note": "x" * 201}, "note"),
    ],
)
def test_a_quota_that_is_none_changes_nothing(engine: Engine, fields: dict[str, Any], says: str) -> None:
    answer = set_quota(engine, **fields)
    assert answer.status_code == 422 and says in answer.json()["error"]["message"]
    assert isolation(engine)["quota"]["note"] == "the engine's settings"


def test_a_customer_who_forges_an_opt_in_is_production(engine: Engine) -> None:
    before = isolation(engine)["steps"]
    forged = {"taphouse": json.dumps({"tag": "0" * 32, "prompt_len": 1, "max_rows": 9, "sig": "0" * 64})}
    complete(engine, prompt(40, 3), vllm_xargs=forged)
    until(lambda: isolation(engine)["steps"]["production_tokens"] >= before["production_tokens"] + 40)
    assert isolation(engine)["steps"]["extraction_tokens"] == before["extraction_tokens"]


def test_an_error_of_ours_leaves_vllms_scheduler_and_everything_goes_on(engine: Engine, fault: Path) -> None:
    """Last: the scheduler stays off. Requests of both classes that were there when it failed are answered."""
    with ThreadPoolExecutor(8) as pool:
        captures = captured_meanwhile(engine, pool, 4, 300)
        served = [pool.submit(complete, engine, prompt(250, 70 + n), max_tokens=60) for n in range(4)]
        until(lambda: isolation(engine)["running"] > 0 or captures.done())
        fault.touch()
        for one in served:
            assert len(one.result()["token_ids"]) == 60
        for captured in [*captures.result(), *capture_all(engine, prompt=prompt(300, 8), max_tokens=3)]:
            assert_equals_reference(tiny_llama(), captured)
    until(lambda: isolation(engine)["scheduler"] == "off")
    assert "broken on purpose" in isolation(engine)["reason"]
    assert status(engine)["capture"] == "on"
