"""An API without tokens, and the other web sites that a browser beside it may show."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from tests.unit.extractor.conftest import TOKEN, Service

Serve = Callable[..., Service]
OURS = ["127.0.0.1:8900", "localhost:8900", "LOCALHOST", "[::1]:8900", "127.0.0.2", "taphouse.example"]
THEIRS = [
    "evil.example",
    "evil.example:8900",
    "127.0.0.1.evil.example",
    "localhost.evil.example:8900",
    "127.0.0.1@evil.example",
    "10.0.0.7:8900",
    "[::1",
    "",
]


@pytest.mark.parametrize("host", THEIRS)
def test_a_name_that_is_not_ours_gets_nothing(serve: Serve, host: str) -> None:
    url = serve(token=None).url
    for path in ("/", "/health", "/metrics", "/v1/jobs", "/openapi.json", "/no/such"):
        answer = httpx.get(url + path, headers={"Host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), path
        assert "set a token, or name it in allowed_hosts" in answer.json()["error"]["message"]
    assert httpx.post(url + "/v1/doctor", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", OURS)
def test_it_goes_by_its_own_names(serve: Serve, host: str) -> None:
    assert httpx.get(serve(token=None).url + "/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["10.0.0.7:8900", "[fd00::7]:8900", "localhost"])
def test_one_that_serves_all_machines_goes_by_every_address(serve: Serve, host: str) -> None:
    url = serve(token=None, host="0.0.0.0").url
    assert httpx.get(url + "/v1/jobs", headers={"Host": host}).status_code == 200
    assert httpx.get(url + "/v1/jobs", headers={"Host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://localhost:3000", "https://127.0.0.1", "http://evil.example:8900"],
)
def test_other_sites_give_no_orders(serve: Serve, origin: str) -> None:
    service = serve(token=None)
    job = service.bench.job([{"prompt": "x"}])
    for path in (f"/v1/jobs/{job.id}/cancel", "/v1/doctor", "/v1/governor"):
        answer = httpx.post(service.url + path, headers={"Origin": origin})
        assert answer.status_code == 403 and "no orders from other sites" in answer.text
    assert service.client.job(job.id).state.value == "queued"


def test_its_own_page_and_programs_give_orders(serve: Serve) -> None:
    service = serve(token=None)
    port = httpx.URL(service.url).port
    for headers in (
        {},
        {"Origin": service.url},
        {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"},
        {"Origin": "https://taphouse.example"},
    ):
        job = service.bench.job([{"prompt": "x"}])
        answer = httpx.post(f"{service.url}/v1/jobs/{job.id}/cancel", headers=headers)
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled"), headers


def test_who_has_a_token_may_come_by_any_name(serve: Serve) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": "any.example", "Origin": "https://other.example"}
    assert httpx.post(serve().url + "/v1/doctor", headers=headers).status_code == 200
