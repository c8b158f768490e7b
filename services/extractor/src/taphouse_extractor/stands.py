"""Which rows stand in a batch, and where they went when they were moved out of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from taphouse_extractor.blanked import numbered_rows
from taphouse_extractor.moves import Move, Moves
from taphouse_extractor.records import BatchRef, JobRecord, Records
from taphouse_extractor.rows import Numbered

__all__ = ["Stands"]


class Stands:
    """Reads rows and moves. Raises `StoreError`s."""

    def __init__(self, records: Records, moves: Moves) -> None:
        self._records, self._moves = records, moves

    def numbers(self, job: JobRecord, ref: BatchRef, *, cut: bool = False) -> Sequence[int]:
        """Row numbers of a batch, rising; `cut`: without those that were moved out of it."""
        first = ref.batch < job.batches
        numbers = job.rows_of(ref.batch) if first else self._moves.batch(job.id, ref.batch)
        move = self.move(ref) if cut else None
        return numbers if move is None else numbers[: len(numbers) - move.rows]

    def rows(self, job: JobRecord, ref: BatchRef, *, cut: bool = False) -> Iterator[Numbered]:
        """A batch's rows, each with the id that it has in its dataset; `cut` as in `numbers`."""
        size, numbers = job.options.batch_size, self.numbers(job, ref, cut=cut)
        for home, group in groupby(numbers, lambda row: row // size):
            wanted = set(group)
            yield from (row for row in numbered_rows(self._records, job, home) if row.row in wanted)

    def move(self, ref: BatchRef) -> Move | None:
        """Where a batch's rows went: all into halves, or the last ones, for which its shard had no room."""
        return self._moves.out_of(ref.job_id, ref.batch)

    def halved(self, job: JobRecord, ref: BatchRef) -> bool:
        """Whether a batch was given up for its halves: all of its rows stand there."""
        move = self.move(ref)
        return move is not None and move.rows == len(self.numbers(job, ref))
