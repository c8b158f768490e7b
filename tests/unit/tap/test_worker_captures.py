"""One capture's rows, and the writer that seals them: what is wrong fails, and only that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.tap.worker_fakes import (
    LAYERS,
    WIDTH,
    admitted,
    area,
    capture_of,
    marks_at,
    opened,
    raw,
    rows_at,
    template,
    tokens_at,
)

from taphouse.slices import OptIn, Start, join_slices, read_trailer
from taphouse_tap.errors import BadRows
from taphouse_tap.rank import writer as writer_module
from taphouse_tap.rank.area import Word
from taphouse_tap.rank.capture import Capture
from taphouse_tap.rank.messages import Admit, Fail, FailAll, Finish, Step
from taphouse_tap.rank.writer import Writer


def put(capture: Capture, marks: np.ndarray, rows: np.ndarray) -> int:
    """Place and write rows as the writer does; return how many had a place."""
    place = capture.place(marks)
    for piece in capture.pieces(place.start, raw(rows)[: len(place)]):
        capture.write(*piece)
    return len(place)


def add(capture: Capture, first: int, count: int) -> int:
    positions = range(first, first + count)
    return put(capture, marks_at(positions), rows_at(positions))


def test_rows_land_where_their_positions_say(tmp_path: Path) -> None:
    start = opened(tmp_path)
    capture = capture_of(start, prompt_len=5, max_rows=8)
    garbage = np.zeros_like(rows_at([5, 6, 7]))
    add(capture, 0, 3)
    add(capture, 3, 2)
    put(capture, marks_at([5, 6, 7]), garbage)  # rejected draft tokens
    add(capture, 5, 2)
    add(capture, 2, 3)  # computed again after a preemption
    sealed = capture.seal()
    assert sealed is not None and sealed.rows == 8
    joined = join_slices(start.slice_paths(capture.tag), tokens_at(range(7)))
    assert np.array_equal(joined, rows_at(range(7)))


def test_rows_past_the_bound_are_left_out(tmp_path: Path) -> None:
    capture = capture_of(opened(tmp_path), prompt_len=3, max_rows=4)
    assert (add(capture, 0, 6), add(capture, 4, 2), add(capture, 400, 1)) == (4, 0, 0)
    sealed = capture.seal()
    assert sealed is not None and sealed.rows == 4


@pytest.mark.parametrize(
    ("chunks", "missing"), [([], 0), ([(0, 2)], 2), ([(0, 2), (3, 3)], 2), ([(1, 5)], 0)]
)
def test_a_missing_row_is_an_error(tmp_path: Path, chunks: list[tuple[int, int]], missing: int) -> None:
    capture = capture_of(opened(tmp_path), prompt_len=4, max_rows=8)
    for first, count in chunks:
        add(capture, first, count)
    with pytest.raises(BadRows, match=f"row {missing} is missing"):
        capture.seal()


@pytest.mark.parametrize(
    ("positions", "says"),
    [([3, 2, 1], "not consecutive"), ([0, 2], "not consecutive"), ([-1, -1], "no positions")],
)
def test_positions_that_cannot_be_are_an_error(tmp_path: Path, positions: list[int], says: str) -> None:
    capture = capture_of(opened(tmp_path), prompt_len=3, max_rows=8)
    with pytest.raises(BadRows, match=says):
        put(capture, marks_at(positions), rows_at(positions))


def test_rows_that_begin_elsewhere_than_the_scheduler_says_are_an_error(tmp_path: Path) -> None:
    capture = capture_of(opened(tmp_path), prompt_len=3, max_rows=8)
    assert capture.place(marks_at([1, 2]), 1) == range(1, 3)
    with pytest.raises(BadRows, match="begin at position 1, the scheduler says 0"):
        capture.place(marks_at([1, 2]), 0)


def test_rows_of_another_requests_tokens_are_an_error(tmp_path: Path) -> None:
    """As when two requests of one length are mistaken for each other: positions alone say nothing."""
    capture = capture_of(opened(tmp_path), prompt_len=3, max_rows=8)
    marks = marks_at([0, 1, 2])
    marks[1, 1] = 99
    with pytest.raises(BadRows, match="row 1 is of token 99, the prompt has 8 there"):
        put(capture, marks, rows_at([0, 1, 2]))


def test_rows_that_were_fed_no_token_ids_are_an_error(tmp_path: Path) -> None:
    capture = capture_of(opened(tmp_path), prompt_len=3, max_rows=8)
    marks = marks_at([0, 1, 2])
    marks[:, 1] = -1
    with pytest.raises(BadRows, match="no token ids"):
        put(capture, marks, rows_at([0, 1, 2]))


class Bench:
    """A writer with everything it needs; messages are handled at once."""

    def __init__(self, tmp_path: Path) -> None:
        self.start: Start = opened(tmp_path)
        self.area = area()
        self.trips: list[str] = []
        self.ended = False
        self.writer = Writer(
            self.area, self.start.directory, template(self.start), self.trips.append, lambda: self.ended
        )
        self.captures: dict[int, OptIn] = {}

    def capture(self, prompt_len: int = 4, max_rows: int = 8, opt_in: OptIn | None = None) -> int:
        opt_in = opt_in or admitted(self.start, prompt_len, max_rows)
        number = len(self.captures) + 1
        self.captures[number] = opt_in
        self.area.prompts[5 : 5 + prompt_len] = tokens_at(range(prompt_len))
        self.writer.handle(Admit(number, opt_in.tag, prompt_len, max_rows, 3, 5, prompt_len))
        return number

    def rows(self, *parts: tuple[int, int, int]) -> Step:
        """Put rows of (capture, first position, count) into the area, from row 7 on."""
        at = 7
        for _, first, count in parts:
            positions = range(first, first + count)
            self.area.rows[at : at + count] = raw(rows_at(positions))
            self.area.marks[at : at + count] = marks_at(positions)
            at += count
        self.area.words[Word.ARRIVED] += 1
        return Step(7, int(self.area.words[Word.ARRIVED]), [(number, n, None) for number, _, n in parts])

    def step(self, *parts: tuple[int, int, int]) -> None:
        self.writer.handle(self.rows(*parts))

    def path(self, number: int) -> Path:
        (path,) = self.start.slice_paths(self.captures[number].tag)
        return path

    def error(self, number: int) -> str | None:
        """The error in the capture's slice."""
        return read_trailer(self.path(number)).error

    def states(self, number: int, rows: int) -> np.ndarray:
        return join_slices([self.path(number)], tokens_at(range(rows)))

    def counted(self, *words: Word) -> tuple[int, ...]:
        return tuple(int(self.area.words[word]) for word in words)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_two_requests_of_one_step_get_their_own_rows(bench: Bench) -> None:
    one, two = bench.capture(), bench.capture(2, 3)
    bench.step((one, 0, 4), (two, 0, 2))
    bench.step((one, 4, 1), (two, 2, 1))
    for number in (one, two):
        bench.writer.handle(Finish(number))
    assert bench.error(one) is None and bench.error(two) is None
    assert np.array_equal(bench.states(one, 5), rows_at(range(5)))
    assert np.array_equal(bench.states(two, 3), rows_at(range(3)))
    assert read_trailer(bench.path(one)).weights_epoch == 3
    assert bench.counted(Word.SEALED, Word.ROWS, Word.FAILED, Word.HANDLED) == (2, 8, 0, 6)
    assert bench.counted(Word.BYTES) == (8 * LAYERS * WIDTH * 4,)


@pytest.mark.parametrize(
    ("dtype", "nan"),
    [("float32", 0x7FC00000), ("bfloat16", 0xFFC0), ("bfloat16", 0x7F81), ("float16", 0x7E00)],
)
def test_a_row_that_the_graph_did_not_write_fails_its_capture_only(
    tmp_path: Path, dtype: str, nan: int
) -> None:
    """Infinities and the largest numbers are the model's own."""
    start, memory = opened(tmp_path), area()
    bits = {"float32": "<u4"}.get(dtype, "<u2")
    width = WIDTH * 4 // np.dtype(bits).itemsize
    base = template(start)
    shaped = type(base)(**{**vars(base), "dtype": dtype, "width": width, "hidden_size": width})
    writer = Writer(memory, start.directory, shaped, pytest.fail, lambda: False)
    opt_ins = [admitted(start, 4, 4), admitted(start, 4, 4)]
    memory.prompts[:4] = tokens_at(range(4))
    for number, opt_in in enumerate(opt_ins):
        writer.handle(Admit(number, opt_in.tag, 4, 4, 0, 0, 4))
    memory.marks[:8] = np.concatenate([marks_at(range(4))] * 2)
    rows = memory.rows.view(bits).reshape(len(memory.rows), LAYERS, width)
    infinity = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}[dtype]
    rows[:8] = infinity
    rows[2, 1, -1] = nan
    writer.handle(Step(0, 0, [(0, 4, 0), (1, 4, 0)]))
    writer.handle(Finish(1))
    bad, good = (read_trailer(start.slice_paths(opt_in.tag)[0]) for opt_in in opt_ins)
    assert good.error is None
    assert "row 2 of a chunk has NaN at tapped layer number 1" in str(bad.error) and not bad.retry
    assert memory.words[Word.FAILED] == 1


def test_a_full_file_system_fails_the_capture_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    number, other = bench.capture(), bench.capture()
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        step = bench.rows((number, 0, 4))
        patch.setattr(Capture, "fail", lambda *_, **how: failed.append(how))
        failed: list[Any] = []
        bench.writer.handle(step)
    assert failed == [{"retry": True}]
    bench.step((other, 0, 4))
    bench.writer.handle(Finish(other))
    assert bench.error(other) is None and bench.trips == []


def test_any_other_error_trips_the_breaker_and_fails_what_is_in_flight(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("ours")

    one, two = bench.capture(), bench.capture()
    monkeypatch.setattr(Capture, "place", broken)
    bench.step((one, 0, 4))
    for number in (one, two):
        assert "capture is off: error in writer: ZeroDivisionError: ours" in str(bench.error(number))
    assert bench.trips == ["ZeroDivisionError: ours"]
    assert bench.counted(Word.HANDLED) == (3,)


def test_a_large_step_is_spread_over_threads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_SPREAD_BYTES", 1)
    monkeypatch.setattr("taphouse.slices.files.BLOCK_BYTES", 40)  # a row and a bit
    captures = [bench.capture(3, 4) for _ in range(5)]
    bench.step(*((number, 0, 3) for number in captures))
    bench.step(*((number, 3, 1) for number in captures))
    for number in captures:
        bench.writer.handle(Finish(number))
        assert bench.error(number) is None
        assert np.array_equal(bench.states(number, 4), rows_at(range(4)))


def test_a_failed_capture_takes_no_more_rows(bench: Bench) -> None:
    number = bench.capture()
    bench.step((number, 0, 3))
    bench.writer.handle(Fail(number, "told so", retry=True))
    bench.step((number, 3, 1))
    bench.writer.handle(Finish(number))
    assert bench.error(number) == "told so" and read_trailer(bench.path(number)).retry
    tag = bench.captures[number].tag
    assert [p.suffix for p in bench.start.directory.glob(f"{tag}.t*")] == [".slice"]


def test_a_replayed_tag_disturbs_nobody(bench: Bench) -> None:
    number = bench.capture()
    again = bench.capture(opt_in=bench.captures[number])
    bench.step((again, 0, 2), (number, 0, 4))
    bench.writer.handle(Finish(again))
    bench.writer.handle(Finish(number))
    assert bench.error(number) is None and np.array_equal(bench.states(number, 4), rows_at(range(4)))
    assert bench.counted(Word.FORGED, Word.SEALED) == (1, 1)


def test_the_tag_of_a_sealed_slice_captures_nothing_again(bench: Bench) -> None:
    number = bench.capture()
    bench.step((number, 0, 4))
    bench.writer.handle(Finish(number))
    again = bench.capture(opt_in=bench.captures[number])
    bench.step((again, 0, 4))
    bench.writer.handle(Finish(again))
    assert bench.counted(Word.FORGED, Word.SEALED, Word.ROWS) == (1, 1, 4)


def test_a_client_that_left_before_its_request_ran_gets_nothing(bench: Bench) -> None:
    opt_in = admitted(bench.start, 4, 8)
    bench.start.release(opt_in.tag)
    number = bench.capture(opt_in=opt_in)
    bench.step((number, 0, 4))
    bench.writer.handle(Finish(number))
    assert list(bench.start.directory.glob(f"{opt_in.tag}*")) == []
    assert bench.counted(Word.FORGED, Word.SEALED, Word.FAILED, Word.ROWS) == (0, 0, 0, 0)


@pytest.mark.parametrize("more", [0, 1])
def test_a_client_that_left_leaves_nothing(bench: Bench, more: int) -> None:
    """Whether it left before its prompt was through or after."""
    number = bench.capture()
    tag = bench.captures[number].tag
    bench.step((number, 0, 3))
    bench.start.release(tag)
    if more:
        bench.step((number, 3, 1))
    bench.writer.handle(Finish(number))
    assert list(bench.start.directory.glob(f"{tag}*")) == []
    assert bench.counted(Word.SEALED, Word.FAILED) == (0, 0)


def test_fail_all_answers_everyone(bench: Bench) -> None:
    waiting = [bench.capture() for _ in range(3)]
    bench.writer.handle(FailAll("capture is off: for a reason"))
    assert {bench.error(number) for number in waiting} == {"capture is off: for a reason"}


def test_a_writer_whose_engine_is_gone_waits_for_no_rows_and_leaves_no_part(bench: Bench) -> None:
    number = bench.capture()
    bench.step((number, 0, 3))
    bench.ended = True
    bench.writer.handle(Step(0, 99, [(number, 1, None)]))
    bench.writer.drop()
    assert not list(bench.start.directory.glob("*.part"))


def test_captures_write_into_the_pages_of_released_ones(bench: Bench) -> None:
    """Rows of the released one that are not overwritten are cut off, and nothing of them is summed."""
    bench.start.spares.allow(1 << 24)
    rows = (1 << 16) // (LAYERS * WIDTH * 4) + 1
    first = bench.capture(1, rows)
    for at in range(0, rows, 50):
        bench.step((first, at, min(50, rows - at)))
    bench.writer.handle(Finish(first))
    inode = bench.path(first).stat().st_ino
    bench.start.release(bench.captures[first].tag)
    second = bench.capture(4, rows)
    bench.step((second, 0, 6))
    bench.writer.handle(Finish(second))
    assert bench.path(second).stat().st_ino == inode and bench.start.spares.total() == 0
    assert np.array_equal(bench.states(second, 6), rows_at(range(6)))
