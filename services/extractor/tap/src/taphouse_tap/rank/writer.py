"""The writer: one thread a rank that turns staged rows into sealed slices, off the engine's threads."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from taphouse.slices import DirectoryFull, SliceError
from taphouse_tap.errors import BadRows

from .breaker import Breaker
from .capture import Capture, Captures
from .record import Counters
from .staging import StagedRows, Staging

_SPREAD_OVER = 8
"""Threads that share the rows of one large step, and checksums: copying and crc32 run outside the GIL."""

_SPREAD_BYTES = 1 << 23
"""Smaller steps are written by the writer's own thread."""

_PIECE_BYTES = 1 << 22
"""What one thread writes at a time."""

_FAILS_ONE = (BadRows, SliceError, OSError)
"""Errors that are one capture's own."""

logger = logging.getLogger("vllm.taphouse")


@dataclass(frozen=True)
class Part:
    """The rows [first, first + count) of a step's `StagedRows` that belong to one capture."""

    capture: Capture
    first: int
    count: int


@dataclass(frozen=True)
class Piece:
    """Rows [n, row bytes] of one capture on their way to row number `row` of its file."""

    capture: Capture
    row: int
    rows: NDArray[np.uint8]


@dataclass(frozen=True)
class Step:
    """Rows of one engine step."""

    rows: StagedRows
    parts: Sequence[Part]


@dataclass(frozen=True)
class Finish:
    """The request ended: seal what there is."""

    capture: Capture


@dataclass(frozen=True)
class Fail:
    """The capture can't be completed; `retry`: for want of room."""

    capture: Capture
    reason: str
    retry: bool = False


@dataclass(frozen=True)
class FailAll:
    """Nothing in flight can be completed."""

    reason: str


class Writer:
    """Works off a queue. An error of one capture fails that capture; any other error trips the breaker."""

    def __init__(
        self, staging: Staging, captures: Captures, breaker: Breaker, counters: Counters, device: torch.device
    ) -> None:
        self._staging, self._captures = staging, captures
        self._breaker, self._counters, self._device = breaker, counters, device
        self._queue: queue.SimpleQueue[Step | Finish | Fail | FailAll] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="taphouse-writer", daemon=True)
        self._pool = ThreadPoolExecutor(_SPREAD_OVER, thread_name_prefix="taphouse-write")

    def start(self) -> None:
        """Start the thread."""
        self._breaker.on_trip(lambda: self.put(FailAll(f"capture is off: {self._breaker.reason}")))
        self._thread.start()

    def put(self, item: Step | Finish | Fail | FailAll) -> None:
        """Queue work; never blocks."""
        self._queue.put(item)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            item = self._queue.get()
            try:
                self._handle(item)
            except Exception as error:
                self._breaker.trip("writer", error)

    def _handle(self, item: Step | Finish | Fail | FailAll) -> None:
        if isinstance(item, Step):
            try:
                self._write(item)
            finally:
                self._staging.give_back()
        elif isinstance(item, Finish):
            self._seal(item.capture)
        elif isinstance(item, Fail):
            self._fail(item.capture, item.reason, retry=item.retry)
        else:
            for capture in self._captures.all():
                self._fail(capture, item.reason)

    def _write(self, step: Step) -> None:
        began = time.perf_counter()
        step.rows.wait()
        waited = time.perf_counter()
        self._counters.wait_s += waited - began
        unwritten = torch.isnan(step.rows.edges).any(dim=2)
        pieces: list[Piece] = []
        for part in step.parts:
            if part.capture in self._captures:
                try:
                    pieces += _pieces(part, step.rows, unwritten)
                except _FAILS_ONE as error:
                    self._fail_for(part.capture, error)
        run = self._pool.map if sum(piece.rows.nbytes for piece in pieces) >= _SPREAD_BYTES else map
        for piece, failure in zip(pieces, list(run(_write_piece, pieces)), strict=True):
            if failure is not None:
                self._fail_for(piece.capture, failure)
            else:
                self._counters.rows += len(piece.rows)
                self._counters.bytes += piece.rows.nbytes
        self._counters.write_s += time.perf_counter() - waited

    def _seal(self, capture: Capture) -> None:
        if capture not in self._captures:
            return
        began = time.perf_counter()
        if capture.abandoned:
            self._captures.remove(capture)
            capture.drop()
            return
        try:
            sealed = capture.seal(self._pool)
        except _FAILS_ONE as error:
            self._fail_for(capture, error)
            return
        self._captures.remove(capture)
        if sealed is not None:
            self._counters.sealed += 1
        self._counters.write_s += time.perf_counter() - began

    def _fail_for(self, capture: Capture, error: Exception) -> None:
        self._fail(capture, str(error), retry=isinstance(error, DirectoryFull))

    def _fail(self, capture: Capture, reason: str, *, retry: bool = False) -> None:
        if not self._captures.remove(capture):
            return
        if capture.abandoned:
            capture.drop()
            return
        self._counters.failed += 1
        logger.warning("Taphouse capture %s failed: %s", capture.tag, reason)
        try:
            capture.fail(reason, retry=retry)
        except (SliceError, OSError) as error:
            logger.warning("Taphouse could not seal the error of capture %s: %s", capture.tag, error)


def _pieces(part: Part, rows: StagedRows, unwritten: torch.Tensor) -> list[Piece]:
    """Place a part's rows in its capture, and cut them so that threads can share the writing."""
    span = slice(part.first, part.first + part.count)
    if unwritten[span].any():
        row, layer = unwritten[span].nonzero()[0].tolist()
        raise BadRows(
            f"row {row} of a chunk has NaN at tapped layer number {layer}: the graph did not write it "
            "(it runs without the tap), or the model made it"
        )
    place = part.capture.place(rows.marks[span])
    raw = rows.raw[span][: len(place)]
    step = max(1, _PIECE_BYTES // raw.shape[1])
    return [Piece(part.capture, place[at], raw[at : at + step]) for at in range(0, len(place), step)]


def _write_piece(piece: Piece) -> Exception | None:
    """Write one piece; return why its capture fails."""
    try:
        piece.capture.write(piece.row, piece.rows)
    except _FAILS_ONE as error:
        return error
    return None
