"""The audit log: who did what, from where; and nothing that shouldn't be there."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.extractor.conftest import TOKEN, Service
from tests.unit.extractor.test_tokens import write_tokens

from taphouse.client import Taphouse
from taphouse.errors import ApiError
from taphouse.wire import GovernorMode, JobOptions, PruneRequest, SampleQuery
from taphouse_extractor.api.audit import write_to

Serve = Callable[..., Service]


@pytest.fixture
def audit(tmp_path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    file = tmp_path / "audit.jsonl"
    write_to(file)
    yield lambda: [json.loads(line) for line in file.read_text().splitlines()]
    write_to(None)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_who_extracted_what(serve: Serve, audit: Callable[[], list[dict[str, Any]]], tmp_path: Path) -> None:
    tokens = write_tokens(
        tmp_path / "t", ("ci", "ci-token", "submit", "acme"), ("look", "look-token", "read", None)
    )
    service = serve(tokens_file=tokens)
    with Taphouse(service.url, token="ci-token") as client:
        job = client.enqueue([b'{"prompt":"SECRET-PROMPT"}\n'] * 3, JobOptions())
        client.extract([{"prompt": "SECRET-PROMPT", "id": "a"}])
        client.jobs()
        client.job(job.id)
        service.bench.run_all(service.bench.records.job(job.id))
        shard = client.shards().shards[0].shard
        client.download(shard, tmp_path)
    with Taphouse(service.url, token="look-token") as client, pytest.raises(ApiError):
        client.cancel(job.id)
    httpx.get(service.url + "/v1/jobs?token=SECRET", headers={"Authorization": "Bearer SECRET-WRONG"})
    lines = audit()
    times = [line.pop("time") for line in lines]
    assert times == sorted(times)
    frame = {"level": "info", "logger": "taphouse_extractor.audit", "event": "audit", "from": "127.0.0.1"}
    ci = {**frame, "who": "ci", "role": "submit", "tenant": "acme"}
    assert lines == [
        {**ci, "what": "POST /v1/jobs", "status": 202, "job": job.id, "rows": 3},
        {**ci, "what": "POST /v1/extract", "status": 200, "rows": 1},
        {**ci, "what": "GET /v1/shards/{name}", "status": 200, "shard": shard},
        {
            **frame,
            "who": "look",
            "role": "read",
            "what": "POST /v1/jobs/{job_id}/cancel",
            "status": 403,
            "job": job.id,
        },
        {**frame, "what": "GET /v1/jobs", "status": 401},
    ]
    assert "SECRET" not in json.dumps(lines)


def test_what_was_ordered_and_what_was_taken_away(
    serve: Serve, audit: Callable[[], list[dict[str, Any]]]
) -> None:
    service = serve()
    client, bench = service.client, service.bench
    job = client.enqueue([b'{"prompt":"x","user":"SECRET-PERSON"}\n', b'{"prompt":"y"}\n'])
    bench.run_all(bench.records.job(job.id))
    client.govern(GovernorMode.PINNED, 2.5)
    client.find_samples(SampleQuery(ids=["SECRET-ID"]))
    deleted = client.delete_samples(SampleQuery(user="SECRET-PERSON"))
    client.prune_shards(PruneRequest(force=True, dry_run=True))
    frame = {"level", "logger", "event", "from", "time", "who", "role", "what", "status"}
    told = [{k: v for k, v in line.items() if k not in frame} for line in audit()]
    assert told == [
        {"job": job.id, "rows": 2},
        {"order": "pinned", "busy_ms": 2.5},
        {"of": "1 ids", "rows": 0},
        {"of": "a user", "rows": 1, "samples": 1, "rewritten": deleted.rewritten, "removed": []},
        {"force": True, "dry_run": True, "shards": 1},
    ]
    assert deleted.rewritten and "SECRET" not in str(told)


def test_what_went_wrong_is_audited_too(serve: Serve, audit: Callable[[], list[dict[str, Any]]]) -> None:
    service = serve()
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/x-ndjson"}
    url = service.url.replace("http://", "")
    assert httpx.post(f"http://{url}/v1/nothing", headers=headers).status_code == 404
    assert httpx.post(f"http://{url}/v1/jobs", headers=headers, content=b"x").status_code == 422
    assert [(line["what"], line["status"]) for line in audit()] == [
        ("POST no route", 404),
        ("POST /v1/jobs", 422),
    ]


def broken(owner: str) -> int:
    raise RuntimeError("SECRET-PROMPT")


def test_an_unexpected_error_is_audited(serve: Serve, audit: Callable[[], list[dict[str, Any]]]) -> None:
    service = serve(max_jobs=1)
    service.bench.overview.unfinished = broken  # type: ignore[method-assign]
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/x-ndjson"}
    assert httpx.post(service.url + "/v1/jobs", headers=headers, content=b"{}\n").status_code == 500
    assert [(line["who"], line["status"]) for line in audit()] == [("token", 500)]


def test_a_file_that_was_rotated_away_is_made_anew(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    write_to(file)
    service = serve()
    service.client.enqueue([b'{"prompt":"x"}\n'])
    file.rename(tmp_path / "audit.1")
    service.client.enqueue([b'{"prompt":"y"}\n'])
    write_to(None)
    assert [len(f.read_text().splitlines()) for f in (file, tmp_path / "audit.1")] == [1, 1]
