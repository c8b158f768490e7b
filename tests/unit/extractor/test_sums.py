"""Sums of outcomes: they say what the outcomes say, and are never believed over them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.extractor.conftest import Bench

from taphouse.store import LocalStore, put_json
from taphouse.wire import JobOptions, RowFailure
from taphouse_extractor.counts import Counts
from taphouse_extractor.progress import Progress
from taphouse_extractor.records import BatchRef, JobRecord, Outcome, Records
from taphouse_extractor.retries import Retries
from taphouse_extractor.sums import SumKeeper, Sums

KINDS = st.sampled_from(["row_refused", "too_long", None])
FAILURES = st.builds(
    RowFailure,
    row=st.integers(0, 9),
    id=st.just("anns-row"),
    reason=st.just("why"),
    kind=KINDS,
    skipped=st.booleans(),
)
OUTCOMES = st.builds(
    Outcome,
    job_id=st.just(""),
    batch=st.just(0),
    rows=st.just(9),
    succeeded=st.integers(0, 9),
    failures=st.lists(FAILURES, max_size=9).map(tuple),
    shard=st.sampled_from([None, "a.safetensors"]),
    tokens=st.integers(0, 99),
    bytes=st.integers(0, 99),
    raw_bytes=st.integers(0, 99),
    fingerprint_id=st.sampled_from([None, "f" * 16]),
    codec=st.sampled_from([None, "stored"]),
    engine=st.sampled_from([None, "http://engine"]),
    stages=st.dictionaries(st.sampled_from(["capture", "seal", "dance"]), st.sampled_from([0.5, 2.0, 4e3])),
    finished_at=st.floats(1.0, 1e6),
)


TOLD = (*Counts.__slots__, "failures", "complete", "rows_left")


def a_job(records: Records, outcomes: list[Outcome], number: int = 0, **facts: Any) -> JobRecord:
    """A job with these outcomes, all that it has unless `facts` say otherwise."""
    job = JobRecord(
        id=f"j20260101{number:06d}-0123abcd",
        options=JobOptions(batch_size=9),
        **{"rows": 9 * len(outcomes), "spooled": True, "created_at": 1.0, **facts},
    )
    records.put_job(job)
    for batch, outcome in enumerate(outcomes):
        mine = outcome.model_copy(update={"job_id": job.id, "batch": batch})
        path = records.outcome_path(BatchRef(job_id=job.id, batch=batch))
        put_json(records.store, path, mine.model_dump(mode="json"), durable=False)
    return job


def sum_up(store: LocalStore, spoil: Callable[[], object] = lambda: None) -> None:
    """What the keeper does in its first half minute; `spoil` comes once all outcomes are counted."""
    progress, now, stop = Progress(Records(store)), time.monotonic(), threading.Event()
    progress.refresh()
    spoil()
    time.sleep(0.02)  # over a tick of the file system's clock
    keeper = SumKeeper(Sums(Records(store)), progress.known, lambda: 0.0)
    with pytest.MonkeyPatch.context() as clock:
        clock.setattr("taphouse.store.listing.time.monotonic", lambda: now)
        for _ in range(3):
            keeper.step(stop)
            now += 3.0


def seen(store: LocalStore) -> list[dict[str, Any]]:
    """All that a process that starts now finds out."""
    progress = Progress(Records(store))
    jobs = progress.refresh()
    told = [{name: getattr(job, name) for name in TOLD} for job in jobs]
    pending = {"pending": [[ref.batch for ref in job.pending()] for job in jobs]}
    return [asdict(progress.tally), pending, *told]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=st.lists(st.lists(OUTCOMES, min_size=1, max_size=6), min_size=1, max_size=3))
def test_a_sum_says_what_the_outcomes_say(
    tmp_path_factory: pytest.TempPathFactory, jobs: list[list[Outcome]]
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("store"))
    made = [a_job(Records(store), outcomes, number) for number, outcomes in enumerate(jobs)]
    before = seen(store)
    sum_up(store)
    sums = Sums(Records(store))
    for job, outcomes in zip(made, jobs, strict=True):
        found = sums.believed(job.id, 0)
        assert found is not None and len(found.batches) == len(outcomes)
        assert b"anns-row" not in store.read(f"jobs/{job.id}/outcomes/000.sum")
    assert seen(store) == before


def outcome(**facts: Any) -> Outcome:
    known = {"job_id": "", "batch": 0, "rows": 9, "succeeded": 9, "tokens": 5, "finished_at": 2.0}
    return Outcome(**{**known, **facts})


FAILED = outcome(succeeded=8, failures=(RowFailure(row=0, id="anns-row", reason="why"),))


def test_a_start_reads_a_sum_in_place_of_its_outcomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    a_job(Records(store), [outcome(), FAILED, outcome()])
    sum_up(store)
    read, asked = store.read, list[str]()

    def reads(path: str) -> bytes:
        asked.append(Path(path).name)
        return read(path)

    monkeypatch.setattr(store, "read", reads)
    progress = Progress(Records(store))
    (job,) = progress.refresh()
    assert (job.succeeded, job.failed, job.complete) == (26, 1, True)
    assert asked == ["job.json", "000.sum", "000001.json"], "of the outcomes only the one with a failed row"


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff\x00")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def another_number(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"succeeded":26', b'"succeeded":99'))


def gone(path: Path) -> None:
    path.unlink()


def of_another_job(path: Path) -> None:
    records = Records(LocalStore(path.parents[3]))
    other = a_job(records, [outcome(tokens=1)], 1)
    sum_up(LocalStore(path.parents[3]))
    path.write_bytes((path.parents[2] / other.id / "outcomes" / "000.sum").read_bytes())


def an_outcome_went_away(path: Path) -> None:
    (path.with_suffix("") / "000002.json").unlink()


def an_outcome_was_replaced(path: Path) -> None:
    place = path.with_suffix("") / "000002.json"
    new = place.with_name("new")
    new.write_text(place.read_text().replace('"tokens":5', '"tokens":7'))
    new.rename(place)


@pytest.mark.parametrize(
    "spoil",
    [garbage, cut_short, another_number, gone, of_another_job, an_outcome_went_away, an_outcome_was_replaced],
)
def test_a_sum_that_is_wrong_is_not_believed(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    store = LocalStore(tmp_path)
    job = a_job(Records(store), [outcome(), FAILED, outcome()])
    sum_up(store)
    place = store.local_path(f"jobs/{job.id}/outcomes/000.sum")
    whole = place.read_bytes()
    spoil(place)
    assert (
        not place.exists() or place.read_bytes() != whole or Sums(Records(store)).believed(job.id, 0) is None
    )
    found = seen(store)
    for left in store.root.glob("jobs/*/outcomes/*.sum"):
        left.unlink()
    assert found == seen(store)
    sum_up(store)
    complete = spoil is not an_outcome_went_away
    assert (Sums(Records(store)).believed(job.id, 0) is not None) == complete


def test_what_ended_lately_is_read_for_its_rate(tmp_path: Path) -> None:
    store, now = LocalStore(tmp_path), time.time()
    a_job(Records(store), [outcome(), outcome(finished_at=now)])
    sum_up(store)
    (job,) = Progress(Records(store)).refresh()
    assert job.recent and job.succeeded == 18


def test_a_job_that_is_not_whole_has_no_sum(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    job = a_job(Records(store), [outcome()], rows=18)
    sum_up(store)
    assert not store.exists(f"jobs/{job.id}/outcomes/000.sum")


def test_failures_that_are_tried_again_are_not_shown_after_a_start(bench: Bench) -> None:
    job = bench.job([{"prompt": "REFUSE"}, {"prompt": "a"}, {"prompt": "x" * 20}], batch_size=1, max_length=9)
    bench.run_all(job)
    bench.tap.refusing = False
    Retries(bench.records).retry(job)
    bench.pipeline.run(BatchRef(job_id=job.id, batch=3))
    old = [bench.records.outcome(BatchRef(job_id=job.id, batch=batch)) for batch in range(4)]
    for known in old:
        assert known is not None
        bench.records.change_outcome(known.model_copy(update={"finished_at": 2.0}))
    before = seen(bench.store)
    assert (before[2]["succeeded"], before[2]["failed"], before[2]["skipped"]) == (2, 0, 1)
    sum_up(bench.store)
    assert Sums(bench.records).believed(job.id, 0) is not None
    assert seen(bench.store) == before


def test_a_sum_that_is_in_the_making_is_left_when_its_process_ends(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    job = a_job(Records(store), [outcome()] * 20)
    stamp = store.stamp(f"jobs/{job.id}/outcomes/000")
    assert stamp is not None and not Sums(Records(store)).make(job.id, 0, stamp, lambda: True)
    assert not store.exists(f"jobs/{job.id}/outcomes/000.sum")


def test_outcomes_that_went_away_since_leave_no_sum(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    job = a_job(Records(store), [outcome()])
    place = store.local_path(f"jobs/{job.id}/outcomes/000/000000.json")
    sum_up(store, place.unlink)
    assert not store.exists(f"jobs/{job.id}/outcomes/000.sum")
    assert seen(store)[2]["succeeded"] == 0


def test_a_sum_that_can_not_be_read_hides_no_job(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    job = a_job(Records(store), [outcome(), FAILED])
    before = seen(store)
    store.local_path(f"jobs/{job.id}/outcomes/000.sum").mkdir()
    assert seen(store) == before and len(before) == 3


def test_a_job_that_can_not_be_added_up_holds_up_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(tmp_path)
    bad, good = (a_job(Records(store), [outcome()], number) for number in range(2))
    place = store.local_path(f"jobs/{bad.id}/outcomes/000/000000.json")
    sum_up(store, lambda: place.write_text("{"))
    assert Sums(Records(store)).believed(good.id, 0) is not None
    (line,) = caplog.messages
    assert line.startswith(f"outcomes of job {bad.id} can't be added up: ")
