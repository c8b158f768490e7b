"""How long a start of the API takes with many finished batches, by their outcomes and by their sums."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.service_bench.service import Service, running, wait_for

from taphouse.store import to_json
from taphouse.wire import JobOptions
from taphouse_extractor.records import SEGMENT, BatchRef, JobRecord, Outcome, Records


def starting(*, rows: int, batch_size: int) -> dict[str, Any]:
    """Seconds from the API's start to its first answer about a job of `rows` rows that is done.

    Once without sums, and once with them; between the two, until all of them were made in the background.
    """
    batches = -(-rows // batch_size)
    segments = -(-batches // SEGMENT)
    with running(workers=0, prepare=lambda service: _fill(service, rows, batch_size)) as service:
        outcomes = Path(service.store.root) / "jobs"
        service.stop(service.processes[-1])  # it has read outcomes, and has begun to add them up
        for made in outcomes.glob("*/outcomes/*.sum"):
            made.unlink()
        by_outcomes = _start(service, rows)
        began = time.monotonic()
        wait_for("the sums", lambda: len(list(outcomes.glob("*/outcomes/*.sum"))) == segments, 900)
        summing = time.monotonic() - began
        service.stop(service.processes[-1])
        by_sums = _start(service, rows)
    return {
        "rows": rows,
        "batches": batches,
        "by_outcomes_s": round(by_outcomes, 2),
        "sums_made_in_s": round(summing, 1),
        "by_sums_s": round(by_sums, 2),
        "empty_store_s": round(_empty(), 2),
    }


def _start(service: Service, rows: int) -> float:
    began = time.monotonic()
    service.start_api()
    (job,) = service.client.jobs()
    assert job.succeeded == rows, job
    return time.monotonic() - began


def _empty() -> float:
    with running(workers=0) as service:
        service.stop(service.processes[-1])
        began = time.monotonic()
        service.start_api()
        assert service.client.jobs() == []
        return time.monotonic() - began


def _fill(service: Service, rows: int, batch_size: int) -> None:
    """A job of which every batch ended an hour ago."""
    root, records = Path(service.store.root), Records(service.store)
    then = time.time() - 3600
    job = JobRecord(
        id="j20260101000000-00000000",
        options=JobOptions(batch_size=batch_size),
        rows=rows,
        spooled=True,
        created_at=then,
    )
    records.put_job(job)
    for batch in range(job.batches):
        count = len(job.rows_of(batch))
        outcome = Outcome(
            job_id=job.id,
            batch=batch,
            rows=count,
            succeeded=count,
            shard=job.shard_of(batch),
            tokens=512 * count,
            bytes=1_600_000 * count,
            raw_bytes=2_359_296 * count,
            codec="planes-zstd1",
            engine="http://engine",
            stages={"queue_wait": 1.0, "capture": 0.1, "encode": 0.1, "seal": 0.01, "ledger": 0.01},
            finished_at=then,
        )
        path = root / Records.outcome_path(BatchRef(job_id=job.id, batch=batch))
        if batch % SEGMENT == 0:
            path.parent.mkdir(parents=True)
        path.write_bytes(to_json(outcome.model_dump(mode="json")))
