from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import uvicorn
from tests.queue.fake_tap import FakeTap
from tests.unit.extractor.governing import FakeRedis

from taphouse.client import Taphouse
from taphouse.ledger import Ledger
from taphouse.shards import open_shard
from taphouse.store import LocalStore
from taphouse.wire import JobOptions
from taphouse_extractor.api import Context, create_app
from taphouse_extractor.api.guards import Names
from taphouse_extractor.aside import Aside
from taphouse_extractor.backlog import Backlog
from taphouse_extractor.direct import DirectExtraction, DirectLimits
from taphouse_extractor.doctor import Doctor
from taphouse_extractor.engine import Engine
from taphouse_extractor.engines import Engines
from taphouse_extractor.feeder import Feeder, FeederLimits
from taphouse_extractor.gate import Gate
from taphouse_extractor.governor.memory import Memory
from taphouse_extractor.governor.orders import Orders
from taphouse_extractor.governor.panel import Panel
from taphouse_extractor.jobs import QueueView
from taphouse_extractor.leases import Tries, Waits
from taphouse_extractor.monitor import Monitors
from taphouse_extractor.overview import Overview
from taphouse_extractor.pipeline import Pipeline
from taphouse_extractor.progress import Progress
from taphouse_extractor.pulse import Pulse, Watchers
from taphouse_extractor.records import BatchRef, JobRecord, Records
from taphouse_extractor.retention import Retention, RetentionPolicy
from taphouse_extractor.retries import Retries
from taphouse_extractor.samples import Samples
from taphouse_extractor.spool import Limits, Spool
from taphouse_extractor.tokens import Tokens

TOKEN = "a-token"


def engine_of(tap: FakeTap, key: str | None = None, url: str = "http://engine") -> Engine:
    """An engine client whose network is the tap itself."""

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        status, headers, out = tap.handle(
            request.method, request.url.path, request.headers.get("Authorization"), body
        )
        return httpx.Response(status, headers=headers, json=out)

    return Engine(
        url,
        slice_dir=tap.slice_dir,
        key=key,
        patience_s=5.0,
        transport=httpx.MockTransport(answer),
        sleep=lambda _: None,
    )


def engines_of(*engines: Engine) -> Engines:
    """These as the settings' engines, with a Redis of their own."""
    return Engines(engines, Aside(FakeRedis(), prefix="taphouse:test"))


@dataclass
class FakeQueue:
    """The queue's face, in memory. `broken` makes every call fail as a Redis that is away does."""

    queued: dict[str, BatchRef] = field(default_factory=dict)
    taken: dict[str, BatchRef] = field(default_factory=dict)
    broken: bool = False
    count: int = 0

    def enqueue(self, ref: BatchRef) -> str:
        self.count += 1
        self.queued[f"rq{self.count}"] = ref
        return f"rq{self.count}"

    def view(self) -> QueueView:
        if self.broken:
            raise redis.ConnectionError("away")
        return QueueView(dict(self.queued), dict(self.taken))

    def discard(self, rq_id: str) -> None:
        self.queued.pop(rq_id, None)
        self.taken.pop(rq_id, None)

    def take(self) -> BatchRef:
        """What a worker does first."""
        rq_id = next(iter(self.queued))
        self.taken[rq_id] = self.queued.pop(rq_id)
        return self.taken[rq_id]


@dataclass
class FakeLeases:
    """The leases' face, in memory."""

    held: dict[BatchRef, str] = field(default_factory=dict)
    counted: dict[BatchRef, Tries] = field(default_factory=dict)
    alive: dict[str, dict[str, Any]] = field(default_factory=dict)
    waits: Waits = field(default_factory=Waits)
    leader: str | None = None
    wiped: bool = False
    broken: bool = False
    renew_every_s: float = 0.0

    def running(self) -> dict[BatchRef, str]:
        return dict(self.held)

    def tries(self) -> dict[BatchRef, Tries]:
        return dict(self.counted)

    def waiting(self, tries: dict[BatchRef, Tries]) -> set[BatchRef]:
        return self.waits.look(tries)

    def count_bad(self, ref: BatchRef, reason: str, *, delay_s: float = 0.0) -> None:
        tries = self.counted.get(ref, Tries())
        self.counted[ref] = tries.again(reason, delay_s, bad=tries.bad + 1)

    def forget(self, ref: BatchRef) -> None:
        self.counted.pop(ref, None)

    def workers(self) -> dict[str, dict[str, Any]]:
        return self.alive

    def lead(self, name: str) -> bool:
        self.leader = self.leader or name
        return self.leader == name

    def stop_leading(self, name: str) -> None:
        self.leader = None

    def was_wiped(self) -> bool:
        wiped, self.wiped = self.wiped, False
        return wiped

    def probe(self) -> None:
        if self.broken:
            raise redis.ConnectionError("away")


@dataclass
class Bench:
    """A service without processes: batches are run by `run_all`."""

    tap: FakeTap
    engine: Engine
    engines: Engines
    store: LocalStore
    records: Records
    ledger: Ledger
    pipeline: Pipeline
    progress: Progress
    queue: FakeQueue
    leases: FakeLeases
    monitors: Monitors
    overview: Overview
    memory: Memory
    orders: Orders

    def job(self, rows: list[Any], **options: Any) -> JobRecord:
        """Spool rows (dicts, or lines as they are) into a job."""
        spool = Spool(self.records, Limits(1 << 20, 1000, 10_000), JobOptions(**options), "a job")
        for row in rows:
            spool.feed((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n")
        return spool.finish()

    def feeder(
        self,
        limits: FeederLimits | None = None,
        paused: Callable[[], str | None] = lambda: None,
        **more: Any,
    ) -> Feeder:
        """One that feeds the bench's queue."""
        return Feeder(
            records=self.records,
            progress=self.progress,
            ledger=self.ledger,
            queue=self.queue,  # type: ignore[arg-type]
            leases=self.leases,  # type: ignore[arg-type]
            limits=limits or FeederLimits(max_queued=3, max_attempts=2, start_grace_s=5.0),
            give_up=self.pipeline.give_up,
            close=self.pipeline.close,
            paused=paused,
            **more,
        )

    def sample_ids(self) -> list[str]:
        """Ids of all sealed samples, in the ledger's order."""
        ids = []
        for entry in self.ledger.entries():
            with open_shard(self.store.local_path(entry.path), sha256=entry.sha256) as shard:
                ids += [sample.id for sample in shard]
        return ids

    def run_all(self, job: JobRecord) -> None:
        """Every batch, in order, in this process."""
        for batch in range(job.batches):
            self.pipeline.run(BatchRef(job_id=job.id, batch=batch))


@pytest.fixture
def tap(tmp_path: Path) -> FakeTap:
    return FakeTap(tmp_path / "slices")


@pytest.fixture
def engines(tap: FakeTap) -> Engines:
    return engines_of(engine_of(tap))


@pytest.fixture
def bench(tmp_path: Path, tap: FakeTap, engines: Engines) -> Bench:
    store = LocalStore(tmp_path / "store")
    records, ledger, engine = Records(store), Ledger(store), engines.each[0]
    progress, queue, leases, monitors = Progress(records), FakeQueue(), FakeLeases(), Monitors(engines)
    memory, orders = Memory(FakeRedis(), prefix="taphouse:test", ttl_s=5.0), Orders(store)
    overview = Overview(
        progress=progress,
        store=store,
        ledger=ledger,
        queue=queue,  # type: ignore[arg-type]
        leases=leases,  # type: ignore[arg-type]
        monitors=monitors,
        governor=Panel(memory, orders, enabled=True).shown,
        unconsumed=Backlog(store, ledger, 0).shown,
        retention=Retention(records, ledger, RetentionPolicy("consumed")).shown,
    )
    pipeline = Pipeline(records, ledger, engines, 3)
    return Bench(
        tap,
        engine,
        engines,
        store,
        records,
        ledger,
        pipeline,
        progress,
        queue,
        leases,
        monitors,
        overview,
        memory,
        orders,
    )


class Prompt(uvicorn.Server):
    """Ends at once when it is told to: uvicorn itself takes up to 0.3 s, which is most of a test."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.serves = threading.Event()

    async def main_loop(self) -> None:
        self._told, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self.serves.set()
        await self._told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.005)

    def end(self) -> None:
        """From another thread."""
        self._loop.call_soon_threadsafe(self._told.set)


@dataclass
class Service:
    """The API over HTTP, and its client."""

    url: str
    client: Taphouse
    bench: Bench
    datasets: Path


@pytest.fixture
def serve(bench: Bench, tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Serve the bench on a free port; `min_free_bytes` is the disk floor."""
    stops: list[Callable[[], None]] = []

    def start(
        *,
        min_free_bytes: int = 0,
        max_rows: int = 50,
        token: str | None = TOKEN,
        host: str = "127.0.0.1",
        body_timeout_s: float = 60.0,
        governor: bool = True,
        tokens_file: Path | None = None,
        requests_per_minute: int = 0,
        max_jobs: int = 0,
        watchers: Watchers | None = None,
        patience_s: float = 2.0,
        open_metrics: bool = True,
        home: Callable[[], str | None] = lambda: None,
    ) -> Service:
        panel = Panel(bench.memory, bench.orders, enabled=governor)
        gate = Gate(bench.store, bench.monitors, min_free_bytes, home=home, stopped=panel.stopped)
        pulse = Pulse(lambda: bench.overview.queue(gate.paused()), lambda: bench.overview.jobs(100))
        datasets = tmp_path / "datasets"
        datasets.mkdir(exist_ok=True)
        context = Context(
            store=bench.store,
            records=bench.records,
            ledger=bench.ledger,
            overview=bench.overview,
            gate=gate,
            direct=DirectExtraction(bench.engines, DirectLimits(4, 32, 20_000, 2), 2),
            doctor=Doctor(
                engines=bench.engines.each,
                store=bench.store,
                leases=bench.leases,  # type: ignore[arg-type]
                gate=gate,
                governor=panel,
                workers=lambda: bench.overview.live().workers,
                ledger=bench.ledger,
            ),
            governor=panel,
            retries=Retries(bench.records, patience_s),
            limits=Limits(100_000, max_rows, 5_000),
            samples=Samples(bench.records, bench.ledger, bench.overview.settled, bench.pipeline.close),
            retention=Retention(bench.records, bench.ledger, RetentionPolicy()),
            dataset_roots=(datasets,),
            pulse=pulse,
            watchers=watchers or Watchers(8, 8),
            max_jobs=max_jobs,
        )
        app = create_app(
            context,
            tokens=Tokens(token, tokens_file),
            requests_per_minute=requests_per_minute,
            open_metrics=open_metrics,
            max_request_bytes=20_000,
            body_timeout_s=body_timeout_s,
            names=Names.of(host, ("taphouse.example",)),
        )
        listener = socket.create_server(("127.0.0.1", 0))
        server = Prompt(uvicorn.Config(app, log_level="error", lifespan="off", http="h11"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        assert server.serves.wait(10)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = Taphouse(url, token=token)

        def stop() -> None:
            client.close()
            server.end()
            thread.join()
            listener.close()

        stops.append(stop)
        return Service(url, client, bench, datasets)

    yield start
    for stop in stops:
        stop()
