from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from taphouse_extractor.finished import Finished
from taphouse_extractor.records import SEGMENT


@given(st.lists(st.integers(0, 3 * SEGMENT)), st.integers(0, 3 * SEGMENT))
def test_it_is_a_set(batches: list[int], end: int) -> None:
    finished, truth = Finished(), set[int]()
    for batch in batches:
        finished.add(batch)
        truth.add(batch)
    assert len(finished) == len(truth)
    assert all(batch in finished for batch in truth)
    assert list(finished.missing(end)) == [batch for batch in range(end) if batch not in truth]


@given(st.integers(0, 2), st.integers(0, SEGMENT - 1))
def test_a_segment_is_full_with_its_last_batch(segment: int, last: int) -> None:
    finished, first = Finished(), segment * SEGMENT
    for batch in range(first, first + SEGMENT):
        if batch != first + last:
            finished.add(batch)
    assert not finished.fills(segment)
    finished.add(first + last)
    assert finished.fills(segment)
    assert [other for other in range(4) if finished.fills(other)] == [segment]


def test_a_million_take_little() -> None:
    finished = Finished()
    for batch in range(10**6):
        finished.add(batch)
    assert len(finished) == 10**6 and len(finished._bits) == 125_000
    assert list(finished.missing(10**6 + 2)) == [10**6, 10**6 + 1]
