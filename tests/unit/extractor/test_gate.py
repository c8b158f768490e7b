from __future__ import annotations

import pytest
import redis
from tests.unit.extractor.conftest import Bench

from taphouse.errors import StoreDenied, StoreError, StoreFull
from taphouse.store import LocalStore
from taphouse_extractor.errors import NotAccepting
from taphouse_extractor.gate import Gate, WriteProbe


class Failing(LocalStore):
    """A store whose `error` every write and look at its space meets."""

    error: StoreError | None = None
    puts = 0

    def put(self, path: str, data: bytes, *, durable: bool = True) -> None:
        self.puts += 1
        if self.error is not None:
            raise self.error
        super().put(path, data, durable=durable)


@pytest.fixture
def store(bench: Bench) -> Failing:
    return Failing(bench.store.root)


@pytest.mark.parametrize("error", [StoreFull("no room"), StoreDenied("read-only"), StoreError("I/O error")])
def test_a_store_that_takes_no_writes_is_looked_at_again_in_a_while(
    store: Failing, error: StoreError
) -> None:
    now = [0.0]
    probe = WriteProbe(store, every_s=2.0, clock=lambda: now[0])
    assert probe.problem() is None
    store.error = error
    now[0] = 1.9
    assert probe.problem() is None
    now[0] = 2.0
    assert probe.problem() == f"the store takes no writes: {error.message}"
    store.error = None
    now[0] = 3.9
    assert probe.problem() is not None
    now[0] = 4.0
    assert probe.problem() is None
    assert store.puts == 3


def test_nothing_is_admitted_or_fed_while_it_takes_none(bench: Bench, store: Failing) -> None:
    store.error = StoreDenied("it is read-only")
    gate = Gate(store, bench.monitors, 0)
    assert gate.paused() == gate.disk_problem() == "the store takes no writes: it is read-only"
    with pytest.raises(NotAccepting, match="read-only"):
        gate.admit()


def test_a_store_that_is_gone_is_a_reason_and_no_error(bench: Bench) -> None:
    gate = Gate(bench.store, bench.monitors, 0)
    assert gate.paused() is None
    bench.store.root.rename(bench.store.root.with_name("elsewhere"))
    assert "the store can't be used" in (gate.paused() or "")


def test_a_redis_that_takes_no_writes_still_tells_what_it_holds(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = bench.job([{"prompt": "p"}])
    bench.queue.enqueue(bench_ref := next(iter(bench.progress.refresh()[0].pending())))

    def full() -> None:
        raise redis.OutOfMemoryError("used memory > 'maxmemory'")

    monkeypatch.setattr(bench.leases, "probe", full)
    live = bench.overview.live()
    assert live.queued == {bench_ref}
    assert bench_ref.job_id == job.id
    assert bench.overview.queue(None).paused == "Redis takes no writes: used memory > 'maxmemory'"
