from __future__ import annotations

import json
from dataclasses import replace

from benchmarks.isolation.trace import Plan, from_json, make_trace

PLAN = Plan(
    seed=7,
    lead_s=2.0,
    bursts=3,
    burst_s=5.0,
    quiet_s=4.0,
    rate=6.0,
    assistants=2,
    system_tokens=64,
    user_tokens=(8, 64),
    output_tokens=(4, 32),
)
VOCABULARY = (300, 4000)


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    assert make_trace(PLAN) == make_trace(PLAN)
    assert make_trace(PLAN) != make_trace(replace(PLAN, seed=8))


def test_a_trace_survives_json() -> None:
    trace = make_trace(PLAN)
    assert from_json(json.loads(json.dumps(trace.as_json()))) == trace


def test_requests_lie_in_their_bursts_in_order_and_the_first_opens_the_burst() -> None:
    trace = make_trace(PLAN)
    times = [request.at_s for request in trace.requests]
    assert times == sorted(times)
    assert trace.bursts[0][0] == PLAN.lead_s
    for number, (start, end) in enumerate(trace.bursts):
        mine = [request.at_s for request in trace.requests if request.burst == number]
        assert mine[0] == start
        assert mine[-1] < end
    gaps = [
        later - end
        for (_, end), later in zip(
            trace.bursts, [start for start, _ in trace.bursts[1:]] + [trace.length_s], strict=True
        )
    ]
    assert all(3.0 <= gap <= 5.0 for gap in gaps)


def test_lengths_keep_to_their_bounds_and_use_them() -> None:
    trace = make_trace(replace(PLAN, bursts=40))
    for lengths, (low, high) in (
        ([request.user_tokens for request in trace.requests], PLAN.user_tokens),
        ([request.output_tokens for request in trace.requests], PLAN.output_tokens),
    ):
        assert min(lengths) >= low
        assert max(lengths) <= high
        assert max(lengths) > 0.9 * high
        assert sum(length < (low + high) / 2 for length in lengths) > len(lengths) / 2


def test_prompts_share_the_system_prompt_and_no_turn_is_seen_twice() -> None:
    trace = make_trace(PLAN)
    one, other = (trace.prompt(0, salt, VOCABULARY) for salt in ("0/none", "0/governed"))
    system = trace.system_prompt(trace.requests[0].assistant, VOCABULARY)
    assert one[: PLAN.system_tokens] == other[: PLAN.system_tokens] == system
    assert one[PLAN.system_tokens :] != other[PLAN.system_tokens :]
    assert len(one) == PLAN.system_tokens + trace.requests[0].user_tokens
    assert all(VOCABULARY[0] <= token < VOCABULARY[1] for token in one)
    assert one == trace.prompt(0, "0/none", VOCABULARY)
    assert trace.system_prompt(0, VOCABULARY) != trace.system_prompt(1, VOCABULARY)
