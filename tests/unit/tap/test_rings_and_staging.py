"""Host memory for rows on their way: bounded, handed out in order, never overlapping."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.tap.worker_fakes import forward, rows_at, staging

from taphouse_tap.errors import CaptureRefused
from taphouse_tap.rank.area import Area, Layout, Word
from taphouse_tap.rank.rings import Ring
from taphouse_tap.rank.staging import Staging


@example(27, [1, 16, None, 10, 1])  # the buffer's end is reached exactly
@given(st.integers(1, 40), st.lists(st.one_of(st.none(), st.integers(1, 45)), max_size=60))
def test_spans_lie_inside_and_never_overlap(capacity: int, moves: list[int | None]) -> None:
    """None gives the oldest span back; a number takes that many rows."""
    ring, held = Ring(capacity), deque[range]()
    for move in moves:
        if move is None:
            if held:
                held.popleft()
                ring.give_back()
            continue
        at = ring.take(move)
        if at is None:
            assert held or move > capacity
            continue
        span = range(at, at + move)
        assert span[-1] < capacity
        assert all(span[-1] < other[0] or other[-1] < span[0] for other in held)
        held.append(span)
        assert sum(map(len, held)) <= ring.used <= capacity


def test_an_empty_ring_takes_whatever_fits() -> None:
    ring = Ring(10)
    assert ring.take(7) == 0
    assert ring.take(4) is None
    ring.give_back()
    assert ring.take(10) == 0


def test_runs_come_out_one_after_the_other() -> None:
    staged = staging()
    forward(staged, [(0, 4), (50, 3), (9, 2)])
    assert staged.area.words[Word.ARRIVED] == 0
    assert staged.move([(0, 4), (7, 2)], 5) == 1
    assert staged.area.words[Word.ARRIVED] == 1
    other = Area(staged.area.layout, staged.area.fd)  # as the writer's process sees it
    assert other.marks[5:11, 0].tolist() == [0, 1, 2, 3, 9, 10]
    rows = other.rows[5:11].copy().view(np.float32).reshape(6, 2, 4)
    assert np.array_equal(rows, rows_at([0, 1, 2, 3, 9, 10]))
    assert not other.rows[:5].any() and not other.rows[11:].any() and not other.prompts.any()


@given(st.integers(1, 5000), st.integers(1, 300).map(lambda n: 4 * n), st.integers(1, 5000))
def test_the_parts_of_the_area_never_overlap(rows: int, row_bytes: int, prompt_tokens: int) -> None:
    layout = Layout(rows, row_bytes, prompt_tokens)
    assert 4096 + 4 * prompt_tokens <= layout.marks_at
    assert layout.marks_at + 16 * rows <= layout.rows_at
    assert layout.rows_at + rows * row_bytes <= layout.nbytes
    assert layout.marks_at % 4096 == layout.rows_at % 4096 == layout.nbytes % 4096 == 0


def test_poison_marks_rows_unwritten() -> None:
    staged = staging()
    forward(staged, [(0, 6)])
    staged.poison(4)
    assert torch.isnan(staged.rows[:4]).all() and not torch.isnan(staged.rows[4:6]).any()
    assert staged.marks[:6, 0].tolist() == [-1, -1, -1, -1, 4, 5]


def test_memory_for_less_than_one_step_is_refused() -> None:
    with pytest.raises(CaptureRefused, match="TAPHOUSE_TAP_PINNED_LIMIT_BYTES"):
        Staging((16, 2, 4), torch.bfloat16, torch.device("cpu"), 100, 16)
