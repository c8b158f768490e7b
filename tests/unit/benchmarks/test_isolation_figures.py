"""The benchmark's numbers from a small recorded sample."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest
from benchmarks.isolation import figures
from benchmarks.isolation.modes import CLASSES, PLAIN, order
from benchmarks.isolation.picture import picture
from benchmarks.isolation.report import markdown, targets


def served(burst: int, sent: float, pieces: list[float], cached: int = 90, **more: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "burst": burst,
        "wanted": len(pieces),
        "sent": sent,
        "late": 0.001,
        "pieces": pieces,
        "ended": pieces[-1] if pieces else sent,
        "prompt_tokens": 100,
        "cached_tokens": cached,
        "output_tokens": len(pieces),
        "error": None,
        "refused": False,
        **more,
    }


def a_pass(mode: str, number: int, **more: Any) -> dict[str, Any]:
    return {
        "mode": mode,
        "engine": CLASSES,
        "base": "none",
        "round": number,
        "length_s": 10.0,
        "bursts": [(2.0, 4.0), (7.0, 8.0)],
        "served": [served(0, 2.0, [2.1, 2.2, 2.4]), served(1, 7.0, [7.1, 7.2])],
        "extraction": [],
        "watch": [],
        "counters": {"prefix_queries": 200.0, "prefix_hits": 180.0, "preemptions": 0.0},
        "governor": None,
        **more,
    }


def look(at: float, quiet: bool, busy_ms: float = 2.0) -> dict[str, Any]:
    return {"at": at, "quiet": quiet, "busy_ms": busy_ms, "stopped": False}


def capture(sent: float, at: float) -> dict[str, Any]:
    return {"sent": sent, "at": at, "tokens": 100}


def test_quantiles_interpolate() -> None:
    assert figures.quantile([], 50) is None
    assert figures.quantile([3.0], 99) == 3.0
    assert figures.quantile([4.0, 1.0, 2.0, 3.0], 50) == pytest.approx(2.5)
    assert figures.quantile([float(n) for n in range(101)], 95) == pytest.approx(95.0)


def test_gaps_and_first_tokens_of_production() -> None:
    one = a_pass("none", 0)
    assert figures.gaps(one) == pytest.approx([0.1, 0.2, 0.1])
    assert figures.first_tokens(one) == pytest.approx([0.1, 0.1])


def test_the_quiet_begins_when_the_last_answer_of_a_burst_has_ended() -> None:
    late = [served(0, 2.0, [2.1, 5.5]), served(1, 7.0, [7.1, 9.8])]
    assert figures.quiet_windows(a_pass("x", 0, served=late)) == [(0.0, 2.0), (5.5, 7.0)]


def test_extractions_tokens_are_spread_over_the_time_they_took() -> None:
    events = [capture(-1.0, 1.0), capture(-1.0, 1.001), capture(1.0, 3.0), {"at": 3.5, "refused": 429}]
    one = a_pass("x", 0, extraction=events)
    found = figures.segments(one)
    assert found == [(-1.0, 1.001, 200), (1.001, 3.0, 100)]
    assert figures.tokens_within(found, [(0.0, 2.0)]) == pytest.approx(100 + 50, rel=0.01)
    assert figures.rate(one, [(0.0, 2.0)]) == pytest.approx(75, rel=0.01)
    assert figures.rate(one, []) is None


def test_the_reaction_is_the_first_look_that_is_not_quiet() -> None:
    looks = [look(-1.0, True), look(2.3, False), look(5.2, True), look(7.45, False)]
    one = a_pass("governed", 0, watch=looks, extraction=[capture(0.0, 1.0)])
    assert figures.reactions(one, by_limit=False) == pytest.approx([0.3, 0.45])
    assert figures.reactions(one, by_limit=True) == [None, None]


def test_the_limits_reaction_is_its_first_decrease() -> None:
    looks = [look(-1.0, True), look(2.3, False, 2.5), look(3.0, False, 1.25), look(7.2, False, 0.0)]
    one = a_pass("governed", 0, watch=looks, extraction=[capture(0.0, 1.0)])
    assert figures.reactions(one, by_limit=True) == pytest.approx([1.0, 0.2])


def test_a_pass_without_extraction_has_no_reaction() -> None:
    assert figures.reactions(a_pass("none", 0, watch=[look(2.1, False)]), by_limit=False) == [None, None]


def sample() -> list[dict[str, Any]]:
    """Two rounds of `none`, one quota and governed extraction, whose gaps are twice as long."""
    slow = [served(0, 2.0, [2.2, 2.4, 2.8], cached=80), served(1, 7.0, [7.2, 7.4])]
    events = [capture(0.0, 0.5), capture(0.5, 1.0), capture(1.0, 1.5), capture(1.5, 2.0)]
    passes = []
    for number in (0, 1):
        passes.append(a_pass("none", number))
        passes.append(a_pass("quota 8 ms", number, extraction=events[::2]))
        looks = [look(-1.0, True), look(2.5, False), look(6.0, True), look(7.4, False)]
        passes.append(a_pass("governed", number, served=slow, extraction=events, watch=looks))
    return passes


def test_the_summary_compares_within_a_round() -> None:
    rows = figures.summary(sample())
    assert rows["none"]["itl_p95_ms_ratio"] == 1.0
    governed = rows["governed"]
    assert governed["rounds"] == 2
    assert governed["itl_p50_ms"] == pytest.approx(200.0)
    assert governed["itl_p95_ms_ratio"] == pytest.approx(2.0)
    assert governed["ttft_p95_ms_ratio"] == pytest.approx(2.0)
    assert governed["hit_ratio"] == pytest.approx(0.85)
    assert governed["hit_ratio_ratio"] == pytest.approx(0.85 / 0.9)
    assert governed["reaction_s"] == {
        "median": pytest.approx(0.45), "worst": pytest.approx(0.5), "bursts": 4
    }  # fmt: skip
    assert (governed["requests"], governed["refused"], governed["failed"]) == (4, 0, 0)


def test_failed_and_refused_requests_are_counted() -> None:
    bad = [
        served(0, 2.0, [], error="HTTP 503", refused=True),
        served(1, 7.0, [7.1], error="the stream broke off"),
    ]
    numbers = figures.of_pass(a_pass("governed", 0, served=bad))
    assert (numbers["refused"], numbers["failed"]) == (1, 2)
    assert numbers["errors"] == ["HTTP 503", "the stream broke off"]


def test_targets_say_what_holds() -> None:
    holds = {what: verdict for what, _, _, verdict in targets(figures.summary(sample()))}
    assert list(holds.values()) == [False, False, True, True, True, False]
    assert {verdict for *_, verdict in targets({})} == {None}


def test_the_report_and_the_picture_can_be_read() -> None:
    passes = sample()
    rows = figures.summary(passes)
    about = {
        "machine": "m",
        "engine": "e",
        "date": "d",
        "command": "c",
        "what": "w",
        "picture": "isolation.svg",
    }
    text = markdown(about, passes)
    assert "| governed | 200.0 / " in text
    assert "![Production beside extraction, mode by mode](isolation.svg)" in text
    drawn = ET.fromstring(picture(passes[:3], rows, "a <title> & more"))
    assert "governed" in {element.text for element in drawn.iter() if element.text}


def test_all_modes_once_then_none_and_governed_in_turns() -> None:
    first = order(0, (2.0, 8.0, 32.0))
    assert [mode.name for mode in first] == [
        "none", "governed", "quota 2 ms", "quota 8 ms", "quota 32 ms", "none, again",
        "none, vLLM's scheduler", "unprotected", "priority",
    ]  # fmt: skip
    assert {mode.engine for mode in first} == {CLASSES, PLAIN}
    assert [mode.name for mode in order(1, (2.0,))] == ["governed", "none"]
    assert [mode.name for mode in order(2, (2.0,))] == ["none", "governed"]
    assert "governed" not in {mode.name for mode in order(0, (8.0,), governed=False)}
