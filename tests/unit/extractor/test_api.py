"""The API over real HTTP, through the client that people install."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.extractor.conftest import TOKEN, Service

from taphouse.client import Taphouse
from taphouse.errors import ApiError, BadRequest, NotFound, TooBusy, TooLarge, Unauthorized, Unavailable
from taphouse.shards import Shard, verify_shard
from taphouse.store import put_json
from taphouse.wire import Check, JobOptions, SampleQuery
from taphouse_extractor import doctor as doctor_module

Serve = Callable[..., Service]
ROUTES = [
    ("POST", "/v1/jobs"),
    ("GET", "/v1/jobs"),
    ("GET", "/v1/jobs/x"),
    ("POST", "/v1/jobs/x/cancel"),
    ("POST", "/v1/extract"),
    ("GET", "/v1/queue"),
    ("GET", "/v1/shards"),
    ("GET", "/v1/shards/x"),
    ("GET", "/v1/doctor"),
    ("GET", "/v1/governor"),
    ("POST", "/v1/governor"),
]


def lines(*rows: Any) -> Iterator[bytes]:
    return (json.dumps(row).encode() + b"\n" for row in rows)


def test_a_job_from_upload_to_download(serve: Serve, tmp_path: Path) -> None:
    service = serve()
    sent: list[int] = []
    options = JobOptions(batch_size=2, max_tokens=3, layers=[4, 1])
    job = service.client.enqueue(
        lines(*({"prompt": f"p{n}"} for n in range(5))), options, "mine", sent.append
    )
    assert (job.state.value, job.rows, job.name, job.options) == ("queued", 5, "mine", options)
    assert (job.batches.pending, len(sent)) == (3, 5)
    service.bench.run_all(service.bench.records.job(job.id))

    done = service.client.job(job.id)
    assert (done.state.value, done.succeeded, done.shards, done.eta_s) == ("done", 5, 3, None)
    assert done.raw_bytes > 0 and done.bytes > 0 and done.tokens == 5 * 4
    assert service.client.jobs()[0].id == job.id
    page = service.client.shards(limit=2)
    assert ([info.seq for info in page.shards], page.next_after, page.head) == ([1, 2], 2, 3)
    assert service.client.shards(after=3).shards == []
    target = service.client.download(page.shards[0].shard, tmp_path / "one.safetensors")
    assert verify_shard(target).ok
    queue = service.client.queue()
    assert (queue.ledger_head, queue.rows_left, queue.depth.finished) == (3, 0, 3)
    assert queue.rates[0].samples > 0
    with pytest.raises(ApiError) as caught:
        service.client.cancel(job.id)
    assert caught.value.status == 409


def test_a_file_and_its_path(serve: Serve) -> None:
    service = serve()
    file = service.datasets / "rows.jsonl"
    file.write_bytes(b"".join(lines({"prompt": "a"}, {"prompt": "b"})))
    assert service.client.enqueue(file).rows == 2
    with file.open("rb") as opened:
        assert service.client.enqueue(opened, again=True).rows == 2
    assert service.client.enqueue_path(str(file), JobOptions(batch_size=1)).batches.pending == 2
    with pytest.raises(BadRequest, match="dataset roots") as caught:
        service.client.enqueue_path("/etc/passwd")
    assert caught.value.param == "path"
    assert len(service.client.jobs()) == 3


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([b'{"a":1}\n', b"nope\n"], BadRequest, "line 2 is not JSON"),
        ([b"{}\n" * 51], TooLarge, "line 51: over 50 rows"),
        ([b'{"a":"' + b"x" * 6000 + b'"}\n'], TooLarge, "line 1 is over 5000 bytes"),
        ([b'{"a":"' + b"x" * 4000 + b'"}\n'] * 40, TooLarge, "over 100000 bytes"),
        ([b"{}\n", *[b'{"a":"' + b"x" * 60_000] * 200], TooLarge, r"over (5000|100000) bytes"),
        ([], BadRequest, "no rows"),
    ],
)
def test_uploads_over_a_limit_leave_nothing(
    serve: Serve, rows: list[bytes], error: type[ApiError], message: str
) -> None:
    service = serve()
    with pytest.raises(error, match=message):
        service.client.enqueue(iter(rows))
    assert service.client.jobs() == []


def test_a_body_that_is_cut_leaves_no_job(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    service = serve()
    host, port = service.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.putrequest("POST", "/v1/jobs")
    for name, value in {
        "Authorization": f"Bearer {TOKEN}",
        "Content-Type": "application/x-ndjson",
        "Content-Length": "1000",
    }.items():
        connection.putheader(name, value)
    connection.endheaders(b'{"prompt":"whole"}\n{"prompt":"cut')
    deadline = time.monotonic() + 10
    while not service.client.jobs() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [job.state.value for job in service.client.jobs()] == ["spooling"]
    connection.close()
    while service.client.jobs() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.client.jobs() == []
    assert service.client.find_samples(SampleQuery(ids=["whole"])).rows == 0
    while 'code="client_left"' not in httpx.get(service.url + "/metrics").text:
        assert time.monotonic() < deadline
    assert not [line for line in caplog.records if line.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("path", "kind", "sent"),
    [
        ("/v1/jobs", "application/x-ndjson", b'{"prompt":"whole"}\n{"prompt":"'),
        ("/v1/jobs", "application/x-ndjson", b""),
        ("/v1/jobs", "application/json", b'{"path"'),
        ("/v1/extract", "application/json", b'{"rows"'),
    ],
)
def test_a_body_that_stands_still_is_cut_off(serve: Serve, path: str, kind: str, sent: bytes) -> None:
    service = serve(body_timeout_s=0.2)
    text = post_a_part(service, path, kind, sent)
    assert text.startswith(b"HTTP/1.1 408 ") and b"stood still for 0.2 s" in text
    assert service.client.jobs() == []


def test_a_dataset_that_was_refused_and_stands_still_is_answered_why(serve: Serve) -> None:
    service = serve(body_timeout_s=0.2)
    kind = "application/x-ndjson\r\nConnection: close"  # it is kept for seconds else
    text = post_a_part(service, "/v1/jobs", kind, b"nope\n{")
    assert text.startswith(b"HTTP/1.1 422 ") and b"line 1 is not JSON" in text


def post_a_part(service: Service, path: str, kind: str, sent: bytes) -> bytes:
    """Send the beginning of a body, then nothing; what came back until the connection ended."""
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: {kind}\r\n"
        connection.sendall(head.encode() + b"Content-Length: 1000\r\n\r\n" + sent)
        with connection.makefile("rb") as answer:
            return answer.read()


def test_an_answer_may_take_longer_than_a_body(serve: Serve) -> None:
    service = serve(body_timeout_s=0.2)
    service.bench.tap.delay_s = 0.6
    assert service.client.extract([{"prompt": "x"}])


def test_the_docs_page_names_everything_and_loads_nothing(serve: Serve) -> None:
    service = serve()
    answer = httpx.get(service.url + "/docs")
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    page, document = answer.text, httpx.get(service.url + "/openapi.json").json()
    for path, methods in document["paths"].items():
        assert all(f"{method.upper()} {path}</code>" in page for method in methods)
    for name, schema in document["components"]["schemas"].items():
        assert f'id="{name}"' in page
        assert all(f"<code>{field}</code>" in page for field in schema.get("properties", {}))
    assert not re.search(r"<(script|link|img|iframe)|src=|//", page)
    links = set(re.findall(r'href="([^"]*)"', page))
    assert {link for link in links if not link.startswith("#")} == {"openapi.json"}
    assert all(f'id="{link[1:]}"' in page for link in links if link.startswith("#"))


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_wants_the_token(serve: Serve, method: str, path: str) -> None:
    service = serve()
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        answer = httpx.request(method, service.url + path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "unauthorized"
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert TOKEN not in answer.text


def test_what_is_open(serve: Serve) -> None:
    service = serve()
    for path in ("/health", "/ready", "/metrics", "/docs", "/openapi.json"):
        assert httpx.get(service.url + path).status_code == 200, path
    document = httpx.get(service.url + "/openapi.json").json()
    for method, path in ROUTES:
        route = document["paths"][path.replace("/x", "/{job_id}" if "jobs" in path else "/{name}")]
        assert route[method.lower()]["security"], path
    content = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]
    assert set(content) == {"application/x-ndjson", "application/json"}
    with Taphouse(service.url, token="wrong") as stranger, pytest.raises(Unauthorized):
        stranger.queue()
    assert serve(token=None).client.queue().jobs == {}


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        ({"url": "/v1/jobs?options={", "content_type": "application/x-ndjson"}, 422, "options"),
        (
            {"url": '/v1/jobs?options={"max_tokens":0}', "content_type": "application/x-ndjson"},
            422,
            "max_tokens",
        ),
        ({"url": '/v1/jobs?options={"typo":0}', "content_type": "application/x-ndjson"}, 422, "typo"),
        (
            {"url": '/v1/jobs?options={"layers":[1,1]}', "content_type": "application/x-ndjson"},
            422,
            "distinct",
        ),
        ({"url": "/v1/jobs", "content_type": "text/csv"}, 415, "text/csv"),
        ({"url": "/v1/jobs", "content_type": "application/json", "content": b"{"}, 422, "JSON"),
        ({"url": "/v1/jobs", "content_type": "application/json", "content": b'{"path":"x","y":1}'}, 422, "y"),
        ({"url": "/v1/extract", "content_type": "application/json", "content": b'{"rows":[]}'}, 422, "rows"),
        (
            {"url": "/v1/governor", "content_type": "application/json", "content": b"SECRET"},
            422,
            "the body is not JSON: Expecting value",
        ),
        (
            {"url": "/v1/extract", "content_type": "application/json", "content": b" " * 30_000},
            413,
            "20000 bytes",
        ),
        ({"url": "/v1/jobs/x/cancel"}, 404, "no job"),
        ({"url": "/v1/none"}, 404, "Not Found"),
    ],
)
def test_wrong_requests_say_what_is_wrong(
    serve: Serve, request_: dict[str, Any], status: int, message: str
) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": request_.get("content_type", "")}
    url = serve().url + request_["url"]
    answer = httpx.post(url, headers=headers, content=request_.get("content", b"{}\n"))
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"] and "SECRET" not in answer.text


def test_names_can_not_leave_their_place(serve: Serve) -> None:
    service = serve()
    for name in ("..", "a/b", "%2e%2e", "", "x?y"):
        with pytest.raises(BadRequest, match="not a name"):
            service.client.job(name)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for path in (
        "/v1/shards/..%2f..%2fjobs",
        "/v1/shards/.hidden",
        "/v1/jobs/..%2f..",
        "/v1/shards/x.safetensors",
    ):
        assert httpx.get(service.url + path, headers=headers).status_code == 404
    with pytest.raises(NotFound, match="no job"):
        service.client.job("j20260101000000-00000000")


def test_a_few_rows_at_once(serve: Serve) -> None:
    service = serve()
    body = service.client.extract(
        [{"prompt": "hello"}, {"prompt": "hello", "id": "row-0"}], JobOptions(max_tokens=2)
    )
    with Shard.from_bytes(body) as shard:
        assert [sample.id for sample in shard] == ["row-0", "row-0#1"]
        assert shard[0].token_ids.tolist() == [*b"hello", 97]
    assert service.bench.store.list("shards") == []
    assert service.bench.tap.slices_left() == []


@pytest.mark.parametrize(
    ("rows", "options", "error", "message"),
    [
        ([{"prompt": "x"}] * 5, {}, TooLarge, "rows: 5, at most 4"),
        ([{"prompt": "x"}], {"max_tokens": 33}, BadRequest, "at most 32"),
        ([{"prompt": "x"}, {"prompt": "REFUSE"}], {}, BadRequest, "rows.1: .*at most 7 tokens"),
        ([{"prompt": "x"}, {}], {}, BadRequest, "rows.1: the row has none"),
        ([{"prompt": "BROKEN"}], {}, Unavailable, "rows.0: .*row 3 is missing"),
        ([{"prompt": "x" * 400}] * 3, {}, TooLarge, "over 20000 bytes"),
        ([{"prompt": "long enough"}], {"max_length": 3}, BadRequest, "max_length 3"),
    ],
)
def test_direct_extraction_is_bounded_and_all_or_nothing(
    serve: Serve, rows: list[dict[str, Any]], options: dict[str, Any], error: type[ApiError], message: str
) -> None:
    service = serve()
    with pytest.raises(error, match=message):
        service.client.extract(rows, JobOptions(**options))


def test_an_engine_that_is_off_is_503_with_its_reason(serve: Serve) -> None:
    service = serve()
    service.bench.tap.off = "the breaker tripped"
    with pytest.raises(Unavailable, match="breaker") as caught:
        service.client.extract([{"prompt": "x"}])
    assert (caught.value.status, caught.value.retry_after) == (503, 5.0)
    service.bench.monitors.look()
    assert "breaker" in (service.client.queue().paused or "")


def test_states_that_are_no_numbers_are_the_engines_fault(serve: Serve) -> None:
    with pytest.raises(Unavailable, match=r"states can't be used: .* NaN") as failed:
        serve().client.extract([{"prompt": "NAN x"}])
    assert (failed.value.status, failed.value.code) == (502, "capture_failed")


def test_too_many_direct_extractions_at_once_are_429(serve: Serve) -> None:
    service = serve()
    direct = service.bench
    direct.tap.delay_s = 1.0
    from concurrent.futures import ThreadPoolExecutor

    def extract(_: int) -> str:
        with Taphouse(service.url, token=TOKEN) as client:
            try:
                client.extract([{"prompt": "x"}])
            except TooBusy as error:
                return f"busy {error.retry_after}"
            return "done"

    with ThreadPoolExecutor(4) as pool:
        answers = sorted(pool.map(extract, range(4)))
    assert answers.count("busy 2.0") == 2 and answers.count("done") == 2


def test_the_disk_floor_refuses_new_work_and_pauses(serve: Serve) -> None:
    service = serve(min_free_bytes=1 << 60)
    with pytest.raises(Unavailable, match="under the floor"):
        service.client.enqueue(lines({"prompt": "x"}))
    assert service.client.jobs() == []
    assert "under the floor" in (service.client.queue().paused or "")
    assert not next(check for check in service.client.doctor() if check.check == "disk").ok


def test_jobs_still_answer_while_redis_is_away(serve: Serve) -> None:
    service = serve()
    service.bench.queue.broken = service.bench.leases.broken = True
    job = service.client.enqueue(lines({"prompt": "x"}))
    assert service.client.job(job.id).state.value == "queued"
    assert "Redis" in (service.client.queue().paused or "")
    ready = service.client.ready()
    assert not ready.ready
    assert [check.check for check in ready.checks if not check.ok] == ["redis"]


def test_doctor_runs_a_canary_when_asked(serve: Serve) -> None:
    service = serve()
    tap = service.bench.tap
    tap.canary = {"state": "failed", "reason": "row 3 gives another token"}

    def canary(**asked: bool) -> Check:
        return next(check for check in service.client.doctor(**asked) if check.check == "canary")

    assert canary().ok and tap.canaries == 0
    said = canary(canary=True)
    assert not said.ok and "row 3 gives another token" in said.detail and tap.canaries == 1
    refused = {"message": "no room for a canary", "type": "capture_off", "code": 503}
    tap.canary = {"error": refused}
    said = canary(canary=True)
    assert not said.ok and "no room for a canary" in said.detail
    tap.canary = {"state": "passed", "reason": None}
    assert canary(canary=True).ok and tap.canaries == 3


def test_doctor_says_when_nobody_can_make_a_ledger_entry(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_module, "LEDGER_S", 0.05)
    service = serve()

    def ledger() -> Check:
        [found] = [check for check in service.client.doctor() if check.check == "ledger"]
        return found

    assert ledger().ok
    with service.bench.store.lock("ledger/lock"):
        assert not ledger().ok and "held its lock for 0.05 s" in ledger().detail
    assert ledger().ok


def test_doctor_names_each_broken_link(serve: Serve) -> None:
    service = serve()
    service.bench.leases.alive = {"w1": {"seen_at": time.time()}}
    service.bench.memory.lead("somebody")
    put_json(
        service.bench.store, "consumers/trainer.json", {"cursor": 0, "updated_at": time.time(), "loss": 2.5}
    )
    assert [check for check in service.client.doctor() if not check.ok] == []
    assert service.client.queue().consumers[0].loss == 2.5
    refusing = {"cursor": 0, "updated_at": time.time(), "phase": "counting tokens", "refused": 3}
    put_json(service.bench.store, "consumers/trainer.json", refusing)
    [check] = [check for check in service.client.doctor() if not check.ok]
    assert check.check == "consumer trainer" and "it refused 3 shards" in check.detail
    ended = {"cursor": 0, "updated_at": 0.0, "step": 420, "ended": "limit reached"}
    put_json(service.bench.store, "consumers/trainer.json", ended)
    [check] = [check for check in service.client.doctor() if check.check == "consumer trainer"]
    assert check.ok and "ended at step 420 (limit reached)" in check.detail and check.advice is None

    service.bench.leases.alive = {}
    service.bench.memory.resign("somebody")
    service.bench.tap.isolation = {"scheduler": "absent", "reason": "no --scheduler-cls"}
    service.bench.tap.off = "a rank is silent"
    put_json(service.bench.store, "consumers/trainer.json", {"cursor": 0, "updated_at": 0.0})
    service.bench.engine.slice_dir.rename(service.bench.engine.slice_dir.with_name("moved"))
    bad = {check.check: check for check in service.client.doctor() if not check.ok}
    assert set(bad) == {"engine", "slices", "workers", "consumer trainer", "scheduler", "governor"}
    assert "two_class_scheduler" in (bad["scheduler"].advice or "")
    assert all(check.advice for check in bad.values())
    assert "a rank is silent" in bad["engine"].detail


def test_metrics_come_from_the_store(serve: Serve) -> None:
    service = serve()
    job = service.bench.job([{"prompt": "good"}, {"prompt": "REFUSE"}, {"prompt": "x" * 20}], max_length=9)
    service.bench.run_all(job)
    put_json(service.bench.store, "consumers/slow.json", {"cursor": 0})
    put_json(service.bench.store, "consumers/quick.json", {"cursor": 1})
    for token in ("wrong", "wrong", TOKEN):
        httpx.get(service.url + "/v1/jobs/x", headers={"Authorization": f"Bearer {token}"})
    text = httpx.get(service.url + "/metrics").text
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["taphouse_samples_total",] == 1
    assert values["taphouse_failed_rows_total",] == 1
    assert values["taphouse_skipped_rows_total",] == 1
    assert values["taphouse_batches", "finished"] == 1
    assert values["taphouse_jobs", "done"] == 1
    assert values["taphouse_ledger_head",] == 1
    assert values["taphouse_rejected_rows_total", "row_refused"] == 1
    assert values["taphouse_rejected_rows_total", "too_long"] == 1
    stored, raw = (values[f"taphouse_{name}_total", "planes-zstd1"] for name in ("shard_bytes", "raw_bytes"))
    assert (stored, raw) == (service.client.job(job.id).bytes, service.client.job(job.id).raw_bytes)
    for stage in ("capture", "encode", "seal", "ledger"):
        assert values["taphouse_batch_stage_seconds_count", stage] == 1
        assert values["taphouse_batch_stage_seconds_bucket", "+Inf", stage] == 1
    assert values["taphouse_batch_stage_seconds_count", "queue_wait"] == 0
    assert values["taphouse_consumer_lag_entries", "slow"] == 1
    assert 0 < values["taphouse_consumer_lag_seconds", "slow"] < 3600
    assert values["taphouse_consumer_lag_seconds", "quick"] == 0
    assert values["taphouse_refused_requests_total", "unauthorized"] == 2
    assert values["taphouse_refused_requests_total", "not_found"] == 1
    assert values["taphouse_workers", "idle"] == 0


def test_a_part_of_a_shard(serve: Serve) -> None:
    service = serve()
    service.bench.run_all(service.bench.job([{"prompt": "good"}]))
    info = service.client.shards().shards[0]
    headers = {"Authorization": f"Bearer {TOKEN}", "Range": "bytes=8-15"}
    answer = httpx.get(f"{service.url}/v1/shards/{info.shard}", headers=headers)
    assert answer.status_code == 206
    assert answer.content == service.bench.store.read(info.path)[8:16]


@pytest.mark.parametrize("content", [b"NaN", b'"\\ud800"'])
def test_a_row_that_is_no_json_is_422(serve: Serve, content: bytes) -> None:
    body = b'{"rows":[{"messages":[{"role":"user","content":' + content + b"}]}]}"
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    answer = httpx.post(serve().url + "/v1/extract", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "rows.0")


def test_direct_rows_keep_apart_whatever_their_ids(serve: Serve) -> None:
    rows = [{"prompt": "xx", "id": "a#2"}, {"prompt": "yy", "id": "a"}, {"prompt": "zz", "id": "a"}]
    with Shard.from_bytes(serve().client.extract(rows)) as shard:
        assert [sample.id for sample in shard] == ["a#2", "a", "a#2#2"]


def test_a_name_that_a_terminal_would_obey_is_refused(serve: Serve, tmp_path: Path) -> None:
    service = serve()
    with pytest.raises(BadRequest, match="can't be printed"):
        service.client.enqueue([b'{"prompt":"x"}\n'], name="\x1b[2J")
    with pytest.raises(BadRequest, match="can't be printed"):
        service.client.enqueue_path(str(tmp_path / "x"), name="a\nb")
    assert service.client.jobs() == []


def test_a_store_that_is_gone_is_503_and_comes_back(serve: Serve, tmp_path: Path) -> None:
    service = serve()
    root = service.bench.store.root
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(Unavailable):
        service.client.enqueue([b'{"prompt":"x"}\n'])
    assert not service.client.ready().ready and not root.exists()
    (tmp_path / "elsewhere").rename(root)
    assert service.client.enqueue([b'{"prompt":"x"}\n']).rows == 1
