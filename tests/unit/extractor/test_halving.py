"""Giving a batch up for its halves never makes a sample twice, whoever dies or lives on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.unit.extractor.conftest import Bench

from taphouse_extractor.engine import Capture
from taphouse_extractor.errors import JobCancelled
from taphouse_extractor.moves import Moves, in_halves
from taphouse_extractor.records import BatchRef, JobRecord, Outcome


def rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"p{n}"} for n in range(count)]


def first_of(job: JobRecord) -> BatchRef:
    return BatchRef(job_id=job.id, batch=0)


def finish(bench: Bench, job: JobRecord) -> None:
    """Run what is left, and look that every row made one sample and is counted once."""
    for ref in list(bench.progress.refresh_one(job.id).pending()):
        bench.pipeline.run(ref)
    done = bench.overview.job(job.id)
    assert (done.state.value, done.succeeded, done.failed, done.rows) == ("done", job.rows, 0, job.rows)
    assert sorted(bench.sample_ids()) == sorted(f"{job.id}/{row}" for row in range(job.rows))


def test_a_leader_that_died_between_the_move_and_its_outcome(bench: Bench) -> None:
    job = bench.job(rows(4), batch_size=4)
    Moves(bench.store).add(job, 0, range(4), in_halves(4))
    outcome = bench.pipeline.run(first_of(job))
    assert (outcome.moved, outcome.shard) == (4, None)
    finish(bench, job)


def test_a_run_that_lost_its_lease_seals_or_is_given_up_and_never_both(bench: Bench) -> None:
    job = bench.job(rows(4), batch_size=4)
    ref, look, looks = first_of(job), bench.records.outcome, list[BatchRef]()
    feeder = threading.Thread(target=bench.pipeline.give_up, args=(job, ref, "its lease was lost"))

    def outcome(asked: BatchRef) -> Outcome | None:
        found = look(asked)
        looks.append(asked)
        if len(looks) == 2:  # after the run's last look, before it seals
            feeder.start()
            feeder.join(0.3)
        return found

    bench.records.outcome = outcome  # type: ignore[method-assign]
    bench.pipeline.run(ref)
    feeder.join(10)
    assert not feeder.is_alive() and len(looks) >= 2
    finish(bench, job)
    assert bench.ledger.head() == 1


def test_a_run_that_lives_on_after_its_batch_was_given_up_seals_nothing(bench: Bench) -> None:
    job = bench.job(rows(4), batch_size=4)
    ref = first_of(job)
    capture = bench.engine.capture

    def captured(body: dict[str, Any]) -> Capture:
        bench.engine.capture = capture  # type: ignore[method-assign]
        bench.pipeline.give_up(job, ref, "its lease was lost")
        return capture(body)

    bench.engine.capture = captured  # type: ignore[method-assign]
    with pytest.raises(JobCancelled, match="was decided while it ran"):
        bench.pipeline.run(ref)
    finish(bench, job)
