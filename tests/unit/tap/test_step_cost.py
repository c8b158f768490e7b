"""Extraction's tokens are worth the time that they were seen to take."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from taphouse_tap.core.step_cost import StepCost


def learned(a_token_s: float, base_s: float = 0.02, constant_s: float = 0.0, sizes: int = 11) -> StepCost:
    """An engine whose steps take so long: production's 8 tokens, and what extraction adds."""
    cost = StepCost()
    for _ in range(30):
        cost.observe(8, 0, base_s)
        for size in range(sizes):
            tokens = 1 << size
            cost.observe(8, tokens, base_s + constant_s + tokens * a_token_s)
            cost.observe(0, tokens, base_s + tokens * a_token_s)
    return cost


def test_it_finds_the_tokens_that_fit() -> None:
    cost = learned(a_token_s=0.0001)
    assert 95 <= cost.tokens_within(0.010, 8192, quiet=False) <= 100
    assert 600 <= cost.tokens_within(0.100, 8192, quiet=True) <= 800


def test_a_constant_cost_makes_few_tokens_dear() -> None:
    """As on a mixture of experts, or when a step leaves its full CUDA graph: 5 ms whatever the number."""
    cost = learned(a_token_s=0.00001, constant_s=0.005)
    assert cost.tokens_within(0.004, 8192, quiet=False) == 0
    assert 250 <= cost.tokens_within(0.008, 8192, quiet=False) <= 310


def test_nothing_known_is_tried_carefully_and_grows_by_doubling() -> None:
    cost = StepCost()
    seen = []
    for _ in range(8):
        tokens = cost.tokens_within(1.0, 8192, quiet=True)
        seen.append(tokens)
        cost.observe(0, tokens, 0.001 + tokens * 0.0001)
    assert seen[0] == 16
    assert seen == sorted(seen) and seen[-1] > 1000
    assert all(later <= 2 * before for before, later in pairwise(seen))


def test_what_was_measured_too_dear_is_measured_again() -> None:
    cost = learned(a_token_s=0.0001)
    for size in range(11):
        for _ in range(50):
            cost.observe(8, 1 << size, 10.0)  # a machine that stood still
    given_tokens = [cost.tokens_within(0.010, 8192, quiet=False) for _ in range(300)]
    assert given_tokens.count(1) == 2 and given_tokens.count(0) == 298


def test_what_needs_several_tokens_is_tried_with_as_many() -> None:
    """One token would compute nothing of a request with drafts, and what is never computed isn't measured."""
    cost = learned(a_token_s=0.0001)
    for size in range(11):
        for _ in range(50):
            cost.observe(8, 1 << size, 10.0)
    given_tokens = [cost.tokens_within(0.010, 8192, quiet=False, least=4) for _ in range(300)]
    assert given_tokens.count(4) == 2 and given_tokens.count(0) == 298
    assert cost.tokens_within(0.010, 8192, quiet=True, least=24) == 24
    fits = learned(a_token_s=0.0001)
    assert all(fits.tokens_within(0.0004, 8192, quiet=False, least=8) <= 4 for _ in range(127))
    assert 8 < fits.tokens_within(0.0004, 8192, quiet=False, least=8) <= 32


def test_where_the_first_token_is_too_dear_one_step_in_a_while_takes_many() -> None:
    """The first costs 5 ms, a thousand 15: with a budget of 1 ms one step in 128 may cost 8."""
    cost = learned(a_token_s=0.00001, constant_s=0.005)
    given_tokens = [cost.tokens_within(0.001, 8192, quiet=False) for _ in range(300)]
    tried = [tokens for tokens in given_tokens if tokens]
    assert len(tried) == 2 and all(250 <= tokens <= 310 for tokens in tried)
    seldom = [cost.tokens_within(0.0005, 8192, quiet=False) for _ in range(300)]  # 4 ms: not even the first
    assert max(seldom) == 1 and sum(seldom) == 2


def steps_until_tried(cost: StepCost, seconds: float, tokens: int) -> int:
    return next(step for step in range(1, 10_000) if cost.tries_whole(seconds, tokens))


def test_a_whole_prompt_of_a_size_that_is_not_known_is_tried_once_in_a_while() -> None:
    cost = StepCost()
    assert [steps_until_tried(cost, 0.1, 300) for _ in range(3)] == [128, 128, 128]
    cost.observe(8, 0, 0.02)
    cost.observe(8, 300, 0.07)
    assert 300 < cost.tokens_within(0.1, 8192, quiet=False) <= 600  # it fits from now on
    assert steps_until_tried(cost, 0.1, 2000) == 128


def test_a_whole_prompt_that_is_too_dear_is_left_alone_and_so_are_longer_ones() -> None:
    cost = StepCost()
    cost.observe(8, 0, 0.02)
    cost.observe(8, 300, 1.02)
    for tokens in (260, 300, 513, 4000):
        assert steps_until_tried(cost, 0.1, tokens) == 4096
    assert steps_until_tried(cost, 0.1, 40) == 128
    assert not any(cost.tries_whole(0.0, 300) for _ in range(10_000))


def test_a_slow_engine_still_computes_something_in_the_quiet() -> None:
    cost = learned(a_token_s=0.01, base_s=1.0)
    assert cost.tokens_within(0.1, 8192, quiet=True) == 16


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 4096), st.floats(0, 100))),
    st.floats(0, 10),
    st.booleans(),
)
def test_any_measurements_give_a_number_in_bounds(
    steps: list[tuple[int, int, float]], seconds: float, quiet: bool
) -> None:
    cost = StepCost()
    for step in steps:
        cost.observe(*step)
    assert 0 <= cost.tokens_within(seconds, 512, quiet=quiet) <= 512
    assert cost.tokens_within(0.0, 512, quiet=quiet) == 0
    cost.as_dict()
