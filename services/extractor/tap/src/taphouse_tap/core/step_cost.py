"""What extraction's tokens cost in time, learned from the engine's own steps.

Tokens alone don't tell: on a mixture of experts the first few tokens touch most of the experts that a step
touches, and a step that is no longer pure decoding leaves its full CUDA graph. So the cost is a curve:
measured points, one for each size of extraction's part of a step (in powers of two), and straight lines
between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_WEIGHT = 0.2
"""Weight of a new measurement in the moving averages."""

_FIRST_TOKENS = 16
"""What is tried while nothing is known."""

_TRY_AGAIN = 128
"""After so many steps in which nothing fitted, something is tried: fewer than one step in a hundred."""

_TRY_BUDGETS = 8
"""What such a step may cost, in budgets: a measurement may have been chance, and where the first token alone
costs more than the budget (a step that leaves its CUDA graph) extraction lives off these steps."""

_TRY_WHOLE_AGAIN = 4096
"""The same for a whole prompt that is known to be too dear: one step in so many moves no percentile."""

_LEAST_S = 1e-7
"""No token is free: a measurement at or below zero is noise."""


@dataclass
class Point:
    """Moving averages of tokens and of the seconds that they took."""

    tokens: float
    seconds: float

    def observe(self, tokens: float, seconds: float) -> None:
        """One more measurement."""
        self.tokens += _WEIGHT * (tokens - self.tokens)
        self.seconds += _WEIGHT * (seconds - self.seconds)


Curve = dict[int, Point]
"""Points by size: size k holds the numbers of tokens in (2**(k-1), 2**k]."""


class StepCost:
    """Seconds of steps without extraction by production's size, and the two curves of extraction's cost."""

    def __init__(self) -> None:
        self._alone: Curve = {}
        self._busy: Curve = {}
        self._quiet: Curve = {}
        self._declined = 0
        self._passed_by = 0

    def observe(self, production: int, extraction: int, seconds: float) -> None:
        """One step took `seconds`, with so many tokens of either class."""
        if extraction == 0:
            if production:
                _observe(self._alone, production, seconds)
        elif production == 0:
            _observe(self._quiet, extraction, seconds)
        elif (alone := self._alone.get(_size(production))) is not None:
            _observe(self._busy, extraction, seconds - alone.seconds)

    def tokens_within(self, seconds: float, most: int, *, quiet: bool, least: int = 1) -> int:
        """How many tokens extraction may have in a step, at most `most`; fewer than `least` are of no use.

        `quiet`: the whole step may take `seconds` (and holds a few tokens at least); otherwise that is what
        extraction may add to it, and nothing may fit. After `_TRY_AGAIN` steps of that, one may take more.
        """
        if seconds <= 0 or most <= 0:
            return 0
        if quiet:
            return min(most, max(_fitting(self._quiet, seconds), _FIRST_TOKENS, least))
        curve = self._busy or self._quiet
        tokens = _fitting(curve, seconds)
        self._declined = 0 if tokens >= least else self._declined + 1
        if self._declined and self._declined % _TRY_AGAIN == 0:
            tokens = max(_fitting(curve, _TRY_BUDGETS * seconds), least)
        return min(most, tokens)

    def tries_whole(self, seconds: float, tokens: int) -> bool:
        """Whether a prompt that is computed whole may join production's step although it does not fit.

        What is never computed is never measured. So after `_TRY_AGAIN` such steps one is tried whose size was
        not measured, unless a smaller one is too dear; any other after `_TRY_WHOLE_AGAIN`.
        """
        if seconds <= 0:
            return False
        self._passed_by += 1
        measured = self._busy or self._quiet
        known = any(
            size == _size(tokens) or (size < _size(tokens) and point.seconds > seconds)
            for size, point in measured.items()
        )
        tried = self._passed_by >= (_TRY_WHOLE_AGAIN if known else _TRY_AGAIN)
        self._passed_by = 0 if tried else self._passed_by
        return tried

    def as_dict(self) -> dict[str, Any]:
        """Milliseconds by number of tokens, as the record shows them."""
        return {
            name: {
                str(round(point.tokens)): round(point.seconds * 1e3, 3) for _, point in sorted(curve.items())
            }
            for name, curve in (("busy_ms", self._busy), ("quiet_ms", self._quiet))
        }


def _fitting(curve: Curve, seconds: float) -> int:
    """The most tokens whose cost is at most `seconds`; past the largest point, up to twice as many."""
    if not curve:
        return _FIRST_TOKENS
    points = [point for _, point in sorted(curve.items())]
    above: Point | None = None
    for point in reversed(points):
        if point.seconds <= seconds:
            if above is None:
                return int(point.tokens * min(2.0, seconds / point.seconds))
            share = (seconds - point.seconds) / (above.seconds - point.seconds)
            return int(point.tokens + share * (above.tokens - point.tokens))
        above = point
    return int(points[0].tokens * seconds / points[0].seconds)


def _observe(curve: Curve, tokens: int, seconds: float) -> None:
    seconds = max(seconds, tokens * _LEAST_S)
    point = curve.get(_size(tokens))
    if point is None:
        curve[_size(tokens)] = Point(tokens, seconds)
    else:
        point.observe(tokens, seconds)


def _size(tokens: int) -> int:
    return (tokens - 1).bit_length()
