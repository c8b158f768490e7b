"""Host memory for rows on their way: bounded, handed out in order, never overlapping."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.tap.worker_fakes import TOKENS, forward, rows_at, staging

from taphouse_tap.errors import CaptureRefused
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
    out = staged.take([(0, 4), (7, 2)])
    assert out is not None
    out.wait()
    assert out.marks[:, 0].tolist() == [0, 1, 2, 3, 9, 10]
    rows = out.raw.copy().view(np.float32).reshape(6, 2, 4)
    assert np.array_equal(rows, rows_at([0, 1, 2, 3, 9, 10]))
    assert out.edges.tolist() == rows[:, :, [0, 3]].tolist()


def test_full_host_memory_refuses_and_frees_in_order() -> None:
    staged = staging(host_rows=20)
    forward(staged, [(0, TOKENS)])
    assert staged.take([(0, 12)]) is not None
    assert staged.take([(0, 9)]) is None
    used = staged.memory["pinned_bytes"]
    assert 0 < used <= staged.memory["pinned_limit"]
    staged.give_back()
    assert staged.take([(0, 9)]) is not None


def test_poison_marks_rows_unwritten() -> None:
    staged = staging()
    forward(staged, [(0, 6)])
    staged.poison(4)
    assert torch.isnan(staged.rows[:4]).all() and not torch.isnan(staged.rows[4:6]).any()
    assert staged.marks[:6, 0].tolist() == [-1, -1, -1, -1, 4, 5]


def test_memory_for_less_than_one_step_is_refused() -> None:
    with pytest.raises(CaptureRefused, match="TAPHOUSE_TAP_PINNED_LIMIT_BYTES"):
        Staging((16, 2, 4), torch.bfloat16, torch.device("cpu"), 100)
