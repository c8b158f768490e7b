"""What is away is said when it goes, once a minute, and when it is back: each error once a minute."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from rq import Worker
from rq.exceptions import StopRequested
from tests.unit.extractor.conftest import Bench
from tests.unit.extractor.governing import FakeRedis

from taphouse.errors import StoreError
from taphouse.wire import Unconsumed
from taphouse_extractor import trouble as trouble_module
from taphouse_extractor.backlog import Backlog
from taphouse_extractor.governor.loop import Governor
from taphouse_extractor.governor.memory import Memory
from taphouse_extractor.governor.verdicts import Bounds
from taphouse_extractor.jobs import BatchWorker, run_worker
from taphouse_extractor.leases import keep_renewing
from taphouse_extractor.monitor import EngineMonitor
from taphouse_extractor.retention import Retention, RetentionPolicy
from taphouse_extractor.trouble import Trouble

AWAY = redis.ConnectionError("Redis is away")


class Rounds(threading.Event):
    """A `stop` that is set after so many rounds, and waits for nothing."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.left = rounds

    def wait(self, timeout: float | None = None) -> bool:
        self.left -= 1
        if self.left == 0:
            self.set()
        return self.is_set()


class Watched:
    """A `Trouble` on a clock of its own, and what it said."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now, self._caplog = 1000.0, caplog
        self._trouble = Trouble(logging.getLogger("test"), "feeder", lambda: self.now)
        caplog.set_level(logging.INFO)

    def rounds(self, *errors: Exception | None, every_s: float = 0.5) -> None:
        """A round for each: it failed by that error, or went well."""
        for error in errors:
            if error is None:
                self._trouble.over()
            else:
                self._trouble.met(error)
            self.now += every_s

    @property
    def said(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def watched(caplog: pytest.LogCaptureFixture) -> Watched:
    return Watched(caplog)


def test_lost_and_back_are_said_and_between_them_a_line_a_minute(watched: Watched) -> None:
    watched.rounds(None, *[AWAY] * 250, *[None] * 30, AWAY)
    assert watched.said == [
        "feeder waits: Redis is away",
        "feeder waits (for 60 s): Redis is away",
        "feeder waits (for 120 s): Redis is away",
        "feeder goes on after 125 s",
        "feeder waits: Redis is away",
    ]


def test_another_error_is_said_at_once_and_each_once_a_minute(watched: Watched) -> None:
    full = OSError("the disk is full")
    watched.rounds(*[AWAY, AWAY, full, full] * 35)  # 70 s
    assert watched.said == [
        "feeder waits: Redis is away",
        "feeder waits (for 1 s): the disk is full",
        "feeder waits (for 60 s): Redis is away",
        "feeder waits (for 61 s): the disk is full",
    ]


def test_a_round_that_goes_well_for_long_ends_it(watched: Watched) -> None:
    watched.rounds(AWAY, None)
    watched.now += 3600
    watched.rounds(AWAY)
    assert watched.said == ["feeder waits: Redis is away"] * 2


def test_errors_that_never_say_the_same_do_not_fill_the_log(watched: Watched) -> None:
    watched.rounds(*[OSError(f"try {n}") for n in range(100)])
    assert len(watched.said) == 10


@pytest.mark.parametrize(("well", "every_s"), [(1, 0.5), (3, 0.5), (1, 30.0)])
def test_a_loop_that_fails_now_and_then_is_in_trouble_all_the_time(
    watched: Watched, well: int, every_s: float
) -> None:
    again = [AWAY, *[None] * well]
    watched.rounds(*again * int(180 / every_s / len(again)), every_s=every_s)
    assert watched.said == [
        "feeder waits: Redis is away",
        "feeder waits (for 60 s): Redis is away",
        "feeder waits (for 120 s): Redis is away",
    ]


def test_what_nobody_foresaw_is_said_with_its_traceback_and_no_more_often(
    caplog: pytest.LogCaptureFixture, watched: Watched
) -> None:
    monitor = EngineMonitor(Mock(url="http://engine"))
    monitor.look = Mock(side_effect=[KeyError("steps")] * 40)  # type: ignore[method-assign]
    monitor.run(Rounds(40), 1.0)
    assert watched.said == ["engine http://engine waits: unexpected KeyError: 'steps'"]
    assert "Traceback" in caplog.text


def governor_of(_: Bench) -> Governor:
    return Governor(
        engines=[], memory=Memory(FakeRedis(), prefix="t", ttl_s=5.0), bounds=Bounds(), ttl_s=10.0
    )


def retention_of(bench: Bench) -> Retention:
    return Retention(bench.records, bench.ledger, RetentionPolicy("consumed"))


def backlog_of(bench: Bench) -> Backlog:
    return Backlog(bench.store, bench.ledger, 0)


WELL = Unconsumed(shards=0, bytes=0, slowest=[], counted=True)
FULL = StoreError("the disk is full")


@pytest.fixture
def calm_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trouble_module, "CALM_S", 0.0)


@pytest.mark.usefixtures("calm_at_once")
@pytest.mark.parametrize(
    ("make", "name", "error"),
    [
        (Bench.feeder, "step", AWAY),
        (governor_of, "step", AWAY),
        (retention_of, "step", FULL),
        (backlog_of, "look", FULL),
    ],
)
def test_a_loop_without_what_it_needs_does_not_fill_the_log(
    bench: Bench,
    make: Callable[[Bench], Any],
    name: str,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, stop = make(bench), Rounds(30)

    def step(*_: object) -> Unconsumed:
        if stop.left > 10:
            raise error
        return WELL

    setattr(loop, name, step)
    with caplog.at_level(logging.INFO):
        loop.run(stop) if isinstance(loop, Backlog) else loop.run(stop, 0.5)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and f"waits: {error}" in said[0] and "goes on after" in said[1]


@pytest.mark.usefixtures("calm_at_once")
def test_a_worker_without_redis_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    tries, enough = list[int](), threading.Event()

    def renew() -> None:
        tries.append(1)
        if len(tries) <= 20:
            raise AWAY
        if len(tries) == 30:
            enough.set()

    with caplog.at_level(logging.INFO), keep_renewing("the lease of a:1", renew, 0.001):
        assert enough.wait(10)
    assert [record.getMessage() for record in caplog.records] == [
        "the lease of a:1 waits: Redis is away",
        "the lease of a:1 goes on after 0 s",
    ]


@pytest.mark.parametrize("entered", [False, True])
def test_a_worker_that_finds_no_redis_says_so_once(
    entered: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 20:
            raise StopRequested

    def enter() -> None:
        if not entered:
            raise AWAY

    def refuse(*_: object, **__: object) -> None:
        raise AWAY

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(Worker, "__init__", rq_begins)
    monkeypatch.setattr(Worker, "heartbeat", refuse)
    monkeypatch.setattr(Worker, "work", lambda worker, **_: worker.dequeue_job_and_maintain_ttl(45))
    for name in ("set_state", "procline"):
        monkeypatch.setattr(Worker, name, lambda *_: None)
    with nullcontext() if entered else pytest.raises(StopRequested):
        run_worker("redis://none", "q", name="w", run=lambda *_: None, on_death=lambda *_: None, enter=enter)
    assert len(waits) == 20
    assert [record.getMessage() for record in caplog.records] == ["worker w waits: Redis is away"]


@pytest.mark.usefixtures("calm_at_once")
def test_a_workers_trouble_is_over_when_redis_has_its_signs_of_life(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, lost = list[object](), [True]

    def heartbeat(_: Worker, *said: object) -> None:
        given.append(said)

    def maintain(worker: Worker, *_: object) -> None:
        if lost[0]:
            raise AWAY
        worker.heartbeat(70)

    monkeypatch.setattr(Worker, "__init__", rq_begins)
    monkeypatch.setattr(Worker, "heartbeat", heartbeat)
    monkeypatch.setattr(Worker, "maintain_heartbeats", maintain)
    caplog.set_level(logging.INFO)
    worker = BatchWorker()
    worker.trouble = Trouble(logging.getLogger("test"), "worker w")
    job: Any = None
    for _ in range(5):
        worker.maintain_heartbeats(job, None)
        worker.heartbeat(60, object())  # nothing is sent yet
    lost[0] = False
    for _ in range(5):
        worker.maintain_heartbeats(job, None)
    assert given[-1] == (70, None)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["worker w waits: Redis is away", "worker w goes on after 0 s"]


def rq_begins(worker: Worker, *_: object, **__: object) -> None:
    """As much of a worker as its loop needs while Redis is away."""
    worker.name, worker.queues, worker.log = "w", [], logging.getLogger("rq.worker")
