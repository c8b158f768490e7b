"""One engine as the benchmark sees it: its status, its quota, its counters, its scheduler's record."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from .client import Target

STATUS = "/v1/hidden_states/status"
QUOTA = "/v1/hidden_states/quota"
CAPTURE_S = 180.0
COUNTERS = {
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}


@dataclass(frozen=True)
class Server:
    """An engine that is up. `key` opens the tap's routes, where they have one of their own."""

    name: str
    target: Target
    key: str | None = None

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """One request to the tap's routes or to vLLM's own."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else self.target.headers
        with httpx.Client(timeout=30, trust_env=False, headers=headers) as client:
            return client.request(method, f"{self.target.url}{path}", json=body)

    def status(self) -> dict[str, Any]:
        """The tap's status; raises `httpx.HTTPError`, and ValueError for what is none."""
        return dict(self.ask("GET", STATUS).json())

    def await_capture(self) -> dict[str, Any]:
        """Wait for the start-up canary; returns the status. Raises `RuntimeError` when it takes too long."""
        deadline = time.monotonic() + CAPTURE_S
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                status = self.status()
                if status.get("capture") == "on":
                    return status
            time.sleep(0.5)
        raise RuntimeError(f"{self.name}: no capture after {CAPTURE_S:.0f} s: {status.get('reason')}")

    def put_quota(self, fields: dict[str, Any], ttl_s: float) -> None:
        """Set the quota; raises `RuntimeError` when the engine refuses it."""
        answer = self.ask("PUT", QUOTA, {**fields, "ttl_s": ttl_s})
        if answer.status_code != 200:
            raise RuntimeError(f"{self.name}: quota: {answer.status_code}: {answer.text[:300]}")

    def counters(self) -> dict[str, float]:
        """vLLM's counters by our names, summed over their labels."""
        lines = self.ask("GET", "/metrics").text.splitlines()
        return {ours: _metric(lines, theirs) for ours, theirs in COUNTERS.items()}

    def await_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until no request runs or waits in the engine."""
        deadline = time.monotonic() + timeout_s
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        while time.monotonic() < deadline:
            lines = self.ask("GET", "/metrics").text.splitlines()
            if not any(_metric(lines, name) for name in names):
                return
            time.sleep(0.2)
        raise RuntimeError(f"{self.name}: requests are left after {timeout_s:.0f} s")


def _metric(lines: list[str], name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


class Watch:
    """Follows the scheduler's record, which the status shows, every 50 ms without asking the server.

    The engine publishes a change within half a second, so what is seen here is late rather than early.
    """

    EVERY_S = 0.05

    def __init__(self, start_dir: Path) -> None:
        self._start_dir = start_dir
        self._seen: list[dict[str, Any]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> list[dict[str, Any]]:
        """End it; returns every change that was seen, `at` in `time.monotonic`."""
        self._over.set()
        self._thread.join(5)
        return self._seen

    def _run(self) -> None:
        last: dict[str, Any] | None = None
        while not self._over.is_set():
            found = scheduler_state(self._start_dir)
            if found is not None and found != last:
                self._seen.append({"at": time.monotonic(), **found})
                last = found
            self._over.wait(self.EVERY_S)


def scheduler_state(start_dir: Path) -> dict[str, Any] | None:
    """The scheduler's records, as one: quiet when all engines are, counters summed. None without any."""
    records = []
    for path in start_dir.glob("scheduler-d*.json"):
        with contextlib.suppress(OSError, ValueError):
            records.append(json.loads(path.read_text()))
    if not records:
        return None
    steps: dict[str, int] = {}
    for record in records:
        for name, value in record.get("steps", {}).items():
            steps[name] = steps.get(name, 0) + value
    return {
        "scheduler": records[0].get("scheduler"),
        "reason": records[0].get("reason"),
        "quiet": all(record.get("quiet") for record in records),
        "busy_ms": (records[0].get("quota") or {}).get("busy_ms"),
        "stopped": (records[0].get("quota") or {}).get("stopped"),
        "note": (records[0].get("quota") or {}).get("note"),
        "steps": steps,
        "cost": records[0].get("cost"),
    }
