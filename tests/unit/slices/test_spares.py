"""Released slices kept for reuse: bounded, never two owners, nothing of the old shows, room is given back."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taphouse.slices import Claim, DirectoryFull, Start, new_tag, open_start
from taphouse.slices.spares import Spares
from taphouse.slices.sums import Sums

KIB = 1 << 10
SIZE = 100 * KIB


@pytest.fixture
def start(tmp_path: Path) -> Start:
    start = open_start(tmp_path / "slices", "spares")
    start.spares.allow(4 * SIZE)
    return start


def sealed(start: Start, size: int = SIZE, rank: int = 0) -> str:
    tag = new_tag()
    (start.directory / f"{tag}.t{rank}.slice").write_bytes(b"o" * size)
    return tag


def test_a_released_slice_becomes_the_next_part_and_is_cut(start: Start) -> None:
    start.release(sealed(start))
    assert start.spares.total() == SIZE
    part = start.directory / "x.part"
    fd = start.spares.take(part, 70 * KIB)
    assert fd is not None and os.fstat(fd).st_size == part.stat().st_size == 70 * KIB
    os.close(fd)
    assert start.spares.take(start.directory / "y.part", 1) is None
    assert start.spares.total() == 0


def test_the_smallest_that_is_large_enough_is_taken_else_the_largest(start: Start) -> None:
    for size in (80, 120, 100):
        start.release(sealed(start, size * KIB))
    for wanted, got in ((90, 90), (200, 120), (200, 80)):
        fd = start.spares.take(start.directory / "x.part", wanted * KIB)
        assert fd is not None and os.fstat(fd).st_size == got * KIB
        os.close(fd)


def test_parts_are_never_kept(start: Start) -> None:
    """Whoever writes one may still do so."""
    tag = new_tag()
    (start.directory / f"{tag}.t0.part").write_bytes(b"o" * SIZE)
    start.release(tag)
    start.release(sealed(start), keep=False)
    assert start.spares.total() == 0 and not list(start.directory.glob("*.*"))


def test_no_more_than_the_limit_is_kept_and_nothing_without_one(start: Start, tmp_path: Path) -> None:
    for _ in range(6):
        start.release(sealed(start))
    start.release(sealed(start, size=KIB))  # not worth it
    assert start.spares.total() == 4 * SIZE
    other = open_start(tmp_path / "slices", "other")
    other.release(sealed(other))
    assert other.spares.total() == 0 and not list(other.directory.glob("*.slice"))


def test_spares_give_way_to_reservations(start: Start) -> None:
    for _ in range(4):
        start.release(sealed(start))
    start.reserve(Claim(new_tag(), 5 * SIZE, time.time(), 1, 1), 8 * SIZE)
    assert start.spares.total() == 3 * SIZE
    with pytest.raises(DirectoryFull):
        start.reserve(Claim(new_tag(), 4 * SIZE, time.time(), 1, 1), 8 * SIZE)


def test_spares_give_way_on_a_full_file_system(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        start.release(sealed(start))

    def free(_: Start, __: int) -> int:
        return 3 * SIZE - start.spares.total()

    monkeypatch.setattr(Start, "_free", free)
    start.reserve(Claim(new_tag(), 2 * SIZE, time.time(), 1, 1), 1 << 40)
    assert start.spares.total() == SIZE


def test_what_nobody_takes_goes(start: Start) -> None:
    start.release(sealed(start))
    start.spares.expire(60)
    assert start.spares.total() == SIZE
    start.spares.expire(-1)
    assert start.spares.total() == 0
    start.release(sealed(start))
    os.utime(next(path for path in start.spares.directory.iterdir() if path.name != "limit"), (1, 1))
    start.expire(3600)  # by when it was released, not by when it was written
    assert start.spares.total() == SIZE


def test_what_expires_is_not_kept(start: Start) -> None:
    """A slow consumer may have it open."""
    tag = sealed(start)
    os.utime(start.directory / f"{tag}.t0.slice", (1, 1))
    assert start.expire(60) == [tag] and start.spares.total() == 0


def test_spares_that_vanish_meanwhile_are_no_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spares, "_held", lambda _: {f"{SIZE}-{'0' * 16}": SIZE})
    assert start.spares.take(start.directory / "x.part", 1) is None
    start.spares.drop(SIZE)
    start.spares.expire(0)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8)), max_size=12))
def test_a_block_is_known_only_while_its_checksum_is_that_of_its_bytes(writes: list[tuple[int, int]]) -> None:
    """Sums of 8 bytes; each write gives its bytes a new value, and the sum is the bytes themselves."""
    content, sums = [0] * 8, Sums()
    seen: dict[int, list[int]] = {0: []}
    for number, (first, length) in enumerate(writes, 1):
        end = min(8, first + length)
        before = sums.before(3)
        told = seen[before.crc][:first] if before.covered == first else []
        content[first:end] = [number] * (end - first)
        seen[number] = [*told, *content[first:end]]
        sums.after(3, before, first, end, number)
        known = sums.before(3)
        if known.covered >= 0:
            assert seen[known.crc] == content[: known.covered]
    assert sums.before(0).covered == 0


def test_two_writes_at_a_time_leave_a_block_unknown() -> None:
    sums = Sums()
    one, two = sums.before(0), sums.before(0)
    sums.after(0, one, 0, 4, 1)
    sums.after(0, two, 0, 4, 2)
    assert sums.before(0).covered == -1
    sums.after(0, sums.before(0), 0, 4, 3)
    assert sums.before(0).covered == -1
