"""One capture's rows, and the writer that seals them: what is wrong fails, and only that."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.tap.worker_fakes import (
    capture_of,
    forward,
    marks_at,
    opened,
    raw,
    rows_at,
    staging,
    tokens_at,
)

from taphouse.slices import Start, join_slices, read_trailer
from taphouse_tap.errors import BadRows
from taphouse_tap.rank import writer as writer_module
from taphouse_tap.rank.breaker import Breaker
from taphouse_tap.rank.capture import Capture, Captures
from taphouse_tap.rank.record import Counters
from taphouse_tap.rank.staging import Staging
from taphouse_tap.rank.writer import Fail, FailAll, Finish, Part, Step, Writer


def put(capture: Capture, marks: np.ndarray, rows: np.ndarray) -> int:
    """Place and write rows as the writer does; return how many had a place."""
    place = capture.place(marks)
    if place:
        capture.write(place.start, raw(rows)[: len(place)])
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
    """A writer with everything it needs."""

    def __init__(self, tmp_path: Path) -> None:
        self.start: Start = opened(tmp_path)
        self.staging: Staging = staging()
        self.captures, self.breaker, self.counters = Captures(), Breaker(), Counters()
        self.writer = Writer(self.staging, self.captures, self.breaker, self.counters, torch.device("cpu"))
        self.writer.start()

    def capture(self, prompt_len: int = 4, max_rows: int = 8) -> Capture:
        capture = capture_of(self.start, prompt_len, max_rows)
        assert self.captures.add(capture)
        return capture

    def step(self, *parts: tuple[Capture, int, int]) -> None:
        """One engine step that computes (capture, first position, count) after one another."""
        forward(self.staging, [(first, count) for _, first, count in parts])
        total = sum(count for _, _, count in parts)
        rows = self.staging.take([(0, total)])
        assert rows is not None
        at, cut = 0, []
        for capture, _, count in parts:
            cut.append(Part(capture, at, count))
            at += count
        self.writer.put(Step(rows, cut))

    def error(self, capture: Capture) -> str | None:
        """Wait for the capture's slice; return the error in it."""
        deadline = time.monotonic() + 10
        while not (paths := self.start.slice_paths(capture.tag)):
            assert time.monotonic() < deadline, "nothing was sealed"
            time.sleep(0.005)
        return read_trailer(paths[0]).error

    def idle(self) -> None:
        """Wait until everything queued was handled."""
        done = threading.Event()
        self.writer.put(Marker(done))  # type: ignore[arg-type]
        assert done.wait(10)


class Marker(Finish):
    """Says when the writer got here."""

    def __init__(self, done: threading.Event) -> None:
        object.__setattr__(self, "done", done)

    @property
    def capture(self) -> Any:
        self.done.set()  # type: ignore[attr-defined]
        return None


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_two_requests_of_one_step_get_their_own_rows(bench: Bench) -> None:
    one, two = bench.capture(), bench.capture(2, 3)
    bench.step((one, 0, 4), (two, 0, 2))
    bench.step((one, 4, 1), (two, 2, 1))
    for capture in (one, two):
        bench.writer.put(Finish(capture))
    assert bench.error(one) is None and bench.error(two) is None
    assert np.array_equal(
        join_slices(bench.start.slice_paths(one.tag), tokens_at(range(5))), rows_at(range(5))
    )
    assert np.array_equal(
        join_slices(bench.start.slice_paths(two.tag), tokens_at(range(3))), rows_at(range(3))
    )
    assert (bench.counters.sealed, bench.counters.rows, len(bench.captures)) == (2, 8, 0)
    assert bench.staging.host.used == 0


def test_a_row_that_the_graph_did_not_write_fails_its_capture_only(bench: Bench) -> None:
    bad, good = bench.capture(), bench.capture()
    forward(bench.staging, [(0, 4), (0, 4)])
    bench.staging.rows[2, 1] = float("nan")
    rows = bench.staging.take([(0, 8)])
    assert rows is not None
    bench.writer.put(Step(rows, [Part(bad, 0, 4), Part(good, 4, 4)]))
    bench.writer.put(Finish(good))
    assert bench.error(good) is None
    assert "row 2 of a chunk has NaN at tapped layer number 1" in str(bench.error(bad))
    assert not read_trailer(bench.start.slice_paths(bad.tag)[0]).retry
    assert not bench.breaker.tripped and bench.counters.failed == 1


def test_a_full_file_system_fails_the_capture_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    capture, other = bench.capture(), bench.capture()
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        bench.step((capture, 0, 4))
        assert "no room" in str(bench.error(capture))
        assert read_trailer(bench.start.slice_paths(capture.tag)[0]).retry
    bench.step((other, 0, 4))
    bench.writer.put(Finish(other))
    assert bench.error(other) is None
    assert not bench.breaker.tripped


def test_any_other_error_trips_the_breaker_and_fails_what_is_in_flight(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("ours")

    one, two = bench.capture(), bench.capture()
    monkeypatch.setattr(Capture, "place", broken)
    bench.step((one, 0, 4))
    for capture in (one, two):
        assert "capture is off: error in writer: ZeroDivisionError: ours" in str(bench.error(capture))
    assert bench.breaker.tripped and bench.breaker.trip_record is not None
    assert bench.breaker.trip_record["where"] == "writer"
    bench.idle()
    assert bench.staging.host.used == 0


def test_a_large_step_is_spread_over_threads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_SPREAD_BYTES", 1)
    monkeypatch.setattr(writer_module, "_PIECE_BYTES", 40)  # a row and a bit
    captures = [bench.capture(3, 4) for _ in range(5)]
    bench.step(*((capture, 0, 3) for capture in captures))
    bench.step(*((capture, 3, 1) for capture in captures))
    for capture in captures:
        bench.writer.put(Finish(capture))
        assert bench.error(capture) is None
        assert np.array_equal(
            join_slices(bench.start.slice_paths(capture.tag), tokens_at(range(4))), rows_at(range(4))
        )


def test_a_failed_capture_takes_no_more_rows(bench: Bench) -> None:
    capture = bench.capture()
    bench.step((capture, 0, 3))
    bench.writer.put(Fail(capture, "told so"))
    bench.step((capture, 3, 1))
    bench.writer.put(Finish(capture))
    assert bench.error(capture) == "told so"
    bench.idle()
    assert [p.suffix for p in bench.start.directory.glob(f"{capture.tag}.t*")] == [".slice"]


@pytest.mark.parametrize("more", [0, 1])
def test_a_client_that_left_leaves_nothing(bench: Bench, more: int) -> None:
    """Whether it left before its prompt was through or after."""
    capture = bench.capture()
    bench.step((capture, 0, 3))
    bench.start.release(capture.tag)
    if more:
        bench.step((capture, 3, 1))
    bench.writer.put(Finish(capture))
    bench.idle()
    assert list(bench.start.directory.glob(f"{capture.tag}*")) == []
    assert (len(bench.captures), bench.counters.sealed, bench.counters.failed) == (0, 0, 0)


def test_fail_all_answers_everyone(bench: Bench) -> None:
    waiting = [bench.capture() for _ in range(3)]
    bench.writer.put(FailAll("capture is off: for a reason"))
    assert {bench.error(capture) for capture in waiting} == {"capture is off: for a reason"}
