"""`GET /v1/queue` and its neighbours, with many jobs and a long ledger."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
from benchmarks.service_bench.service import TOKEN, Service, running

from taphouse.ledger import LedgerEntry
from taphouse.shards import shard_name, shard_path
from taphouse.store import to_json
from taphouse.wire import JobOptions
from taphouse_extractor.records import BatchRef, JobRecord, Outcome, Pin, Records

PIN = Pin(fingerprint_id="0" * 16, layers=(2, 15, 27, 30), num_layers=30, dtype="bfloat16")
PATHS = ("/v1/queue", "/v1/jobs?limit=100", "/metrics")


def looking(*, jobs: int, entries: int, done: int, asks: int, loaded: bool) -> dict[str, Any]:
    """Latencies in ms of requests one after another, while the feeder looks once a second.

    `done` of the jobs are at their end, the others have one batch left. `loaded`: while two workers work.
    """

    def fill(service: Service) -> None:
        _fill(service, jobs, entries // jobs, done)

    workers = 2 if loaded else 0
    with running(workers=workers, prepare=fill) as service:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(
            base_url=f"http://127.0.0.1:{service.api_port}", headers=headers, timeout=300
        ) as http:
            began = time.monotonic()
            http.get("/v1/queue").raise_for_status()
            first_s = time.monotonic() - began
            time.sleep(5)
            found: dict[str, Any] = {"first_look_s": round(first_s, 2)}
            for path in PATHS:
                found[path] = _latencies(http, path, asks if path == PATHS[0] else max(20, asks // 20))
            status = http.get("/v1/queue").json()
        found["resident_mb"] = service.resident_mb()
        return {"jobs": status["jobs"], "ledger_head": status["ledger_head"], **found}


def _latencies(http: httpx.Client, path: str, asks: int) -> dict[str, float]:
    took = []
    for _ in range(asks):
        began = time.perf_counter()
        http.get(path).raise_for_status()
        took.append(1000 * (time.perf_counter() - began))
        time.sleep(0.02)
    took.sort()
    return {
        "p50_ms": round(took[len(took) // 2], 1),
        "p99_ms": round(took[int(len(took) * 0.99)], 1),
        "worst_ms": round(took[-1], 1),
    }


def _fill(service: Service, jobs: int, each: int, done: int) -> None:
    """Write a store as it is after all but one batch of most jobs."""
    store, records, now, seq = service.store, Records(service.store), time.time(), 0
    root = Path(store.root)
    for name in ("ledger/by-shard", "shards"):
        (root / name).mkdir(parents=True)
    for number in range(jobs):
        rows = each if number < done else each + 1
        job = JobRecord(
            id=f"j20260101{number:06d}-{number:08x}",
            options=JobOptions(batch_size=1),
            rows=rows,
            spooled=True,
            created_at=now - 3600,
        )
        lines = [b'{"prompt":"a row"}\n'] * rows
        (root / "jobs" / job.id / "outcomes" / "000").mkdir(parents=True)
        rows_path, index_path = records.rows_paths(job.id)
        (root / rows_path).write_bytes(b"".join(lines))
        offsets = [at * len(lines[0]) for at in range(rows + 1)]
        (root / index_path).write_bytes(b"".join(at.to_bytes(8, "little") for at in offsets))
        records.put_job(job)
        records.pin(job.id, PIN)
        for batch in range(each):
            seq += 1
            _finish(root, job, batch, seq, now)
    (root / "ledger" / "last").write_text(str(seq))


def _finish(root: Path, job: JobRecord, batch: int, seq: int, now: float) -> None:
    shard = shard_name(job.id, batch)
    entry = LedgerEntry(
        seq=seq,
        created_at=now,
        shard=shard,
        path=shard_path(shard),
        job_id=job.id,
        batch=batch,
        samples=1,
        tokens=512,
        bytes=1_600_000,
        raw_bytes=2_359_296,
        sha256="0" * 64,
        layers=(2, 15, 27, 30),
        num_layers=30,
        hidden_size=576,
        dtype="bfloat16",
        fingerprint_id="0" * 16,
    )
    data = to_json(entry.model_dump(exclude={"gone", "replaces"}))
    place = root / "ledger" / f"{seq:012d}.json"
    place.write_bytes(data)
    (root / "ledger" / "by-shard" / f"{shard}.json").hardlink_to(place)
    (root / "shards" / shard).touch()
    outcome = Outcome(
        job_id=job.id,
        batch=batch,
        rows=1,
        succeeded=1,
        shard=shard,
        tokens=512,
        bytes=1_600_000,
        raw_bytes=2_359_296,
        finished_at=now,
    )
    path = root / Records.outcome_path(BatchRef(job_id=job.id, batch=batch))
    path.write_bytes(to_json(outcome.model_dump(mode="json")))
