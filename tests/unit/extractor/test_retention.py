"""Shards go when they may, and only then; their numbers stay."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.extractor.conftest import Bench, Service
from tests.unit.extractor.test_backlog import consumer, sealed

from taphouse.errors import NotFound, StoreBusy, StoreError
from taphouse.ledger import Ledger
from taphouse.store import LocalStore
from taphouse.wire import PruneRequest
from taphouse_extractor.records import DELETING, BatchRef, Records
from taphouse_extractor.retention import Retention, RetentionPolicy

Serve = Callable[..., Service]
CONSUMED = RetentionPolicy("consumed")


def retention(bench: Bench, policy: RetentionPolicy = CONSUMED, now: float = 1e12) -> Retention:
    return Retention(bench.records, bench.ledger, policy, lambda: now)


def there(bench: Bench) -> list[int]:
    """Entries whose shard is there; each other one says that it is gone, and has no file."""
    entries = list(Ledger(bench.store).entries())
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    for entry in entries:
        assert bench.store.exists(entry.path) == (entry.gone is None)
    return [entry.seq for entry in entries if entry.gone is None]


def test_what_every_consumer_acknowledged_goes(bench: Bench) -> None:
    sizes = sealed(bench, 4)
    keeper = retention(bench)
    assert keeper.step().shards == 0, "nobody consumed anything"
    consumer(bench, 4, "a", acknowledged=3)
    consumer(bench, 4, "b", acknowledged=2)
    done = keeper.step()
    assert (done.shards, done.bytes) == (2, sum(sizes[:2]))
    assert done.held == "consumer b acknowledged 2 of 4 entries"
    assert there(bench) == [3, 4]
    consumer(bench, 4, "b", acknowledged=4)
    assert keeper.step().shards == 1
    consumer(bench, 4, "c")
    consumer(bench, 4, "a", acknowledged=4)
    assert keeper.step().shards == 0, "one that acknowledges nothing"
    assert there(bench) == [4]
    assert bench.overview.job(bench.records.job_ids()[0]).succeeded == 4
    assert bench.ledger.reconcile().missing == ()


def test_age_waits_for_consumers_too(bench: Bench) -> None:
    sealed(bench, 3)
    born = [entry.created_at for entry in bench.ledger.entries()]
    policy = RetentionPolicy("age", 100.0)
    assert retention(bench, policy, born[0] + 99).step().shards == 0
    consumer(bench, 3, acknowledged=1)
    assert retention(bench, policy, born[2] + 101).step().shards == 1
    bench.store.delete("consumers/t.json")
    assert retention(bench, policy, born[2] + 101).step().shards == 2
    assert there(bench) == []


def test_keep_keeps(bench: Bench) -> None:
    sealed(bench, 2)
    consumer(bench, 2, acknowledged=2)
    assert retention(bench, RetentionPolicy()).step().shards == 0
    assert there(bench) == [1, 2]


def test_a_batch_without_an_outcome_keeps_its_shard_even_by_force(bench: Bench) -> None:
    sealed(bench, 2)
    job = bench.records.job_ids()[0]
    bench.store.delete(f"jobs/{job}/outcomes/000/000000.json")
    keeper = retention(bench)
    done = keeper.prune(PruneRequest(force=True))
    assert done.shards == 1 and "entry 1 has no outcome" in (done.held or "")
    assert there(bench) == [1]
    bench.pipeline.run(BatchRef(job_id=job, batch=0))
    assert keeper.prune(PruneRequest(force=True)).shards == 1
    assert there(bench) == []


def test_shards_of_a_job_that_was_removed_go(bench: Bench) -> None:
    sealed(bench, 2)
    consumer(bench, 2, acknowledged=2)
    shutil.rmtree(bench.store.local_path("jobs"))
    assert retention(bench).step().shards == 2
    assert there(bench) == []


def test_a_late_second_run_leaves_no_file(bench: Bench) -> None:
    """Two workers ran one batch; by the time the second seals, the first's shard was consumed."""
    sealed(bench, 1)
    retention(bench).prune(PruneRequest(force=True))
    job = bench.records.job_ids()[0]
    bench.store.delete(f"jobs/{job}/outcomes/000/000000.json")  # it had looked before there was one
    bench.pipeline.run(BatchRef(job_id=job, batch=0))
    assert there(bench) == [] and bench.ledger.head() == 1


def test_it_stays_away_while_samples_are_deleted_or_a_record_is_bad(bench: Bench) -> None:
    sealed(bench, 1)
    consumer(bench, 1, acknowledged=1)
    with bench.store.lock(DELETING), pytest.raises(StoreBusy):
        retention(bench).step()
    bench.store.put("consumers/u.json", b"[]")
    with pytest.raises(StoreError):
        retention(bench).step()
    assert there(bench) == [1]


def test_prune_over_http_says_first_and_does_then(serve: Serve) -> None:
    service = serve()
    bench, client = service.bench, service.client
    sizes = sealed(bench, 3)
    consumer(bench, 3, acknowledged=1)
    asked = client.prune_shards(PruneRequest(dry_run=True))
    assert (asked.shards, asked.bytes, asked.dry_run) == (1, sizes[0], True)
    assert there(bench) == [1, 2, 3]
    assert client.prune_shards(PruneRequest(force=True, older_than_s=1e6)).shards == 0
    assert client.prune_shards(PruneRequest()).shards == 1
    gone = client.shards(after=0, limit=1).shards[0]
    assert gone.gone == "pruned once consumed"
    with pytest.raises(NotFound, match="any more: pruned once consumed"):
        client.download(gone.shard, service.datasets / "x.safetensors")
    assert client.prune_shards(PruneRequest(force=True)).shards == 2
    assert there(bench) == []


class Killed(Exception):
    pass


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kill_at=st.integers(0, 9), acknowledged=st.integers(0, 4))
def test_cut_short_anywhere_the_next_round_finishes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kill_at: int, acknowledged: int
) -> None:
    """Between any two changes of the store: no entry is lost, no unacknowledged shard goes, no file stays."""
    first = bench.ledger.head()
    sealed(bench, 4)
    consumer(bench, first + 4, acknowledged=first + acknowledged)
    left = [kill_at]

    def dying(change: Callable[..., object]) -> Callable[..., object]:
        def then(*args: object, **kwargs: object) -> object:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return change(*args, **kwargs)

        return then

    store = LocalStore(bench.store.root)
    for name in ("put", "delete"):
        monkeypatch.setattr(store, name, dying(getattr(store, name)))
    with suppress(Killed):
        Retention(Records(store), Ledger(store), CONSUMED, lambda: 1e12).step()
    for entry in bench.ledger.entries(first + acknowledged if acknowledged or first else 0):
        assert entry.gone is None and bench.store.exists(entry.path)
    retention(bench).step()
    assert [seq for seq in there(bench) if seq > first] == list(
        range(first + acknowledged + 1, bench.ledger.head() + 1)
    )
    retention(bench).prune(PruneRequest(force=True))
