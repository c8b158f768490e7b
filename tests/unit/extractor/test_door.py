"""Which token opens which route, over real HTTP; and how often."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from tests.unit.extractor.conftest import TOKEN, Service
from tests.unit.extractor.test_tokens import write_tokens

from taphouse.client import Taphouse
from taphouse.errors import NotFound, TooBusy
from taphouse.wire import JobOptions
from taphouse_extractor.api.door import RULES, Pace, check_rules
from taphouse_extractor.errors import TooBusy as Busy
from taphouse_extractor.tokens import Role

Serve = Callable[..., Service]


@pytest.fixture
def several(serve: Serve, tmp_path: Path) -> Service:
    """A service with a token of each role, and two tenants."""
    file = write_tokens(
        tmp_path / "tokens.json",
        *((role.value, f"{role.value}-token", role.value, None) for role in Role),
        ("acme", "acme-token", "submit", "acme"),
        ("acme2", "acme2-token", "read", "acme"),
        ("bulk", "bulk-token", "admin", "bulk"),
    )
    return serve(tokens_file=file, open_metrics=False)


def ask(service: Service, method: str, path: str, token: str) -> httpx.Response:
    filled = re.sub(r"\{\w+\}", "x", path)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.stream(method, service.url + filled, headers=headers) as answer:
        if "event-stream" not in answer.headers.get("content-type", ""):  # which has no end
            answer.read()
    return answer


@pytest.mark.parametrize(("method", "path"), RULES)
def test_a_route_opens_to_its_role_and_to_no_less(several: Service, method: str, path: str) -> None:
    rule = RULES[method, path]
    nobody = ask(several, method, path, "").status_code
    assert (nobody == 401) == (rule.role is not None)
    if rule.role is None:
        return
    for role in Role:
        answer = ask(several, method, path, f"{role.value}-token")
        assert (answer.status_code == 403) == (not role.includes(rule.role)), role
        assert answer.status_code not in (401, 405)
        if answer.status_code == 403:
            assert rule.role.value in answer.json()["error"]["message"]
    tenants = ask(several, method, path, "bulk-token")
    assert (tenants.status_code == 403) == rule.wide


def test_every_route_has_a_rule_and_every_rule_a_route(several: Service) -> None:
    document = httpx.get(several.url + "/openapi.json").json()
    routes = {(m.upper(), path) for path, methods in document["paths"].items() for m in methods}
    hidden = {("GET", path) for path in ("/docs", "/", "/dashboard/{file}")}
    assert routes | hidden == RULES.keys()


def test_a_route_without_a_rule_is_not_served() -> None:
    app = FastAPI()
    app.router.routes.append(APIRoute("/v1/new", lambda: None, methods=["GET"]))
    with pytest.raises(LookupError, match="GET /v1/new has no rule"):
        check_rules(app)


def test_a_tenant_sees_its_own_and_nothing_else(several: Service) -> None:
    jobs = {}
    for token in ("acme", "bulk", "submit"):
        with Taphouse(several.url, token=f"{token}-token") as client:
            jobs[token] = client.enqueue([b'{"prompt":"x"}\n'], JobOptions(), f"of {token}")
    for job in jobs.values():
        several.bench.run_all(several.bench.records.job(job.id))
    assert (jobs["acme"].owner, jobs["acme"].tenant, jobs["submit"].tenant) == ("acme", "acme", None)
    with Taphouse(several.url, token="acme2-token") as client:
        assert [job.id for job in client.jobs()] == [jobs["acme"].id]
        assert client.job(jobs["acme"].id).name == "of acme"
        page = client.shards()
        assert [info.job_id for info in page.shards] == [jobs["acme"].id]
        assert (page.next_after, page.head, client.shards(after=1).shards) == (3, 3, [])
        for other in ("bulk", "submit"):
            with pytest.raises(NotFound, match="there is no job"):
                client.job(jobs[other].id)
        others = several.client.shards(after=1).shards[0].shard
        assert ask(several, "GET", f"/v1/shards/{page.shards[0].shard}", "acme2-token").status_code == 200
        assert ask(several, "GET", f"/v1/shards/{others}", "acme2-token").status_code == 404
        assert ask(several, "POST", f"/v1/jobs/{jobs['bulk'].id}/cancel", "acme-token").status_code == 404
    assert len(several.client.jobs()) == 3 and len(several.client.shards().shards) == 3


def test_metrics_are_open_where_the_settings_say_so(serve: Serve) -> None:
    assert httpx.get(serve(open_metrics=False).url + "/metrics").status_code == 401
    assert httpx.get(serve(open_metrics=True).url + "/metrics").status_code == 200


def test_a_token_has_so_many_unfinished_jobs(serve: Serve) -> None:
    service = serve(max_jobs=2)
    first = service.client.enqueue([b'{"prompt":"x"}\n'])
    service.client.enqueue([b'{"prompt":"x2"}\n'])
    with pytest.raises(TooBusy, match="has 2 unfinished jobs") as caught:
        service.client.enqueue([b'{"prompt":"x3"}\n'])
    assert caught.value.retry_after == 60
    service.client.cancel(first.id)
    assert service.client.enqueue([b'{"prompt":"x4"}\n']).rows == 1


def test_requests_a_minute_are_bounded_and_the_answer_says_when(serve: Serve) -> None:
    service = serve(requests_per_minute=3)
    answers = [ask(service, "GET", "/v1/jobs", TOKEN) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert 1 <= int(answers[-1].headers["Retry-After"]) <= 20
    assert "3 requests a minute" in answers[-1].json()["error"]["message"]
    assert ask(service, "GET", "/health", "").status_code == 200


def test_pace_is_each_caller_own_and_comes_back() -> None:
    now = [0.0]
    pace = Pace(60, lambda: now[0])
    for _ in range(60):
        pace.take("a")
    with pytest.raises(Busy) as caught:
        pace.take("a")
    assert caught.value.retry_after == 1
    pace.take("b")
    now[0] = 2.0
    pace.take("a")
    pace.take("a")
    with pytest.raises(Busy):
        pace.take("a")
    now[0] = 1e6
    for _ in range(60):
        pace.take("a")
    with pytest.raises(Busy):
        pace.take("a")


@pytest.mark.parametrize("kind", ["application/json", "application/x-ndjson"])
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/extract"])
def test_an_encoded_body_is_refused_unread(serve: Serve, path: str, kind: str) -> None:
    service = serve()
    bomb = zlib.compress(b'{"prompt":"x"}\n' * 100_000)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind, "Content-Encoding": "gzip"}
    answer = httpx.post(service.url + path, headers=headers, content=bomb)
    assert answer.status_code == 415 and "send the body as it is" in answer.json()["error"]["message"]
    assert service.client.jobs() == []


def test_a_misspelt_query_parameter_is_refused(serve: Serve) -> None:
    answer = ask(serve(), "GET", "/v1/jobs?limt=5", TOKEN)
    assert answer.status_code == 422 and answer.json()["error"]["param"] == "query"
    assert "'limt' (there is: limit)" in answer.json()["error"]["message"]
