"""Extraction's load: keeps captures in flight, takes their slices away, and says when how many tokens came.

    python -m benchmarks.isolation.extraction '{"url": ..., "in_flight": 8, "prompt_tokens": 256, ...}'

A process of its own, and a nice one, so that reading states takes no processor from the clients that measure.
Each of its threads does what an extractor worker does with a prompt: `POST /v1/hidden_states`, join and check
the slices, release them; at 429 it waits as long as Retry-After says. Prints a JSON line an event with `at`
from `time.monotonic()`, which all processes of a machine share, and ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from taphouse.slices import SliceError, join_slices, release

TIMEOUT_S = 300.0
LONGEST_WAIT_S = 30.0
NICE = 10


@dataclass(frozen=True)
class Load:
    """`in_flight` captures of `prompt_tokens` tokens at a time, at vLLM's `priority` (more waits longer)."""

    url: str
    in_flight: int
    prompt_tokens: int
    vocabulary: tuple[int, int]
    seed: int = 0
    priority: int = 0
    key: str | None = None


class Extraction:
    """`processes` processes that share the load, from the side of the benchmark."""

    def __init__(self, load: Load, processes: int = 1) -> None:
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        for number in range(processes):
            share = load.in_flight // processes + (number < load.in_flight % processes)
            part = {**asdict(load), "in_flight": share, "seed": load.seed * 1000 + number}
            self._start(part)

    def _start(self, part: dict[str, Any]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.isolation.extraction", json.dumps(part)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        self._processes.append(process)
        self._readers.append(reader)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._lock:
                self._events.append(json.loads(line))

    def events(self) -> list[dict[str, Any]]:
        """All events so far, in order of time."""
        with self._lock:
            return sorted(self._events, key=lambda event: float(event["at"]))

    def await_first(self, timeout_s: float, since: float = 0.0) -> bool:
        """Wait for the first capture after `since` (`time.monotonic`); False when none came in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if any("tokens" in event and event["at"] >= since for event in self.events()):
                return True
            time.sleep(0.05)
        return False

    def stop(self) -> list[dict[str, Any]]:
        """End the load; what is in flight is given up, as by clients that leave. Returns all events."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process, reader in zip(self._processes, self._readers, strict=True):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            reader.join(5)
        return self.events()


class _Worker:
    """What runs in the load's process."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._over = threading.Event()
        self._out = threading.Lock()
        self._client = httpx.Client(
            base_url=load.url,
            timeout=TIMEOUT_S,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
            headers={"Authorization": f"Bearer {load.key}"} if load.key else {},
        )

    def run(self) -> None:
        for number in range(self._load.in_flight):
            threading.Thread(target=self._loop, args=(number,), daemon=True).start()
        for _ in sys.stdin:  # until it ends
            pass
        self._over.set()
        with self._out:
            sys.stdout.flush()
            os._exit(0)  # connections of captures in flight end with the process

    def _loop(self, number: int) -> None:
        draw = random.Random(f"{self._load.seed}/{number}")
        while not self._over.is_set():
            sent = time.monotonic()
            try:
                wait = self._capture(draw, sent)
            except (httpx.HTTPError, SliceError, OSError, KeyError, ValueError) as error:
                self._say(failed=f"{type(error).__name__}: {error}"[:300])
                wait = 0.5
            if wait:
                self._over.wait(wait)

    def _capture(self, draw: random.Random, sent: float) -> float:
        """Take one capture; return how long to wait before the next (seconds)."""
        load = self._load
        body: dict[str, Any] = {
            "prompt": [draw.randrange(*load.vocabulary) for _ in range(load.prompt_tokens)]
        }
        if load.priority:
            body["priority"] = load.priority
        answer = self._client.post("/v1/hidden_states", json=body)
        if answer.status_code == 429:
            wait = float(answer.headers.get("Retry-After", 1))
            self._say(refused=429, retry_after=wait)
            return min(max(wait, 0.05), LONGEST_WAIT_S)
        if answer.status_code != 200:
            raise ValueError(f"HTTP {answer.status_code}: {answer.text[:200]}")
        found = answer.json()
        (item,) = found["data"]
        paths = [Path(piece["path"]) for piece in item["slices"]]
        try:
            states = join_slices(paths, item["token_ids"][: item["rows"]], found["layers"])
        finally:
            release(paths[0].parent, item["tag"])
        if len(states) < load.prompt_tokens:
            raise ValueError(f"{len(states)} rows of {load.prompt_tokens} tokens")
        self._say(sent=sent, tokens=load.prompt_tokens)
        return 0.0

    def _say(self, **event: Any) -> None:
        with self._out:
            print(json.dumps({"at": time.monotonic(), **event}), flush=True)


def main() -> None:
    given = json.loads(sys.argv[1])
    given["vocabulary"] = tuple(given["vocabulary"])
    os.nice(NICE)
    _Worker(Load(**given)).run()


if __name__ == "__main__":
    main()
