"""A batch is cut where its shard would pass the job's bound: nothing is lost, doubled or captured in vain."""

from __future__ import annotations

import threading
from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.extractor.conftest import Bench
from tests.unit.extractor.test_samples import held, samples_of

from taphouse.errors import StoreError
from taphouse.shards import shard_path
from taphouse.wire import SampleQuery
from taphouse_extractor import moves
from taphouse_extractor.fill import Fill
from taphouse_extractor.recent import Sums
from taphouse_extractor.records import BatchRef, JobRecord, Outcome

ROW_BYTES = 3 * 8 * 4 + 4 + 1
"""Of one token: three layers of eight float32, its id and its place in the mask."""


def row(name: str, tokens: int) -> dict[str, str]:
    """A prompt of so many tokens: they are bytes."""
    return {"id": name, "prompt": "x" * tokens}


def run_all(bench: Bench, job: JobRecord) -> None:
    """What feeder and workers do, until nothing is left."""
    while refs := list(bench.progress.refresh_one(job.id).pending()):
        for ref in refs:
            bench.pipeline.run(ref)


def shards(bench: Bench) -> list[list[str]]:
    return list(held(bench).values())


def test_rows_of_one_size_fill_shards_and_none_is_captured_twice(bench: Bench) -> None:
    bound = 3 * 10 * ROW_BYTES
    job = bench.job([row(f"r{n}", 10) for n in range(20)], batch_size=10, max_shard_bytes=bound)
    run_all(bench, job)
    assert sorted(map(len, shards(bench))) == [1, 1, 3, 3, 3, 3, 3, 3]
    assert len(bench.tap.requests) == 20
    done = bench.overview.job(job.id)
    assert (done.state.value, done.succeeded, done.shards) == ("done", 20, 8)
    assert done.batches.finished == 8
    sums = Sums()
    bench.progress.refresh_one(job.id).recent.add_to(sums, 0.0)
    assert (sums.rows, sums.samples) == (20, 20), "rows that were moved are counted where they ended"
    assert all(entry.raw_bytes <= bound for entry in bench.ledger.entries())
    assert bench.tap.slices_left() == []


def test_a_row_that_alone_is_larger_is_its_own_shard(bench: Bench) -> None:
    sizes = [5, 100, 100, 5]
    rows = [row(f"r{n}", size) for n, size in enumerate(sizes)]
    job = bench.job(rows, batch_size=4, max_shard_bytes=20 * ROW_BYTES)
    run_all(bench, job)
    assert shards(bench) == [["r0"], ["r1"], ["r2"], ["r3"]]


def test_without_a_bound_a_batch_is_one_shard(bench: Bench) -> None:
    job = bench.job([row(f"r{n}", 50) for n in range(6)], batch_size=6)
    run_all(bench, job)
    assert list(map(len, shards(bench))) == [6]
    assert not bench.store.list(f"moves/{job.id}")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 60) | st.just(0), min_size=1, max_size=24),
    batch_size=st.integers(1, 12),
    bound=st.integers(1, 120),
    crashes=st.sets(st.integers(0, 12), max_size=4),
)
def test_whatever_the_sizes_and_whoever_dies(
    bench: Bench, sizes: list[int], batch_size: int, bound: int, crashes: set[int]
) -> None:
    """Size 0 is a row that the engine refuses. `crashes` are outcomes that are not recorded when due."""
    before = bench.ledger.head()
    rows = [
        row(f"r{n}", size) if size else {"id": f"r{n}", "prompt": "REFUSE"} for n, size in enumerate(sizes)
    ]
    job = bench.job(rows, batch_size=batch_size, max_shard_bytes=bound * ROW_BYTES)
    put, puts = bench.records.put_outcome, list[Outcome]()

    def dies(outcome: Outcome) -> Outcome:
        puts.append(outcome)
        if len(puts) - 1 in crashes:
            raise StoreError("the worker dies")
        return put(outcome)

    bench.records.put_outcome = dies  # type: ignore[method-assign]
    while refs := list(bench.progress.refresh_one(job.id).pending()):
        for ref in refs:
            try:
                outcome = bench.pipeline.run(ref)
            except StoreError:
                continue
            assert outcome.succeeded + len(outcome.failures) + outcome.moved == outcome.rows
    done = bench.overview.job(job.id)
    refused = sum(size == 0 for size in sizes)
    assert (done.succeeded, done.failed, done.skipped) == (len(sizes) - refused, refused, 0)
    bench.records.put_outcome = put  # type: ignore[method-assign]
    made = [ids for seq, ids in held(bench).items() if seq > before]
    assert sorted(chain.from_iterable(made)) == sorted(f"r{n}" for n, size in enumerate(sizes) if size)
    for shard, entry in zip(made, bench.ledger.entries(before), strict=True):
        assert len(shard) == 1 or entry.raw_bytes <= bound * ROW_BYTES


def test_two_runs_of_a_batch_that_has_a_bound(bench: Bench) -> None:
    """The second finds the first's shard, and both say the same of the rest."""
    job = bench.job(
        [row("a", 10), row("b", 10), {"id": "c", "prompt": "REFUSE"}], batch_size=3, max_shard_bytes=5000
    )
    ref = BatchRef(job_id=job.id, batch=0)
    put = bench.records.put_outcome

    def second(outcome: Outcome) -> Outcome:
        bench.records.put_outcome = put  # type: ignore[method-assign]
        other = threading.Thread(target=bench.pipeline.run, args=(ref,))
        other.start()
        other.join(0.2)
        assert other.is_alive(), "it waits for the first to decide"
        return put(outcome)

    bench.records.put_outcome = second  # type: ignore[method-assign]
    first = bench.pipeline.run(ref)
    assert (first.succeeded, len(first.failures), first.moved) == (2, 1, 0)
    run_all(bench, job)
    done = bench.overview.job(job.id)
    assert (done.succeeded, done.failed, done.batches.finished) == (2, 1, 1)


def sealed_by_one_that_dies(bench: Bench, job: JobRecord) -> BatchRef:
    """The job's first batch: who runs it seals its shard, and dies before the outcome is recorded."""
    ref, put = BatchRef(job_id=job.id, batch=0), bench.records.put_outcome

    def dies(outcome: Outcome) -> Outcome:
        raise StoreError("the worker dies")

    bench.records.put_outcome = dies  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        bench.pipeline.run(ref)
    bench.records.put_outcome = put  # type: ignore[method-assign]
    return ref


def test_a_cut_batch_whose_worker_dies_is_not_halved(bench: Bench) -> None:
    job = bench.job([row(f"r{n}", 10) for n in range(4)], batch_size=4, max_shard_bytes=20 * ROW_BYTES)
    ref = sealed_by_one_that_dies(bench, job)
    given_up = bench.pipeline.give_up(job, ref, "crashed too often")
    assert (given_up.succeeded, given_up.moved) == (2, 2)
    run_all(bench, job)
    assert shards(bench) == [["r0", "r1"], ["r2", "r3"]]


@pytest.mark.parametrize("given_up", [False, True])
def test_a_cut_batch_whose_shard_is_lost_before_its_outcome(bench: Bench, given_up: bool) -> None:
    """The rows that were cut off stand elsewhere: the others are run again, or fail, and are counted once."""
    job = bench.job([row(f"r{n}", 10) for n in range(5)], batch_size=5, max_shard_bytes=20 * ROW_BYTES)
    ref = sealed_by_one_that_dies(bench, job)
    bench.store.delete(shard_path(job.shard_of(0)))
    if given_up:
        bench.pipeline.give_up(job, ref, "its shard was lost")
    run_all(bench, job)
    done, lost = bench.overview.job(job.id), 2 if given_up else 0
    assert (done.state.value, done.succeeded, done.failed) == ("done", 5 - lost, lost)
    if not given_up:
        assert shards(bench) == [["r0", "r1"], ["r2", "r3"], ["r4"]]


def test_rows_for_which_there_may_be_no_more_batches_fail(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "MAX_BATCHES", 2)
    job = bench.job([row(f"r{n}", 10) for n in range(6)], batch_size=6, max_shard_bytes=20 * ROW_BYTES)
    run_all(bench, job)
    done = bench.overview.job(job.id)
    assert (done.state.value, done.succeeded, done.failed) == ("done", 4, 2)
    assert "more than 2 batches" in done.failures[0].reason


def test_a_persons_samples_are_found_in_every_part(bench: Bench) -> None:
    rows: list[dict[str, Any]] = [{**row(f"r{n}", 10), "user": "ann"} for n in range(5)]
    job = bench.job(rows, batch_size=5, max_shard_bytes=20 * ROW_BYTES)
    run_all(bench, job)
    found = samples_of(bench).find(SampleQuery(user="ann"))
    assert found.rows == 5 and len({sample.shard for sample in found.samples}) == 3
    deleted = samples_of(bench).delete(SampleQuery(ids=["r1", "r4"]))
    assert deleted.samples == 2
    assert shards(bench) == [["r0"], ["r2", "r3"]]


def test_how_much_is_begun_for_a_shard() -> None:
    fill = Fill(bound=100)
    assert fill.room(0) and not fill.room(1), "nothing is known of sizes yet"
    assert fill.takes(400), "the first in any case"
    fill = Fill(bound=100, usual=30.0)
    assert [fill.room(begun) for begun in range(4)] == [True, True, True, False]
    fill.add(60)
    assert not fill.room(0) and fill.takes(40) and not fill.takes(41)
    assert fill.full and not fill.takes(1), "what comes after a sample that was left out is left out too"
    assert Fill().room(1000) and Fill().takes(1 << 40)
