"""The last of things that are numbered without gaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from taphouse.store import last_number


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_last_is_found_in_few_questions(count: int, known: int) -> None:
    asked = list[int]()

    def exists(number: int) -> bool:
        assert number >= 1
        asked.append(number)
        return number <= count

    assert last_number(exists, known) == count
    assert len(asked) <= 2 * count.bit_length() + 3
    asked.clear()
    assert last_number(exists, count) == count and len(asked) <= 2
