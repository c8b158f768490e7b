"""A batch's wall time beside a real engine: how much of it is not the engine's."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.isolation_cpu import model
from benchmarks.service_bench.service import Service
from tests.engine.launch import Engine as Launched
from tests.engine.launch import launch

from taphouse_extractor.engine import Engine, in_order
from taphouse_extractor.records import BatchRef, Records

ROWS, TOKENS = 64, 512
CONCURRENCY = 8
TURNS = 3


def overhead() -> Iterator[dict[str, Any]]:
    """Batches straight to the engine and through the service in turns; ratios to the mean of neighbours."""
    env = {"TAPHOUSE_TAP_PROOF_INTERVAL_S": "0", "OMP_NUM_THREADS": "1"}
    args = ["--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-batched-tokens", "512"]
    with launch(model(False), args=args, env=env, forked=False) as engine, _service(engine) as service:
        service.wait_done(service.enqueue(8, batch_size=8).id, 300)
        bare, turns = [_bare(engine, seed=0)], list[tuple[float, float]]()
        for turn in range(TURNS):
            turns.append(_through(service, seed=2 * turn + 1))
            bare.append(_bare(engine, seed=2 * turn + 2))
    ratios = [
        took / ((before + after) / 2)
        for (took, _), before, after in zip(turns, bare[:-1], bare[1:], strict=True)
    ]
    yield {
        "bare_batch_s": [round(took, 2) for took in bare],
        "service_batch_s": [round(took, 2) for took, _ in turns],
        "service_over_bare": [round(ratio, 4) for ratio in ratios],
        "median": round(statistics.median(ratios), 4),
        "waiting_for_the_engine": [round(waited, 4) for _, waited in turns],
    }


@contextlib.contextmanager
def _service(engine: Launched) -> Iterator[Service]:
    directory = Path(tempfile.mkdtemp(prefix="taphouse-service-"))
    settings = {
        "TAPHOUSE_EXTRACTOR_GOVERNOR": "false",
        "TAPHOUSE_EXTRACTOR_ENGINE_CONCURRENCY": str(CONCURRENCY),
    }
    port = int(engine.url.rsplit(":", 1)[1])
    service = Service(directory, engine_port=port, settings=settings, places={"slices": engine.slice_dir})
    try:
        service.start_named(workers=1)
        yield service
    finally:
        service.close()
        shutil.rmtree(directory, ignore_errors=True)


def _prompt(seed: int, row: int) -> list[int]:
    return [300 + (seed * 7919 + row * 104_729 + at * 31) % 4000 for at in range(TOKENS)]


def _bare(engine: Launched, seed: int) -> float:
    """Seconds of one batch's rows without the service: asked for, read, checked and released."""
    with Engine(engine.url, slice_dir=engine.slice_dir) as client:
        bodies = [
            {"prompt": _prompt(seed, row), "max_tokens": 1, "delivery": "slices"} for row in range(ROWS)
        ]
        began = time.monotonic()
        for capture in in_order(client.capture, bodies, CONCURRENCY):
            assert capture.rows == TOKENS
        return time.monotonic() - began


def _through(service: Service, seed: int) -> tuple[float, float]:
    """Seconds of a batch through the service, and the part of them that it waited for the engine.

    Two batches in a queue with one worker: from the end of the first to the end of the second.
    """
    from taphouse.wire import JobOptions

    lines = (b'{"prompt":%s}\n' % str(_prompt(seed, row)).encode() for row in range(2 * ROWS))
    job = service.client.enqueue(lines, JobOptions(batch_size=ROWS), again=True)
    while not (done := service.client.job(job.id)).state.final:
        time.sleep(1.0)  # a closer look would take time from what is measured
    assert done.succeeded == 2 * ROWS
    records = Records(service.store)
    first, second = (records.outcome(BatchRef(job_id=job.id, batch=batch)) for batch in range(2))
    assert first is not None and second is not None
    took = second.finished_at - first.finished_at
    return took, second.stages["capture"] / took
