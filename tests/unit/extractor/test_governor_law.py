"""The control law against a written model of production."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.extractor.governing import SCALE, TICK_S, Production, Simulation, counts, moved

from taphouse.wire import GovernorMode
from taphouse_extractor.governor.law import PROBE_S, RETRY_CAP_S, SETTLE_S, decide, fresh, unseen
from taphouse_extractor.governor.state import Observation, Order, State
from taphouse_extractor.governor.verdicts import Bounds

PINNED = Order(GovernorMode.PINNED, 7.0)
STOPPED = Order(GovernorMode.STOPPED)


def slowdown(production: Production, state: State) -> float:
    """What the model really does at a limit."""
    return 1 + production.a * state.limit_ms


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("a", [0.05, 0.02, 0.005])
def test_it_comes_to_the_tolerance_and_keeps_to_it(a: float) -> None:
    sim = Simulation(Production(a=a))
    sim.learn()
    sim.run(120)
    late = sim.run(240)
    bound = 0.05 / a
    limits = [state.limit_ms for state in late]
    assert 0.4 * bound < mean(limits) < 1.2 * bound
    assert mean([slowdown(sim.production, state) for state in late]) < 1.06
    assert max(slowdown(sim.production, state) for state in late) < 1.10
    assert not any(state.stopped for state in late)


def test_it_keeps_all_of_an_extraction_that_hurts_nobody() -> None:
    sim = Simulation(Production(a=0.0), Bounds(step_ms=2.0))
    sim.learn()
    assert sim.run(120)[-1].limit_ms == sim.bounds.max_ms
    assert "at the most" in sim.state.reason


def test_a_burst_is_answered_within_two_seconds() -> None:
    production = Production(a=0.004)
    sim = Simulation(production, Bounds(trip_factor=10.0))
    sim.learn()
    sim.run(60)
    before = sim.state.limit_ms
    assert before > 5
    production.a = 0.05  # the same limit hurts more now
    answer = sim.run(2.0)
    assert min(state.limit_ms for state in answer) <= before / 2
    assert any("halved" in state.reason for state in answer)


def test_one_cut_a_round_trip() -> None:
    production = Production(a=0.004)
    sim = Simulation(production, Bounds(trip_factor=10.0))
    sim.learn()
    sim.run(60)
    production.a = 0.05
    cuts = [state.clock_s for state in sim.run(20) if "halved" in state.reason]
    assert len(cuts) >= 2
    assert all(later - earlier > SETTLE_S for earlier, later in pairwise(cuts))


def test_zero_when_any_extraction_hurts_and_tries_grow_rare() -> None:
    sim = Simulation(Production(a=0.4, spread=0.05))
    sim.learn()
    sim.run(120)
    late = sim.run(400)
    assert sum(state.limit_ms > 0 for state in late) / len(late) < 0.05
    assert max(state.limit_ms for state in late) == sim.bounds.floor_ms
    assert late[-1].retry_s == RETRY_CAP_S


def test_it_recovers_when_extraction_does_not_hurt_any_more() -> None:
    sim = Simulation(Production(a=0.4))
    sim.learn()
    sim.run(60)
    assert sim.state.limit_ms <= sim.bounds.floor_ms
    sim.production.a = 0.005
    assert max(state.limit_ms for state in sim.run(RETRY_CAP_S + 60)) > 5


def test_the_limit_stands_without_production_and_without_extraction() -> None:
    sim = Simulation(Production(a=0.005))
    sim.learn()
    sim.run(20)
    sim.production.streams = 0
    still = sim.run(30)
    assert {state.limit_ms for state in still[1:]} == {still[0].limit_ms}
    assert "no production" in sim.state.reason
    sim.production.streams, sim.production.wanted = 8, False
    sim.run(1)
    before = sim.state.limit_ms
    assert {state.limit_ms for state in sim.run(30)} == {before}


def test_the_limit_does_not_rise_on_what_extraction_has_no_use_for() -> None:
    sim = Simulation(Production(a=0.005))
    sim.learn()
    sim.run(10)
    before = sim.state.limit_ms
    for _ in range(20):
        seen = replace(sim.production.interval(False, sim.state.limit_ms), wanted=False)
        sim.state = decide(sim.bounds, sim.state, seen)
    assert sim.state.limit_ms == before and "no use for more" in sim.state.reason


def test_a_limit_too_small_for_anything_rises_while_extraction_waits() -> None:
    sim = Simulation(Production(a=0.005, least_ms=3.0))
    sim.learn()
    assert any("none of it ran" in state.reason for state in sim.run(5))
    assert max(state.limit_ms for state in sim.run(60)) > 4


def test_a_failed_request_of_production_stops_extraction_for_a_while() -> None:
    sim = Simulation(Production(a=0.005))
    sim.learn()
    sim.run(30)
    sim.production.failing = 1
    [tripped] = sim.run(TICK_S)
    assert tripped.stopped and tripped.limit_ms == 0
    assert "1 production request failed" in tripped.reason and "30 s" in tripped.reason
    held = sim.run(29)
    assert all(state.stopped for state in held)
    assert held[-1].reason == tripped.reason
    again = sim.run(2)[-1]
    assert not again.stopped and 0 < again.limit_ms <= sim.bounds.start_ms + 4 * sim.bounds.step_ms
    sim.run(20)
    assert sim.state.limit_ms > sim.bounds.start_ms  # the baseline was kept


def test_a_request_that_fails_without_extraction_is_none_of_ours() -> None:
    sim = Simulation(Production())
    sim.learn()
    sim.production.wanted = False
    sim.run(2)
    sim.production.failing = 3
    assert not any(state.stopped for state in sim.run(2))


def test_far_over_the_baseline_trips_at_once() -> None:
    production = Production(a=0.005)
    sim = Simulation(production)
    sim.learn()
    sim.run(30)
    production.a = 1.0
    answer = sim.run(2.0)
    assert answer[-1].stopped and "far over" in answer[-1].reason


def test_an_objective_stands_in_for_the_baseline() -> None:
    production = Production(a=0.02, spread=0.01)
    base = production.itl_s * 1.5
    sim = Simulation(production, Bounds(itl_slo_s=base * 1.4, ttft_slo_s=9.0, step_ms=0.5))
    late = sim.run(200)[200:]  # without ever learning a baseline
    assert 0.5 * 20 < mean([state.limit_ms for state in late]) < 1.15 * 20
    assert not any(state.stopped for state in late)


def test_production_that_misses_its_objective_by_itself_gets_no_extraction() -> None:
    production = Production(a=0.01)
    sim = Simulation(production, Bounds(itl_slo_s=production.itl_s, trip_factor=9.0))
    sim.run(30)
    assert all(state.limit_ms == 0 for state in sim.run(200))
    assert "without extraction" in sim.state.reason


def test_a_load_without_a_baseline_is_probed_a_small_share_of_the_time() -> None:
    sim = Simulation(Production(a=0.002, limit_ms=1.0))  # extraction has run from the first interval on
    states = sim.run(20)
    probing = [state for state in states if "probe" in state.reason]
    assert probing and len(probing) * TICK_S <= PROBE_S
    assert all(state.limit_ms <= sim.bounds.start_ms for state in states[:4])
    assert sim.state.limit_ms > sim.bounds.start_ms  # what it learned was enough
    sim.production.itl_s = 0.1  # another engine altogether would be as new
    sim.state = replace(sim.state, baseline=fresh(sim.bounds).baseline)
    more = sim.run(400)
    assert sum("probe" in state.reason for state in more) / len(more) <= 0.06


def test_a_new_load_is_met_with_the_cautious_limit() -> None:
    sim = Simulation(Production(a=0.002, streams=2))
    sim.learn()
    sim.run(60)
    assert sim.state.limit_ms > 5
    sim.production.streams = 64
    sim.run(5)
    assert sim.state.limit_ms <= sim.bounds.start_ms + 10 * sim.bounds.step_ms
    assert 6 in sim.state.baseline.itl


def test_the_baseline_follows_the_day() -> None:
    sim = Simulation(Production(), Bounds(half_life_s=20.0))
    sim.learn()
    sim.production.itl_s *= 2
    sim.learn(200)
    assert not any("halved" in state.reason or state.stopped for state in sim.run(3))


def test_a_first_token_out_of_the_quiet_is_not_judged() -> None:
    bounds = Bounds()
    state = fresh(bounds)
    calm = Observation(TICK_S, SCALE, {}, {0: counts(*[0.05] * 40)}, running=1)
    for _ in range(3):
        state = decide(bounds, state, calm)
    slow = Observation(TICK_S, SCALE, {}, {0: counts(*[0.5] * 40)}, True, running=1, from_quiet=True)
    assert not decide(bounds, state, slow).stopped
    assert decide(bounds, state, replace(slow, from_quiet=False)).stopped


def test_production_that_gets_no_token_at_all_is_over_its_target() -> None:
    bounds = Bounds(start_ms=8.0)
    state = fresh(bounds)
    starved = Observation(TICK_S, SCALE, extracted=True, running=3)
    for _ in range(4):
        state = decide(bounds, state, starved)
    assert state.limit_ms == 4.0 and "no token" in state.reason


def test_the_operator_pins_stops_and_lets_go() -> None:
    sim = Simulation(Production(a=0.4))
    sim.learn()
    sim.order = PINNED
    assert {state.limit_ms for state in sim.run(20)} == {7.0}
    assert "pinned at 7 ms" in sim.state.reason
    sim.production.failing = 1
    assert sim.run(1)[-1].stopped  # a pin is no licence to break production
    assert sim.run(35)[-1].limit_ms == 7.0
    sim.order = STOPPED
    stopped = sim.run(5)
    assert all(state.stopped and state.limit_ms == 0 for state in stopped)
    sim.order = Order()
    [first] = sim.run(TICK_S)
    assert not first.stopped and first.limit_ms <= sim.bounds.start_ms + sim.bounds.step_ms


def test_what_was_not_seen_moves_nothing_but_orders_are_followed() -> None:
    bounds = Bounds()
    state = replace(fresh(bounds), limit_ms=3.0)
    assert unseen(bounds, state, 5.0).limit_ms == 3.0
    assert unseen(bounds, state, 5.0, PINNED).limit_ms == 7.0
    stopped = unseen(bounds, state, 5.0, STOPPED)
    assert stopped.stopped and stopped.limit_ms == 0
    assert not unseen(bounds, stopped, 1.0).stopped
    held = replace(state, stopped=True, limit_ms=0.0, hold_until=10.0)
    assert unseen(bounds, held, 5.0).stopped
    assert unseen(bounds, held, 15.0).limit_ms == bounds.start_ms


samples = st.dictionaries(
    st.integers(0, 6), st.dictionaries(st.integers(0, 300), st.integers(1, 500), max_size=8), max_size=4
)
intervals = st.builds(
    Observation,
    dt=st.floats(0.05, 5.0),
    scale=st.just(SCALE),
    itl=samples,
    ttft=samples,
    extracted=st.booleans(),
    failed=st.integers(0, 1),
    running=st.integers(0, 64),
    wanted=st.booleans(),
    from_quiet=st.booleans(),
)
orders = st.sampled_from([Order(), Order(), Order(), PINNED, STOPPED])
bounds_ = st.builds(
    Bounds,
    itl_slo_s=st.none() | st.floats(0.001, 1.0),
    start_ms=st.floats(0.1, 10.0),
    step_ms=st.floats(0.01, 20.0),
    floor_ms=st.floats(0.01, 20.0),
    min_samples=st.integers(1, 100),
    hold_s=st.floats(0.5, 30.0),
)


@settings(max_examples=200, deadline=None)
@given(bounds_, st.lists(st.tuples(intervals, orders), max_size=25))
def test_whatever_comes_the_limit_is_within_its_bounds(
    bounds: Bounds, story: list[tuple[Observation, Order]]
) -> None:
    state = fresh(bounds)
    for seen, order in story:
        state = decide(bounds, state, seen, order)
        assert 0 <= state.limit_ms <= bounds.max_ms
        assert state.limit_ms == 0 or not state.stopped
        assert state.reason


@settings(max_examples=200, deadline=None)
@given(st.lists(intervals, min_size=1, max_size=12), intervals, st.integers(1, 40))
def test_slower_production_never_gets_a_higher_limit(
    story: list[Observation], last: Observation, buckets: int
) -> None:
    bounds = Bounds(min_samples=5)
    state = fresh(bounds)
    for seen in story:
        state = decide(bounds, state, seen)
    last = replace(last, extracted=True, failed=0)
    slower = replace(last, itl=moved(last.itl, buckets), ttft=moved(last.ttft, buckets))
    assert limit(decide(bounds, state, slower)) <= limit(decide(bounds, state, last))


def limit(state: State) -> float:
    """The limit, also while a probe suspends it."""
    return state.resume_ms if state.probe_until else state.limit_ms


@settings(max_examples=100, deadline=None)
@given(st.lists(intervals, max_size=12), st.floats(0.05, 5.0))
def test_without_production_nothing_moves_up(story: list[Observation], dt: float) -> None:
    bounds = Bounds()
    state = fresh(bounds)
    for seen in story:
        state = decide(bounds, state, seen)
    quiet = Observation(dt=dt, scale=SCALE, extracted=True)
    after = decide(bounds, state, quiet)
    calm = not state.stopped and not state.probe_until
    assert not calm or after.limit_ms == state.limit_ms
