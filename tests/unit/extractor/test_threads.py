"""Requests that wait for long keep nobody else waiting."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from tests.unit.extractor.conftest import TOKEN, Bench, Service

from taphouse_extractor.errors import EngineUnavailable, TooBusy
from taphouse_extractor.records import DELETING
from taphouse_extractor.retries import Retries

Serve = Callable[..., Service]
AUTH = {"Authorization": f"Bearer {TOKEN}"}
MANY = 60


class Gone(threading.Event):
    """Stands in place of something that hangs until it is set, and counts who came to it."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Semaphore(0)

    def __call__(self, *_: object, **__: object) -> None:
        self.came.release()
        assert self.wait(30)
        raise EngineUnavailable("it is gone")


@pytest.fixture
def gone() -> Iterator[Gone]:
    found = Gone()
    yield found
    found.set()


@pytest.fixture
def ask() -> Iterator[Callable[[str, str], list[Future[httpx.Response]]]]:
    """Send a request many times at once."""
    with ThreadPoolExecutor(MANY) as pool, httpx.Client(headers=AUTH, timeout=30) as client:
        yield lambda method, url: [pool.submit(client.request, method, url) for _ in range(MANY)]


Ask = Callable[[str, str], "list[Future[httpx.Response]]"]


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_an_engine_that_hangs_is_asked_once_and_all_else_goes_on(
    serve: Serve, ask: Ask, gone: Gone, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    service = serve()
    monkeypatch.setattr(service.bench.engine, "canary" if method == "POST" else "status", gone)
    answers = ask(method, service.url + "/v1/doctor")
    assert gone.came.acquire(timeout=10)
    job = service.bench.job([{"prompt": "x"}])
    for path in ("/health", "/ready", "/v1/queue", "/v1/jobs"):
        assert httpx.get(service.url + path, headers=AUTH, timeout=10).status_code == 200
    assert service.client.cancel(job.id).state.value == "cancelled"
    assert not any(answer.done() for answer in answers)
    gone.set()
    assert {answer.result().status_code for answer in answers} == {200}
    assert not gone.came.acquire(blocking=False), "the engine was asked more than once"


def test_retries_do_not_wait_for_a_deletion_nor_let_others_wait(serve: Serve, ask: Ask, bench: Bench) -> None:
    service = serve(patience_s=0.05)
    job = bench.job([{"prompt": "REFUSE"}])
    bench.run_all(job)
    with bench.store.lock(DELETING):
        answers = ask("POST", f"{service.url}/v1/jobs/{job.id}/retry")
        assert httpx.get(service.url + "/v1/jobs", headers=AUTH, timeout=10).status_code == 200
        said = [answer.result() for answer in answers]
    assert {(answer.status_code, answer.headers["Retry-After"]) for answer in said} == {(429, "5")}
    assert service.client.retry(job.id).failed == 0


def test_a_retry_waits_for_one_that_is_quick(bench: Bench) -> None:
    job = bench.job([{"prompt": "REFUSE"}])
    bench.run_all(job)
    with bench.store.lock(DELETING), pytest.raises(TooBusy, match="are being deleted"):
        Retries(bench.records, 0.0).retry(job)
    held = bench.store.lock(DELETING)
    held.__enter__()
    threading.Timer(0.2, held.__exit__, (None, None, None)).start()
    Retries(bench.records, 30.0).retry(job)
    assert bench.overview.job(job.id).failed == 0


def test_who_looks_while_redis_hangs_keeps_nobody_from_acting(
    serve: Serve, ask: Ask, gone: Gone, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve()
    job = service.bench.job([{"prompt": "x"}])
    with monkeypatch.context() as patch:
        patch.setattr(service.bench.overview, "jobs", gone)
        answers = ask("GET", service.url + "/v1/jobs")
        assert gone.came.acquire(timeout=10)
        assert service.client.cancel(job.id).state.value == "cancelled"
        assert not any(answer.done() for answer in answers)
        gone.set()
        assert {answer.result().status_code for answer in answers} == {503}


def test_whether_it_lives_is_answered_where_all_threads_are_taken(
    serve: Serve, ask: Ask, gone: Gone, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve()
    with monkeypatch.context() as patch:
        patch.setattr(service.bench.records, "job", gone)
        answers = ask("GET", service.url + "/v1/jobs/j/failures")
        for _ in range(40):
            assert gone.came.acquire(timeout=10)
        for path in ("/health", "/ready", "/metrics", "/", "/docs"):
            assert httpx.get(service.url + path, timeout=10).status_code == 200, path
        gone.set()
        assert Counter(answer.result().status_code for answer in answers) == {503: MANY}
