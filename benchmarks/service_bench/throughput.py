"""How much goes through queue, worker, codec and ledger when the engine answers at once."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.service_bench.service import Service, running

from taphouse_extractor.records import BatchRef, Records
from taphouse_extractor.stages import STAGES

TICK_HZ = os.sysconf("SC_CLK_TCK")


def throughput(*, batches: int, batch_size: int, workers: int) -> dict[str, Any]:
    """Run one job; rates a second over the time from its first batch's begin to its last outcome."""
    with running(workers=workers) as service:
        warm = service.enqueue(workers * batch_size, batch_size=batch_size)
        service.wait_done(warm.id, 300)
        before, began = _cpu_s(service), time.time()
        job = service.wait_done(service.enqueue(batches * batch_size, batch_size=batch_size).id, 600)
        records = Records(service.store)
        outcomes = [records.outcome(BatchRef(job_id=job.id, batch=n)) for n in range(batches)]
        ended = max(outcome.finished_at for outcome in outcomes if outcome is not None)
        cpu = {name: round(used - before[name], 2) for name, used in _cpu_s(service).items()}
    took = ended - began
    stages = {
        name: sum(outcome.stages.get(name, 0.0) for outcome in outcomes if outcome is not None)
        for name in STAGES
    }
    inside = sum(stages.values()) - stages["queue_wait"]
    return {
        "samples_s": round(job.succeeded / took, 1),
        "raw_mb_s": round(job.raw_bytes / took / 1e6, 1),
        "stored_mb_s": round(job.bytes / took / 1e6, 1),
        "ratio": round(job.bytes / job.raw_bytes, 3),
        "batches_s": round(batches / took, 2),
        "seconds": round(took, 1),
        "of_a_workers_time": {
            **{name: round(stages[name] / took / workers, 3) for name in STAGES if name != "queue_wait"},
            "around it": round(1 - inside / took / workers, 3),
        },
        "queue_wait_s": round(stages["queue_wait"] / batches, 2),
        "cpu_s": cpu,
    }


def _cpu_s(service: Service) -> dict[str, float]:
    """Seconds of CPU by process, with those of children that ended."""
    pids = {**service.pids, "stand-in engine": service.engine}
    return {name: _ticks(pid) / TICK_HZ for name, pid in pids.items()}


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15]))  # user and system time, its own and its children's
