"""What is measured in one wave of engines: the steps of every section, in the order they are taken."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .shapes import Shape

ROUNDS = ("decode", "prefill", "captured")
SECTIONS = ("check", "bitwise", *ROUNDS, "peer", "mixed", "steady", "traffic", "rates")
"""Sections of a wave, in their order; all of `ROUNDS` are taken round by round together."""


@dataclass
class Calibration:
    """How much one sample holds, found in the warm-up on the untapped engine."""

    decode_tokens: dict[int, int] = field(default_factory=dict)
    prefill_prompts: int = 8


@dataclass(frozen=True)
class Step:
    """One command to one engine. `figure` and `round` say where its answer belongs."""

    section: str
    engine: str
    figure: str
    round: int
    command: Callable[[Calibration], dict[str, Any]]
    guess_s: float


@dataclass(frozen=True)
class Plan:
    """Makes the steps of a wave with these engines, for the sections `wanted`."""

    args: argparse.Namespace
    shape: Shape
    engines: Sequence[str]
    wanted: Sequence[str]

    def steps(self) -> list[Step]:
        """Return all steps, in their order."""
        made = [*self._check(), *self._bitwise(), *self._warm_up()]
        for number in range(self.args.rounds):
            made += self._round(number)
        for number in range(self.args.peer_rounds if self._has("peer", "peer") else 0):
            made += self._peer_round(number)
        return [*made, *self._mixed(), *self._steady(), *self._traffic(), *self._rates()]

    def _has(self, section: str, engine: str) -> bool:
        return section in self.wanted and engine in self.engines

    def _check(self) -> Iterator[Step]:
        if self._has("check", "tapped"):
            yield _step("check", "tapped", "check", 0, 4.0, do="check", tokens=9, seed=1, repeat=False)

    def _bitwise(self) -> Iterator[Step]:
        for engine in ("untapped", "tapped", "untapped2"):
            if self._has("bitwise", engine):
                yield _step("bitwise", engine, "bitwise", 0, 3.0, do="logprobs", seed=2)

    def _warm_up(self) -> Iterator[Step]:
        """Every engine once at every figure; not counted."""
        if not {*ROUNDS, "peer"} & set(self.wanted):
            return
        for engine in self.engines:
            for batch in self.shape.batch_sizes:
                decode = {"do": "decode", "batch": batch, "tokens": 40, "seed": batch}
                yield _step("warm-up", engine, f"decode {batch}", 0, 0.6, **decode)
            for capture in (False, True) if engine == "tapped" else (False,):
                prefill = {"do": "prefill", "prompts": 8, "capture": capture, "seed": 3}
                yield _step("warm-up", engine, "prefill", 0, 0.8, **prefill)

    def _round(self, number: int) -> Iterator[Step]:
        """A B C B A and C B A B C in rounds by turns, A B B A without C; prefill captured beside idle.

        So neither untapped engine is favoured: one that just was at work may have an advantage.
        """
        first, last = ("untapped", "untapped2")[:: -1 if "untapped2" in self.engines and number % 2 else 1]
        order = (first, "tapped", last, "tapped", first)
        order = [engine for engine in order if engine in self.engines]
        for batch in self.shape.batch_sizes if "decode" in self.wanted else ():
            for turn, engine in enumerate(order):
                yield self._decode("rounds", engine, batch, number, turn)
        if not {"prefill", "captured"} & set(self.wanted):
            return
        for turn, engine in enumerate(order):
            if engine != "tapped" or "prefill" in self.wanted:
                yield self._prefill("rounds", engine, "prefill, tap idle (tok/s)", number, turn)
            if engine == "tapped" and "captured" in self.wanted:
                yield self._prefill("rounds", engine, "prefill, all captured (tok/s)", number, 10 + turn)

    def _peer_round(self, number: int) -> Iterator[Step]:
        order = ("untapped", "peer", "peer", "untapped")
        for batch in self.shape.batch_sizes:
            for turn, engine in enumerate(order):
                yield self._decode("peer", engine, batch, 500 + number, turn)
        for turn, engine in enumerate(order):
            yield self._prefill("peer", engine, "peer: prefill, all captured (tok/s)", 500 + number, turn)

    def _decode(self, section: str, engine: str, batch: int, *at: int) -> Step:
        figure = f"{'peer: ' if section == 'peer' else ''}decode ITL batch {batch} (ms)"
        number, turn = at
        seed = 1_000_000 + 1000 * number + 10 * batch + turn

        def command(calibration: Calibration) -> dict[str, Any]:
            tokens = calibration.decode_tokens.get(batch, 40)
            return {"do": "decode", "batch": batch, "tokens": tokens, "seed": seed}

        slow = 3.0 if engine == "peer" else 1.0
        return Step(section, engine, figure, number, command, slow * self.args.decode_s + 0.1)

    def _prefill(self, section: str, engine: str, figure: str, *at: int) -> Step:
        number, turn = at
        seed = 2_000_000 + 1000 * number + turn
        capture = engine == "tapped" and "captured" in figure

        def command(calibration: Calibration) -> dict[str, Any]:
            prompts = calibration.prefill_prompts
            return {"do": "prefill", "prompts": prompts, "capture": capture, "seed": seed}

        return Step(section, engine, figure, number, command, self.args.prefill_s + 0.1)

    def _mixed(self) -> Iterator[Step]:
        """One engine, the same load, captured or not: I C C I."""
        args = self.args
        for number in range(args.mixed_rounds if self._has("mixed", "tapped") else 0):
            for turn, capture in enumerate((False, True, True, False)):
                seed = 3_000_000 + 10 * number + turn
                command = {"do": "mixed", "seconds": args.mixed_s, "capture": capture, "seed": seed}
                figure = "captured" if capture else "idle"
                yield _step("mixed", "tapped", figure, number, args.mixed_s + 1.5, **command)

    def _steady(self) -> Iterator[Step]:
        """Windows A B, B A and so on, with the same prompts on both engines."""
        args = self.args
        for number in range(args.steady_windows if "steady" in self.wanted else 0):
            for engine in ("untapped", "tapped") if number % 2 == 0 else ("tapped", "untapped"):
                if engine in self.engines:
                    command = {"do": "steady", "seconds": args.steady_s, "capture": engine == "tapped"}
                    command["seed"] = 4_000_000 + number
                    yield _step("steady", engine, "steady", number, args.steady_s + 2.5, **command)

    def _traffic(self) -> Iterator[Step]:
        """The same trace of chats three times: untapped, tapped with captures beside it, untapped again."""
        if not self._has("traffic", "tapped"):
            return
        args = self.args
        for number, engine in enumerate(("untapped", "tapped", "untapped")):
            command = {"do": "traffic", "seconds": args.traffic_s, "rate": args.traffic_rate}
            command |= {"capture": engine == "tapped", "seed": 5_000_000}
            yield _step("traffic", engine, "traffic", number, 1.1 * args.traffic_s + 3.0, **command)
        yield _step("check", "tapped", "check", 1, 4.0, do="check", tokens=9, seed=8, repeat=False)

    def _rates(self) -> Iterator[Step]:
        if self._has("rates", "tapped"):
            yield _step("rates", "tapped", "d2h", 0, 1.0, do="d2h")
            yield _step("rates", "tapped", "record", 0, 4.0, do="record")


def _step(section: str, engine: str, figure: str, number: int, guess_s: float, **command: Any) -> Step:
    return Step(section, engine, figure, number, lambda _: command, guess_s)
