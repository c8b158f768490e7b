"""A service whose processes are killed and frozen at random while jobs come in; then every sample is counted.

python -m tests.queue.soak [--seconds 300] [--seed 7] [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.queue.conftest import TOKEN, Cluster, children, free_port, wait_for

from taphouse.client import Taphouse
from taphouse.errors import TaphouseError
from taphouse.shards import open_shard
from taphouse.wire import JobOptions

SETTINGS = {
    "TAPHOUSE_EXTRACTOR_LEASE_TTL_S": "2",
    "TAPHOUSE_EXTRACTOR_START_GRACE_S": "2",
    "TAPHOUSE_EXTRACTOR_FEEDER_INTERVAL_S": "0.3",
    "TAPHOUSE_EXTRACTOR_BACKOFF_BASE_S": "0.2",
    "TAPHOUSE_EXTRACTOR_BACKOFF_CAP_S": "1",
    "TAPHOUSE_EXTRACTOR_ENGINE_POLL_S": "0.5",
    "TAPHOUSE_EXTRACTOR_ENGINE_TIMEOUT_S": "5",
    "TAPHOUSE_EXTRACTOR_MAX_ATTEMPTS": "100000",  # a batch that is given up is told, not lost
}
WORKERS = 3
SETTLES_S = 180.0


@dataclass
class Part:
    """A process of the service, and how it is started again."""

    name: str
    start: Callable[[], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes]

    def family(self) -> list[int]:
        """Its pid, and that of a worker's work-horse."""
        try:
            return [self.process.pid, *children(self.process.pid)]
        except FileNotFoundError:
            return [self.process.pid]

    def tell(self, how: int, pids: list[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, how)


class Soak:
    """One run: `begin`, `torment`, `settle`, `check`. What happens follows from `seed`, up to timing."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.dice = cluster, random.Random(seed)
        cluster.settings = {**SETTINGS, **cluster.settings}
        self.parts: list[Part] = []
        self.did = Counter[str]()
        self.acknowledged: dict[str, tuple[str, int]] = {}
        self.followed: list[str] = []
        self._stop, self._cursor = threading.Event(), 0
        self._other_port = free_port()
        ports = (cluster.api_port, self._other_port)
        self._clients = [
            Taphouse(f"http://127.0.0.1:{port}", token=TOKEN, timeout=10.0, extract_timeout=10.0)
            for port in ports
        ]
        self._frozen: list[tuple[float, Part, list[int]]] = []
        self._wrong: list[BaseException] = []

    def begin(self) -> None:
        """Redis, engine, two APIs, workers."""
        start, second = self.cluster, {"TAPHOUSE_EXTRACTOR_PORT": str(self._other_port)}
        ways: list[tuple[str, Callable[[], subprocess.Popen[bytes]]]] = [
            ("redis", start.start_redis),
            ("engine", partial(start.start_engine, delay_s=0.03)),
            ("api", partial(start.start_api, wait=False)),
            ("api", partial(start.start_api, wait=False, **second)),
            *[("worker", start.start_worker)] * WORKERS,
        ]
        self.parts = [Part(name, way, way()) for name, way in ways]
        wait_for("API", start.api_answers)
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,)) for work in (self._submit, self._follow)
        ]
        for thread in self._threads:
            thread.start()

    def torment(self, seconds: float) -> None:
        """Kill or freeze one process after the other at random moments; what is killed is started again."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._thaw(self.dice.uniform(0.02, 0.8))
            part = self.dice.choice(self.parts)
            if self.dice.random() < 0.3:
                self._freeze(part)
            else:
                self._kill(part)
        self._thaw(5.0)

    def _freeze(self, part: Part) -> None:
        """Longer than a lease lives, sometimes: what wakes up then is not the only one any more."""
        pids, for_s = part.family(), self.dice.uniform(0.2, 4.0 if part.name == "worker" else 1.5)
        part.tell(signal.SIGSTOP, pids)
        self._frozen.append((time.monotonic() + for_s, part, pids))
        self.did[f"{part.name} frozen"] += 1

    def _thaw(self, seconds: float) -> None:
        """Sleep, and let what was frozen go on in time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.02)
            for frozen in [each for each in self._frozen if each[0] <= time.monotonic()]:
                self._frozen.remove(frozen)
                frozen[1].tell(signal.SIGCONT, frozen[2])

    def _kill(self, part: Part) -> None:
        pids = part.family()
        whom = self.dice.choice(["all", "parent", "horse"]) if len(pids) > 1 else "parent"
        part.tell(signal.SIGKILL, {"all": pids, "parent": pids[:1], "horse": pids[1:]}[whom])
        self.did[f"{part.name} killed" if whom != "horse" else "work-horse killed"] += 1
        if whom != "horse":
            part.process.wait(timeout=30)
            self._thaw(self.dice.uniform(0.0, 0.5))
            part.process = part.start()

    def settle(self) -> None:
        """No more jobs; those there are come to their end."""
        self._stop.set()
        self._threads[0].join()
        for key, (job_id, _) in self.acknowledged.items():
            wait_for(f"job {job_id} of {key}", partial(self._final, job_id), SETTLES_S)
        self._threads[1].join()
        self._look()

    def _final(self, job_id: str) -> bool:
        with suppress(TaphouseError):
            return self._clients[0].job(job_id).state.final
        return False

    def check(self) -> int:
        """Every acknowledged job is done, and no other is there; every row has its sample once. How many."""
        assert self._wrong == []
        jobs = {job.id: job for job in self._clients[0].jobs(limit=10_000)}
        for job_id, rows in self.acknowledged.values():
            job = jobs[job_id]
            assert (job.state.value, job.rows, job.succeeded) == ("done", rows, rows), job
        assert set(jobs) == {job_id for job_id, _ in self.acknowledged.values()}
        made = self.cluster.sample_ids()
        assert made == self.followed, "who followed the ledger saw what there is, in this order"
        doubled = [name for name, times in Counter(made).items() if times > 1]
        assert doubled == []
        wanted = {f"{key}-{n}" for key, (_, rows) in self.acknowledged.items() for n in range(rows)}
        assert set(made) == wanted
        return len(made)

    def close(self) -> None:
        self._stop.set()
        for part in self.parts:
            part.tell(signal.SIGCONT, part.family())
        for client in self._clients:
            client.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._wrong.append(error)

    def _submit(self) -> None:
        """Jobs of a few batches, each sent until it is acknowledged, and sometimes once more."""
        dice, number = random.Random(self.dice.random()), 0
        while not self._stop.is_set():
            key, rows = f"job{number}", dice.randint(5, 40)
            lines = [b'{"id":"%s-%d","prompt":"row %d"}\n' % (key.encode(), n, n) for n in range(rows)]
            options = JobOptions(batch_size=dice.choice([4, 8, 16]))
            again = dice.random() < 0.3
            while True:
                try:
                    job = dice.choice(self._clients).enqueue(lines, options, key=key)
                except TaphouseError:
                    time.sleep(0.2)
                    continue
                before = self.acknowledged.setdefault(key, (job.id, rows))
                assert before == (job.id, rows), f"{key} made {before} and {job.id}"
                if not again:
                    break
                again = False
            number += 1
            self._stop.wait(dice.uniform(0.2, 1.5))

    def _follow(self) -> None:
        while not self._stop.wait(0.2):
            self._look()

    def _look(self) -> None:
        for entry in self.cluster.ledger.entries(self._cursor):
            with open_shard(self.cluster.store.local_path(entry.path), sha256=entry.sha256) as shard:
                self.followed += [sample.id for sample in shard]
            self._cursor = entry.seq


def run(directory: Path, seed: int, seconds: float) -> str:
    """One soak; returns what happened, in words. Raises AssertionError when anything is lost or doubled."""
    cluster = Cluster(directory)
    soak = Soak(cluster, seed)
    try:
        began = time.monotonic()
        soak.begin()
        soak.torment(seconds)
        soak.settle()
        samples = soak.check()
        took = time.monotonic() - began
    finally:
        soak.close()
        cluster.close()
    deeds = ", ".join(f"{what} {times} times" for what, times in sorted(soak.did.items()))
    jobs = len(soak.acknowledged)
    return f"seed {seed}: {jobs} jobs, {samples} samples, none lost or doubled, in {took:.0f} s. {deeds}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", type=Path, help="directory to run in, kept; a temporary one otherwise")
    given = parser.parse_args()
    print(f"soak of {given.seconds:g} s, seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="taphouse-soak-") as temporary:
        directory = given.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        print(run(directory, given.seed, given.seconds))


if __name__ == "__main__":
    main()
