"""What waits for a consumer is told, and one that will not go on is forgotten."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.extractor.conftest import Bench, Service
from tests.unit.extractor.test_backlog import Clock, backlog, consumer, sealed

from taphouse.errors import Conflict, NotFound
from taphouse.store import put_json
from taphouse.wire import Check
from taphouse_extractor import backlog as backlog_module
from taphouse_extractor import consumers
from taphouse_extractor.retention import Retention, RetentionPolicy

Serve = Callable[..., Service]


def test_the_queue_says_how_much_waits_and_for_whom(bench: Bench) -> None:
    sizes = sealed(bench, 3)
    count = backlog(bench, 0)
    told = count.shown()
    assert told is not None
    assert (told.shards, told.bytes, told.bound_bytes, told.slowest) == (3, sum(sizes), None, [])
    consumer(bench, 2, "slow")
    consumer(bench, 3, "fast")
    told = count.shown()
    assert told is not None
    assert (told.shards, told.bytes, told.slowest) == (1, sizes[2], ["slow"])
    bench.store.put("consumers/slow.json", b"not json")
    assert count.shown() is None


def test_a_recount_shows_the_old_count_until_it_is_whole(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    sizes = sealed(bench, 4)
    count = backlog(bench, 0, clock)
    assert count.look().bytes == sum(sizes)
    bench.ledger.remove(1, "deleted")
    assert count.look().shards == 4, "not looked at again yet"
    clock.now += backlog_module.RECOUNT_S
    monkeypatch.setattr(backlog_module, "COUNTED_AT_ONCE", 2)
    assert (count.look().shards, count.look().shards) == (4, 3)
    assert count.look().bytes == sum(sizes[1:])


def test_retention_says_which_consumer_holds_it(bench: Bench) -> None:
    sealed(bench, 2)

    def told(mode: str) -> tuple[str | None, list[str]]:
        policy = RetentionPolicy(mode, 60.0)  # type: ignore[arg-type]
        said = Retention(bench.records, bench.ledger, policy, lambda: 1000.0).shown()
        assert said is not None and said.mode == mode
        assert (said.age_s is not None) == (mode == "age")
        return said.held, said.held_by

    assert told("consumed") == ("no consumer is registered", [])
    assert told("age") == (None, [])
    consumer(bench, 2, "old", acknowledged=1, ended="data ended", updated_at=900.0)
    consumer(bench, 2, "quiet", acknowledged=1, updated_at=100.0)
    consumer(bench, 2, "new", acknowledged=2, updated_at=999.0)
    held, by = told("consumed")
    assert by == ["old", "quiet"]
    assert held is not None and "consumers forget old" in held and "quiet (silent for 900 s)" in held
    assert told("keep") == (None, [])


def test_feeding_says_that_it_waits_for_one_that_ended(bench: Bench) -> None:
    sealed(bench, 2)
    consumer(bench, 0, "t", ended="stopped after 10 steps")
    said = backlog(bench, 1).problem()
    assert said is not None and "consumer t (ended: `taphouse consumers forget t` if for good)" in said


def test_one_that_runs_is_not_forgotten(bench: Bench) -> None:
    consumer(bench, 3, "t", loss=1.5)
    with (
        bench.store.lock("consumers/t.lock", wait=False),
        pytest.raises(consumers.Conflict, match="running"),
    ):
        consumers.forget(bench.store, "t")
    assert consumers.forget(bench.store, "t").cursor == 3
    assert consumers.registered(bench.store) == []
    for name in ("t", "..", "../t", "t.lock", ""):
        with pytest.raises(consumers.NotFound):
            consumers.forget(bench.store, name)


def test_a_record_that_can_not_be_read_is_forgotten_too(bench: Bench) -> None:
    bench.store.put("consumers/t.json", b"not json")
    assert consumers.forget(bench.store, "t").cursor is None
    assert consumers.names(bench.store) == []


@pytest.mark.parametrize("bad", [{"cursor": -5}, {"acknowledged": -1}])
def test_a_record_that_no_consumer_writes_is_refused_by_its_name(bench: Bench, bad: dict[str, int]) -> None:
    put_json(bench.store, "consumers/odd.json", bad)
    sealed(bench, 2)
    assert "consumers/odd.json is no consumer's record" in (backlog(bench, 1).problem() or "")


@pytest.mark.parametrize("bad", [b"not json", b"[]", b'{"cursor": -5}', b"\xff"])
def test_the_doctor_shows_a_record_that_can_not_be_read_and_its_advice_works(
    serve: Serve, bad: bytes
) -> None:
    service = serve()
    put_json(service.bench.store, "consumers/good.json", {"cursor": 0, "updated_at": time.time()})
    service.bench.store.put("consumers/odd.json", bad)

    def shown() -> dict[str, Check]:
        return {check.check: check for check in service.client.doctor() if "consumer" in check.check}

    checks = shown()
    assert (checks["consumer good"].ok, checks["consumer odd"].ok) == (True, False)
    assert "consumers/odd.json is no" in checks["consumer odd"].detail
    assert "`taphouse consumers forget odd`" in (checks["consumer odd"].advice or "")
    service.client.forget_consumer("odd")
    assert set(shown()) == {"consumer good"}


def test_a_copied_record_goes_by_its_own_name(bench: Bench) -> None:
    consumer(bench, 1, "draft")
    bench.store.put("consumers/copy.json", bench.store.read("consumers/draft.json"))
    assert [found.name for found in consumers.registered(bench.store)] == ["copy", "draft"]


def test_it_is_a_door_of_its_own(serve: Serve) -> None:
    service = serve()
    sealed(service.bench, 2)
    consumer(service.bench, 1, "t", acknowledged=1)
    status = service.client.queue()
    assert status.unconsumed is not None and status.unconsumed.slowest == ["t"]
    assert status.retention is not None and status.retention.held_by == ["t"]
    with service.bench.store.lock("consumers/t.lock", wait=False), pytest.raises(Conflict):
        service.client.forget_consumer("t")
    assert service.client.forget_consumer("t").acknowledged == 1
    with pytest.raises(NotFound):
        service.client.forget_consumer("t")
    status = service.client.queue()
    assert status.consumers == [] and status.unconsumed is not None and status.unconsumed.shards == 2


def test_metrics_have_it(serve: Serve) -> None:
    service = serve()
    sizes = sealed(service.bench, 3)
    consumer(service.bench, 1, "t")
    text = httpx.get(service.url + "/metrics").text
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("taphouse_unconsumed")
    }
    assert found == {"taphouse_unconsumed_shards": 2, "taphouse_unconsumed_bytes": sum(sizes[1:])}
