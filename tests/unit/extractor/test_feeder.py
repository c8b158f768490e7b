from __future__ import annotations

import os
import time

import pytest
from tests.unit.extractor.conftest import Bench

from taphouse.errors import StoreFull, WrongStore
from taphouse.ledger import Reconciliation
from taphouse.shards import shard_path
from taphouse.wire import JobOptions, PruneRequest
from taphouse_extractor import feeder as feeder_module
from taphouse_extractor import moves
from taphouse_extractor.feeder import Feeder
from taphouse_extractor.leases import Tries, Waits
from taphouse_extractor.moves import Moves
from taphouse_extractor.records import BatchRef, JobRecord
from taphouse_extractor.retention import Retention, RetentionPolicy
from taphouse_extractor.spool import Limits, Spool
from taphouse_extractor.stands import Stands


class Clock:
    """`time` as the feeder sees it."""

    def __init__(self) -> None:
        self.now = time.time()
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(feeder_module, "time", clock)
    return clock


class Pause:
    reason: str | None = None

    def __call__(self) -> str | None:
        return self.reason


@pytest.fixture
def pause() -> Pause:
    return Pause()


@pytest.fixture
def feeder(bench: Bench, clock: Clock, pause: Pause) -> Feeder:
    return bench.feeder(paused=pause)


def refs(job_id: str, *batches: int) -> list[BatchRef]:
    return [BatchRef(job_id=job_id, batch=batch) for batch in batches]


def rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"p{n}"} for n in range(count)]


def test_the_queue_is_filled_to_its_bound_oldest_job_first(bench: Bench, feeder: Feeder) -> None:
    job = bench.job(rows(5), batch_size=1)
    assert feeder.step() == 3
    assert list(bench.queue.queued.values()) == refs(job.id, 0, 1, 2)
    assert feeder.step() == 0
    bench.pipeline.run(bench.queue.take())
    bench.queue.taken.clear()
    assert feeder.step() == 1
    assert list(bench.queue.queued.values()) == refs(job.id, 1, 2, 3)


def test_a_batch_that_is_held_is_left_alone(bench: Bench, feeder: Feeder) -> None:
    job = bench.job(rows(2), batch_size=1)
    bench.leases.held[refs(job.id, 0)[0]] = "worker"
    assert feeder.step() == 1
    assert list(bench.queue.queued.values()) == refs(job.id, 1)


def test_a_worker_that_is_gone_loses_its_batch_after_the_grace(
    bench: Bench, feeder: Feeder, clock: Clock
) -> None:
    job = bench.job(rows(1))
    feeder.step()
    ref = bench.queue.take()
    bench.leases.held[ref] = "worker"
    clock.now += 100
    assert feeder.step() == 0
    del bench.leases.held[ref]  # killed: its lease ran out
    assert feeder.step() == 0
    clock.now += 4
    assert feeder.step() == 0
    clock.now += 2
    assert feeder.step() == 1
    assert list(bench.queue.queued.values()) == refs(job.id, 0)
    assert bench.queue.taken == {}
    assert bench.leases.counted[ref].bad == 1


def test_a_batch_that_ends_between_two_looks_is_not_run_again(
    bench: Bench, feeder: Feeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis is read before the store: it no longer holds the batch, and the outcome is there."""
    bench.job(rows(1))
    feeder.step()
    ref = bench.queue.take()
    bench.leases.held[ref] = "worker"
    look = bench.queue.view

    def ends_after_the_look() -> object:
        seen = look()
        bench.pipeline.run(ref)
        bench.queue.taken.clear()
        bench.leases.held.clear()
        return seen

    monkeypatch.setattr(bench.queue, "view", ends_after_the_look)
    assert feeder.step() == 0


def test_a_lost_queue_is_rebuilt(bench: Bench, feeder: Feeder, clock: Clock) -> None:
    job = bench.job(rows(4), batch_size=1)
    feeder.step()
    bench.pipeline.run(bench.queue.take())
    bench.queue.queued.clear()
    bench.queue.taken.clear()
    bench.leases.wiped = True
    bench.leases.renew_every_s = 3.0
    assert feeder.step() == 3
    assert clock.slept == [6.0]  # whoever runs a batch says so again within this time
    assert list(bench.queue.queued.values()) == refs(job.id, 1, 2, 3)


def test_waiting_is_kept_and_does_not_end_in_failure(bench: Bench, feeder: Feeder, clock: Clock) -> None:
    job = bench.job(rows(1))
    ref = refs(job.id, 0)[0]
    bench.leases.waits = Waits(clock.monotonic)
    bench.leases.counted[ref] = Tries(waits=50, delay_s=10, reason="engine away")
    assert feeder.step() == 0
    told = bench.overview.job(job.id)
    assert told.reason == "a batch waits for its next run: engine away" and told.batches.waiting == 1
    clock.now += 9
    assert feeder.step() == 0
    clock.now += 2
    assert feeder.step() == 1


def test_a_wall_clock_that_jumps_or_differs_delays_no_batch(
    bench: Bench, feeder: Feeder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose clock is an hour ahead counted the wait, then ours went back a day."""
    job = bench.job(rows(1))
    bench.leases.waits = Waits(clock.monotonic)
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: 1e9 + 3600)
        bench.leases.counted[refs(job.id, 0)[0]] = Tries().again("engine away", 10.0, waits=1)
    monkeypatch.setattr(clock, "time", lambda: 1e9 - 86_400)
    assert feeder.step() == 0
    clock.now += 11
    assert feeder.step() == 1


def test_each_wait_begins_anew(clock: Clock) -> None:
    waits, ref = Waits(clock.monotonic), BatchRef(job_id="j20200101000000-00000000", batch=0)
    first = Tries().again("away", 10.0, waits=1)
    assert waits.look({ref: first}) == {ref}
    clock.now += 11
    assert waits.look({ref: first}) == set()
    assert waits.look({ref: first.again("away", 10.0, waits=2)}) == {ref}
    assert waits.look({}) == set()


def test_a_batch_that_keeps_crashing_is_given_up_with_its_reason(bench: Bench, feeder: Feeder) -> None:
    job = bench.job(rows(3), batch_size=1)
    bench.leases.counted[refs(job.id, 0)[0]] = Tries(bad=2, reason="killed by signal 9")
    assert feeder.step() == 2
    for batch in (1, 2):
        bench.pipeline.run(refs(job.id, batch)[0])
    done = bench.overview.job(job.id)
    assert (done.state.value, done.succeeded, done.failed, done.rows) == ("done", 2, 1, 3)
    assert done.failures[0].reason == "given up after 2 runs; the last: killed by signal 9"


def test_a_poison_row_is_found_by_halving_its_batch(bench: Bench, feeder: Feeder) -> None:
    job, poison = bench.job(rows(8), batch_size=8), "p5"
    for _ in range(40):
        feeder.step()
        while bench.queue.queued:
            ref = bench.queue.take()
            bench.queue.taken.clear()
            if any(poison in line.decode() for line in _lines(bench, job, ref)):
                bench.leases.count_bad(ref, "killed by signal 9")
            else:
                bench.pipeline.run(ref)
    done = bench.overview.job(job.id)
    assert (done.state.value, done.succeeded, done.failed, done.rows) == ("done", 7, 1, 8)
    assert [(f.row, f.id) for f in done.failures] == [(5, f"{job.id}/5")]
    assert "killed by signal 9" in done.failures[0].reason
    assert sorted(bench.sample_ids()) == sorted(f"{job.id}/{row}" for row in range(8) if row != 5)


def _lines(bench: Bench, job: JobRecord, ref: BatchRef) -> list[bytes]:
    return [row.line for row in Stands(bench.records, Moves(bench.store)).rows(job, ref)]


def test_paused_and_stopped_jobs_are_not_fed_and_higher_priorities_go_first(
    bench: Bench, feeder: Feeder
) -> None:
    paused, low = bench.job(rows(2), batch_size=1), bench.job(rows(2), batch_size=1)
    high = bench.job(rows(1), job_priority=5)
    stops = bench.job([{"prompt": "REFUSE"}, {"prompt": "p"}], batch_size=1, on_error="fail")
    bench.records.pause(paused.id)
    bench.pipeline.run(refs(stops.id, 0)[0])
    assert feeder.step() == 3
    assert list(bench.queue.queued.values()) == [*refs(high.id, 0), *refs(low.id, 0, 1)]
    failed = bench.overview.job(stops.id)
    assert (failed.state.value, failed.failed, failed.skipped) == ("failed", 1, 1)
    bench.records.pause(low.id)
    feeder.step()
    assert list(bench.queue.queued.values()) == refs(high.id, 0)
    bench.records.resume(paused.id)
    assert feeder.step() == 2


def test_a_pause_feeds_nothing_and_drops_nothing(bench: Bench, feeder: Feeder, pause: Pause) -> None:
    bench.job(rows(2), batch_size=1)
    pause.reason = "disk"
    assert feeder.step() == 0
    pause.reason = None
    assert feeder.step() == 2


def test_nothing_is_fed_from_the_wrong_store(bench: Bench, feeder: Feeder) -> None:
    def wrong() -> None:
        raise WrongStore("the store's directory is empty")

    bench.job(rows(2), batch_size=1)
    feeder._check, right = wrong, feeder._check
    with pytest.raises(WrongStore):
        feeder.step()
    assert bench.queue.queued == {}
    assert bench.leases.leader is None, "another API, whose store is the right one, may feed"
    feeder._check = right
    assert feeder.step() == 2


def test_batches_of_another_stores_jobs_leave_the_queue(bench: Bench, feeder: Feeder) -> None:
    job = bench.job(rows(1))
    bench.queue.enqueue(BatchRef(job_id="j20200101000000-00000000", batch=0))
    feeder.step()
    assert list(bench.queue.queued.values()) == refs(job.id, 0)


def test_only_the_leader_feeds(bench: Bench, feeder: Feeder) -> None:
    bench.job(rows(1))
    bench.leases.leader = "another"
    assert feeder.step() == 0
    bench.leases.leader = None
    assert feeder.step() == 1


def test_a_cancelled_jobs_batches_leave_the_queue(bench: Bench, feeder: Feeder) -> None:
    job = bench.job(rows(3), batch_size=1)
    feeder.step()
    bench.records.cancel(job.id)
    assert feeder.step() == 0
    assert bench.queue.queued == {}


def test_the_leader_mends_the_ledger_and_drops_dead_spools(
    bench: Bench, feeder: Feeder, clock: Clock
) -> None:
    job = bench.job(rows(1))
    outcome = bench.pipeline.run(refs(job.id, 0)[0])
    bench.store.delete("ledger/000000000001.json")
    bench.store.delete(f"ledger/by-shard/{outcome.shard}.json")
    bench.store.delete("ledger/last")
    dead = bench.records.job(job.id).model_copy(
        update={"id": "j20200101000000-00000000", "created_at": 0.0, "spooled": False}
    )
    bench.records.put_job(dead)
    goes_on = Spool(bench.records, Limits(1000, 10, 100), JobOptions(), None)
    killed = bench.store.root / "shards" / ".tmp-1-killed"
    killed.write_bytes(b"half a shard")
    os.utime(killed, (0, 0))
    clock.now += 10_000_000.0
    feeder.step()
    assert [entry.shard for entry in bench.ledger.entries()] == [outcome.shard]
    assert not bench.store.exists(f"jobs/{dead.id}/job.json")
    goes_on.feed(b'{"prompt":"p"}\n')
    assert goes_on.finish().rows == 1
    assert not killed.exists()


def test_a_batch_whose_rows_are_lost_is_given_up_and_holds_up_no_other(bench: Bench, feeder: Feeder) -> None:
    lost, other = bench.job(rows(1)), bench.job(rows(1))
    bench.store.delete(f"jobs/{lost.id}/rows.jsonl")
    bench.leases.counted[refs(lost.id, 0)[0]] = Tries(bad=2, reason="no rows")
    assert feeder.step() == 1
    assert list(bench.queue.queued.values()) == refs(other.id, 0)
    outcome = bench.records.outcome(refs(lost.id, 0)[0])
    assert outcome is not None
    assert [(f.row, "is not there" in f.reason) for f in outcome.failures] == [(0, True)]


def test_looking_for_lost_shards_takes_a_hundredth_of_the_time(
    bench: Bench, feeder: Feeder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, reconcile = list[float](), bench.ledger.reconcile

    def slow() -> Reconciliation:
        looked.append(clock.now)
        clock.now += 20.0
        return reconcile()

    monkeypatch.setattr(bench.ledger, "reconcile", slow)
    first = clock.now
    for later in (0.0, 61.0, 1_900.0, 2_021.0, 2_022.0):
        clock.now = first + later
        feeder.step()
    assert [at - first for at in looked] == [0.0, 2_021.0]


def test_what_can_not_be_halved_fails_and_holds_nobody_up(
    bench: Bench, feeder: Feeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "MAX_BATCHES", 2)
    full, other = bench.job(rows(4), batch_size=2), bench.job(rows(1))
    (ref,) = refs(full.id, 0)
    for _ in range(2):
        bench.leases.count_bad(ref, "it crashed")
    feeder.step()
    assert set(bench.queue.queued.values()) == {*refs(full.id, 1), *refs(other.id, 0)}
    outcome = bench.records.outcome(ref)
    assert outcome is not None and len(outcome.failures) == 2
    assert "more than 2 batches" in outcome.failures[0].reason


def test_a_sealed_shard_that_is_none_ends_its_batch(bench: Bench, feeder: Feeder) -> None:
    spoilt, other = bench.job(rows(2), batch_size=2), bench.job(rows(1))
    (ref,) = refs(spoilt.id, 0)
    bench.store.put(shard_path(spoilt.shard_of(0)), b"rubbish")
    for _ in range(2):
        bench.leases.count_bad(ref, "MalformedShard")
    feeder.step()
    assert list(bench.queue.queued.values()) == refs(other.id, 0)
    done = bench.overview.job(spoilt.id)
    assert (done.state.value, done.failed) == ("failed", 2)
    assert "its shard can't be used" in done.failures[0].reason


def test_a_batch_that_can_not_be_given_up_now_holds_nobody_up(
    bench: Bench, feeder: Feeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, other = bench.job(rows(2), batch_size=2), bench.job(rows(1))
    (ref,) = refs(broken.id, 0)
    for _ in range(2):
        bench.leases.count_bad(ref, "it crashed")
    with monkeypatch.context() as patch:

        def full(*_: object) -> bool:
            raise StoreFull("no space")

        patch.setattr(bench.store, "put_new", full)
        feeder.step()
    assert list(bench.queue.queued.values()) == refs(other.id, 0)
    feeder.step()
    assert bench.records.outcome(ref) is not None


@pytest.mark.parametrize("at", ["append", "put_outcome"])
def test_a_sealed_batch_of_a_cancelled_job_gets_entry_and_outcome(
    bench: Bench, clock: Clock, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Its worker died after sealing; the job was cancelled long ago, and is not looked at any more."""
    job = bench.job(rows(5), batch_size=2, output_prefix="pre-x")

    def die(*_: object) -> None:
        raise InterruptedError

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(bench.ledger if at == "append" else bench.records, at, die)
        bench.pipeline.run(refs(job.id, 1)[0])
    bench.records.cancel(job.id)
    os.utime(bench.store.root / "jobs" / f"{job.id}.cancelled", (clock.now - 10_000, clock.now - 10_000))
    assert bench.overview.job(job.id).skipped == 5
    feeder = bench.feeder()
    bench.leases.held[refs(job.id, 1)[0]] = "a worker"
    feeder.step()
    assert bench.records.outcome(refs(job.id, 1)[0]) is None  # who runs it knows more of it
    bench.leases.held.clear()
    clock.now += 100
    feeder.step()
    done = bench.overview.job(job.id)
    assert (done.state.value, done.succeeded, done.skipped) == ("cancelled", 2, 3)
    assert bench.sample_ids() == [f"{job.id}/2", f"{job.id}/3"]
    assert (
        Retention(bench.records, bench.ledger, RetentionPolicy()).prune(PruneRequest(force=True)).shards == 1
    )
