"""The client against servers that misbehave."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from taphouse.client import Taphouse
from taphouse.errors import ChecksumMismatch, TaphouseError, TooBusy, TruncatedShard, Unavailable, Unreachable


def client_of(answer: Callable[[httpx.Request], httpx.Response]) -> Taphouse:
    return Taphouse("http://service", token="t", transport=httpx.MockTransport(answer))


def test_a_service_that_is_not_there() -> None:
    with (
        Taphouse("http://127.0.0.1:1", timeout=2.0) as client,
        pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"),
    ):
        client.health()


def test_something_else_behind_the_url() -> None:
    page = client_of(lambda _: httpx.Response(200, text="<html>welcome</html>"))
    with pytest.raises(Unavailable, match="did not answer like Taphouse"):
        page.queue()
    moved = client_of(lambda _: httpx.Response(302, headers={"Location": "/login"}))
    with pytest.raises(Unavailable, match="did not answer like Taphouse"):
        moved.jobs()
    missing = client_of(lambda _: httpx.Response(404, text="no such page"))
    with pytest.raises(Unavailable, match="did not answer like Taphouse"):
        missing.queue()
    proxy = client_of(lambda _: httpx.Response(502, text="bad gateway"))
    with pytest.raises(Unavailable, match="HTTP 502"):
        proxy.jobs()
    with pytest.raises(Unavailable):
        client_of(lambda _: httpx.Response(200, json={"a": 1})).doctor()


def test_retry_after_is_told() -> None:
    def busy(_: httpx.Request) -> httpx.Response:
        body = {"error": {"message": "full", "type": "x"}}
        return httpx.Response(429, headers={"Retry-After": "7"}, json=body)

    with pytest.raises(TooBusy, match="full") as caught:
        client_of(busy).extract([{"prompt": "x"}])
    assert caught.value.retry_after == 7.0


def test_a_time_out_that_is_raised_counts_everywhere() -> None:
    waited: list[float] = []

    def slow(request: httpx.Request) -> httpx.Response:
        waited.append(request.extensions["timeout"]["read"])
        raise httpx.ReadTimeout("silence", request=request)

    client = Taphouse("http://service", timeout=900.0, transport=httpx.MockTransport(slow))
    for ask in (client.doctor, lambda: client.extract([{"prompt": "x"}]), lambda: client.enqueue([b"{}"])):
        with pytest.raises(Unreachable, match="no answer in time"):
            ask()
    assert waited == [900.0] * 3


def test_a_time_out() -> None:
    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("silence", request=request)

    with pytest.raises(Unreachable, match="no answer in time from http://service/v1/queue"):
        client_of(silent).queue()


def test_bytes_that_changed_on_the_way_are_refused(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sent").hexdigest()

    def changed(_: httpx.Request) -> httpx.Response:
        headers = {"X-Taphouse-SHA256": digest}
        return httpx.Response(200, headers=headers, stream=httpx.ByteStream(b"s3nt"))

    with pytest.raises(ChecksumMismatch):
        client_of(changed).extract([{"prompt": "x"}])
    with pytest.raises(ChecksumMismatch):
        client_of(changed).download("a.safetensors", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_is_cut_leaves_nothing(tmp_path: Path) -> None:
    def cut(_: httpx.Request) -> httpx.Response:
        headers = {"X-Taphouse-SHA256": hashlib.sha256(b"whole").hexdigest(), "Content-Length": "5"}
        return httpx.Response(200, headers=headers, stream=httpx.ByteStream(b"who"))

    with pytest.raises(TruncatedShard, match="3 of 5 bytes"):
        client_of(cut).download("a.safetensors", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["health", "ready", "jobs", "queue", "shards", "doctor"])
def test_every_failure_is_of_the_tree(call: str) -> None:
    with pytest.raises(TaphouseError):
        getattr(client_of(lambda _: httpx.Response(500)), call)()
