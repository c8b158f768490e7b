"""Rows that were moved into further batches of their job: failed ones to be tried again, parts of a batch.

::

    moves/<job id>/<number>.move    one move, first writer wins:
                                    a line of JSON (`Move`), then u32, little-endian:
                                    where each of its batches ends among its rows, and its rows, rising
    moves/<job id>/of/<batch>.json  the number for which a move of that batch's rows was about to be written

A job's batches are numbered on: those of its dataset first, then those of each move in order. A row's outcome
is that of the last batch it stands in. A batch reads its own rows of a move and no others, whatever the size,
and no other moves than a search among them asks for, however many there are.

Where a batch's rows went is found by its `of`, which is durable before the move is there, and is believed
only if the move of that number says the same: after a crash it may name none that is there, or another's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from taphouse.errors import StoreError
from taphouse.store import Store, last_number, put_json, read_json, to_json
from taphouse_extractor.errors import Conflict
from taphouse_extractor.records import MAX_BATCHES, JobRecord

__all__ = ["Move", "Moves", "Retried", "Rows", "in_halves"]

_HEAD_BYTES = 512
_U32 = np.dtype("<u4")
Rows = NDArray[np.uint32]


class Move(BaseModel):
    """Number `number` of its job's moves: `rows` rows stand in `batches` new batches, from `first` on.

    `of` is the batch whose rows they all were, and which has no other outcome; None: rows that had failed.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    number: int
    of: int | None
    first: int
    batches: int
    rows: int

    @property
    def end(self) -> int:
        """The number after its last batch."""
        return self.first + self.batches


class Moves:
    """Reads and writes moves, which never change. Raises `StoreError`s. Safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def of(self, job_id: str, after: int = 0) -> tuple[Move, ...]:
        """A job's moves in order, without the first `after`; reads each."""
        found = list[Move]()
        while (move := self._find(job_id, after + len(found))) is not None:
            found.append(move)
        return tuple(found)

    def add(self, job: JobRecord, of: int | None, rows: Sequence[int] | Rows, ends: Sequence[int]) -> Move:
        """Move rising rows into new batches, which end at `ends`; a batch that was moved keeps that move.

        One at a time moves rows of a batch. Raises `Conflict` when the job would get more batches than
        there may be.
        """
        known = None if of is None else self.out_of(job.id, of)
        if known is not None:
            return known
        while True:
            number = last_number(lambda count: self._store.exists(self._path(job.id, count - 1)))
            first = self._read(job.id, number - 1).end if number else job.batches
            new = Move(number=number, of=of, first=first, batches=len(ends), rows=len(rows))
            if new.end > MAX_BATCHES:
                raise Conflict(f"job {job.id} would have more than {MAX_BATCHES} batches", param="job_id")
            if of is not None:
                put_json(self._store, self._of_path(job.id, of), number)
            body = np.asarray(ends, _U32).tobytes() + np.asarray(rows, _U32).tobytes()
            if self._store.put_new(self._path(job.id, number), to_json(new.model_dump()) + body):
                return new

    def out_of(self, job_id: str, batch: int) -> Move | None:
        """The move of a batch's rows, None while they stand in it. One small read where there is none."""
        path = self._of_path(job_id, batch)
        if not self._store.exists(path):
            return None
        number = read_json(self._store, path)
        if not isinstance(number, int):
            raise StoreError(f"{path} is not a move's number", path=path)
        move = self._find(job_id, number)
        return move if move is not None and move.of == batch else None

    def holding(self, job_id: str, batch: int) -> Move:
        """The move that made a batch; reads about as many as the number of moves has binary digits."""
        first = self._find(job_id, 0)
        last = batch - first.first if first is not None else -1  # each move made a batch or more
        at = bisect_right(range(last + 1), 0, key=lambda number: self._later(job_id, number, batch)) - 1
        move = self._find(job_id, at) if at >= 0 else None
        if move is None or batch >= move.end:
            raise StoreError(f"job {job_id} has no batch {batch}")
        return move

    def batch(self, job_id: str, batch: int) -> list[int]:
        """Row numbers of a batch that a move made."""
        move = self.holding(job_id, batch)
        at = batch - move.first
        path = self._path(job_id, move.number)
        with self._store.open(path) as file:
            start = len(file.readline(_HEAD_BYTES))
            before = _u32s(file, path, start + 4 * (at - 1), 2) if at else _u32s(file, path, start, 1)
            begin, end = (int(before[0]) if at else 0), int(before[-1])
            rows: list[int] = _u32s(file, path, start + 4 * (move.batches + begin), end - begin).tolist()
            return rows

    def rows(self, job_id: str, move: Move) -> Rows:
        """All rows of a move, rising: four bytes each in memory."""
        path = self._path(job_id, move.number)
        with self._store.open(path) as file:
            start = len(file.readline(_HEAD_BYTES))
            return _u32s(file, path, start + 4 * move.batches, move.rows)

    def batches_with(self, job_id: str, move: Move, rows: Iterable[int]) -> list[int]:
        """Batches of a move in which any of `rows` stand, rising."""
        path = self._path(job_id, move.number)
        found = np.flatnonzero(np.isin(self.rows(job_id, move), np.fromiter(rows, np.uint32)))
        with self._store.open(path) as file:
            ends = _u32s(file, path, len(file.readline(_HEAD_BYTES)), move.batches)
        places: list[int] = np.unique(np.searchsorted(ends, found, side="right")).tolist()
        return [move.first + place for place in places]

    def _later(self, job_id: str, number: int, batch: int) -> int:
        """1 for a move after the one that made a batch, or one that is not there; 0 up to that."""
        move = self._find(job_id, number)
        return int(move is None or move.first > batch)

    def _find(self, job_id: str, number: int) -> Move | None:
        exists = self._store.exists(self._path(job_id, number))
        return self._read(job_id, number) if exists else None

    def _read(self, job_id: str, number: int) -> Move:
        path = self._path(job_id, number)
        try:
            with self._store.open(path) as file:
                return Move.model_validate_json(file.readline(_HEAD_BYTES))
        except ValidationError as error:
            raise StoreError(f"{path} is no move", path=path) from error

    @staticmethod
    def _path(job_id: str, number: int) -> str:
        return f"moves/{job_id}/{number:06d}.move"

    @staticmethod
    def _of_path(job_id: str, batch: int) -> str:
        return f"moves/{job_id}/of/{batch:06d}.json"


class Retried:
    """Whether a row that failed in a batch is tried again since. Reads retries' rows once, when asked."""

    def __init__(self, moves: Moves, job_id: str, known: Iterable[Move]) -> None:
        self._moves, self._job_id = moves, job_id
        self._retries = [move for move in known if move.of is None]
        self._rows: dict[int, Rows] = {}

    def __len__(self) -> int:
        """How many retries it knows."""
        return len(self._retries)

    def __call__(self, row: int, batch: int) -> bool:
        """Whether it stands in a later batch."""
        return any(move.first > batch and self._has(move, row) for move in self._retries)

    def _has(self, move: Move, row: int) -> bool:
        if move.number not in self._rows:
            self._rows[move.number] = self._moves.rows(self._job_id, move)
        rows = self._rows[move.number]
        at = int(np.searchsorted(rows, row))
        return at < len(rows) and int(rows[at]) == row


def in_halves(rows: int) -> list[int]:
    """Where two halves of at least two rows end."""
    return [rows // 2, rows]


def _u32s(file: BinaryIO, path: str, at: int, count: int) -> NDArray[Any]:
    file.seek(at)
    data = file.read(4 * count)
    if len(data) != 4 * count:
        raise StoreError(f"{path} ends before its rows do", path=path)
    return np.frombuffer(data, _U32)
