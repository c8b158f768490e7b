"""What every process holds in memory as a dataset of a million rows is enqueued, and finished."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.service_bench.service import Service, running, wait_for

from taphouse.store import to_json
from taphouse.wire import Job
from taphouse_extractor.records import BatchRef, Outcome, Records

SETTLE_S = 8.0


def memory(*, few: int, many: int, batch_size: int) -> list[dict[str, Any]]:
    """Enqueue `few` rows, then `many`; workers run batches of both; then let the rest be finished at once.

    Small samples (8 tokens of 64 columns): memory follows from rows and batches, not from what they hold.
    """
    with running(workers=2, tokens=8, hidden=64) as service:
        service.wait_done(service.enqueue(2000, batch_size=100).id, 300)  # every process has worked once
        first = service.enqueue(few, batch_size=batch_size)
        looks = [_look(service, f"{few:,} rows enqueued", first)]
        began = time.monotonic()
        second = service.enqueue(many, batch_size=batch_size)
        took = time.monotonic() - began
        looks.append(_look(service, f"{many:,} rows enqueued", second) | {"enqueue_s": round(took, 1)})
        looks.append(_look(service, "30 s later", second, after_s=30.0))
        for worker in service.workers:
            service.stop(worker)
            del service.pids[next(name for name, pid in service.pids.items() if pid == worker.pid)]
        service.workers = []
        began = time.monotonic()
        _finish(service, second)
        wait_for("the rest is counted", lambda: _counted(service, second), 900)
        took = time.monotonic() - began
        looks.append(_look(service, f"{many:,} rows finished", second) | {"finish_s": round(took, 1)})
        return looks


def _look(service: Service, when: str, job: Job, after_s: float = SETTLE_S) -> dict[str, Any]:
    horse = service.horses_mb(after_s) if service.workers else 0.0
    if not service.workers:
        time.sleep(after_s)
    now = service.client.job(job.id)
    return {
        "when": when,
        **service.resident_mb(),
        "work-horse, at most": horse,
        "Redis's data": service.redis_used_mb(),
        "batches": now.batches.model_dump(),
    }


def _counted(service: Service, job: Job) -> bool:
    return service.client.job(job.id).state.final


def _finish(service: Service, job: Job) -> None:
    """Write the outcomes that are missing, as workers would, without a flush each."""
    root, batches = Path(service.store.root), -(-job.rows // job.options.batch_size)
    for batch in range(batches):
        path = root / Records.outcome_path(BatchRef(job_id=job.id, batch=batch))
        rows = min(job.options.batch_size, job.rows - batch * job.options.batch_size)
        outcome = Outcome(
            job_id=job.id,
            batch=batch,
            rows=rows,
            succeeded=rows,
            tokens=8 * rows,
            bytes=4096 * rows,
            raw_bytes=4096 * rows,
            stages={"capture": 0.1, "encode": 0.1, "seal": 0.01, "ledger": 0.01},
            finished_at=time.time(),
        )
        if batch % 1000 == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            whole = path.with_name(f".tmp-{batch}")
            whole.write_bytes(to_json(outcome.model_dump(mode="json")))
            whole.rename(path)
