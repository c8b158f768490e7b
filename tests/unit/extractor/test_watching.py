"""What a page that watches gets: events, history, and the page itself."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.types import Message
from tests.unit.extractor.conftest import TOKEN, Bench, Service

from taphouse.errors import StoreError
from taphouse.live import History
from taphouse.store import put_json
from taphouse.wire import (
    Batches,
    Consumer,
    Engine,
    Governor,
    GovernorMode,
    JobState,
    Latency,
    QueueStatus,
    Rate,
)
from taphouse_extractor.api import events as events_module
from taphouse_extractor.api.events import Watched
from taphouse_extractor.pulse import Pulse, Watchers, point_of
from taphouse_extractor.states import ACTIONS

Serve = Callable[..., Service]
AUTH = {"Authorization": f"Bearer {TOKEN}"}


@dataclass
class Event:
    name: str
    data: dict[str, Any]
    id: str | None


@contextmanager
def watching(service: Service, **headers: str) -> Iterator[Iterator[Event]]:
    """Events of an open stream, as they come."""
    with httpx.stream("GET", service.url + "/v1/events", headers={**AUTH, **headers}, timeout=20) as answer:
        assert (answer.status_code, answer.headers["content-type"]) == (
            200,
            "text/event-stream; charset=utf-8",
        )
        yield _events(answer.iter_lines())


def _events(lines: Iterator[str]) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield Event(fields["event"], json.loads(fields["data"]), fields.get("id"))
            fields = {}


def until(events: Iterator[Event], name: str, number: int = 1) -> list[Event]:
    """All events up to the `number`th of a name."""
    found = []
    for event in events:
        found.append(event)
        number -= event.name == name
        if not number:
            return found
    pytest.fail(f"the stream ended before {name}")


def test_a_stream_greets_then_tells_the_moment_jobs_and_shards(serve: Serve) -> None:
    service = serve()
    record = service.bench.job([{"prompt": f"p{n}"} for n in range(6)], batch_size=2)
    service.bench.run_all(record)
    with watching(service) as events:
        said = until(events, "shard", 3)
    assert [event.name for event in said] == ["hello", "moment", "jobs", "shard", "shard", "shard"]
    hello, moment, jobs, *shards = said
    assert (hello.data["role"], hello.data["governor"]) == ("admin", True)
    assert hello.data["job_actions"]["queued"] == list(ACTIONS[JobState.QUEUED])
    assert moment.data["status"]["ledger_head"] == 3
    assert moment.data["point"]["at"] == moment.data["status"]["updated_at"]
    assert [job["succeeded"] for job in jobs.data["jobs"]] == [6]
    assert [(event.id, event.data["seq"], event.data["samples"]) for event in shards] == [
        ("1", 1, 2),
        ("2", 2, 2),
        ("3", 3, 2),
    ]


def test_a_stream_goes_on_after_the_last_id(serve: Serve) -> None:
    service = serve()
    service.bench.run_all(service.bench.job([{"prompt": "x"}] * 3, batch_size=1))
    with watching(service, **{"Last-Event-ID": "2"}) as events:
        assert [event.id for event in until(events, "shard") if event.name == "shard"] == ["3"]
        service.bench.run_all(service.bench.job([{"prompt": "y"}], batch_size=1))
        news = until(events, "shard")
        assert (news[-1].id, "jobs" in {event.name for event in news}) == ("4", True)


def test_jobs_are_told_only_when_they_changed(serve: Serve) -> None:
    service = serve()
    with watching(service) as events:
        quiet = [event.name for event in until(events, "moment", 3)]
        assert quiet == ["hello", "moment", "jobs", "moment", "moment"]
        service.bench.job([{"prompt": "x"}])
        assert until(events, "jobs")[-1].data["jobs"][0]["state"] == "queued"


def test_an_id_that_is_none_is_refused(serve: Serve) -> None:
    answer = httpx.get(serve().url + "/v1/events", headers={**AUTH, "Last-Event-ID": "x"})
    assert answer.status_code == 422


def test_streams_are_bounded_and_counted_down(serve: Serve) -> None:
    service = serve(watchers=Watchers(1))
    with watching(service) as events:
        until(events, "moment")
        refused = httpx.get(service.url + "/v1/events", headers=AUTH)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "10")
    for _ in range(100):
        with httpx.stream("GET", service.url + "/v1/events", headers=AUTH) as again:
            if again.status_code == 200:
                return
    pytest.fail("a stream that was left is still counted")


@pytest.mark.parametrize("ends_by", ["its deadline", "the end of the process"])
def test_a_stream_that_nobody_reads_gives_its_place_back(
    ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "GRACE_S", 0.05)
    watchers, leaving = Watchers(1, longest_s=0.1 if ends_by == "its deadline" else 3600), threading.Event()
    stuck = asyncio.Event()

    async def said() -> AsyncIterator[str]:
        yield "event: hello"

    async def never_taken(message: Message) -> None:
        if message["type"] == "http.response.body":
            stuck.set()
            await asyncio.Event().wait()

    async def stream() -> None:
        assert watchers.enter("ci") is None
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        over = asyncio.ensure_future(Watched(said(), watchers, "ci", leaving)(scope, never, never_taken))
        await stuck.wait()
        assert watchers.enter("ci") is not None
        if ends_by != "its deadline":
            leaving.set()
        await asyncio.wait_for(over, 10)

    asyncio.run(stream())
    assert watchers.open == 0


async def never() -> Message:
    """A client that says nothing and stays."""
    return await asyncio.get_running_loop().create_future()


def test_one_token_cannot_take_all_streams() -> None:
    watchers = Watchers(3, each=2)
    assert [watchers.enter("ci") for _ in range(2)] == [None, None]
    assert watchers.enter("ci") == "2 streams are open already with this token"
    assert watchers.enter("ops") is None
    assert watchers.enter("other") == "3 streams are open already"
    watchers.leave("ci")
    assert watchers.enter("other") is None


def test_many_at_once_are_no_more_than_may_be(serve: Serve) -> None:
    url = serve(watchers=Watchers(3)).url + "/v1/events"

    async def status(client: httpx.AsyncClient, all_asked: asyncio.Barrier) -> int:
        async with client.stream("GET", url, headers=AUTH) as answer:
            await all_asked.wait()
            return answer.status_code

    async def statuses() -> list[int]:
        async with httpx.AsyncClient(timeout=20) as client:
            all_asked = asyncio.Barrier(60)
            return await asyncio.gather(*(status(client, all_asked) for _ in range(60)))

    assert Counter(asyncio.run(statuses())) == {200: 3, 429: 57}


def test_a_store_that_cannot_be_read_is_a_problem_not_an_end(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve()

    def broken(directory: str) -> None:
        raise StoreError("the disk is gone")

    with watching(service) as events:
        until(events, "moment")
        with monkeypatch.context() as patch:
            patch.setattr(service.bench.store, "stamp", broken)
            assert "the disk is gone" in until(events, "problem")[-1].data["message"]
        until(events, "moment")


def test_the_page_and_its_parts_need_no_token_and_load_nothing_else(serve: Serve) -> None:
    service = serve()
    page = httpx.get(service.url)
    policy = page.headers["content-security-policy"]
    assert page.status_code == 200 and "default-src 'none'" in policy and "unsafe" not in policy
    parts = [piece.split('"')[0] for piece in page.text.split('"dashboard/')[1:]]
    assert {"app.js", "style.css", "uplot.min.js"} <= set(parts)
    for part in parts:
        answer = httpx.get(f"{service.url}/dashboard/{part}")
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        again = httpx.get(
            f"{service.url}/dashboard/{part}", headers={"If-None-Match": answer.headers["etag"]}
        )
        assert (again.status_code, again.content) == (304, b"")
    assert "<script>" not in page.text and " style=" not in page.text and " onclick=" not in page.text
    assert "//" not in page.text.replace("<!--", "")


@pytest.mark.parametrize("name", ["..%2fmain.py", "%2e%2e/main.py", "__init__.py", "x" * 500])
def test_nothing_else_comes_out_of_the_pages_directory(serve: Serve, name: str) -> None:
    answer = httpx.get(f"{serve().url}/dashboard/{name}")
    assert answer.status_code == 404 and "import" not in answer.text


def test_history_is_an_hour_and_no_more(bench: Bench) -> None:
    ticks = iter(range(100_000))

    def status() -> QueueStatus:
        return bench.overview.queue(None).model_copy(update={"updated_at": float(next(ticks))})

    pulse = Pulse(status, list, every_s=600, clock=lambda: float(next(ticks)))
    for _ in range(20):
        pulse.keep()
    points = History.model_validate_json(pulse.history().model_dump_json()).points
    assert len(points) == 6
    assert [point.at for point in points] == sorted({point.at for point in points})


def test_many_who_look_at_once_are_one_look() -> None:
    looks: list[int] = []
    quiet = QueueStatus(
        depth=Batches(),
        jobs={},
        rows_left=0,
        rates=[Rate(window_s=60)],
        workers=[],
        engines=[],
        consumers=[],
        ledger_head=0,
        updated_at=1.0,
    )

    def status() -> QueueStatus:
        looks.append(1)
        return quiet

    now = [0.0]
    pulse = Pulse(status, list, clock=lambda: now[0])
    threads = [threading.Thread(target=pulse.look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(looks) == 1
    now[0] = 1.0
    pulse.look()
    assert len(looks) == 2


def test_a_gap_is_kept_where_nothing_could_be_seen() -> None:
    def status() -> QueueStatus:
        raise StoreError("away")

    pulse = Pulse(status, list)
    pulse.keep()
    assert pulse.history().points == []


def test_what_nobody_expected_and_a_clock_that_is_set_back_do_not_end_the_history(bench: Bench) -> None:
    at = [1000.0]

    def status() -> QueueStatus:
        if not at[0]:
            raise RuntimeError("nobody expected this")
        return bench.overview.queue(None).model_copy(update={"updated_at": at[0]})

    pulse = Pulse(status, list, clock=lambda: float(next(ticks)))
    ticks = iter(range(100))
    for at[0] in (1000.0, 1010.0, 0.0, 990.0, 1005.0):
        pulse.keep()
    assert [point.at for point in pulse.history().points] == [990.0, 1005.0]


def test_a_point_says_whose_latency_it_is(bench: Bench) -> None:
    base = bench.overview.queue(None)
    governor = Governor(
        mode=GovernorMode.AUTO, reason="", busy_ms=2.5, itl_p95_s=0.03, itl_p95_baseline_s=0.029
    )
    engine = Engine(url="http://e", capture="on", latency=Latency(window_s=60, itl_p95=0.5, ttft_p95=0.7))
    governed = point_of(base.model_copy(update={"governor": governor, "engines": [engine]}))
    assert (governed.itl_p95_s, governed.itl_held_to_s, governed.limit_ms, governed.mixed) == (
        0.03,
        0.029,
        2.5,
        False,
    )
    stopped = governor.model_copy(update={"stopped": True})
    assert point_of(base.model_copy(update={"governor": stopped})).limit_ms == 0.0
    alone = point_of(base.model_copy(update={"governor": None, "engines": [engine]}))
    assert (alone.itl_p95_s, alone.ttft_p95_s, alone.mixed, alone.limit_ms) == (0.5, 0.7, True, None)


def test_a_point_keeps_the_trainers_heard_of_last(bench: Bench) -> None:
    for number in range(6):
        put_json(
            bench.store,
            f"consumers/t{number}.json",
            Consumer(name=f"t{number}", cursor=0, loss=float(number), updated_at=float(number)).model_dump(),
        )
    point = point_of(bench.overview.queue(None))
    assert [(trainer.name, trainer.loss) for trainer in point.trainers] == [
        ("t5", 5.0),
        ("t4", 4.0),
        ("t3", 3.0),
        ("t2", 2.0),
    ]
