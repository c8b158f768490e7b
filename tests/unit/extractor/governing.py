"""What the governor's tests stand on: a modelled production, and Redis in memory."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import redis

from taphouse_extractor.governor.histograms import ByLoad, Counts, Scale
from taphouse_extractor.governor.law import decide, fresh
from taphouse_extractor.governor.memory import SET_IF_LEADER
from taphouse_extractor.governor.state import AUTO, Observation, Order, State
from taphouse_extractor.governor.verdicts import Bounds
from taphouse_extractor.home import GET_OR_SET
from taphouse_extractor.leases import DROP_IF_MINE, KEEP_IF_MINE

SCALE = Scale(2 ** (1 / 16), 0.00025)
TICK_S = 0.5


def bucket(seconds: float) -> int:
    """As the tap counts."""
    return max(0, math.ceil(math.log(seconds / SCALE.first_s) / math.log(SCALE.ratio) - 1e-9))


def counts(*seconds: float) -> Counts:
    return Counter(bucket(value) for value in seconds)


def load_bin(streams: int) -> int:
    return streams.bit_length() - 1


@dataclass
class Production:
    """`streams` requests at a time, each of `length` tokens, and extraction while it is `wanted`.

    Latency is base(streams) * (1 + a * limit) * noise while extraction runs; `itl_s` is the base of one
    stream, `spread` the noise's standard deviation on the logarithm. A limit below `least_ms` lets nothing
    run. One takes effect an interval late, as it does in an engine.
    """

    streams: int = 8
    itl_s: float = 0.02
    a: float = 0.02
    spread: float = 0.1
    length: int = 40
    wanted: bool = True
    failing: int = 0
    least_ms: float = 0.0
    seed: int = 7
    limit_ms: float = 0.0
    was_there: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def interval(self, stopped: bool, limit_ms: float) -> Observation:
        """What an interval shows; `limit_ms` is in force from the next one on."""
        now, self.limit_ms = self.limit_ms, 0.0 if stopped else limit_ms
        there, self.was_there = self.was_there, self.streams > 0
        quiet = self.streams == 0 and self.wanted and not stopped
        extracted = quiet or (self.wanted and now > self.least_ms)
        failed, self.failing = self.failing, 0
        if self.streams == 0:
            return Observation(TICK_S, SCALE, extracted=extracted, wanted=self.wanted, from_quiet=not there)
        base = self.itl_s * (1 + self.streams / 16) * (1 + self.a * now * extracted)
        tokens = int(self.streams * TICK_S / base)
        noise = self._random.lognormvariate
        itl = counts(*(base * noise(0, self.spread) for _ in range(tokens)))
        firsts = max(1, tokens // self.length)
        ttft = counts(*(3 * base * noise(0, self.spread) for _ in range(firsts)))
        bin_ = load_bin(self.streams)
        return Observation(
            dt=TICK_S,
            scale=SCALE,
            itl={bin_: itl},
            ttft={bin_: ttft},
            extracted=extracted,
            failed=failed,
            running=self.streams,
            wanted=self.wanted,
            from_quiet=not there,
        )


@dataclass
class Simulation:
    """A law that governs a production. `states` holds every state, two a second."""

    production: Production
    bounds: Bounds = field(default_factory=Bounds)
    order: Order = AUTO
    states: list[State] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = fresh(self.bounds)

    def run(self, seconds: float) -> list[State]:
        """The states of the next seconds."""
        begun = len(self.states)
        for _ in range(int(seconds / TICK_S)):
            seen = self.production.interval(self.state.stopped, self.state.limit_ms)
            self.state = decide(self.bounds, self.state, seen, self.order)
            self.states.append(self.state)
        return self.states[begun:]

    def learn(self, seconds: float = 20.0) -> None:
        """Production alone."""
        wanted, self.production.wanted = self.production.wanted, False
        self.run(seconds)
        self.production.wanted = wanted


def moved(loads: ByLoad, buckets: int) -> ByLoad:
    """The same samples, each `buckets` buckets slower."""
    return {load: {k + buckets: n for k, n in inside.items()} for load, inside in loads.items()}


class FakeRedis:
    """What the governor's memory, engines set aside and `Home` call, in memory. `away` makes it fail."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lives: dict[str, int] = {}
        self.away = False

    def _check(self) -> None:
        if self.away:
            raise redis.ConnectionError("away")

    def get(self, key: str) -> str | None:
        self._check()
        return self.values.get(key)

    def mget(self, *keys: str) -> list[str | None]:
        self._check()
        return [self.values.get(key) for key in keys]

    def set(self, key: str, value: str, px: int | None = None) -> None:
        self._check()
        self.values[key] = value
        self.lives[key] = -1 if px is None else px

    def pttl(self, key: str) -> int:
        self._check()
        return self.lives[key] if key in self.values else -2

    def expire(self, key: str) -> None:
        """What time does to a lease."""
        self.values.pop(key, None)

    def eval(self, script: str, keys: int, *given: Any) -> int | str:
        self._check()
        names, values = given[:keys], given[keys:]
        if script == GET_OR_SET:
            return self.values.setdefault(names[0], values[0])
        holder = self.values.get(names[0])
        if script == KEEP_IF_MINE:
            if holder not in (None, values[0]):
                return 0
            self.values[names[0]] = values[0]
            return 1
        if holder != values[0]:
            return 0
        if script == DROP_IF_MINE:
            del self.values[names[0]]
        else:
            assert script == SET_IF_LEADER
            self.values |= dict(zip(names[1:], values[1:], strict=True))
        return 1
