"""A real engine's requests, timed by class: what is counted is exactly what was sent, on whatever route."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.engine.capturing import capture_all, complete, metric, prompt, status, until
from tests.engine.launch import Engine
from tests.unit.tap.latency_fakes import over_loads, quantile, samples

from taphouse_tap.api.latency import BUCKET_RATIO, METRICS

pytestmark = pytest.mark.engine

ENDED = ("finished", "failed", "aborted")


def counts(engine: Engine) -> dict[str, dict[str, int]]:
    """Samples by metric and requests by end, by class."""
    latency = status(engine)["latency"]
    assert latency["problem"] is None
    return {
        name: {
            **{metric: samples(latency[name][metric]) for metric in METRICS},
            **{end: latency[name][end] for end in (*ENDED, "running")},
        }
        for name in ("production", "extraction")
    }


def grown(before: dict[str, Any], after: dict[str, Any], name: str) -> dict[str, int]:
    return {key: after[name][key] - before[name][key] for key in after[name]}


def expected(requests: int, tokens: int) -> dict[str, int]:
    """What requests that all ended by themselves leave behind."""
    ones = dict.fromkeys(("ttft", "queue", "e2e", "finished"), requests)
    return {**ones, "itl": tokens - requests, "failed": 0, "aborted": 0, "running": 0}


def body(engine: Engine, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": engine.model,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "Count the pints"}],
        **more,
    }


def chat(engine: Engine, max_tokens: int, **more: Any) -> int:
    """A chat that is not streamed; returns how many tokens the server says it generated."""
    url = f"{engine.url}/v1/chat/completions"
    answer = httpx.post(url, json=body(engine, max_tokens, **more), timeout=120)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


def stream(engine: Engine, max_tokens: int) -> tuple[int, float]:
    """A streamed chat: how many tokens were generated, and seconds to the first of them."""
    url = f"{engine.url}/v1/chat/completions"
    wanted = body(engine, max_tokens, stream=True, stream_options={"include_usage": True})
    began, first, usage = time.monotonic(), 0.0, 0
    with httpx.stream("POST", url, json=wanted, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if any(choice["token_ids"] if "token_ids" in choice else choice["delta"].get("content")
                   for choice in event["choices"]):  # fmt: skip
                first = first or time.monotonic() - began
            usage = (event.get("usage") or {}).get("completion_tokens", usage)
    return int(usage), first or time.monotonic() - began


def test_what_is_counted_is_what_was_sent(llama_engine: Engine) -> None:
    engine, before = llama_engine, counts(llama_engine)
    with ThreadPoolExecutor(16) as pool:
        chats = [
            *[pool.submit(lambda n: stream(engine, n)[0], tokens) for tokens in (1, 9, 30)],
            *[pool.submit(chat, engine, tokens) for tokens in (1, 12)],
            pool.submit(chat, engine, 7, n=2, temperature=1.0),
        ]
        completions = [pool.submit(complete, engine, prompt(300, seed), max_tokens=5) for seed in range(2)]
        captures = [
            pool.submit(capture_all, engine, prompt=prompt(200, seed), max_tokens=tokens)
            for seed, tokens in enumerate((1, 1, 6))
        ]
        generated = [future.result() for future in chats]
        for future in (*completions, *captures):
            future.result()
    assert generated == [1, 9, 30, 1, 12, 14]
    after = counts(engine)
    assert grown(before, after, "production") == expected(requests=9, tokens=sum(generated) + 2 * 5)
    assert grown(before, after, "extraction") == expected(requests=3, tokens=8)


MESSAGES = [{"role": "user", "content": "Count the pints"}]
TOKENS = 9
ROUTES: dict[str, tuple[dict[str, Any], int]] = {
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": TOKENS, "ignore_eos": True}, 1),
    "/v1/completions": (
        {
            "prompt": [[11, 12], [13, 14, 15]],
            "n": 2,
            "temperature": 1.0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
        },
        4,
    ),
    "/v1/responses": ({"input": "Count", "max_output_tokens": TOKENS, "ignore_eos": True}, 1),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": TOKENS}, 1),
}
"""Every route that generates text and is on without a flag, with a body and how many sequences it makes."""


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_is_timed(llama_engine: Engine, route: str, streamed: bool) -> None:
    """One route cannot be told to go on past an end of sequence: its answer may be shorter."""
    wanted, sequences = ROUTES[route]
    before = counts(llama_engine)
    url, body_ = llama_engine.url + route, {"model": llama_engine.model, **wanted, "stream": streamed}
    answer = httpx.post(url, json=body_, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream") == streamed
    until(lambda: grown(before, counts(llama_engine), "production")["finished"] == sequences, seconds=10)
    after = counts(llama_engine)
    more = grown(before, after, "production")
    if route == "/v1/messages":
        assert 0 <= more["itl"] < TOKENS
        more["itl"] = TOKENS - 1
    assert more == expected(requests=sequences, tokens=sequences * TOKENS)
    assert not any(grown(before, after, "extraction").values())


def test_time_to_first_token_is_what_the_client_feels(llama_engine: Engine) -> None:
    """The server's is a part of the client's, request by request; so its median is under the client's."""
    before = over_loads(status(llama_engine)["latency"]["production"]["ttft"])
    felt = sorted(stream(llama_engine, 3)[1] for _ in range(9))
    after = over_loads(status(llama_engine)["latency"]["production"]["ttft"])
    new = {bucket: count - before.get(bucket, 0) for bucket, count in after.items()}
    assert sum(new.values()) == len(felt)
    median = quantile(new, 0.5)
    assert felt[0] / 100 < median <= felt[4] * BUCKET_RATIO


def test_a_client_that_leaves_is_aborted_and_not_failed(llama_engine: Engine) -> None:
    before = counts(llama_engine)
    url = f"{llama_engine.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body(llama_engine, 1500, stream=True), timeout=120) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()  # the connection is closed once nobody holds them
        next(lines)
        assert counts(llama_engine)["production"]["running"] == before["production"]["running"] + 1
    until(lambda: counts(llama_engine)["production"]["running"] == before["production"]["running"])
    more = grown(before, counts(llama_engine), "production")
    assert {end: more[end] for end in ENDED} == {"finished": 0, "failed": 0, "aborted": 1}


def test_nobody_can_call_a_customers_request_extraction(llama_engine: Engine) -> None:
    """On one route the caller chooses the engine's request id, on all an opt-in that is not signed."""
    before, name = counts(llama_engine), f"taphouse-{'0' * 32}"
    wanted = {"model": llama_engine.model, "input": "Hi", "request_id": name, "max_output_tokens": 2}
    answer = httpx.post(f"{llama_engine.url}/v1/responses", json=wanted, timeout=120)
    assert answer.status_code == 200 and answer.json()["id"] == name
    answer = httpx.post(
        f"{llama_engine.url}/v1/chat/completions",
        json=body(llama_engine, 2, vllm_xargs={"taphouse": "extraction"}),
        headers={"X-Request-Id": name},
        timeout=120,
    )
    assert answer.status_code == 200
    after = counts(llama_engine)
    assert grown(before, after, "production")["finished"] == 2
    assert not any(grown(before, after, "extraction").values())


def test_metrics_have_both_classes_with_the_same_counts(llama_engine: Engine) -> None:
    chat(llama_engine, 2)
    capture_all(llama_engine, prompt=prompt(8, 1), max_tokens=3)
    found = counts(llama_engine)
    for name, of in found.items():
        for kind in METRICS:
            published = metric(llama_engine, f'taphouse_request_{kind}_seconds_count{{class="{name}"}}')
            assert published == of[kind] > 0
        for end in ENDED:
            label = f'taphouse_requests_finished_total{{class="{name}",outcome="{end}"}}'
            assert metric(llama_engine, label) == of[end]
