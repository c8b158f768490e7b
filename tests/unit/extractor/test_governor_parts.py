"""Histograms, the baseline's slowdown, and what is read out of an engine's status."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.extractor.governing import SCALE, counts

from taphouse_extractor.governor.baseline import Baseline, Interval, Window, compare, compare_with
from taphouse_extractor.governor.histograms import grown, loads_added, pooled, scaled, size_by_load
from taphouse_extractor.governor.report import Follower, merged, read_report

loads = st.dictionaries(
    st.integers(0, 8), st.dictionaries(st.integers(0, 300), st.integers(1, 1000), min_size=1), max_size=5
)


def status(**changed: Any) -> dict[str, Any]:
    """An engine's answer, as JSON gives it."""
    production = {
        "itl": {"2": {"100": 50}},
        "ttft": {"2": {"140": 5}},
        "queue": {},
        "finished": 5,
        "running": 4,
    }
    given: dict[str, Any] = {
        "start_id": "start-1",
        "capture": "on",
        "isolation": {"scheduler": "on", "reason": None, "steps": {"extraction_tokens": 10}, "quiet": False},
        "latency": {
            "bucket_ratio": SCALE.ratio,
            "first_bound_s": SCALE.first_s,
            "production": {**production, "failed": 0},
            "extraction": {"finished": 2, "failed": 0, "running": 0},
        },
    }
    return {**given, **changed}


def later(extraction_tokens: int = 10, **production: Any) -> dict[str, Any]:
    """The same engine after some work."""
    found = status()
    found["isolation"]["steps"]["extraction_tokens"] = extraction_tokens
    found["latency"]["production"] |= production
    return found


def test_a_quantile_lies_within_its_bucket() -> None:
    assert SCALE.quantile({}, 0.95) is None
    assert SCALE.quantile({0: 10}, 0.5) == pytest.approx(SCALE.first_s / 2)
    assert SCALE.quantile({7: 10}, 1.0) == pytest.approx(SCALE.first_s * SCALE.ratio**7)
    assert SCALE.quantile({7: 10}, 0.5) == pytest.approx(SCALE.first_s * SCALE.ratio**6.5)
    chance = random.Random(1)
    values = sorted(chance.lognormvariate(-3, 0.5) for _ in range(4000))
    assert SCALE.quantile(counts(*values), 0.95) == pytest.approx(values[3800], rel=0.01)


@given(loads, loads)
def test_what_was_added_is_what_came_between(before: Any, more: Any) -> None:
    now = loads_added(before, more)
    found = grown(now, before)
    assert found is not None
    assert {load: dict(inside) for load, inside in found.items()} == more
    assert size_by_load(now) == pytest.approx(size_by_load(before) + size_by_load(more))
    if more:
        assert grown(before, now) is None


@given(loads, st.floats(0.0, 1.0))
def test_a_decay_keeps_the_quantile(given_: Any, factor: float) -> None:
    decayed = scaled(given_, max(factor, 0.1), 0.0)
    assert SCALE.quantile(pooled(decayed), 0.95) == (
        pytest.approx(SCALE.quantile(pooled(given_), 0.95)) if given_ else None
    )


def test_the_baseline_forgets_half_in_a_half_life() -> None:
    learnt = Baseline(SCALE).learnt({1: counts(*[0.02] * 100)}, {})
    assert size_by_load(learnt.aged(600.0, 600.0).itl) == pytest.approx(50)
    assert size_by_load(learnt.aged(1e6, 600.0).itl) == 0


def test_equal_loads_are_compared_and_unknown_ones_left_out() -> None:
    base = {0: counts(*[0.02] * 100), 2: counts(*[0.04] * 100), 3: counts(*[0.08] * 5)}
    busier = {2: counts(*[0.04] * 90), 0: counts(*[0.02] * 10)}
    same = compare(busier, base, 40, SCALE)
    assert same is not None and same.ratio == pytest.approx(1.0) and same.samples == same.total == 100
    slower = compare({2: counts(*[0.08] * 50), 0: counts(*[0.02] * 50)}, base, 40, SCALE)
    assert slower is not None and slower.ratio == pytest.approx(1.5, rel=0.01)
    new = compare({3: counts(*[0.5] * 30), 2: counts(*[0.04] * 10)}, base, 40, SCALE)
    assert new is not None and (new.samples, new.total) == (10, 40) and new.ratio == pytest.approx(1.0)
    nothing = compare({7: counts(0.5)}, base, 40, SCALE)
    assert nothing is not None and (nothing.samples, nothing.ratio) == (0, 1)
    assert compare({}, base, 40, SCALE) is None and compare_with({}, 0.1, SCALE) is None


def test_few_samples_are_never_surely_slow() -> None:
    base = {0: counts(*[0.02] * 1000)}
    one_slow = compare({0: counts(*[0.02] * 9, 0.2)}, base, 40, SCALE)
    assert one_slow is not None and one_slow.ratio > 5 and one_slow.surely < 1.05
    all_slow = compare({0: counts(*[0.03] * 10)}, base, 40, SCALE)
    assert all_slow is not None and all_slow.surely > 1.4


def test_a_p95_between_two_kinds_of_steps_is_no_alarm() -> None:
    """On Kimi's shape 4 to 7% of production's tokens come from steps with a prompt, ten times as long."""
    base = {2: counts(*[0.016] * 955, *[0.155] * 45)}
    latest = {2: counts(*[0.016] * 280, *[0.155] * 20)}
    chance = compare(latest, base, 40, SCALE, shared=True)
    assert chance is not None and chance.ratio > 5 and chance.surely < 1.05 and chance.by_far < 1.05
    believed = compare(latest, base, 40, SCALE)
    assert believed is not None and believed.surely > 5, "as if every token were a measurement"


def test_tokens_of_one_step_are_one_measurement() -> None:
    base = {2: counts(*[0.016] * 1000)}
    doubled = compare({2: counts(*[0.035] * 300)}, base, 40, SCALE, shared=True)
    assert doubled is not None and doubled.by_far > 2
    slow_step = {3: counts(*[0.016] * 88, *[0.2] * 12)}
    one = compare(slow_step, {3: counts(*[0.016] * 1000)}, 40, SCALE, shared=True)
    assert one is not None and one.surely < 1.05, "twelve requests that shared one long step"
    against = compare_with(slow_step, 0.05, SCALE, shared=True)
    assert against is not None and against.ratio > 1 and against.surely < 1 and against.by_far < 1


def test_a_window_keeps_what_is_young() -> None:
    window = Window()
    for at in range(10):
        window = window.moved(Interval(float(at), at % 2 == 0, {0: {1: 1}}, {}), 4.0)
    assert [interval.at for interval in window.intervals] == [6.0, 7.0, 8.0, 9.0]
    assert size_by_load(window.itl(6.0, extracted=False)) == 3
    assert size_by_load(window.itl(6.0, extracted=True)) == 1


def test_an_interval_is_the_difference_of_two_reports() -> None:
    follower = Follower()
    assert follower.take(read_report(status()), 10.0) is None
    grew = later(25, itl={"2": {"100": 60, "101": 3}}, failed=1, running=2)
    seen = follower.take(read_report(grew), 10.5)
    assert seen is not None
    assert (seen.dt, seen.itl, seen.ttft) == (0.5, {2: {100: 10, 101: 3}}, {})
    assert (seen.extracted, seen.failed, seen.running, seen.from_quiet) == (True, 1, 2, False)
    still = follower.take(read_report(grew), 11.0)
    assert still is not None and not still.extracted and not still.itl and still.production


@pytest.mark.parametrize(
    "second",
    [
        later(25, itl={"2": {"100": 49}}),
        later(25, itl={}),
        later(9),
        later(25, finished=4),
        {**later(25), "start_id": "start-2"},
        {**later(25), "latency": None},
        {**later(25), "latency": {"production": "fast"}},
    ],
)
def test_an_engine_that_began_anew_is_not_compared_with_itself(second: dict[str, Any]) -> None:
    follower = Follower()
    follower.take(read_report(status()), 10.0)
    assert follower.take(read_report(second), 10.5) is None
    third = later(100, itl={"2": {"100": 70}}, finished=9)
    assert follower.take(read_report({**third, "start_id": second["start_id"]}), 40.0) is None  # a gap


def test_without_the_scheduler_extraction_is_known_by_its_requests() -> None:
    follower = Follower()
    absent = {"isolation": {"scheduler": "absent", "reason": "no flag"}}
    follower.take(read_report(status(**absent)), 1.0)
    calm = follower.take(read_report(status(**absent)), 1.5)
    assert calm is not None and not calm.extracted
    busy = status(**absent)
    busy["latency"]["extraction"]["running"] = 3
    seen = follower.take(read_report(busy), 2.0)
    assert seen is not None and seen.extracted
    assert "without the two-class scheduler (no flag)" in (read_report(busy).lacks or "")


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        ({"latency": {"bucket_ratio": 0.5, "first_bound_s": 1, "production": {}}}, "bucket_ratio"),
        ({"latency": {"bucket_ratio": 2, "first_bound_s": 1, "production": {"itl": {"x": {}}}}}, "latency"),
        (
            {"latency": {"bucket_ratio": 2, "first_bound_s": 1, "production": {"itl": {"0": {"1": -1}}}}},
            "itl",
        ),
        ({"latency": []}, "latency"),
        ({"isolation": "yes"}, "isolation"),
        ({"isolation": {"scheduler": 3}}, "isolation"),
    ],
)
def test_a_status_that_can_not_be_read_says_so_and_harms_nothing(given_: dict[str, Any], text: str) -> None:
    report = read_report(status(**given_))
    assert report.problem is not None and text in report.problem and "\n" not in report.problem


def test_a_tap_that_knows_nothing_of_this_is_no_problem() -> None:
    report = read_report({"capture": "on", "start_id": 7})
    assert (report.problem, report.latency, report.isolation) == (None, None, None)
    assert "no latency" in (report.lacks or "")


def test_engines_are_summed() -> None:
    followers = Follower(), Follower()
    for follower in followers:
        follower.take(read_report(status()), 1.0)
    one = followers[0].take(read_report(later(10, itl={"2": {"100": 60}})), 1.5)
    other = followers[1].take(read_report(later(99, itl={"2": {"100": 51}}, failed=2)), 1.6)
    assert one is not None and other is not None
    both = merged([one, other])
    assert both is not None and both.itl == {2: {100: 11}} and both.extracted and both.failed == 2
    assert both.running == 8 and merged([]) is None
