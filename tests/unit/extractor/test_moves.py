"""Moves of any size: what is read of them is what is asked for."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taphouse.errors import StoreError
from taphouse.store import LocalStore, to_json
from taphouse.wire import JobOptions
from taphouse_extractor.abreast import abreast
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
    """Counts the bytes that are read through `open`, what is opened, and what is asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.bytes_read, self.opened, self.asked = 0, 0, 0

    def exists(self, path: str) -> bool:
        self.asked += 1
        return super().exists(path)

    def open(self, path: str) -> BinaryIO:
        self.opened += 1
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
    with pytest.raises(StoreError, match="is no move"):
        Moves(store).of(JOB.id)
    assert Move.model_validate(first.model_dump()) == first


def many(store: MeasuringStore, count: int) -> list[Move]:
    """Moves that each cut one row off a batch of the job, in an order of their own."""
    made, directory = [], store.root / "moves" / JOB.id
    (directory / "of").mkdir(parents=True)
    for number in range(count):
        of = (number * 7) % count
        made.append(Move(number=number, of=of, first=JOB.batches + number, batches=1, rows=1))
        body = np.array([1, 100 * of + 99], "<u4").tobytes()
        (directory / f"{number:06d}.move").write_bytes(to_json(made[-1].model_dump()) + body)
        (directory / "of" / f"{of:06d}.json").write_text(f"{number}\n")
    return made


@pytest.mark.parametrize("count", [1, 2, 10, 2000])
def test_a_batch_finds_its_move_among_many(tmp_path: Path, count: int) -> None:
    store = MeasuringStore(tmp_path)
    made, moves, most = many(store, count), Moves(store), 2 * count.bit_length() + 4
    for number in {0, 1, count // 3, count // 2, count - 1} & set(range(count)):
        store.opened = store.asked = 0
        assert moves.holding(JOB.id, JOB.batches + number) == made[number]
        assert store.opened <= most and store.asked <= most
        store.opened = store.asked = 0
        assert moves.out_of(JOB.id, made[number].of or 0) == made[number]
        assert store.opened == 1 and store.asked == 2
    assert moves.batch(JOB.id, JOB.batches + count - 1) == [100 * ((count - 1) * 7 % count) + 99]
    with pytest.raises(StoreError, match="has no batch"):
        moves.holding(JOB.id, JOB.batches + count)
    assert moves.out_of(JOB.id, count) is None
    store.opened = store.asked = 0
    assert moves.add(JOB, count, [100 * count], [1]).first == JOB.batches + count
    assert store.opened <= 1 and store.asked <= most


def test_whoever_dies_before_a_move_is_there_has_moved_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    moves = Moves(store)

    def dies(*_: object) -> bool:
        raise StoreError("the worker dies")

    with monkeypatch.context() as dying:
        dying.setattr(store, "put_new", dies)
        with pytest.raises(StoreError):
            moves.add(JOB, 3, [300], [1])
    assert moves.out_of(JOB.id, 3) is None and moves.of(JOB.id) == ()
    other = moves.add(JOB, 4, [400], [1])
    assert moves.out_of(JOB.id, 3) is None, "the number that it had in mind is another batch's"
    again = moves.add(JOB, 3, [300, 301], [2])
    assert (other.number, again.number) == (0, 1)
    assert (moves.out_of(JOB.id, 3), moves.out_of(JOB.id, 4)) == (again, other)


def test_workers_that_move_at_once_get_batches_of_their_own(tmp_path: Path) -> None:
    def work(worker: int) -> list[Move]:
        moves = Moves(LocalStore(tmp_path))
        return [moves.add(JOB, of, [100 * of], [1]) for of in range(worker, 40, 4)]

    made = sorted(chain.from_iterable(abreast(work, range(4))), key=lambda move: move.number)
    assert [move.number for move in made] == list(range(40))
    assert [move.first for move in made] == list(range(JOB.batches, JOB.batches + 40))
    moves = Moves(LocalStore(tmp_path))
    assert [moves.out_of(JOB.id, of) for of in range(40)] == sorted(made, key=lambda move: move.of or 0)
