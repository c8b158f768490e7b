from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.extractor.conftest import Bench

from taphouse.errors import NotInStore, StoreError
from taphouse.store import put_json
from taphouse_extractor.job_progress import JobProgress
from taphouse_extractor.overview import describe
from taphouse_extractor.progress import Progress
from taphouse_extractor.recent import Recent, rate
from taphouse_extractor.records import SEGMENT, BatchRef, Outcome, Records
from taphouse_extractor.retries import Retries
from taphouse_extractor.standing import Live


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


def test_a_job_that_is_no_record_is_left_alone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = bench.job([{"prompt": "a"}]), bench.job([{"prompt": "b"}])
    put_json(bench.store, f"jobs/{bad.id}/job.json", {**bad.model_dump(mode="json"), "rows": "many"})
    assert [job.record.id for job in bench.progress.refresh()] == [good.id]
    assert "no record of a job" in caplog.text
    with pytest.raises(StoreError, match="no record of a job"):
        bench.pipeline.run(BatchRef(job_id=bad.id, batch=0))
    assert bench.ledger.head() == 0


def test_a_job_that_was_deleted_is_forgotten(bench: Bench) -> None:
    job, other = bench.job([{"prompt": "a"}]), bench.job([{"prompt": "b"}])
    assert len(bench.overview.jobs(10)) == 2
    bench.records.drop_unspooled(job.id)
    bench.store.local_path(f"jobs/{job.id}").rmdir()
    assert [left.id for left in bench.overview.jobs(10)] == [other.id]


def test_a_store_that_was_unmounted_is_not_taken_for_an_empty_one(bench: Bench) -> None:
    job = bench.job([{"prompt": "a"}, {"prompt": "REFUSE"}])
    bench.run_all(job)
    assert bench.overview.queue(None).jobs == {"done": 1}
    away = bench.store.root.rename(bench.store.root.with_name("away"))
    bench.store.root.mkdir()
    for _ in range(3):
        with pytest.raises(NotInStore, match="none of the 1 jobs"):
            bench.overview.queue(None)
    bench.store.root.rmdir()
    away.rename(bench.store.root)
    assert bench.overview.queue(None).jobs == {"done": 1}
    assert bench.progress.tally.rejected == {"row_refused": 1}


def test_a_spooling_that_died_can_be_cancelled(bench: Bench) -> None:
    job = bench.job([{"prompt": "a"}]).model_copy(update={"rows": 0, "spooled": False})
    bench.records.put_job(job)
    assert bench.overview.job(job.id).state.value == "spooling"
    bench.records.cancel(job.id)
    assert bench.overview.job(job.id).state.value == "cancelled"


def test_rates_are_over_the_window_or_the_time_there_was() -> None:
    recent = [Recent(), Recent()]
    for number, at in enumerate((100, 900, 990, 995)):
        outcome = Outcome(job_id="j", batch=number, rows=12, succeeded=10, tokens=100, finished_at=at)
        recent[number % 2].add(outcome, now=1000.0)
    minute = rate(recent, 60.0, since=0.0, now=1000.0)
    assert (minute.samples, minute.tokens, minute.batches) == pytest.approx((20 / 60, 200 / 60, 2 / 60))
    assert rate(recent, 300.0, since=0.0, now=1000.0).samples == pytest.approx(30 / 300)
    assert rate(recent, 60.0, since=980.0, now=1000.0).samples == pytest.approx(1.0)
    assert rate([], 60.0, since=0.0, now=1000.0).samples == 0.0
    for one in recent:
        one.forget(1296.0)
    assert not any(recent)


def test_what_was_finished_under_a_clock_that_was_set_back_since_counts_no_more() -> None:
    recent = Recent()
    recent.add(Outcome(job_id="j", batch=0, rows=1, succeeded=1, finished_at=9e6), now=9e6)
    recent.forget(1000.0)
    recent.add(Outcome(job_id="j", batch=1, rows=1, succeeded=1, finished_at=9e6), now=1000.0)
    assert not recent


def test_rates_are_told_while_another_thread_counts() -> None:
    recent, stop, wrong = Recent(), threading.Event(), list[BaseException]()

    def look() -> None:
        while not stop.is_set():
            try:
                rate([recent], 300.0, since=0.0, now=2000.0)
            except RuntimeError as error:
                wrong.append(error)
                return

    before, reader = sys.getswitchinterval(), threading.Thread(target=look)
    sys.setswitchinterval(1e-6)
    try:
        reader.start()
        for n in range(3000):
            recent.add(Outcome(job_id="j", batch=n, rows=1, succeeded=1, finished_at=1e3 + n), now=1e3 + n)
            recent.forget(1e3 + n)
    finally:
        stop.set()
        reader.join()
        sys.setswitchinterval(before)
    assert wrong == []


@pytest.mark.parametrize("what", ["halved", "retried"])
def test_nobody_sees_a_job_at_its_end_before_its_moves_are_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A move and the outcomes after it, all made between a look at the moves and one at the outcomes."""
    job = bench.job([{"prompt": "REFUSE"}, {"prompt": "p"}], batch_size=2)
    assert bench.overview.job(job.id).state.value == "queued"
    if what == "halved":
        bench.pipeline.give_up(job, BatchRef(job_id=job.id, batch=0), "it crashed")
    else:
        bench.run_all(job)
        bench.tap.refusing = False
        Retries(bench.records).retry(job)
        bench.pipeline.run(BatchRef(job_id=job.id, batch=1))
    seen, count = list[tuple[str, int]](), JobProgress.count

    def counted(found: JobProgress, *given: Any) -> None:
        count(found, *given)
        shown = describe(found, Live())
        seen.append((shown.state.value, shown.succeeded + shown.failed))

    monkeypatch.setattr(JobProgress, "count", counted)
    monkeypatch.setattr(bench.progress, "_moving", SimpleNamespace(news=lambda: None))
    bench.progress.refresh_one(job.id)
    assert seen == ([("running", 0)] if what == "halved" else [("done", 2)] * 2)


def test_a_look_costs_what_is_new(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs at their end aren't looked at, nor directories that stay as they are."""
    done = [bench.job([{"prompt": "a"}]) for _ in range(3)]
    for job in done:
        bench.run_all(job)
    waiting = bench.job([{"prompt": "b"}] * 3, batch_size=1)
    asked, now = list[str](), time.monotonic()
    stamp, listed = bench.store.stamp, bench.store.list

    def stamped(directory: str) -> tuple[int, int] | None:
        asked.append(directory)
        return stamp(directory)

    def lists(directory: str) -> list[str]:
        asked.append(f"list {directory}")
        return listed(directory)

    monkeypatch.setattr(bench.store, "stamp", stamped)
    monkeypatch.setattr(bench.store, "list", lists)
    monkeypatch.setattr("taphouse.store.listing.time.monotonic", lambda: now)
    for _ in range(3):
        asked.clear()
        bench.overview.queue(None)
        now += 3.0
    assert set(asked) == {"jobs", "moves", f"jobs/{waiting.id}", "list consumers"}
    bench.pipeline.run(BatchRef(job_id=waiting.id, batch=1))
    asked.clear()
    assert bench.overview.queue(None).depth.finished == 4
    assert f"list jobs/{waiting.id}/outcomes/000" in asked
    assert not any(job.id in place for place in asked for job in done)
    for _ in range(3):
        asked.clear()
        bench.overview.queue(None)
        now += 3.0
    assert set(asked) == {"jobs", "moves", f"jobs/{waiting.id}/outcomes/000", "list consumers"}
    for act, state in ((bench.records.pause, "paused"), (bench.records.resume, "running")):
        act(waiting.id)
        assert bench.overview.queue(None).jobs == {"done": 3, state: 1}


def test_an_outcome_that_cannot_be_read_is_read_once_it_can(bench: Bench) -> None:
    job = bench.job([{"prompt": "a"}, {"prompt": "b"}], batch_size=1)
    bench.run_all(job)
    place = bench.store.local_path(Records.outcome_path(BatchRef(job_id=job.id, batch=0)))
    whole = place.read_bytes()
    place.write_bytes(b"{}")
    for _ in range(2):
        assert bench.overview.queue(None).jobs == {"queued": 1}
    place.write_bytes(whole)
    assert bench.overview.queue(None).jobs == {"done": 1}


def test_a_job_of_many_segments_is_counted_once(bench: Bench) -> None:
    job = bench.job([{"prompt": "a"}], batch_size=1).model_copy(update={"rows": 2 * SEGMENT + 5})
    bench.records.put_job(job)

    def end(batch: int) -> None:
        bench.records.put_outcome(
            Outcome(job_id=job.id, batch=batch, rows=1, succeeded=1, finished_at=time.time())
        )

    for batch in (0, SEGMENT - 1, SEGMENT, 2 * SEGMENT + 4):
        end(batch)
    assert bench.overview.job(job.id).succeeded == 4
    for batch in range(2 * SEGMENT + 5):
        end(batch)
        if batch % 700 == 0:
            assert bench.overview.job(job.id).succeeded == batch + 1 + sum(
                other > batch for other in (SEGMENT - 1, SEGMENT, 2 * SEGMENT + 4)
            )
    assert bench.overview.job(job.id).state.value == "done"
    again = Progress(bench.records).refresh_one(job.id)
    assert (again.succeeded, again.complete) == (2 * SEGMENT + 5, True)
    assert list(bench.records.finished(job.id)) == list(range(2 * SEGMENT + 5))
