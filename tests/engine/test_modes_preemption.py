"""Captured requests that are preempted, in the middle of their prompt and while they generate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.engine.capturing import (
    LAYERS,
    assert_equals_reference,
    capture,
    capture_files,
    complete,
    metric,
    prompt,
    ranks_counter,
    rpc,
    status,
    until,
    until_capturing,
)
from tests.engine.checkpoints import tiny_llama
from tests.engine.launch import Engine, launch

pytestmark = pytest.mark.engine

BLOCK, BLOCKS = 32, 32
"""A KV cache of 1,024 tokens."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Prompts are taken in before the whole of them fits, as vLLM does with little to spare."""
    args = ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS)]
    args += ["--max-model-len", "800", "--max-num-seqs", "32", "--no-scheduler-reserve-full-isl"]
    args += ["--worker-extension-cls", "tests.engine.faults.FaultyExtension"]
    env = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "VLLM_SERVER_DEV_MODE": "1"}
    with launch(tiny_llama(), layers=LAYERS, args=args, env=env, two_classes=False) as running:
        until_capturing(running)
        assert status(running)["isolation"]["scheduler"] == "absent"
        yield running


def preempted_since(engine: Engine, before: float) -> float:
    """Preemptions of captured requests, once the ranks have published them."""
    until(lambda: ranks_counter(engine, "preempted") > before, seconds=10)
    return ranks_counter(engine, "preempted") - before


def test_preempted_while_generating(engine: Engine) -> None:
    """12 captures of a short prompt need 2.5 times the cache, and nearly all of it for what they generate."""
    before, all_before = ranks_counter(engine, "preempted"), metric(engine, "vllm:num_preemptions_total")
    with ThreadPoolExecutor(12) as pool:
        futures = [
            pool.submit(capture, engine, prompt=prompt(20 + n, n), max_tokens=190, ignore_eos=True)
            for n in range(12)
        ]
        for n, future in enumerate(futures):
            captured = future.result()
            assert captured.states.shape[0] == 20 + n + 189
            assert_equals_reference(tiny_llama(), captured)
    assert preempted_since(engine, before) >= 3
    assert metric(engine, "vllm:num_preemptions_total") - all_before >= 3
    assert capture_files(engine) == []


def test_preempted_in_the_middle_of_a_prompt(engine: Engine) -> None:
    """Two others hold half of the cache and grow to 28 of 32 blocks, so no long prompt fits beside them.

    One token is generated, so whatever is preempted is a prompt that was not whole yet.
    """
    ordinary = [prompt(100, 90), prompt(100, 91)]
    alone = [complete(engine, token_ids, max_tokens=340)["token_ids"] for token_ids in ordinary]
    rpc(engine, "taphouse_break", "pace")
    before = ranks_counter(engine, "preempted")
    for _ in range(5):  # whether a prompt is hit in its middle is a matter of moments
        with ThreadPoolExecutor(8) as pool:
            others = [pool.submit(complete, engine, token_ids, max_tokens=340) for token_ids in ordinary]
            until(lambda: metric(engine, "vllm:kv_cache_usage_perc") > 0.5)
            futures = [pool.submit(capture, engine, prompt=prompt(520 + 30 * n, 100 + n)) for n in range(6)]
            captures = [future.result() for future in futures]
            assert [future.result()["token_ids"] for future in others] == alone
        for n, captured in enumerate(captures):
            assert captured.states.shape[0] == 520 + 30 * n
            assert_equals_reference(tiny_llama(), captured)
        time.sleep(3)  # the rank's record is at most two seconds old
        if ranks_counter(engine, "preempted") > before:
            break
    rpc(engine, "taphouse_mend")
    assert preempted_since(engine, before) >= 1
    assert capture_files(engine) == []
