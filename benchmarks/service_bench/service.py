"""The service as the benchmark runs it: real processes, production's settings, and the memory they hold."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.queue.conftest import TOKEN, Cluster, children, wait_for

from taphouse.store.identity import begin

__all__ = ["TOKEN", "Service", "running", "wait_for"]

MB = 1e6


class Service(Cluster):
    """A cluster whose engine answers at once."""

    def start_bench_engine(self, *, tokens: int, hidden: int) -> None:
        """Start the stand-in engine."""
        options = ["--tokens", str(tokens), "--hidden", str(hidden)]
        command = [sys.executable, "-m", "benchmarks.service_bench.engine", str(self.engine_port)]
        self.spawn("engine", [*command, str(self.place("slices")), *options])
        self.engine = self.processes[-1].pid

    def start_named(self, workers: int) -> None:
        """Start Redis, the API and workers, and remember their pids by name."""
        self.pids = {"Redis": self.start_redis().pid, "API (feeder's leader)": self.start_api().pid}
        self.workers = [self.start_worker() for _ in range(workers)]
        for number, worker in enumerate(self.workers, start=1):
            self.pids[f"worker {number}"] = worker.pid
        wait_for("workers", lambda: len(self.client.queue().workers) == workers)

    def resident_mb(self) -> dict[str, float]:
        """Resident memory by process, in MB."""
        return {name: round(_resident(pid) / MB, 1) for name, pid in self.pids.items()}

    def horses_mb(self, seconds: float) -> float:
        """The largest resident memory of a work-horse that is seen in the next `seconds`, in MB."""
        most, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            for worker in self.workers:
                with contextlib.suppress(OSError, IndexError):
                    most = max(most, _resident(children(worker.pid)[0]))
            time.sleep(0.002)
        return round(most / MB, 1)

    def redis_used_mb(self) -> float:
        """What Redis says that its data take, in MB."""
        return round(self.redis.info("memory")["used_memory"] / MB, 2)


def _resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise IndexError(f"process {pid} has no memory")


@contextlib.contextmanager
def running(
    *,
    workers: int,
    tokens: int = 512,
    hidden: int = 576,
    prepare: Callable[[Service], None] = lambda _: None,
    **settings: str,
) -> Iterator[Service]:
    """A service in a directory of its own, gone afterwards. `prepare` fills the store before it starts."""
    directory = Path(tempfile.mkdtemp(prefix="taphouse-service-"))
    slices = Path(tempfile.mkdtemp(prefix="taphouse-service-", dir="/dev/shm"))
    names = {f"TAPHOUSE_EXTRACTOR_{name.upper()}": value for name, value in settings.items()}
    service = Service(directory, settings=names, places={"slices": slices / "slices"})
    try:
        begin(service.store)
        prepare(service)
        service.start_bench_engine(tokens=tokens, hidden=hidden)
        service.start_named(workers)
        yield service
    finally:
        service.close()
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(slices, ignore_errors=True)
