from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.queue.fake_tap import FakeTap, states_of
from tests.unit.extractor.conftest import Bench, Service, engine_of, engines_of

from taphouse.samples import Witness
from taphouse_extractor.engine import Engine, in_order
from taphouse_extractor.engine_http import MAX_ANSWER_BYTES
from taphouse_extractor.errors import (
    BadRow,
    CaptureFailed,
    EngineFailing,
    EngineTimeout,
    EngineUnavailable,
    RowRefused,
)
from taphouse_extractor.fitting import view_of
from taphouse_extractor.monitor import EngineMonitor
from taphouse_extractor.pipeline import Pipeline
from taphouse_extractor.records import BatchRef


def engine_that(answer: Callable[[httpx.Request], httpx.Response], slice_dir: Path) -> Engine:
    transport = httpx.MockTransport(answer)
    return Engine("http://engine", slice_dir=slice_dir, transport=transport, sleep=lambda _: None)


def tampering(tap: FakeTap, change: Callable[[dict[str, Any]], None]) -> Engine:
    """An engine whose answers are changed on the way."""

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        status, headers, out = tap.handle(request.method, request.url.path, None, body)
        if status == 200 and "data" in out:
            change(out)
        return httpx.Response(status, headers=headers, content=json.dumps(out).encode())

    return engine_that(answer, tap.slice_dir)


def test_a_capture_is_joined_from_all_ranks_and_released(tap: FakeTap) -> None:
    capture = engine_of(tap).capture({"prompt": "hello", "max_tokens": 3})
    assert capture.token_ids.tolist() == [*b"hello", 97, 98, 99]
    assert (capture.prompt_len, capture.rows, capture.num_layers, capture.hidden_size) == (5, 7, 4, 8)
    np.testing.assert_array_equal(capture.states, states_of([*b"hello", 97, 98], (1, 2, 4), 8))
    assert tap.slices_left() == []


def trickling() -> Iterator[bytes]:
    for _ in range(100):
        time.sleep(0.01)
        yield b" "
    yield b"{}"


def without_end() -> Iterator[bytes]:
    for _ in range(2 * MAX_ANSWER_BYTES >> 20):
        yield bytes(1 << 20)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (lambda: b"[" * 100_000 + b"]" * 100_000, CaptureFailed),
        (lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000, CaptureFailed),
        (without_end, EngineUnavailable),
        (trickling, EngineTimeout),
    ],
)
def test_an_answer_that_is_too_much_is_the_engines_fault(
    tmp_path: Path, content: Callable[[], Any], error: type[Exception]
) -> None:
    engine = engine_that(lambda _: httpx.Response(200, content=content()), tmp_path)
    with pytest.raises(error):
        engine.status(timeout_s=0.3)
    refusing = engine_that(lambda _: httpx.Response(503, content=content()), tmp_path)
    if error is CaptureFailed:
        with pytest.raises(EngineUnavailable, match="503: no explanation"):
            refusing.status()


@pytest.mark.parametrize(
    "said",
    [
        {"in_flight": {"claims": -(10**6)}},
        {"layers": [10**4000]},
        {"layers": [-1]},
        {"max_model_len": -5},
        {"num_layers": 2**60},
        {"fingerprint_id": "x" * 10**6},
        {"dtype": ["float32"]},
    ],
)
def test_a_status_that_can_not_be_is_an_engine_that_is_off(said: dict[str, Any]) -> None:
    view = view_of("http://engine", {"capture": "on", **said})
    assert view.capture == "off" and view.detail is not None
    assert view.detail.startswith("its status is none of this version") and len(view.detail) < 500


def test_the_words_of_an_engine_are_cut() -> None:
    view = view_of("http://engine", {"capture": "off", "reason": "x" * 10**6})
    assert view.detail is not None and len(view.detail) == 500


def test_a_monitor_outlives_whatever_an_engine_says(tmp_path: Path) -> None:
    stop, asked = threading.Event(), []

    def answer(_: httpx.Request) -> httpx.Response:
        asked.append(1)
        if len(asked) > 2:
            stop.set()
        raise LookupError("nobody thought of this")

    EngineMonitor(engine_that(answer, tmp_path)).run(stop, 0.0)
    assert len(asked) == 3


def test_a_full_engine_is_waited_for(tap: FakeTap) -> None:
    tap.full = 3
    assert engine_of(tap).capture({"prompt": "hello", "max_tokens": 1}).rows == 5
    assert len(tap.requests) == 4


@pytest.mark.parametrize(
    ("prompt", "error", "message", "asked"),
    [("REFUSE", RowRefused, "at most 7 tokens", 1), ("BROKEN", CaptureFailed, "row 3 is missing", 3)],
)
def test_what_is_the_rows_fault(
    tap: FakeTap, prompt: str, error: type[Exception], message: str, asked: int
) -> None:
    with pytest.raises(error, match=message):
        engine_of(tap).capture({"prompt": prompt, "max_tokens": 1})
    assert len(tap.requests) == asked


def test_a_row_is_not_blamed_for_an_engine_that_stops_capturing(tap: FakeTap, tmp_path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"capture": "off", "reason": "the breaker tripped" * 10**5})
        return httpx.Response(500, json={"error": {"message": "engine core died"}})

    with pytest.raises(EngineUnavailable, match="breaker tripped") as raised:
        engine_that(answer, tmp_path).capture({"prompt": "x", "max_tokens": 1})
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("status", [401, 403, 404, 502, 503])
def test_what_is_not_the_rows_fault(status: int, tmp_path: Path) -> None:
    engine = engine_that(lambda _: httpx.Response(status, text="<html>"), tmp_path)
    with pytest.raises(EngineUnavailable, match=str(status)):
        engine.capture({"prompt": "x", "max_tokens": 1})


ECHO = "SECRET prompt"


@pytest.mark.parametrize("status", [401, 403, 404, 429, 502, 503])
@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": ECHO}},
        {"error": {"message": ECHO, "type": "ServiceUnavailableError", "param": None, "code": 503}},
        {"error": {"message": ECHO, "type": "busy", "code": None}},
        {"error": {"message": ECHO, "type": ["busy"], "code": 429}},
        {"error": ECHO},
        [ECHO],
    ],
)
def test_what_others_answer_for_an_engine_is_not_told(status: int, body: Any, tmp_path: Path) -> None:
    """It ends in a log, and a proxy may echo the row."""
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json=body))
    engine = Engine("http://engine", slice_dir=tmp_path, transport=transport, patience_s=0.0)
    for ask in (engine.status, partial(engine.capture, {"prompt": ECHO}), engine.metrics):
        with pytest.raises(EngineUnavailable, match=f"engine answered {status}: no explanation") as raised:
            ask()
        assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize(("status", "kind"), [(429, "busy"), (503, "capture_off")])
def test_what_the_tap_says_for_itself_is_told_and_cut(status: int, kind: str, tmp_path: Path) -> None:
    error = {"message": "the breaker tripped " + "x" * 10**6, "type": kind, "param": None, "code": status}
    engine = engine_that(lambda _: httpx.Response(status, json={"error": error}), tmp_path)
    with pytest.raises(
        EngineUnavailable, match=f"^engine answered {status}: the breaker tripped x"
    ) as raised:
        engine.status()
    assert len(str(raised.value)) < 400


def test_an_answer_that_is_no_http_is_not_quoted(tmp_path: Path) -> None:
    def garbled(request: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError(f"illegal status line: {ECHO!r}", request=request)

    with pytest.raises(EngineUnavailable, match="no HTTP") as raised:
        engine_that(garbled, tmp_path).capture({"prompt": "x"})
    assert "SECRET" not in str(raised.value)


def test_network_failures(tmp_path: Path) -> None:
    def refused(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("silence", request=request)

    with pytest.raises(EngineUnavailable, match="can't reach"):
        engine_that(refused, tmp_path).capture({"prompt": "x"})
    with pytest.raises(EngineTimeout):
        engine_that(silent, tmp_path).capture({"prompt": "x"})


def test_a_wrong_key_names_the_setting(tap: FakeTap) -> None:
    tap.key = "right"
    with pytest.raises(EngineUnavailable, match="engine_key"):
        engine_of(tap, "wrong").capture({"prompt": "x", "max_tokens": 1})
    assert engine_of(tap, "right").capture({"prompt": "x", "max_tokens": 1}).rows == 1


def test_a_slice_directory_that_is_not_shared_is_said(tap: FakeTap, tmp_path: Path) -> None:
    engine = tampering(tap, lambda _: None)
    engine.slice_dir = tmp_path / "other"
    with pytest.raises(EngineUnavailable, match="slice_dir"):
        engine.capture({"prompt": "x", "max_tokens": 1})


def test_a_path_in_an_answer_is_never_opened(tap: FakeTap, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    os.mkfifo(elsewhere)  # opening it would wait for ever

    def change(out: dict[str, Any]) -> None:
        for part in out["data"][0]["slices"]:
            part["path"] = str(elsewhere)

    assert tampering(tap, change).capture({"prompt": "x", "max_tokens": 1}).rows == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda out: out["data"][0].update(tag="../../etc"),
        lambda out: out.update(start_id="../elsewhere"),
        lambda out: out["data"][0]["slices"][0].update(tp_rank="../secret"),
        lambda out: out["data"][0].update(rows=99),
        lambda out: out["data"][0].update(rows=0),
        lambda out: out["data"][0]["slices"].pop(),
        lambda out: out["data"][0].update(error="row 2 is missing"),
        lambda out: out.pop("data"),
        lambda out: out.pop("fingerprint"),
        lambda out: out["data"][0].update(token_ids="abc"),
        lambda out: out["data"][0].update(token_ids=[*b"jello", 97]),
        lambda out: out["data"][0].update(witness={"first_row": 1}),
        lambda out: out["data"][0].update(witness={"first_row": 1, "top_tokens": [[]], "top_logprobs": [[]]}),
        lambda out: out["data"][0].update(witness=[1, 2]),
    ],
)
def test_answers_that_contradict_themselves_make_no_capture(
    tap: FakeTap, change: Callable[[dict[str, Any]], None]
) -> None:
    with pytest.raises(CaptureFailed):
        tampering(tap, change).capture({"prompt": "hello", "max_tokens": 1})


def test_a_witness_comes_along(tap: FakeTap) -> None:
    witness = {"first_row": 4, "top_tokens": [[97, 5]], "top_logprobs": [[-0.5, -2.0]]}
    capture = tampering(tap, lambda out: out["data"][0].update(witness=witness)).capture(
        {"prompt": "hello", "max_tokens": 1}
    )
    assert capture.witness == Witness(4, ((97, 5),), ((-0.5, -2.0),))


def test_a_damaged_slice_makes_no_capture(tap: FakeTap) -> None:
    def flip(out: dict[str, Any]) -> None:
        path = tap.start.directory / (out["data"][0]["tag"] + ".t1.slice")
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)

    with pytest.raises(CaptureFailed, match="crc32"):
        tampering(tap, flip).capture({"prompt": "hello", "max_tokens": 1})
    assert tap.slices_left() == []


def test_in_order_keeps_the_order_and_the_bound() -> None:
    running, peak, lock = 0, 0, threading.Lock()

    def work(n: int) -> int:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        time.sleep(0.002 * (7 - n % 7))
        with lock:
            running -= 1
        return n * n

    assert list(in_order(work, range(40), 4)) == [n * n for n in range(40)]
    assert 1 < peak <= 4


def test_in_order_is_lazy_and_raises_where_the_result_would_be() -> None:
    begun: list[int] = []

    def work(n: int) -> int:
        begun.append(n)
        return 1 // (n - 2)

    results = in_order(work, range(1000), 3)
    assert [next(results), next(results)] == [-1, -1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert len(begun) < 10


@pytest.mark.parametrize("content", [float("nan"), float("inf"), "\ud800"])
def test_a_row_that_is_no_json_is_the_rows_fault(tap: FakeTap, content: object) -> None:
    """Otherwise one such row would fail its whole batch."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    with pytest.raises(BadRow, match="can't be sent"):
        engine_of(tap).capture(body)
    assert tap.requests == []


@pytest.mark.parametrize(("said", "kept"), [("nan", None), ("-5", None), ("1e400", None), ("1e12", 60.0)])
def test_a_retry_after_that_makes_no_sense(tmp_path: Path, said: str, kept: float | None) -> None:
    engine = engine_that(lambda _: httpx.Response(503, headers={"Retry-After": said}, json={}), tmp_path)
    with pytest.raises(EngineUnavailable) as raised:
        engine.capture({"prompt": "hello"})
    assert raised.value.retry_after == kept


@pytest.mark.parametrize(
    "change",
    [{"token_ids": [2**40]}, {"loss_mask": [300]}, {"finish_reason": {}}, {"slices": [{"tp_rank": 1e400}]}],
)
def test_an_answer_of_wrong_values_is_a_failed_capture(tap: FakeTap, change: dict[str, Any]) -> None:
    engine = tampering(tap, lambda out: out["data"][0].update(change))
    with pytest.raises(CaptureFailed):
        engine.capture({"prompt": "hello", "max_tokens": 1})
    assert tap.slices_left() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": -1}, "num_layers"),
        ({"num_layers": 3}, "not all in 0..3"),
        ({"num_layers": 10**9}, "num_layers"),
        ({"num_layers": None}, ""),
        ({"fingerprint": []}, "identifies nothing"),
        ({"fingerprint": {}}, "identifies nothing"),
        ({"fingerprint": {"weights": float("nan")}}, "NaN"),
    ],
)
def test_an_engine_of_impossible_facts_is_the_failure_of_a_row_alone(
    bench: Bench, change: dict[str, Any], message: str
) -> None:
    engine = tampering(bench.tap, lambda out: out.update(change))
    job = bench.job([{"prompt": "hello"}])
    outcome = Pipeline(bench.records, bench.ledger, engines_of(engine), 2).run(
        BatchRef(job_id=job.id, batch=0)
    )
    assert (outcome.succeeded, len(outcome.failures), outcome.shard) == (0, 1, None)
    [failure] = outcome.failures
    assert message in failure.reason and "\n" not in failure.reason
    assert bench.tap.slices_left() == []


def test_an_engine_that_fails_every_row_of_a_batch_decides_nothing(bench: Bench) -> None:
    rows = [{"prompt": "BROKEN"}, {"prompt": "BROKEN too"}]
    job = bench.job(rows)
    with pytest.raises(EngineFailing, match=r"none of 2 rows was captured$") as failing:
        bench.pipeline.run(BatchRef(job_id=job.id, batch=0))
    assert "row 3 is missing" in failing.value.said
    assert list(bench.records.finished(job.id)) == []
    mixed = bench.job([*rows, {"id": "no prompt"}])
    outcome = bench.pipeline.run(BatchRef(job_id=mixed.id, batch=0))
    assert [failure.kind for failure in outcome.failures] == ["capture_failed", "capture_failed", "bad_row"]


@pytest.mark.parametrize(
    "change",
    [{"versions": [1]}, {"plugins": "all"}, {"canary": 5}, {"start_id": "x" * 5000}, {"start_id": "../x"}],
)
def test_doctor_outlives_a_status_of_another_kind(
    serve: Callable[..., Service], change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve()
    status = {**service.bench.tap.status(), **change}
    monkeypatch.setattr(service.bench.tap, "status", lambda: status)
    assert {check.check for check in service.client.doctor()} >= {"engine", "canary", "slices"}


@pytest.mark.parametrize(
    "status", [{"reason": 5}, {"layers": "x"}, {"fingerprint_id": 3}, {"in_flight": {"claims": "many"}}]
)
def test_the_monitor_outlives_a_status_of_another_kind(tmp_path: Path, status: dict[str, Any]) -> None:
    monitor = EngineMonitor(engine_that(lambda _: httpx.Response(200, json=status), tmp_path))
    seen = monitor.look()
    assert seen.capture == "off" and "status is none of this version" in (seen.detail or "")


def test_the_monitor_outlives_a_body_that_can_not_be_decoded(tmp_path: Path) -> None:
    broken = httpx.ByteStream(b"no gzip")
    answer = httpx.Response(200, headers={"Content-Encoding": "gzip"}, stream=broken)
    assert EngineMonitor(engine_that(lambda _: answer, tmp_path)).look().capture == "unreachable"
