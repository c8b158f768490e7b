"""How requests are sampled, stopped and left, and what runs beside them: rows and tokens always agree."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.capturing import (
    Captured,
    assert_equals_reference,
    capture,
    capture_all,
    capture_files,
    complete,
    metric,
    prompt,
    status,
    until,
)
from tests.engine.checkpoints import tiny_llama
from tests.engine.launch import Engine

pytestmark = pytest.mark.engine

EOS = 2
CLIENTS = 50
ABORTED = 1000


def check(captured: Captured, *, greedy: bool = True) -> list[int]:
    """A row for every token but the last, the states the model's own; returns the generated tokens."""
    item = captured.item
    generated = item["token_ids"][item["prompt_len"] :]
    assert item["rows"] == captured.states.shape[0] == item["prompt_len"] + len(generated) - 1
    assert_equals_reference(tiny_llama(), captured, greedy=greedy)
    return list(generated)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.0, 0.5), (2.0, 1.0)])
def test_sampled_tokens(llama_engine: Engine, temperature: float, top_p: float) -> None:
    """The tokens differ from run to run; the states are those of the tokens that were sampled."""
    token_ids = prompt(40, 11)
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": 40, "ignore_eos": True}
    runs = [check(capture(llama_engine, prompt=token_ids, **sampling), greedy=False) for _ in range(2)]
    assert [len(run) for run in runs] == [40, 40]
    assert runs[0] != runs[1]


def test_an_end_of_sequence_token_ends_a_capture_unless_ignored(llama_engine: Engine) -> None:
    """At a high temperature a sampled token is the end of sequence once in about a thousand."""
    sampling = {"prompt": [prompt(10, n) for n in range(16)], "max_tokens": 200, "temperature": 2.0}
    ended: list[list[int]] = []

    def some_ended() -> bool:
        for captured in capture_all(llama_engine, **sampling):
            generated = check(captured, greedy=False)
            assert EOS not in generated[:-1]
            stopped = captured.item["finish_reason"] == "stop"
            assert stopped == (generated[-1] == EOS) and (stopped or len(generated) == 200)
            if stopped:
                ended.append(generated)
        return bool(ended)

    until(some_ended)
    for captured in capture_all(llama_engine, **sampling, ignore_eos=True):
        assert len(check(captured, greedy=False)) == 200


def test_stop_token_ids_end_a_capture(llama_engine: Engine) -> None:
    token_ids = prompt(30, 12)
    whole = check(capture(llama_engine, prompt=token_ids, max_tokens=30, ignore_eos=True))
    for at in (0, 1, 15, 28):
        first = whole.index(whole[at])
        stopped = capture(
            llama_engine, prompt=token_ids, max_tokens=30, ignore_eos=True, stop_token_ids=[whole[at]]
        )
        assert stopped.item["finish_reason"] == "stop"
        assert check(stopped) == whole[: first + 1]


def test_a_stop_string_ends_a_sampled_capture(llama_engine: Engine) -> None:
    """Most of the vocabulary reads `<|unused…|>`: sampling meets it within a few tokens."""
    for _ in range(4):
        stopped = capture(
            llama_engine, prompt=prompt(30, 13), max_tokens=60, temperature=1.0, stop=["unused"]
        )
        assert stopped.item["finish_reason"] == "stop"
        check(stopped, greedy=False)


def stream_chat(engine: Engine, text: str, leave_after: int | None = None) -> str:
    """A streaming chat client; returns what it read. `leave_after`: it hangs up after so many pieces."""
    body = {
        "model": engine.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    read: list[str] = []
    with httpx.stream("POST", f"{engine.url}/v1/chat/completions", json=body, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            read += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
            if leave_after is not None and len(read) > leave_after:
                break
    return "".join(read)


def complete_all(engine: Engine, **more: Any) -> list[list[int]]:
    """An ordinary request with several prompts or choices; returns each choice's tokens."""
    body = {"model": engine.model, "max_tokens": 30, "ignore_eos": True, "return_token_ids": True, **more}
    response = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def test_captures_beside_choices_lists_and_streams(llama_engine: Engine) -> None:
    """Ordinary requests of every kind answer as they do alone; each capture has its own rows meanwhile."""
    engine = llama_engine
    choices = {"prompt": prompt(50, 30), "n": 3, "temperature": 1.0, "top_k": 1}
    prompts = {"prompt": [prompt(20 + 30 * n, 40 + n) for n in range(5)], "temperature": 0}
    ordinary: list[Callable[[], Any]] = [
        lambda: complete_all(engine, **choices),
        lambda: complete_all(engine, **prompts),
        lambda: stream_chat(engine, "Tell me about taps"),
        lambda: stream_chat(engine, "Tell me about houses " * 10),
    ]
    alone = [request() for request in ordinary]
    assert [len(tokens) for tokens in alone[0]] == [30] * 3 and len(alone[1]) == 5 and all(alone[2:])
    done = threading.Event()

    def again_and_again(request: Callable[[], Any]) -> list[Any]:
        answers = []
        while not done.is_set():
            answers.append(request())
            stream_chat(engine, "I will be gone", leave_after=5)
        return answers

    with ThreadPoolExecutor(16) as pool:
        running = [pool.submit(again_and_again, request) for request in ordinary]
        try:
            futures = [
                pool.submit(
                    capture_all,
                    engine,
                    prompt=[prompt(30 + 17 * n, 50 + n), prompt(90 + 31 * n, 60 + n)],
                    max_tokens=10 + 3 * n,
                    temperature=0.0 if n % 2 else 1.0,
                    ignore_eos=True,
                )
                for n in range(6)
            ]
            captures = [future.result() for future in futures]
        finally:
            done.set()
        for expected, answers in zip(alone, running, strict=True):
            assert answers.result() and all(answer == expected for answer in answers.result())
    for n, pair in enumerate(captures):
        for captured in pair:
            assert len(check(captured, greedy=bool(n % 2))) == 10 + 3 * n
    assert capture_files(engine) == []


async def leave(client: httpx.AsyncClient, url: str, numbers: random.Random) -> None:
    """Ask for a capture that takes longer than the caller stays, and hang up."""
    body = {
        "prompt": [numbers.randrange(10, 1000) for _ in range(numbers.choice((5, 60, 400)))],
        "max_tokens": 1500,
        "ignore_eos": True,
        "delivery": numbers.choice(("slices", "stream")),
    }
    stay = 0.02 + numbers.choice((0.1, 0.5, 1.5)) * numbers.random()
    with pytest.raises(TimeoutError):
        answer = await asyncio.wait_for(client.post(url, json=body), stay)
        pytest.fail(f"the server was faster: {answer.status_code} {answer.text}")


async def leave_often(url: str, times: int, seed: int) -> None:
    """`CLIENTS` callers at a time, on a connection of its own each."""
    numbers, slots = random.Random(seed), asyncio.Semaphore(CLIENTS)

    async def one() -> None:
        async with slots:
            await leave(client, url, numbers)

    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        await asyncio.gather(*(one() for _ in range(times)))


def test_a_thousand_callers_that_leave_take_nothing_with_them(llama_engine: Engine) -> None:
    """They leave while claiming, waiting, computing a prompt, generating; 10 s later nothing is left."""
    engine = llama_engine
    before = status(engine)
    start_dir = Path(before["start_dir"])
    names = {path.name for path in start_dir.iterdir()}

    def aborted() -> int:
        """Some leave before the server has read their request: it doesn't count those."""
        endpoint = status(engine)["counters"]["endpoint"]
        return int(endpoint["aborted"] - before["counters"]["endpoint"]["aborted"])

    for round_ in range(8):
        if (missing := ABORTED - aborted()) > 0:
            asyncio.run(leave_often(f"{engine.url}/v1/hidden_states", missing, round_))

    def nothing_left() -> bool:
        now = status(engine)
        return (
            capture_files(engine) == []
            and now["in_flight"] == {"here": 0, "claims": 0, "claimed_bytes": 0}
            and all(rank["in_flight"] == 0 for rank in now["ranks"])
            and all(rank["memory"]["pinned_bytes"] == 0 for rank in now["ranks"])
            and metric(engine, "vllm:num_requests_running") == 0
            and metric(engine, "vllm:num_requests_waiting") == 0
        )

    until(nothing_left, seconds=10)
    after = status(engine)
    assert (after["capture"], after["breaker"]) == ("on", None)
    assert {path.name for path in start_dir.iterdir()} == names
    assert aborted() >= 0.98 * ABORTED
    assert after["counters"]["ranks"]["rows"] > before["counters"]["ranks"]["rows"]
    assert after["counters"]["ranks"]["forged"] == before["counters"]["ranks"]["forged"]
    check(capture(engine, prompt=prompt(200, 70), max_tokens=20, ignore_eos=True))
    assert len(complete(engine, prompt(30, 71))["token_ids"]) == 12
