"""Failed rows tried again: what stands beside what in a batch, and what else goes on meanwhile."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.extractor.conftest import Bench
from tests.unit.extractor.test_samples import samples_of

from taphouse.wire import SampleQuery
from taphouse_extractor import samples as samples_module
from taphouse_extractor.errors import Conflict
from taphouse_extractor.records import BatchRef, JobRecord, Records
from taphouse_extractor.retries import Retries, in_batches


def run_rest(bench: Bench, job: JobRecord) -> None:
    for ref in list(bench.progress.refresh_one(job.id).pending()):
        bench.pipeline.run(ref)


def test_rows_of_one_id_out_of_several_batches_all_make_their_sample(bench: Bench) -> None:
    """Ids are distinct within a batch only, and a shard takes each once."""
    rows = [{"id": f"r{n % 3}", "prompt": f"REFUSE {n}"} for n in range(12)]
    job = bench.job(rows, batch_size=3)
    bench.run_all(job)
    bench.tap.refusing = False
    move = Retries(bench.records).retry(job)
    assert (move.rows, move.batches) == (12, 4)
    run_rest(bench, job)
    done = bench.overview.job(job.id)
    assert (done.state.value, done.succeeded, done.failed) == ("done", 12, 0)
    assert sorted(bench.sample_ids()) == sorted(["r0", "r1", "r2"] * 4)


def test_a_second_row_of_an_id_is_no_success_of_the_first(bench: Bench) -> None:
    """Should two stand in one batch all the same, only one has made the sample."""
    job = bench.job([{"id": "a", "prompt": "REFUSE"}, {"id": "a", "prompt": "REFUSE 2"}], batch_size=1)
    bench.run_all(job)
    bench.tap.refusing = False
    Retries(bench.records)._moves.add(job, None, [0, 1], [2])
    outcome = bench.pipeline.run(BatchRef(job_id=job.id, batch=2))
    assert (outcome.succeeded, len(outcome.failures)) == (1, 1)
    assert "of this id" in outcome.failures[0].reason
    assert bench.sample_ids() == ["a"]


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1), st.integers(1, 5))
def test_batches_are_as_large_as_they_may_be(ids: list[int], size: int) -> None:
    ends = in_batches(ids, size)
    parts = [ids[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    assert [found for part in parts for found in part] == ids
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        assert 0 < len(set(part)) == len(part) <= size
        assert after is None or len(part) == size or after[0] in part


def test_a_job_that_was_cancelled_as_it_ended_is_not_taken_up_again(bench: Bench) -> None:
    job = bench.job([{"prompt": "REFUSE"}, {"prompt": "p"}])
    bench.run_all(job)
    bench.records.cancel(job.id)
    with pytest.raises(Conflict, match="was cancelled"):
        Retries(bench.records).retry(job)
    done = bench.overview.job(job.id)
    assert (done.state.value, done.succeeded, done.failed) == ("done", 1, 1)


def test_rows_that_are_being_deleted_are_not_tried_again_beside_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry that began in the middle would make a sample of what was to be gone."""
    job = bench.job([{"user": "ann", "prompt": "REFUSE ann"}, {"user": "bob", "prompt": "REFUSE bob"}])
    bench.run_all(job)
    bench.tap.refusing = False
    samples, retry = samples_of(bench), threading.Thread(target=Retries(bench.records).retry, args=(job,))
    blank = samples_module.blank_rows

    def blanked(records: Records, of: JobRecord, rows: set[int]) -> None:
        retry.start()
        retry.join(0.3)
        run_rest(bench, job)
        blank(records, of, rows)

    monkeypatch.setattr(samples_module, "blank_rows", blanked)
    samples.delete(SampleQuery(user="ann"))
    retry.join(10)
    run_rest(bench, job)
    assert bench.sample_ids() == [f"{job.id}/1"]
    assert samples_of(bench).find(SampleQuery(user="ann")).rows == 0
