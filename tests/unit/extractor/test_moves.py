"""Moves of any size: what is read of them is what is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taphouse.errors import StoreError
from taphouse.store import LocalStore
from taphouse.wire import JobOptions
from taphouse_extractor.moves import Move, Moves, Retried, in_halves
from taphouse_extractor.records import JobRecord

JOB = JobRecord(
    id="j20260101000000-0123abcd",
    options=JobOptions(batch_size=100),
    rows=1_000_000,
    spooled=True,
    created_at=1.0,
)


class MeasuringStore(LocalStore):
    """Counts the bytes that are read through `open`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.bytes_read = 0

    def open(self, path: str) -> BinaryIO:
        file = self.local_path(path).open("rb", buffering=0)
        read = file.read

        class Counted:
            def __enter__(self) -> Counted:
                return self

            def __exit__(self, *exc: object) -> None:
                file.close()

            def read(counted, size: int = -1) -> bytes:
                data = read(size)
                self.bytes_read += len(data)
                return data

            readline, seek = file.readline, file.seek

        return Counted()  # type: ignore[return-value]


@settings(deadline=None)
@given(st.sets(st.integers(0, 2**32 - 1), min_size=1), st.integers(1, 9))
def test_batches_and_rows_come_back(
    tmp_path_factory: pytest.TempPathFactory, chosen: set[int], size: int
) -> None:
    moves, rows = Moves(LocalStore(tmp_path_factory.mktemp("store"))), sorted(chosen)
    move = moves.add(JOB, None, rows, [*range(size, len(rows), size), len(rows)])
    again = Moves(moves._store)
    assert again.of(JOB.id) == (move,) and move.rows == len(rows)
    assert again.rows(JOB.id, move).tolist() == rows
    parts = [again.batch(JOB.id, batch) for batch in range(move.first, move.end)]
    assert parts == [rows[at : at + size] for at in range(0, len(rows), size)]
    for number, part in enumerate(parts, start=move.first):
        assert again.batches_with(JOB.id, move, part[-1:]) == [number]
    assert again.batches_with(JOB.id, move, rows) == list(range(move.first, move.end))
    retried = Retried(again, JOB.id, [move])
    assert all(retried(row, 0) for row in rows)
    assert not any(retried(row, move.first) for row in rows)
    assert not retried(next(n for n in range(len(rows) + 1) if n not in chosen), 0)


def test_a_batch_reads_its_own_rows_of_a_great_move(tmp_path: Path) -> None:
    store = MeasuringStore(tmp_path)
    rows = range(0, 1_000_000, 2)
    Moves(store).add(JOB, None, rows, range(100, 500_001, 100))
    moves = Moves(store)
    assert moves.batch(JOB.id, JOB.batches + 4_321) == list(rows[432_100:432_200])
    assert store.bytes_read <= 500


def test_moves_follow_each_other_and_one_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    moves = Moves(store)
    first = moves.add(JOB, 3, range(300, 307), in_halves(7))
    assert moves.add(JOB, 3, range(300, 307), in_halves(7)) == first
    second = moves.add(JOB, None, [5, 9], [2])
    assert (first.first, second.first, second.end) == (10_000, 10_002, 10_003)
    assert [moves.batch(JOB.id, batch) for batch in range(10_000, 10_003)] == [
        [300, 301, 302],
        [303, 304, 305, 306],
        [5, 9],
    ]
    assert moves.of(JOB.id, after=1) == (second,)
    for batch in (9_999, 10_003):
        with pytest.raises(StoreError, match=f"no batch {batch}"):
            moves.batch(JOB.id, batch)
    path = store.local_path(f"moves/{JOB.id}/000001.move")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match="ends before its rows do"):
        moves.rows(JOB.id, second)
    path.write_bytes(b"{}\n")
    with pytest.raises(StoreError, match="not a move of this version"):
        Moves(store).of(JOB.id)
    assert Move.model_validate(first.model_dump()) == first
