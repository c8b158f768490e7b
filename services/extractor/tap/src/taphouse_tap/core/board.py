"""What an engine core reads and says beside its steps: a thread that does the files, off the step path."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taphouse.slices import write_atomically
from taphouse_tap.quota import Quota, read_quota

READ_S = 0.05
_CHANGED_S = 0.5
_HEARTBEAT_S = 2.0

logger = logging.getLogger("vllm.taphouse")


class Board:
    """Keeps `quota` up to date with the start's file, and publishes what `state` says as a record.

    `record` without `quota` and `updated_at`; published when it changed, and every two seconds anyway.
    """

    def __init__(
        self, start_dir: Path, dp_rank: int, default: Quota, state: Callable[[], dict[str, Any]]
    ) -> None:
        self.quota = default
        self._default, self._state = default, state
        self._start_dir, self._dp_rank = start_dir, dp_rank
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="taphouse-board", daemon=True)

    def start(self) -> None:
        """Publish once, and start the thread."""
        self.publish()
        self._thread.start()

    def publish(self) -> dict[str, Any]:
        """Write the record now; returns what it says."""
        said = self._record()
        body = {**said, "pid": os.getpid(), "updated_at": time.time()}
        write_atomically(self._start_dir / f"scheduler-d{self._dp_rank}.json", json.dumps(body))
        return said

    def read(self) -> None:
        """Read the quota now. One that can't be read leaves the defaults in force, and is said once."""
        try:
            self.quota, problem = read_quota(self._start_dir, self._default, time.time()), None
        except (OSError, ValueError) as error:
            self.quota, problem = self._default, f"the quota can't be read: {error}"
        if problem is not None and problem != self._problem:
            logger.warning("Taphouse: %s", problem)
        self._problem = problem

    def _record(self) -> dict[str, Any]:
        return {"dp_rank": self._dp_rank, "quota": self.quota.as_dict(), **self._state()}

    def _run(self) -> None:
        said: dict[str, Any] = {}
        said_at = 0.0
        while True:
            time.sleep(READ_S)
            try:
                self.read()
                now = time.monotonic()
                if now - said_at >= _HEARTBEAT_S or (now - said_at >= _CHANGED_S and said != self._record()):
                    said_at = now
                    said = self.publish()
            except Exception as error:  # a full tmpfs, or counts that changed while they were read: next time
                logger.warning("Taphouse: the scheduler's record can't be written: %s", error)
