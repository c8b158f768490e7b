"""The routes on a fake server: answers, refusals, and that nothing is left behind whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.unit.tap.endpoint_fakes import (
    Bench,
    FakeTokenizer,
    expected_states,
    make_bench,
    make_model,
)

from taphouse import slices
from taphouse_tap.api import collect as collect_module
from taphouse_tap.api import service as service_module
from taphouse_tap.api.admission import Pace
from taphouse_tap.api.endpoint import Endpoint
from taphouse_tap.api.refusals import Busy
from taphouse_tap.api.requests import Prompt

URL = "/v1/hidden_states"
PROMPT = [10, 11, 12]


def post(bench: Bench, body: Any, url: str = URL, key: str | None = None) -> httpx.Response:
    """Start the service, send one request, stop the service."""

    async def go() -> httpx.Response:
        await bench.ready()
        async with bench.client(key) as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await client.post(url, content=content)
        await stop(bench)
        return answer

    return asyncio.run(go())


async def stop(bench: Bench) -> None:
    """End the background work but keep the directory, so that a test can look into it."""
    task = bench.service._task
    assert task is not None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def message(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert error["code"] == answer.status_code
    return str(error["message"])


@pytest.mark.parametrize("url", ["/v1/hidden_states", "/hidden_states"])
def test_slices_of_a_prompt(tmp_path: Path, url: str) -> None:
    bench = make_bench(tmp_path)
    answer = post(bench, {"prompt": PROMPT, "request_id": "mine"}, url)
    assert answer.status_code == 200
    body = answer.json()
    (item,) = body.pop("data")
    fingerprint = {"config": "m0", "tokenizer": "t0", "chat_template": "c0"}
    assert body == {
        "object": "hidden_states",
        "start_id": "abc12",
        "fingerprint": fingerprint,
        "fingerprint_id": slices.fingerprint_id(fingerprint),
        "layers": [0, 2, 4],
        "num_layers": 4,
        "dtype": "float32",
        "request_id": "mine",
    }
    files = item.pop("slices")
    assert item == {
        "index": 0,
        "tag": item["tag"],
        "token_ids": [10, 11, 12, 100],
        "prompt_len": 3,
        "rows": 3,
        "shape": [3, 3, 8],
        "finish_reason": "length",
        "error": None,
    }
    for rank, file in enumerate(files):
        trailer, states = slices.read_slice(file["path"])
        assert (file["tp_rank"], file["crc32"]) == (rank, trailer.crc32)
        assert file["bytes"] == states.nbytes
    joined = slices.join_slices([file["path"] for file in files], item["token_ids"][: item["rows"]])
    assert np.array_equal(joined, expected_states(3, bench.model))


def test_generated_rows_are_captured_but_for_the_last_token(tmp_path: Path) -> None:
    answer = post(make_bench(tmp_path), {"prompt": PROMPT, "max_tokens": 4})
    (item,) = answer.json()["data"]
    assert item["token_ids"] == [10, 11, 12, 100, 101, 102, 103]
    assert (item["prompt_len"], item["rows"], item["shape"]) == (3, 6, [6, 3, 8])


def test_a_stream_holds_the_asked_layers_and_leaves_nothing(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    answer = post(bench, {"prompt": [PROMPT, [20]], "delivery": "stream", "layers": [4, 0]})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/octet-stream"
    assert int(answer.headers["content-length"]) == len(answer.content)
    stream = slices.parse_stream(answer.content)
    assert stream.header["layers"] == [4, 0]
    assert [item["token_ids"] for item in stream.header["data"]] == [[10, 11, 12, 100], [20, 100]]
    for rows, states in zip((3, 1), stream.states, strict=True):
        assert np.array_equal(states, expected_states(rows, bench.model)[:, [2, 0]])
    assert bench.leftovers() == []


def test_no_cut_or_damaged_stream_parses(tmp_path: Path) -> None:
    whole = post(make_bench(tmp_path), {"prompt": PROMPT, "delivery": "stream"}).content
    slices.parse_stream(whole)
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        for body in (whole[:at], bytes(damaged)):
            with pytest.raises(slices.BadStream):
                slices.parse_stream(body)


def test_surplus_rows_are_cut_from_a_stream(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    bench.engine.surplus = 2
    answer = post(bench, {"prompt": PROMPT, "delivery": "stream"})
    (states,) = slices.parse_stream(answer.content).states
    assert states is not None and states.shape == (3, 3, 8)


def test_prompts_are_captured_at_once_and_answered_in_order(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    answer = post(bench, {"prompt": [[20], [21, 22], [23]], "max_tokens": 2})
    data = answer.json()["data"]
    assert [item["index"] for item in data] == [0, 1, 2]
    assert [item["token_ids"][: item["prompt_len"]] for item in data] == [[20], [21, 22], [23]]
    assert len({item["tag"] for item in data}) == 3


def test_messages_come_with_their_loss_mask(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    answer = post(make_bench(tmp_path), {"messages": chat, "return_loss_mask": True})
    (item,) = answer.json()["data"]
    assert len(item["loss_mask"]) == len(item["token_ids"])
    chosen = [token for token, bit in zip(item["token_ids"], item["loss_mask"], strict=True) if bit]
    assert chosen == [FakeTokenizer.word("b"), 1]


def test_generated_tokens_of_an_opened_turn_count_for_the_loss(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "return_loss_mask": True, "max_tokens": 3}
    (item,) = post(make_bench(tmp_path), body).json()["data"]
    assert item["loss_mask"] == [0] * item["prompt_len"] + [1, 1, 1]


def test_sampling_fields_reach_the_engine(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0.5, "seed": 7, "stop": "x", "priority": -3}
    post(bench, body)
    ((token_ids, request, dp_rank),) = bench.engine.seen
    assert (token_ids, dp_rank) == (PROMPT, None)
    assert (request.temperature, request.seed, request.stop, request.priority) == (0.5, 7, "x", -3)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        ({"prompt": PROMPT, "layers": [1]}, 422, "layers"),
        ({"prompt": []}, 422, "prompt"),
        ({"prompt": [10] * 64}, 422, "prompt"),
        ({"prompt": [[10], [512]]}, 422, "prompt[1]"),
        ({"prompt": PROMPT, "n": 2}, 422, "n"),
        ({"prompt": [[1]] * 5}, 422, "prompt"),
        (b'{"prompt": "' + b"x" * 3000 + b'"}', 413, None),
        ({"prompt": [PROMPT] * 4, "delivery": "stream", "max_tokens": 50}, 413, "delivery"),
        ({"prompt": [PROMPT] * 4, "max_tokens": 60}, 413, "max_tokens"),
    ],
)
def test_refusals(tmp_path: Path, body: Any, status: int, param: str | None) -> None:
    limits = {"max_body_bytes": 2048, "stream_limit_bytes": 15_000, "slice_dir_limit_bytes": 280_000}
    bench = make_bench(tmp_path, max_prompts=4, **limits)
    answer = post(bench, body)
    assert answer.status_code == status
    assert message(answer)
    assert answer.json()["error"]["param"] == param
    assert bench.leftovers() == [] and bench.engine.seen == []
    assert bench.service.metrics.counts["refused"] == 1


def test_a_body_that_grows_past_the_limit_is_not_read_to_its_end(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, max_body_bytes=1000)
    sent = 0

    async def chunks() -> Any:
        nonlocal sent
        for _ in range(100):
            sent += 100
            yield b" " * 100

    async def go() -> httpx.Response:
        await bench.ready()
        async with bench.client() as client:
            answer = await client.post(URL, content=chunks())
        await stop(bench)
        return answer

    answer = asyncio.run(go())
    assert (answer.status_code, sent < 2000) == (413, True)


@pytest.mark.parametrize("delay_s", [0.0, 5.0], ids=["afterwards", "while it runs"])
def test_a_rank_without_room_is_429_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    """The host memory for rows on their way or the file system was full: the same request may work later."""
    monkeypatch.setattr(collect_module, "WATCH_S", 0.01)
    bench = make_bench(tmp_path)

    async def go() -> httpx.Response:
        await bench.ready()
        bench.engine.error_rank, bench.engine.retry = 1, True
        bench.engine.delay_after_s = delay_s
        async with bench.client() as client:
            answer = await client.post(URL, json={"prompt": PROMPT})
        await stop(bench)
        return answer

    answer = asyncio.run(go())
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "2")
    assert "row 3 was never written" in message(answer)
    assert bench.leftovers() == []


def test_states_a_second_are_bounded_however_many_ask_at_once() -> None:
    pace, start, admitted = Pace(1, time.monotonic), threading.Barrier(16), []

    def ask() -> None:
        start.wait()
        with contextlib.suppress(Busy):
            pace.spend(1000)
            admitted.append(1)

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(admitted) == 1


def test_states_a_second_count_what_was_admitted(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, max_bytes_per_s=1000, slice_dir_limit_bytes=100_000)

    async def go() -> None:
        await bench.ready()
        assert bench.service.tap is not None
        admission = bench.service.tap.admission
        admission._pace = Pace(1000, time.monotonic)
        taken = slices.Claim(slices.new_tag(), 90_000, time.time(), 2, 2)
        bench.start.reserve(taken, 100_000)
        with pytest.raises(Busy, match="reserved"):
            admission.reserve([Prompt([1, 2])], 1)
        bench.start.release(taken.tag)
        assert len(admission.reserve([Prompt([1, 2])], 1)) == 1
        await stop(bench)

    asyncio.run(go())


def test_states_a_second_are_bounded(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, max_bytes_per_s=1000)

    async def go() -> list[httpx.Response]:
        await bench.ready()
        now = [1e6]
        assert bench.service.tap is not None
        bench.service.tap.admission._pace = Pace(1000, lambda: now[0])
        answers = []
        async with bench.client() as client:
            for wait in (0.0, 1.0, 100.0):
                now[0] += wait
                answers.append(await client.post(URL, json={"prompt": PROMPT}))
        await stop(bench)
        return answers

    first, second, third = asyncio.run(go())
    assert (first.status_code, second.status_code, third.status_code) == (200, 429, 200)
    assert "1000 bytes of states a second" in message(second)
    assert 60 < int(second.headers["Retry-After"]) < 70, "a claim is a little over 65,000 bytes"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"silent_rank": 1}, "rank 1 sealed nothing within 0.2 s"),
        ({"error_rank": 1}, "rank 1: row 3 was never written"),
        ({"short": True}, "rank 0: row 2 of 3 is missing"),
        ({"wrong": {"layers": (0, 2, 3)}}, "layers is (0, 2, 3), expected (0, 2, 4)"),
        ({"wrong": {"prompt_len": 7}}, "prompt_len is 7, expected 3"),
        ({"wrong": {"start_id": "other"}}, "start_id is 'other'"),
        ({"wrong": {"dtype": "bfloat16"}}, "dtype"),
        ({"generated": []}, "without a token"),
        ({"fed": [10, 9, 12]}, "row 1 is of token 9, the sequence has"),
    ],
)
def test_a_capture_that_is_not_whole_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(service_module, "SEAL_TIMEOUT_S", 0.2)
    bench = make_bench(tmp_path)

    async def go() -> httpx.Response:
        await bench.ready()
        for name, value in fault.items():
            setattr(bench.engine, name, value)
        async with bench.client() as client:
            answer = await client.post(URL, json={"prompt": PROMPT})
        await stop(bench)
        return answer

    answer = asyncio.run(go())
    assert answer.status_code == 500
    assert says in message(answer)
    assert bench.leftovers() == []
    assert bench.service.metrics.counts["failed"] == 1


def test_one_failed_prompt_fails_all_and_aborts_the_rest(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)

    async def go() -> httpx.Response:
        await bench.ready()
        bench.engine.error_rank, bench.engine.hang_from = 0, 1
        async with bench.client() as client:
            answer = await client.post(URL, json={"prompt": [[10], [11], [12]]})
        await stop(bench)
        return answer

    answer = asyncio.run(go())
    assert answer.status_code == 500
    assert len(bench.engine.aborted) == 2 and not bench.engine.running
    assert bench.leftovers() == []


def test_a_caller_who_leaves_aborts_the_request_and_leaves_nothing(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)

    async def go() -> None:
        await bench.ready()
        bench.engine.hangs = True
        body = json.dumps({"prompt": [[10], [11]]}).encode()
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        scope = {"type": "http", "method": "POST", "path": URL, "headers": [], "query_string": b""}
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        request = asyncio.create_task(bench.endpoint(scope, inbox.get, send))
        while len(bench.engine.running) < 2:
            await asyncio.sleep(0.005)
        assert len(bench.leftovers()) == 2
        inbox.put_nowait({"type": "http.disconnect"})
        await request
        assert sent == []
        assert len(bench.engine.aborted) == 2 and not bench.engine.running
        assert bench.leftovers() == []
        late = next(iter(bench.service.tap.collector._left))  # type: ignore[union-attr]
        (bench.start.directory / f"{late}.t0.part").touch()
        bench.service.tap.collector.tidy(600)  # type: ignore[union-attr]
        assert bench.leftovers() == []
        assert bench.service.metrics.counts["aborted"] == 1
        await stop(bench)

    asyncio.run(go())


def test_a_full_directory_answers_429_until_captures_are_consumed(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, slice_dir_limit_bytes=150_000)

    async def go() -> None:
        await bench.ready()
        async with bench.client() as client:
            first = await client.post(URL, json={"prompt": PROMPT})
            second = await client.post(URL, json={"prompt": PROMPT})
            third = await client.post(URL, json={"prompt": PROMPT})
            assert [a.status_code for a in (first, second, third)] == [200, 200, 429]
            assert int(third.headers["retry-after"]) > 0
            assert "150000 bytes" in message(third)
            slices.release(bench.start.directory, first.json()["data"][0]["tag"])
            assert (await client.post(URL, json={"prompt": PROMPT})).status_code == 200
        await stop(bench)

    asyncio.run(go())


def test_too_many_captures_at_once_answer_429(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, max_in_flight=2)

    async def go() -> None:
        await bench.ready()
        bench.engine.delay_s = 0.3
        async with bench.client() as client:
            running = asyncio.create_task(client.post(URL, json={"prompt": [[10], [11]]}))
            while len(bench.engine.running) < 2:
                await asyncio.sleep(0.005)
            refused = await client.post(URL, json={"prompt": [12]})
            assert refused.status_code == 429
            assert "2 captures are in flight" in message(refused)
            assert (await running).status_code == 200
            assert (await client.post(URL, json={"prompt": [12]})).status_code == 200
        await stop(bench)

    asyncio.run(go())


def test_streams_share_one_limit_and_give_it_back(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, stream_limit_bytes=500)

    async def go() -> None:
        await bench.ready()
        bench.engine.delay_s = 0.3
        body = {"prompt": PROMPT, "delivery": "stream"}
        async with bench.client() as client:
            running = asyncio.create_task(client.post(URL, json=body))
            while not bench.engine.running:
                await asyncio.sleep(0.005)
            refused = await client.post(URL, json=body)
            assert (refused.status_code, "288 bytes are on their way" in message(refused)) == (429, True)
            assert (await running).status_code == 200
            bench.engine.error_rank = 0
            assert (await client.post(URL, json=body)).status_code == 500
            bench.engine.error_rank = None
            assert (await client.post(URL, json=body)).status_code == 200
        await stop(bench)

    asyncio.run(go())


def test_what_nobody_consumes_expires_but_what_runs_does_not(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)

    async def go() -> None:
        await bench.ready()
        tap = bench.service.tap
        assert tap is not None
        async with bench.client() as client:
            answer = await client.post(URL, json={"prompt": PROMPT})
            bench.engine.hangs = True
            running = asyncio.create_task(client.post(URL, json={"prompt": PROMPT}))
            while not bench.engine.running:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)
            assert tap.collector.tidy(ttl_s=0.2) == [answer.json()["data"][0]["tag"]]
            (claim,) = bench.leftovers()
            assert claim.endswith(".claim")
            running.cancel()
        await stop(bench)

    asyncio.run(go())


@pytest.mark.parametrize(
    ("own", "server", "given", "status"),
    [
        ("", [], None, 200),
        ("own", [], "own", 200),
        ("own", [], None, 401),
        ("own", [], "wrong", 401),
        ("own", ["customer"], "own", 200),
        ("own", ["customer"], "customer", 401),
        ("", ["one", "two"], "two", 200),
        ("", ["one", "two"], "three", 401),
        ("", ["one"], None, 401),
    ],
)
def test_keys(tmp_path: Path, own: str, server: list[str], given: str | None, status: int) -> None:
    bench = make_bench(tmp_path, own_key=own, server_keys=server)

    async def go() -> list[httpx.Response]:
        await bench.ready()
        async with bench.client(given) as client:
            answers = [
                await client.post(URL, json={"prompt": PROMPT}),
                await client.get(f"{URL}/status"),
                await client.post(f"{URL}/canary"),
            ]
        await stop(bench)
        return answers

    answers = asyncio.run(go())
    assert [answer.status_code for answer in answers] == [status] * 3
    if status == 401:
        assert answers[0].headers["www-authenticate"] == "Bearer"
        assert "own" not in message(answers[0]).split("(")[0]


@pytest.mark.parametrize("header", ["own", "Basic own", "bearer own", "Bearer  own", "Bearer \xff"])
def test_the_scheme_is_bearer_in_any_case(tmp_path: Path, header: str) -> None:
    bench = make_bench(tmp_path, own_key="own")

    async def go() -> int:
        async with bench.client() as client:
            raw = {"Authorization": header.encode("latin-1")}
            return (await client.get(f"{URL}/status", headers=raw)).status_code

    assert asyncio.run(go()) == (200 if header.lower().split() == ["bearer", "own"] else 401)


def test_an_endpoint_that_could_not_start_answers_503_with_the_reason() -> None:
    endpoint = Endpoint()
    endpoint.problem = "the endpoint did not start: no such directory"

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=endpoint)
        async with httpx.AsyncClient(transport=transport, base_url="http://tap") as client:
            return await client.post(URL, json={"prompt": PROMPT})

    answer = asyncio.run(go())
    assert answer.status_code == 503
    assert "no such directory" in message(answer)


def test_one_rank_alone_is_captured_too(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, model=make_model(tp_size=1))
    (item,) = post(bench, {"prompt": PROMPT}).json()["data"]
    assert [file["tp_rank"] for file in item["slices"]] == [0]
