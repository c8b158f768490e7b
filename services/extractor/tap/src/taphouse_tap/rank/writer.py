"""The writer: turns rows in shared memory into sealed slices, in a process of its own.

It knows no torch and no engine, so the engine's interpreter lock is not its own, and nothing that goes wrong
here reaches the engine. `process.py` runs it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from taphouse.slices import RAW_DTYPES, DirectoryFull, SliceError, Trailer
from taphouse_tap.errors import BadRows

from .area import Area, Word
from .capture import Capture
from .messages import Admit, FailAll, Finish, Message, Step

_SPREAD_OVER = 8
"""Threads that share the rows of one large step: copying and crc32 run outside the GIL."""

_SPREAD_BYTES = 1 << 23
"""Smaller steps are written by the writer's own thread."""

_POLL_S = 2e-4
"""Between two looks at whether a step's rows have arrived."""

_FAILS_ONE = (BadRows, SliceError, OSError)
"""Errors that are one capture's own."""

_NAN_BITS = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""The largest magnitude, as bits, that is no NaN (infinity's)."""

logger = logging.getLogger("vllm.taphouse")


@dataclass(frozen=True)
class Piece:
    """Bytes of one capture's rows on their way to byte `offset` of its file."""

    capture: Capture
    offset: int
    data: NDArray[np.uint8]


class Writer:
    """Handles messages in order. An error of one capture fails that capture; any other error is a trip.

    `tripped` is told what happened, after everything in flight was failed. `ended` tells whether the engine's
    process is gone.
    """

    def __init__(
        self,
        area: Area,
        directory: Path,
        template: Trailer,
        tripped: Callable[[str], None],
        ended: Callable[[], bool],
    ) -> None:
        self._area, self._directory, self._template = area, directory, template
        self._tripped, self._ended = tripped, ended
        self._captures: dict[int, Capture] = {}
        self._pool = ThreadPoolExecutor(_SPREAD_OVER, thread_name_prefix="taphouse-write")
        self._shape = (-1, len(template.layers), template.width)
        self._dtype = RAW_DTYPES[template.dtype]

    def handle(self, message: Message) -> None:
        """Do what a message says; never raises."""
        try:
            self._handle(message)
        except Exception as error:
            logger.exception("Taphouse's slice writer failed")
            told = f"{type(error).__name__}: {error}"
            self._fail_all(f"capture is off: error in writer: {told}")
            self._tripped(told)
        finally:
            self._area.words[Word.HANDLED] += 1

    def alive(self) -> None:
        """Say that the writer goes round its loop."""
        self._area.words[Word.ALIVE] = time.monotonic_ns()

    def drop(self) -> None:
        """Remove the parts of everything in flight: the engine is gone."""
        for capture in self._captures.values():
            capture.drop()
        self._captures.clear()

    def _handle(self, message: Message) -> None:
        if isinstance(message, Step):
            self._step(message)
        elif isinstance(message, Admit):
            self._admit(message)
        elif isinstance(message, FailAll):
            self._fail_all(message.reason)
        elif (capture := self._captures.get(message.number)) is None:
            return  # it failed before
        elif isinstance(message, Finish):
            self._seal(message.number, capture)
        else:
            self._fail(message.number, message.reason, retry=message.retry)

    def _admit(self, new: Admit) -> None:
        trailer = replace(self._template, tag=new.tag, prompt_len=new.prompt_len, weights_epoch=new.epoch)
        prompt = self._area.prompts[new.prompt_at : new.prompt_at + new.prompt_count].copy()
        capture = Capture(trailer, self._directory, new.max_rows, prompt)
        if capture.sealed or any(other.tag == new.tag for other in self._captures.values()):
            self._area.words[Word.FORGED] += 1  # a replay
        elif not capture.abandoned:  # else its client left, or the tag is an old one: its rows are ignored
            self._captures[new.number] = capture

    def _step(self, step: Step) -> None:
        words = self._area.words
        began = time.monotonic_ns()
        while words[Word.ARRIVED] < step.arrival:
            if self._ended():
                return
            self.alive()
            time.sleep(_POLL_S)
        arrived = time.monotonic_ns()
        words[Word.WAIT] += arrived - began
        self._write(step)
        words[Word.WRITE] += time.monotonic_ns() - arrived

    def _write(self, step: Step) -> None:
        words, first = self._area.words, 0
        end = step.at + sum(count for _, count, _ in step.parts)
        raw, marks = self._area.rows[step.at : end], self._area.marks[step.at : end]
        unwritten = self._unwritten(raw)
        pieces: list[tuple[int, Piece]] = []
        before: dict[int, tuple[float, float]] = {}
        for number, count, told in step.parts:
            span, first = slice(first, first + count), first + count
            capture = self._captures.get(number)
            if capture is not None:
                try:
                    before[number] = capture.spent
                    cut = self._pieces(capture, raw[span], marks[span], unwritten[span], told)
                    pieces += [(number, piece) for piece in cut]
                except _FAILS_ONE as error:
                    self._fail_for(number, error)
        written = self._run([piece for _, piece in pieces])
        for (number, piece), failure in zip(pieces, written, strict=True):
            if failure is not None:
                self._fail_for(number, failure)
            else:
                words[Word.BYTES] += piece.data.nbytes
        for number, (checksum_s, copy_s) in before.items():
            if (capture := self._captures.get(number)) is not None:
                words[Word.CHECKSUM] += int(1e9 * (capture.spent[0] - checksum_s))
                words[Word.COPY] += int(1e9 * (capture.spent[1] - copy_s))

    def _pieces(
        self,
        capture: Capture,
        raw: NDArray[np.uint8],
        marks: NDArray[np.int64],
        unwritten: NDArray[np.bool_],
        told: int | None,
    ) -> list[Piece]:
        """Place a part's rows in its capture, and cut them so that threads can share the writing."""
        if unwritten.any():
            row, layer = np.argwhere(unwritten)[0].tolist()
            raise BadRows(
                f"row {row} of a chunk has NaN at tapped layer number {layer}: the graph did not write it "
                "(it runs without the tap), or the model made it"
            )
        place = capture.place(marks, told)
        self._area.words[Word.ROWS] += len(place)
        return [Piece(capture, *piece) for piece in capture.pieces(place.start, raw[: len(place)])]

    def _unwritten(self, raw: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which layers of which rows [n, row bytes] still hold poison at an edge: [n, L]."""
        rows = raw.view(self._dtype).reshape(self._shape)
        edges = rows[:, :, :: max(1, rows.shape[2] - 1)]
        limit = _NAN_BITS.get(self._template.dtype)
        nan = np.isnan(edges) if limit is None else (edges.view("<u2") & 0x7FFF) > limit
        return np.asarray(nan.any(axis=2))

    def _run(self, pieces: Sequence[Piece]) -> list[Exception | None]:
        spread = sum(piece.data.nbytes for piece in pieces) >= _SPREAD_BYTES
        return list((self._pool.map if spread else map)(_write_piece, pieces))

    def _seal(self, number: int, capture: Capture) -> None:
        began = time.monotonic_ns()
        if capture.abandoned:
            del self._captures[number]
            capture.drop()
            return
        try:
            sealed = capture.seal()
        except _FAILS_ONE as error:
            self._fail_for(number, error)
            return
        del self._captures[number]
        self._area.words[Word.SEALED] += sealed is not None
        self._area.words[Word.SEAL] += time.monotonic_ns() - began

    def _fail_for(self, number: int, error: Exception) -> None:
        self._fail(number, str(error), retry=isinstance(error, DirectoryFull))

    def _fail_all(self, reason: str) -> None:
        for number in list(self._captures):
            self._fail(number, reason)

    def _fail(self, number: int, reason: str, *, retry: bool = False) -> None:
        capture = self._captures.pop(number, None)
        if capture is None:
            return
        if capture.abandoned:
            capture.drop()
            return
        self._area.words[Word.FAILED] += 1
        logger.warning("Taphouse capture %s failed: %s", capture.tag, reason)
        try:
            capture.fail(reason, retry=retry)
        except (SliceError, OSError) as error:
            logger.warning("Taphouse could not seal the error of capture %s: %s", capture.tag, error)


def _write_piece(piece: Piece) -> Exception | None:
    """Write one piece; return why its capture fails."""
    try:
        piece.capture.write(piece.offset, piece.data)
    except _FAILS_ONE as error:
        return error
    return None
