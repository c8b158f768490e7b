"""What is away for long is said once when it goes, once a minute, and once when it is back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import httpx
import pytest
import redis
import uvicorn
from tests.unit.extractor.conftest import Bench
from tests.unit.extractor.governing import FakeRedis

from taphouse_extractor.feeder import Feeder, FeederLimits
from taphouse_extractor.governor.loop import Governor
from taphouse_extractor.governor.memory import Memory
from taphouse_extractor.governor.verdicts import Bounds
from taphouse_extractor.serving import Server
from taphouse_extractor.trouble import Trouble

AWAY = redis.ConnectionError("Redis is away")


def test_lost_and_back_are_said_at_once_and_between_them_a_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 1000.0
    trouble = Trouble(logging.getLogger("test"), "feeder", lambda: now)
    with caplog.at_level(logging.INFO):
        trouble.over()
        for _ in range(250):  # half a second each
            trouble.met(AWAY)
            now += 0.5
        trouble.over()
        trouble.over()
        trouble.met(AWAY)
    assert [record.getMessage() for record in caplog.records] == [
        "feeder waits: Redis is away",
        "feeder waits (for 60 s): Redis is away",
        "feeder waits (for 120 s): Redis is away",
        "feeder goes on after 125 s",
        "feeder waits: Redis is away",
    ]


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


def feeder_of(bench: Bench) -> Feeder:
    return Feeder(
        records=bench.records,
        progress=bench.progress,
        ledger=bench.ledger,
        queue=bench.queue,  # type: ignore[arg-type]
        leases=bench.leases,  # type: ignore[arg-type]
        limits=FeederLimits(max_queued=3, max_attempts=2, start_grace_s=5.0),
        give_up=bench.pipeline.give_up,
        paused=lambda: None,
    )


def governor_of(_: Bench) -> Governor:
    return Governor(
        engines=[], memory=Memory(FakeRedis(), prefix="t", ttl_s=5.0), bounds=Bounds(), ttl_s=10.0
    )


@pytest.mark.parametrize("make", [feeder_of, governor_of])
def test_a_loop_without_redis_does_not_fill_the_log(
    bench: Bench,
    make: Callable[[Bench], Feeder | Governor],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, stop = make(bench), Rounds(30)

    def step() -> bool:
        if stop.left > 10:
            raise AWAY
        return False

    monkeypatch.setattr(loop, "step", step)
    with caplog.at_level(logging.INFO):
        loop.run(stop, 0.5)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "waits: Redis is away" in said[0] and "goes on after" in said[1]


def test_a_server_says_once_where_it_serves(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: object, receive: object, send: Callable[..., object]) -> None:
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    leaving = threading.Event()
    server = Server(
        uvicorn.Config(app, port=0, lifespan="off", log_level="warning"), leaving, {"governor": "on"}
    )
    thread = threading.Thread(target=server.run, daemon=True)
    with caplog.at_level(logging.INFO, "taphouse_extractor"):
        thread.start()
        try:
            until = time.monotonic() + 10
            while not caplog.records and time.monotonic() < until:
                thread.join(0.01)
            [line] = caplog.records
            status = httpx.get(line.address).status_code
        finally:
            server.handle_exit(15, None)
            thread.join(10)
    assert (line.getMessage(), line.governor, status) == ("serves", "on", 204)
    assert leaving.is_set() and not thread.is_alive()
