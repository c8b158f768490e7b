"""An engine's process, from the driver's side."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EngineFailed(Exception):
    """The engine's process ended, or did not answer in time."""


class CommandFailed(Exception):
    """The engine answered with an error and goes on."""


class Engine:
    """One engine's process: `started` waits until it is up, `ask` sends a command and returns its answer."""

    def __init__(self, spec: dict[str, Any], environment: Mapping[str, str], log: Path) -> None:
        self.name, self.spec, self.log, self.alive = spec["name"], spec, log, True
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tap_bench.engine", json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def started(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the engine; return its start's `seconds` and `kv_tokens`. Raises `EngineFailed`."""
        try:
            return self._answer(timeout_s)
        except CommandFailed as error:
            self.alive = False
            raise EngineFailed(str(error)) from error

    def ask(self, command: dict[str, Any], timeout_s: float = 240.0) -> Any:
        """Carry out one command. Raises `CommandFailed` or `EngineFailed`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            self.alive = False
            raise EngineFailed(f"{self.name} is gone") from error
        return self._answer(timeout_s)

    def quit(self) -> None:
        """Tell the engine to end, without waiting for it. Idempotent."""
        self.alive = False
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write('{"do": "quit"}\n')
            self._process.stdin.close()

    def close(self, grace_s: float = 8.0) -> None:
        """End the engine and everything it started."""
        self.quit()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def log_tail(self, size: int = 3000) -> str:
        """The end of what the engine printed."""
        return self.log.read_text(errors="replace")[-size:]

    def _answer(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._answers.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                self.alive = False
                raise EngineFailed(f"{self.name} did not answer within {timeout_s:.0f} s") from None
            if line is None:
                self.alive = False
                raise EngineFailed(f"{self.name} ended")
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
                if not answer["ok"] and answer["error"].startswith("EngineDeadError"):
                    self.alive = False
                    raise EngineFailed(answer["error"])
                if not answer["ok"]:
                    raise CommandFailed(answer["error"])
                return answer["value"]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)
