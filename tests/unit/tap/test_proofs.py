"""Captures proven against the engine's own top tokens: how often, what comes of a right and a wrong one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.tap.endpoint_fakes import PASSED, Bench, make_bench

from taphouse_tap.api.metrics import Metrics
from taphouse_tap.api.proof import ROWS, TOP, Proofs
from taphouse_tap.api.refusals import CaptureFailed
from taphouse_tap.api.requests import CaptureRequest
from taphouse_tap.compat_server import VllmEngine

URL = "/v1/hidden_states"
WRONG = {**PASSED, "ok": False, "reason": "2 of 4 tokens are not what the captured states give"}


async def ask(bench: Bench, **body: Any) -> Any:
    async with bench.client() as client:
        return await client.post(URL, json={"prompt": [10, 11, 12], **body})


async def never(*_: Any) -> list[Any]:
    raise AssertionError


def test_they_are_rare() -> None:
    """At most one every half interval, whatever is asked."""
    now = 0.0
    proofs = Proofs(never, 60.0, Metrics(publish=False), clock=lambda: now)
    due = []
    for now in range(0, 3600, 2):
        if proofs.due():
            due.append(now)
    assert 35 <= len(due) <= 120 and min(b - a for a, b in pairwise(due)) >= 30
    assert not any(Proofs(never, 0.0, Metrics(publish=False)).due() for _ in range(10))


def test_an_engine_that_ends_before_it_answers_fails_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM never answers an RPC that was under way then, and a server that ends waits for its requests."""
    monkeypatch.setattr("taphouse_tap.api.proof.LOOK_S", 0.01)
    reasons = iter([None, None, "rank 0 has not reported for 16 s"])
    cancelled: list[bool] = []

    async def silent(*_: Any) -> list[Any]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return []

    proofs = Proofs(silent, 60.0, Metrics(publish=False), why_off=lambda: next(reasons))
    generated, prompt = SimpleNamespace(top=[[(7, -0.5), (8, -1.5)]]), SimpleNamespace(token_ids=[1, 2])
    capture: Any = SimpleNamespace(generated=generated, prompt=prompt, tag="t", fed_token_ids=[1, 2], rows=2)

    async def go() -> None:
        with pytest.raises(CaptureFailed, match="could not be proven: rank 0 has not reported"):
            await proofs.prove(capture)
        await asyncio.sleep(0)

    asyncio.run(go())
    assert cancelled == [True]


@pytest.mark.parametrize("generated", [1, 6])
def test_a_proven_capture_brings_its_witness(tmp_path: Path, generated: int) -> None:
    bench = make_bench(tmp_path, proof_interval_s=60)

    async def go() -> None:
        await bench.ready()
        answer = await ask(bench, max_tokens=generated)
        witness = answer.json()["data"][0]["witness"]
        (proven,) = bench.server.proven
        assert proven == (witness["first_row"], [row[0] for row in witness["top_tokens"]])
        assert len(witness["top_tokens"]) == min(ROWS, generated)
        assert 2 <= witness["first_row"] <= 2 + generated - len(witness["top_tokens"])
        first_token = bench.engine.generated[witness["first_row"] - 2]
        assert witness["top_tokens"][0] == [first_token, first_token + 1]
        assert witness["top_logprobs"][0] == [-0.5, -1.5]
        again = await ask(bench, max_tokens=generated)
        assert "witness" not in again.json()["data"][0] and len(bench.server.proven) == 1
        assert bench.service.metrics.counts["proven"] == 1
        await bench.service.close()

    asyncio.run(go())


def test_a_disproved_capture_is_no_sample_and_the_canary_runs_again(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, proof_interval_s=60)

    async def go() -> None:
        await bench.ready()
        bench.server.proof_answer = bench.server.canary_answer = WRONG
        answer = await ask(bench)
        assert answer.status_code == 500
        assert "not those of the engine: rank 0: 2 of 4 tokens" in answer.json()["error"]["message"]
        assert bench.leftovers() == [] and bench.service.metrics.counts["disproved"] == 1
        while bench.service.why_off() is None:
            await asyncio.sleep(0.005)
        assert (await ask(bench)).status_code == 503
        await bench.service.close()

    asyncio.run(go())


def test_they_can_be_switched_off(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, proof_interval_s=0)

    async def go() -> None:
        await bench.ready()
        assert "witness" not in (await ask(bench)).json()["data"][0]
        await bench.service.close()

    asyncio.run(go())


def test_what_could_not_be_compared_fails_and_disproves_nothing(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, proof_interval_s=1e-9)
    bench.server.proof_answer = {"ok": False, "reason": "the weights changed since", "checked": 0}

    async def go() -> Any:
        await bench.ready()
        answer = await ask(bench)
        assert not bench.service._doubted
        await bench.service.close()
        return answer

    answer = asyncio.run(go())
    assert answer.status_code == 500 and "could not be proven: rank 0: the weights changed" in answer.text
    assert bench.service.metrics.counts["disproved"] == 0 and bench.leftovers() == []


class Client:
    """vLLM's engine client, of an engine with some settings; keeps what it was asked."""

    def __init__(self, max_logprobs: int, mode: str) -> None:
        self.model_config = SimpleNamespace(
            max_logprobs=max_logprobs, logprobs_mode=mode, get_vocab_size=lambda: 512
        )
        self.asked: list[Any] = []

    async def generate(self, _prompt: Any, params: Any, _request_id: str, **_: Any) -> AsyncIterator[Any]:
        self.asked.append(params.logprobs)
        answer = SimpleNamespace(finish_reason="length", token_ids=[7], logprobs=None)
        yield SimpleNamespace(outputs=[answer])


@pytest.mark.parametrize(
    ("max_logprobs", "mode", "temperature", "asked"),
    [
        (20, "raw_logprobs", 1.0, 5),
        (-1, "raw_logits", 1.0, 5),
        (2, "raw_logprobs", 1.0, 2),
        (0, "raw_logprobs", 0.0, None),
        (20, "processed_logprobs", 0.0, 5),
        (20, "processed_logprobs", 0.7, None),
        (20, "processed_logits", 0.7, None),
    ],
)
def test_an_engine_is_asked_for_what_it_names(
    max_logprobs: int, mode: str, temperature: float, asked: int | None
) -> None:
    """More than its limit would refuse the caller; processed logprobs are no ranking of the head's."""
    client = Client(max_logprobs, mode)
    request = CaptureRequest(prompt=[1], temperature=temperature)
    asyncio.run(VllmEngine(client).generate([1], request, {}, "a", top=TOP))
    assert client.asked == [asked]


def test_one_token_a_row_is_no_witness(tmp_path: Path) -> None:
    """An engine with ``--max-logprobs 1``: the capture is proven, but nobody could check it again."""
    bench = make_bench(tmp_path, proof_interval_s=60)
    bench.engine.most_top = 1

    async def go() -> None:
        await bench.ready()
        assert "witness" not in (await ask(bench)).json()["data"][0]
        assert bench.service.metrics.counts["proven"] == 1
        await bench.service.close()

    asyncio.run(go())
