"""Stages of a batch, and what is tallied of outcomes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.extractor.conftest import Bench

from taphouse.wire import Batches, Governor, GovernorMode, QueueStatus, RowFailure
from taphouse_extractor.metrics import Moment, render
from taphouse_extractor.overview import Figures
from taphouse_extractor.records import BatchRef, Outcome
from taphouse_extractor.stages import STAGES, StageClock
from taphouse_extractor.tally import BOUNDS_S, Durations, Tally


def test_a_clock_adds_up_by_stage() -> None:
    now = [0.0]

    def items() -> Iterator[int]:
        for step in (1.0, 2.0):
            now[0] += step
            yield int(step)
        now[0] += 4.0

    clock = StageClock(-3.0, lambda: now[0])
    for _ in clock.waiting("capture", items()):
        with clock.stage("encode"):
            now[0] += 10.0
        now[0] += 100.0
    with pytest.raises(KeyError), clock.stage("seal"):
        now[0] += 0.5
        raise KeyError
    assert clock.seconds == {"queue_wait": 0.0, "capture": 7.0, "encode": 20.0, "seal": 0.5}


@given(st.lists(st.floats(0, 1e5)))
def test_a_histogram_counts_what_is_at_most_its_bound(seconds: list[float]) -> None:
    durations = Durations()
    for value in seconds:
        durations.add(value)
    buckets = dict(durations.buckets())
    for bound in BOUNDS_S:
        assert buckets[str(bound)] == sum(value <= bound for value in seconds)
    assert buckets["+Inf"] == len(seconds)
    assert durations.sum_s == pytest.approx(sum(seconds))


def outcome(**facts: Any) -> Outcome:
    return Outcome(job_id="j", batch=0, rows=1, succeeded=0, finished_at=0.0, **facts)


def test_what_older_outcomes_do_not_say_is_unknown() -> None:
    tally = Tally()
    tally.add(outcome(shard="s", bytes=3, raw_bytes=4, failures=(RowFailure(row=0, reason="x"),)))
    tally.add(outcome(shard="s", codec="stored", bytes=5, raw_bytes=5, stages={"seal": 1.0, "dance": 2.0}))
    tally.add(outcome(bytes=7, codec="stored"))
    assert dict(tally.bytes) == {"unknown": 3, "stored": 5} and tally.raw_bytes.total() == 9
    assert dict(tally.rejected) == {"unknown": 1}
    assert set(tally.stages) == set(STAGES) and tally.stages["seal"].sum_s == 1.0


def test_a_batchs_stages_are_in_its_outcome(bench: Bench) -> None:
    job = bench.job([{"prompt": "one"}, {"prompt": "two"}])
    done = bench.pipeline.run(BatchRef(job_id=job.id, batch=0), waited_s=2.5)
    assert done.stages["queue_wait"] == 2.5
    assert set(done.stages) == set(STAGES) and min(done.stages.values()) >= 0
    assert bench.records.outcome(BatchRef(job_id=job.id, batch=0)) == done
    assert done.codec == "planes-zstd1"


def moment(reason: str) -> Moment:
    queue = QueueStatus(
        depth=Batches(),
        jobs={},
        rows_left=0,
        rates=[],
        workers=[],
        engines=[],
        consumers=[],
        ledger_head=0,
        updated_at=0.0,
        governor=Governor(mode=GovernorMode.AUTO, busy_ms=2.5, reason=reason),
    )
    figures = Figures(queue=queue, succeeded=0, failed=0, skipped=0, tokens=0, shards=0, tally=Tally())
    return Moment(figures=figures, free_bytes=1, refused={}, lag_s={})


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("production's ITL p95 is 1.07 of its baseline: halved", "ITL p95 is # of its baseline: halved"),
        ("tries 0.25 ms again; http://engine:8000 is away", "tries # ms again"),
    ],
)
def test_the_governors_reason_is_a_label_of_few_values(reason: str, label: str) -> None:
    families = {
        family.name: family for family in text_string_to_metric_families(render(moment(reason)).decode())
    }
    said = families["taphouse_governor_info"].samples[0].labels
    assert said["mode"] == "auto" and said["reason"].endswith(label) and "8000" not in said["reason"]
    assert families["taphouse_governor_limit_seconds"].samples[0].value == 0.0025
