from __future__ import annotations

import pytest
from tests.unit.extractor.conftest import Bench

from taphouse_extractor.progress import Done, rate
from taphouse_extractor.records import BatchRef


def test_counts_are_kept_across_looks_and_by_a_second_reader(bench: Bench) -> None:
    job = bench.job(
        [{"prompt": "good"}, {"prompt": "REFUSE"}, {"prompt": "x" * 20}], batch_size=1, max_length=9
    )
    for batch in range(3):
        bench.pipeline.run(BatchRef(job_id=job.id, batch=batch))
        seen = bench.overview.job(job.id)
        assert seen.batches.finished == batch + 1
        assert bench.overview.job(job.id).batches.finished == batch + 1
    assert (seen.state.value, seen.succeeded, seen.failed, seen.skipped) == ("done", 1, 1, 1)
    assert [failure.skipped for failure in seen.failures] == [False, True]


def test_one_unreadable_job_does_not_hide_the_others(bench: Bench) -> None:
    bad, good = bench.job([{"prompt": "a"}]), bench.job([{"prompt": "b"}])
    bench.store.put(f"jobs/{bad.id}/job.json", b'{"id": 7')
    bench.store.put("jobs/notes.txt", b"not a job")
    assert [job.id for job in bench.overview.jobs(10)] == [good.id]
    assert bench.overview.queue(None).rows_left == 1


def test_a_job_that_was_deleted_is_forgotten(bench: Bench) -> None:
    job = bench.job([{"prompt": "a"}])
    assert len(bench.overview.jobs(10)) == 1
    bench.records.drop_unspooled(job.id)
    bench.store.local_path(f"jobs/{job.id}").rmdir()
    assert bench.overview.jobs(10) == []


def test_a_spooling_that_died_can_be_cancelled(bench: Bench) -> None:
    job = bench.job([{"prompt": "a"}]).model_copy(update={"rows": 0, "spooled": False})
    bench.records.put_job(job)
    assert bench.overview.job(job.id).state.value == "spooling"
    bench.records.cancel(job.id)
    assert bench.overview.job(job.id).state.value == "cancelled"


def test_rates_are_over_the_window_or_the_time_there_was() -> None:
    recent = [
        Done(finished_at=at, rows=12, samples=10, tokens=100, bytes=5, raw_bytes=7) for at in (900, 990, 995)
    ]
    minute = rate(recent, 60.0, since=0.0, now=1000.0)
    assert (minute.samples, minute.tokens, minute.batches) == pytest.approx((20 / 60, 200 / 60, 2 / 60))
    assert rate(recent, 60.0, since=980.0, now=1000.0).samples == pytest.approx(1.0)
    assert rate([], 60.0, since=0.0, now=1000.0).samples == 0.0
