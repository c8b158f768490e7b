"""What the service itself costs, and where it stops: `make bench-service`.

    python -m benchmarks.service                          all but overhead: about fifteen minutes
    python -m benchmarks.service --sections overhead      beside a real engine on this machine's CPU

throughput  4 workers, batches of 64 samples of 512 tokens, 4 layers of 576 in bfloat16, a stand-in engine
            that answers at once: samples and bytes a second, and where a worker's time goes
looking     latency of `GET /v1/queue` with 1,000 jobs and 100,000 ledger entries
memory      resident memory of every process from 10,000 to 1,000,000 rows
starting    the API's start with 1,000,000 rows done in batches of 16: by outcomes, and by their sums
overhead    a batch's wall time beside a real engine, and what of it isn't the engine's

Prints a JSON line a measurement; docs/benchmarks.md has the tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.service_bench.looking import looking
from benchmarks.service_bench.memory import memory
from benchmarks.service_bench.overhead import overhead
from benchmarks.service_bench.starting import starting
from benchmarks.service_bench.throughput import throughput


def run_throughput() -> Iterator[dict[str, Any]]:
    for workers in (4, 1):
        yield {"workers": workers, **throughput(batches=8 * workers + 8, batch_size=64, workers=workers)}
    yield {"workers": 4, "batch_size": 1, **throughput(batches=400, batch_size=1, workers=4)}


def run_looking() -> Iterator[dict[str, Any]]:
    for done, loaded in ((900, False), (0, False), (900, True)):
        found = looking(jobs=1000, entries=100_000, done=done, asks=2000, loaded=loaded)
        yield {"while_workers_work": loaded, **found}


def run_memory() -> Iterator[dict[str, Any]]:
    for batch_size in (64, 1):
        for look in memory(few=10_000, many=1_000_000, batch_size=batch_size):
            yield {"batch_size": batch_size, **look}


def run_starting() -> Iterator[dict[str, Any]]:
    yield starting(rows=1_000_000, batch_size=16)


SECTIONS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "throughput": run_throughput,
    "looking": run_looking,
    "memory": run_memory,
    "starting": run_starting,
    "overhead": overhead,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sections", default="throughput,looking,memory,starting", help=", ".join(SECTIONS))
    for section in parser.parse_args().sections.split(","):
        for found in SECTIONS[section]():
            print(json.dumps({"section": section, **found}), flush=True)


if __name__ == "__main__":
    main()
