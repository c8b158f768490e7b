"""Production's chat traffic as a seeded trace: bursts of requests with shared system prompts, and quiet gaps.

Everything follows from the plan and its seed, so that every mode meets the same requests at the same times.
Times are seconds since the trace's start, lengths are tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Plan:
    """What a trace is drawn from.

    `lead_s` is quiet before the first burst; gaps between bursts last `quiet_s` on average (three quarters to
    five quarters of it). `rate` is requests a second in a burst. Each request carries the system prompt of
    one of `assistants`, and a user's turn and an answer whose lengths lie between two bounds, short ones
    being the more frequent.
    """

    seed: int
    lead_s: float
    bursts: int
    burst_s: float
    quiet_s: float
    rate: float
    assistants: int
    system_tokens: int
    user_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


@dataclass(frozen=True)
class Request:
    """One chat request: sent at `at_s`, in burst number `burst`."""

    at_s: float
    burst: int
    assistant: int
    user_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    """The requests in order of time, the bursts' starts and ends, and where the last quiet gap ends."""

    plan: Plan
    bursts: tuple[tuple[float, float], ...]
    length_s: float
    requests: tuple[Request, ...]

    def as_json(self) -> dict[str, Any]:
        """A form that `json` writes and `from_json` reads."""
        return asdict(self)

    def prompt(self, index: int, salt: str, vocabulary: tuple[int, int]) -> list[int]:
        """Token ids of request `index`: the assistant's system prompt, then a turn that no other request has.

        System prompts are the same in every pass; turns differ with `salt`, so that no pass finds another's
        turns in the prefix cache. Ids lie in [vocabulary[0], vocabulary[1]).
        """
        request = self.requests[index]
        turn = _draw(f"{self.plan.seed}/{salt}/{index}", request.user_tokens, vocabulary)
        return [*self.system_prompt(request.assistant, vocabulary), *turn]

    def system_prompt(self, assistant: int, vocabulary: tuple[int, int]) -> list[int]:
        """Token ids of an assistant's system prompt."""
        return _draw(f"{self.plan.seed}/assistant/{assistant}", self.plan.system_tokens, vocabulary)


def make_trace(plan: Plan) -> Trace:
    """Draw the trace. Every burst begins with a request at its very start."""
    draw = random.Random(plan.seed)
    bursts: list[tuple[float, float]] = []
    requests: list[Request] = []
    now = plan.lead_s
    for burst in range(plan.bursts):
        end = now + plan.burst_s
        bursts.append((now, round(end, 3)))
        at = now
        while at < end:
            requests.append(_request(draw, plan, at, burst))
            at += draw.expovariate(plan.rate)
        now = round(end + plan.quiet_s * draw.uniform(0.75, 1.25), 3)
    return Trace(plan, tuple(bursts), now, tuple(requests))


def from_json(found: Mapping[str, Any]) -> Trace:
    """Read what `Trace.as_json` gave, through JSON or not."""
    plan = dict(found["plan"])
    for name in ("user_tokens", "output_tokens"):
        low, high = plan[name]
        plan[name] = (int(low), int(high))
    bursts = tuple((float(start), float(end)) for start, end in found["bursts"])
    requests = tuple(Request(**request) for request in found["requests"])
    return Trace(Plan(**plan), bursts, float(found["length_s"]), requests)


def _request(draw: random.Random, plan: Plan, at: float, burst: int) -> Request:
    return Request(
        at_s=round(at, 4),
        burst=burst,
        assistant=draw.randrange(plan.assistants),
        user_tokens=_length(draw, plan.user_tokens),
        output_tokens=_length(draw, plan.output_tokens),
    )


def _length(draw: random.Random, bounds: tuple[int, int]) -> int:
    """Log-uniform between the bounds."""
    low, high = bounds
    return min(high, round(math.exp(draw.uniform(math.log(low), math.log(high)))))


def _draw(seed: str, count: int, vocabulary: tuple[int, int]) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(*vocabulary) for _ in range(count)]
