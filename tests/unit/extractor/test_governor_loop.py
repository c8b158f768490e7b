"""The governor's thread against a fake engine and Redis in memory: one leads, quotas end, state survives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.queue.fake_tap import FakeTap, two_classes
from tests.unit.extractor.governed import Clock, ModelledEngine
from tests.unit.extractor.governing import FakeRedis, Production

from taphouse.store import LocalStore
from taphouse.wire import GovernorMode, GovernorOrder
from taphouse_extractor.errors import EngineTimeout, EngineUnavailable
from taphouse_extractor.governor.loop import Governor
from taphouse_extractor.governor.memory import Memory
from taphouse_extractor.governor.orders import Orders
from taphouse_extractor.governor.panel import Panel
from taphouse_extractor.governor.state import AUTO, Order
from taphouse_extractor.governor.verdicts import Bounds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> FakeRedis:
    return FakeRedis()


@pytest.fixture
def memory(store: FakeRedis, clock: Clock) -> Memory:
    return Memory(store, prefix="t", ttl_s=5.0, now=clock)


@pytest.fixture
def engine(tap: FakeTap) -> ModelledEngine:
    return ModelledEngine(Production(a=0.01), tap)


@pytest.fixture
def other_tap(tmp_path: Path) -> FakeTap:
    return FakeTap(tmp_path / "other")


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    return Orders(LocalStore(tmp_path / "store"))


Make = Callable[..., Governor]


@pytest.fixture
def make(engine: ModelledEngine, store: FakeRedis, orders: Orders, clock: Clock) -> Make:
    def governor(
        name: str = "one", engines: list[Any] | None = None, order: Callable[[], Order] = orders.now
    ) -> Governor:
        memory = Memory(store, prefix="t", ttl_s=5.0, now=clock)
        made = engines or [engine]
        return Governor(
            engines=made,
            memory=memory,
            bounds=Bounds(),
            ttl_s=10.0,
            order=order,
            name=name,
            monotonic=clock,
            now=clock,
        )

    return governor


def run(governor: Governor, clock: Clock, seconds: float) -> int:
    """Ticks of that time; how many acted."""
    acted = 0
    for _ in range(int(seconds / 0.5)):
        clock.now += 0.5
        acted += governor.step()
    return acted


def learn(governor: Governor, engine: ModelledEngine, clock: Clock) -> None:
    engine.production.wanted = False
    run(governor, clock, 20)
    engine.production.wanted = True


def test_it_moves_the_engines_quota(make: Make, engine: ModelledEngine, memory: Memory, clock: Clock) -> None:
    governor = make()
    learn(governor, engine, clock)
    run(governor, clock, 60)
    view = memory.view()
    assert view is not None and view.busy_ms is not None and view.busy_ms > 2
    last = engine.tap.quotas[-1]
    assert last["busy_ms"] == pytest.approx(view.busy_ms, abs=0.11) and last["ttl_s"] == 10.0
    assert last["note"].startswith("governor: ") and len(last["note"]) <= 200 and not last["stopped"]
    assert view.slowdown is not None and 0.9 < view.slowdown < 1.15
    assert view.itl_p95_s is not None and view.itl_p95_baseline_s is not None
    assert view.itl_p95_s == pytest.approx(view.itl_p95_baseline_s, rel=0.15)


def test_a_quota_is_renewed_while_it_stands_and_ends_by_itself(
    make: Make, engine: ModelledEngine, orders: Orders, clock: Clock
) -> None:
    orders.give(GovernorOrder(mode=GovernorMode.PINNED, busy_ms=7.0))
    run(make(), clock, 30)
    assert {quota["busy_ms"] for quota in engine.tap.quotas} == {7.0}
    assert 8 <= len(engine.tap.quotas) <= 11  # a third of its time, not each tick
    assert engine.tap.quota()["busy_ms"] == 7.0
    engine.tap.quotas[-1]["expires_at"] = time.time() - 1
    assert engine.tap.quota()["note"] == "the engine's settings"


def test_an_engine_that_hangs_holds_up_neither_the_others_nor_each_tick(
    make: Make, engine: ModelledEngine, memory: Memory, clock: Clock, other_tap: FakeTap
) -> None:
    asked: list[float] = []

    class Hanging(ModelledEngine):
        url = "http://hangs"

        def status(self, *, timeout_s: float = 5.0) -> dict[str, Any]:
            asked.append(clock.now)
            clock.now += timeout_s
            raise EngineTimeout(f"the engine at {self.url} did not answer in time")

    hangs = Hanging(Production(a=0.01), other_tap)
    assert run(make(engines=[hangs, engine]), clock, 20) == 40
    assert len(asked) == 4 and not hangs.tap.quotas
    assert engine.tap.quotas and "http://hangs did not answer" in str(memory.view())


def test_two_leaders_never_act_at_once(
    make: Make, engine: ModelledEngine, store: FakeRedis, clock: Clock
) -> None:
    first, second = make("first"), make("second")
    for _ in range(10):
        clock.now += 0.5
        assert (first.step(), second.step()) == (True, False)
    store.expire("t:governor-leader")
    clock.now += 0.5
    assert (second.step(), first.step()) == (True, False)


def test_one_that_lost_its_lease_in_the_middle_of_a_tick_does_not_act(
    make: Make, engine: ModelledEngine, store: FakeRedis, clock: Clock
) -> None:
    first = make("first")
    run(first, clock, 2)
    told = len(engine.tap.quotas)
    kept = dict(store.values)

    class Slow(ModelledEngine):
        def status(self, *, timeout_s: float = 5.0) -> dict[str, Any]:
            store.values["t:governor-leader"] = "second"  # it took so long that another became the leader
            return super().status()

    first._links[0].engine = Slow(engine.production, engine.tap)
    clock.now += 4
    assert not first.step()
    assert len(engine.tap.quotas) == told
    assert store.values["t:governor-state"] == kept["t:governor-state"]


def test_the_next_leader_goes_on_where_the_last_one_was(
    make: Make, engine: ModelledEngine, memory: Memory, store: FakeRedis, clock: Clock
) -> None:
    first = make("first")
    learn(first, engine, clock)
    run(first, clock, 60)
    before = memory.view()
    assert before is not None and before.busy_ms is not None and before.busy_ms > 2
    store.expire("t:governor-leader")  # killed
    second = make("second")
    run(second, clock, 0.5)
    after = memory.view()
    assert after is not None and after.busy_ms == before.busy_ms
    run(second, clock, 10)
    later = memory.view()
    assert later is not None and "baseline yet" not in later.reason and "probe" not in later.reason


def test_a_trip_outlives_its_leader(
    make: Make, engine: ModelledEngine, store: FakeRedis, memory: Memory, clock: Clock
) -> None:
    first = make("first")
    learn(first, engine, clock)
    run(first, clock, 10)
    engine.production.failing = 1
    run(first, clock, 0.5)
    assert engine.tap.quota()["stopped"]
    store.expire("t:governor-leader")
    second = make("second")
    run(second, clock, 20)
    view = memory.view()
    assert view is not None and view.stopped and "failed" in view.reason
    run(second, clock, 12)
    assert not engine.tap.quota()["stopped"]


def test_orders_are_followed_within_a_tick(
    make: Make, engine: ModelledEngine, orders: Orders, clock: Clock
) -> None:
    governor = make()
    run(governor, clock, 2)
    orders.give(GovernorOrder(mode=GovernorMode.STOPPED))
    run(governor, clock, 0.5)
    assert engine.tap.quota()["stopped"] and engine.tap.quota()["expires_at"] is None
    orders.give(GovernorOrder(mode=GovernorMode.AUTO))
    run(governor, clock, 0.5)
    assert not engine.tap.quota()["stopped"] and engine.tap.quota()["expires_at"] is not None


def test_who_takes_an_order_governs_since_another_may_have_lost_sight_of_the_store(
    make: Make, engine: ModelledEngine, orders: Orders, clock: Clock, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    blind = Orders(LocalStore(away))
    first, second = make("first", order=blind.now), make("second")
    run(first, clock, 2)
    away.rmdir()  # on its host the disk is gone
    panel = Panel(second._memory, orders, enabled=True, lead=second.take_over)
    panel.give(GovernorOrder(mode=GovernorMode.STOPPED))
    clock.now += 0.5
    assert blind.look() == AUTO and not first.step() and second.step()
    assert engine.tap.quota()["stopped"]


@pytest.mark.parametrize("section", [{"scheduler": "absent", "reason": "no flag"}, None])
def test_an_engine_without_the_scheduler_is_stopped_and_allowed(
    make: Make, engine: ModelledEngine, memory: Memory, clock: Clock, section: dict[str, Any] | None
) -> None:
    engine.tap.isolation = None if section is None else {**two_classes(), **section}
    governor = make(order=lambda: Order(GovernorMode.PINNED, 0.0))
    run(governor, clock, 2)
    view = memory.view()
    assert view is not None and "without the two-class scheduler" in view.reason
    if section is None:  # it has no quota to set either, which is said
        assert "quota can't be set" in view.reason and engine.tap.quotas == []
        return
    assert engine.tap.quota()["stopped"]
    engine.production.streams = 0
    run(governor, clock, 1)
    assert not engine.tap.quota()["stopped"]  # nothing beside production, everything without it


def test_an_engine_that_is_away_or_speaks_nonsense_changes_nothing(
    make: Make, engine: ModelledEngine, memory: Memory, clock: Clock
) -> None:
    governor = make()
    learn(governor, engine, clock)
    run(governor, clock, 20)
    before = memory.view()
    engine.away = "connection refused"
    run(governor, clock, 5)
    away = memory.view()
    assert before is not None and away is not None
    assert away.busy_ms == before.busy_ms and "connection refused" in away.reason
    engine.away = None
    run(governor, clock, 3)
    back = memory.view()
    assert back is not None and "refused" not in back.reason


def test_an_engine_that_restarts_is_followed_anew(
    make: Make, engine: ModelledEngine, memory: Memory, clock: Clock
) -> None:
    governor = make()
    learn(governor, engine, clock)
    run(governor, clock, 10)
    engine._itl, engine._ttft = {}, {}
    assert engine.tap.isolation is not None
    engine.tap.isolation["steps"]["extraction_tokens"] = 0
    engine.tap.quotas.clear()
    run(governor, clock, 5)
    view = memory.view()
    assert view is not None and not view.stopped and engine.tap.quotas


def test_an_engine_that_takes_no_quota_is_said_once_a_minute_and_when_it_does(
    make: Make, engine: ModelledEngine, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        url, refuses = engine.url, True
        status = staticmethod(engine.status)

        def set_quota(self, quota: dict[str, Any]) -> None:
            if self.refuses:
                raise EngineUnavailable("it is full")
            engine.set_quota(quota)

    refusing = Refusing()
    governor = make(engines=[refusing])
    with caplog.at_level(logging.INFO):
        run(governor, clock, 90)
        refusing.refuses = False
        run(governor, clock, 20)
    said = [text for record in caplog.records if "the quota of" in (text := record.getMessage())]
    assert [text.partition(" (for")[0].partition(" after")[0] for text in said] == [
        "governor: the quota of http://modelled waits: it is full",
        "governor: the quota of http://modelled waits",
        "governor: the quota of http://modelled goes on",
    ]


def test_the_thread_outlives_every_error(make: Make, store: FakeRedis) -> None:
    class Broken:
        url = "http://broken"
        asked = 0

        def status(self, *, timeout_s: float = 5.0) -> dict[str, Any]:
            self.asked += 1
            store.away = self.asked == 2
            if self.asked == 1:
                raise ZeroDivisionError("nobody expected this")
            return {"capture": "on"}

        def set_quota(self, quota: dict[str, Any]) -> None:
            raise AssertionError("an engine without any section is left alone")

    broken, stop = Broken(), threading.Event()
    memory = Memory(store, prefix="t", ttl_s=5.0)
    governor = Governor(engines=[broken], memory=memory, bounds=Bounds(), ttl_s=10.0, name="one")
    thread = threading.Thread(target=governor.run, args=(stop, 0.05))
    thread.start()
    deadline = time.monotonic() + 10
    while broken.asked < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    store.away = False
    while broken.asked < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    stop.set()
    thread.join(5)
    assert broken.asked >= 4 and not thread.is_alive()
    assert memory.leader() is None  # it handed over


def test_what_redis_holds_may_be_lost_or_broken(
    make: Make, engine: ModelledEngine, memory: Memory, store: FakeRedis, clock: Clock
) -> None:
    store.values |= {
        "t:governor-state": '{"at": 1}',
        "t:governor-baseline": "{",
    }
    assert memory.view() is None
    governor = make()
    run(governor, clock, 1)
    store.values.clear()
    assert run(governor, clock, 6) == 12
    assert {"t:governor-state", "t:governor-baseline"} <= store.values.keys()


def test_an_old_view_says_that_nobody_leads(make: Make, memory: Memory, clock: Clock) -> None:
    run(make(), clock, 1)
    clock.now += 60
    view = memory.view()
    assert view is not None and "no governor has led for 60 s" in view.reason
