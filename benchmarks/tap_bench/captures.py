"""Captures as the tap's endpoint makes them: a claim, a signed opt-in, sealed slices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taphouse.slices import TOKEN_BYTES, Claim, OptIn, check_slices, new_tag, open_start

_LIMIT = 1 << 40
_WAIT_S = 60.0


class Captures:
    """The captures of one tapped engine, seen from its front end."""

    def __init__(self, llm: Any, row_bytes: int) -> None:
        self._llm = llm
        self.ranks = llm.collective_rpc("taphouse_start")
        off = [rank for rank in self.ranks if rank["capture"] != "on"]
        if off:
            raise RuntimeError(f"capture is off: {off[0]['reason']}")
        first = self.ranks[0]
        self.start = open_start(Path(first["start_dir"]).parent, first["start_id"])
        self.row_bytes = row_bytes

    def claim(self, lengths: Sequence[int], tokens: int) -> list[tuple[str, dict[str, Any]]]:
        """Claim room for prompts of these lengths; return each one's tag and signed opt-in."""
        made = []
        for length in lengths:
            tag, rows = new_tag(), length + tokens - 1
            nbytes = rows * (self.row_bytes + TOKEN_BYTES * len(self.ranks))
            made.append(
                (
                    Claim(tag, nbytes, time.time(), length, rows),
                    OptIn(tag, length, rows).signed(self.start.secret),
                )
            )
        self.start.reserve_all([claim for claim, _ in made], _LIMIT)
        return [(claim.tag, opt_in) for claim, opt_in in made]

    def free_bytes(self) -> int:
        """What the slices' file system has left."""
        space = os.statvfs(self.start.directory)
        return space.f_bavail * space.f_frsize

    def wait(self, tags: Sequence[str]) -> None:
        """Wait until every rank sealed every tag."""
        deadline = time.monotonic() + _WAIT_S
        left = set(tags)
        while left:
            left = {tag for tag in left if len(self.start.slice_paths(tag)) < len(self.ranks)}
            if left and time.monotonic() > deadline:
                raise RuntimeError(f"{len(left)} captures were not sealed: {self.start.records()}")
            if left:
                time.sleep(0.002)

    def take(self, tags: Sequence[str]) -> int:
        """Check and remove sealed captures; return the bytes of their rows. Raises the slice errors."""
        total = 0
        for tag in tags:
            total += sum(t.rows * t.row_bytes for t in check_slices(self.start.slice_paths(tag)))
            self.start.release(tag)
        return total

    def check(self, tag: str, token_ids: list[int]) -> dict[str, Any]:
        """Let the ranks compare a capture with the greedy tokens of the engine; remove it."""
        from taphouse_tap.verdict import combine

        rows = check_slices(self.start.slice_paths(tag))[0].rows
        answers = self._llm.collective_rpc("taphouse_check", args=(tag, token_ids, len(token_ids) - 1))
        self.start.release(tag)
        return {"rows": rows, **combine(answers)}


class Ahead:
    """Claims made ahead of their requests, all of one length, so that none waits for its own."""

    def __init__(self, captures: Captures, length: int, count: int) -> None:
        self._captures, self._length, self._count = captures, length, count
        self._ready: deque[tuple[str, dict[str, Any]]] = deque()
        self.fill()

    def fill(self) -> None:
        """Make claims until `count` are ready."""
        missing = self._count - len(self._ready)
        if missing > 0:
            self._ready.extend(self._captures.claim([self._length] * missing, 1))

    def take(self) -> dict[str, Any]:
        """Return the opt-in of the next request."""
        if not self._ready:
            self.fill()
        return self._ready.popleft()[1]

    def close(self) -> None:
        """Give up the claims that were not used."""
        for tag, _ in self._ready:
            self._captures.start.release(tag)


class Consumer:
    """The process that takes slices away, and what it has told.

    With `verify` it takes what it was told to `expect`, and joins and compares all of it.
    """

    def __init__(self, captures: Captures, *, verify: bool = False) -> None:
        command = [sys.executable, "-m", "tap_bench.consumer", str(captures.start.directory)]
        command += [str(len(captures.ranks)), *(["--verify"] if verify else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.taken: dict[str, Any] = {"slices": 0, "bytes": 0, "errors": 0, "error": None}
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def done(self) -> int:
        """Captures that are gone, good or bad."""
        return int(self.taken["slices"] + self.taken["errors"])

    def expect(self, tag: str, token_ids: list[int]) -> None:
        """Tell it the token ids [rows] of a capture that is on its way."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([tag, token_ids]) + "\n")
        self._process.stdin.flush()

    def wait(self, count: int) -> None:
        """Wait until `count` captures are gone, or give up."""
        deadline = time.monotonic() + _WAIT_S
        while self.done < count and time.monotonic() < deadline and self._process.poll() is None:
            time.sleep(0.002)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.taken = json.loads(line)
