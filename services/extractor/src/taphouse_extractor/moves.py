"""Rows that were moved into further batches of their job: failed ones to be tried again, halves of a batch.

::

    moves/<job id>/<number>.json    one move, first writer wins

A job's batches are numbered on: those of its dataset first, then those of each move in order. A row's outcome
is that of the last batch it stands in.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from taphouse.errors import StoreError
from taphouse.store import Store, put_json_new, read_json
from taphouse_extractor.errors import Conflict
from taphouse_extractor.records import MAX_BATCHES, JobRecord

__all__ = ["Move", "Moves", "again", "halves", "superseded"]

_NAME = re.compile(r"[0-9]{6}\.json")


class Move(BaseModel):
    """Rows that stand in new batches: `batches[i]` are the row numbers, rising, of batch `first + i`.

    `of` is the batch whose rows they all were, and which has no other outcome; None: rows that had failed.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = 1
    of: int | None
    first: int
    batches: tuple[tuple[int, ...], ...]

    @property
    def end(self) -> int:
        """The number after its last batch."""
        return self.first + len(self.batches)

    @property
    def rows(self) -> int:
        """How many rows were moved."""
        return sum(map(len, self.batches))

    def has(self, row: int) -> bool:
        """Whether a row was moved."""
        for batch in self.batches:
            at = bisect_left(batch, row)
            if at < len(batch) and batch[at] == row:
                return True
        return False


class Moves:
    """Reads and writes moves. Raises `StoreError`s."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def jobs(self) -> frozenset[str]:
        """Ids of the jobs that have any."""
        return frozenset(self._store.list("moves"))

    def of(self, job_id: str, after: int = 0) -> list[Move]:
        """A job's moves in order, without the first `after`."""
        names = [name for name in self._store.list(f"moves/{job_id}") if _NAME.fullmatch(name)]
        return [self._read(job_id, number) for number in range(after, len(names))]

    def add(self, job: JobRecord, of: int | None, batches: Sequence[Sequence[int]]) -> Move:
        """Move rows into new batches; a batch that was moved before keeps that move.

        Raises `Conflict` when the job would get more batches than there may be.
        """
        while True:
            known = self.of(job.id)
            for move in known:
                if of is not None and move.of == of:
                    return move
            first = known[-1].end if known else job.batches
            new = Move(of=of, first=first, batches=tuple(tuple(rows) for rows in batches))
            if new.end > MAX_BATCHES:
                raise Conflict(f"job {job.id} would have more than {MAX_BATCHES} batches", param="job_id")
            if put_json_new(self._store, self._path(job.id, len(known)), new.model_dump(mode="json")):
                return new

    def _read(self, job_id: str, number: int) -> Move:
        path = self._path(job_id, number)
        try:
            return Move.model_validate(read_json(self._store, path))
        except ValidationError as error:
            raise StoreError(f"{path} is not a move of this version", path=path) from error

    @staticmethod
    def _path(job_id: str, number: int) -> str:
        return f"moves/{job_id}/{number:06d}.json"


def halves(rows: Sequence[int]) -> list[Sequence[int]]:
    """Two halves of at least two rows."""
    middle = len(rows) // 2
    return [rows[:middle], rows[middle:]]


def again(rows: Iterable[int], size: int) -> list[list[int]]:
    """Rows to be tried again, in batches of at most `size`."""
    ordered = sorted(rows)
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]


def superseded(moves: Iterable[Move], row: int, batch: int) -> bool:
    """Whether a row that failed in a batch was moved since."""
    return any(move.of is None and move.first > batch and move.has(row) for move in moves)
