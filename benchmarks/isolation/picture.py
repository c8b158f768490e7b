"""The picture: one strip a mode over time, and bars of production's p95 beside `none`. Hand-written SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from .figures import Pass, segments

WIDTH, LEFT, RIGHT = 1000, 200, 70
STRIP, GAP, TOP = 96, 16, 64
BAR = 15
MOST_DOTS = 1500
BIN_S = 1.0
ITL, TTFT, EXTRACTION, BURST, INK, PALE = "#2563a8", "#d9480f", "#5b9a5b", "#ece8df", "#222222", "#8a8a8a"


def picture(passes: Sequence[Pass], rows: Mapping[str, dict[str, Any]], title: str) -> str:
    """The SVG. `passes` are shown from top to bottom, one a mode; `rows` are `figures.summary`'s."""
    length = max((_length(one) for one in passes), default=1.0)
    latencies = [value for one in passes for _, value in (*_itl(one), *_ttft(one))]
    low, high = _decades(latencies)
    most = max((rate for one in passes for _, rate in _area(one)), default=1.0) or 1.0
    parts = _legend(title)
    y = float(TOP)
    for one in passes:
        parts += _strip(one, length, y, bounds=(low, high), most=most)
        y += STRIP + GAP
    parts += _time_axis(length, y - GAP)
    y += 46
    bars, y = _bars(rows, y)
    parts += bars
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" width="{WIDTH}" '
        f'height="{y:.0f}" font-family="sans-serif" font-size="12" fill="{INK}">'
    )
    return (
        "\n".join([head, f'<rect width="{WIDTH}" height="{y:.0f}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"
    )


def _itl(one: Pass) -> list[tuple[float, float]]:
    """Time and gap (s) of every piece after a stream's first."""
    return [(b, b - a) for served in one["served"] for a, b in itertools.pairwise(served["pieces"])]


def _ttft(one: Pass) -> list[tuple[float, float]]:
    return [(s["pieces"][0], s["pieces"][0] - s["sent"]) for s in one["served"] if s["pieces"]]


def _length(one: Pass) -> float:
    """The trace's length, and up to half as much again for answers that came later."""
    last = max((served["ended"] for served in one["served"]), default=0.0)
    return float(max(one["length_s"], min(last, 1.5 * one["length_s"])))


def _area(one: Pass) -> list[tuple[float, float]]:
    """Start of each bin of `BIN_S` and extraction's tokens a second in it."""
    found = segments(one)
    bins = []
    for number in range(math.ceil(_length(one) / BIN_S)):
        left, right = number * BIN_S, (number + 1) * BIN_S
        tokens = sum(
            count * max(0.0, min(end, right) - max(start, left)) / max(end - start, 1e-6)
            for start, end, count in found
        )
        bins.append((left, tokens / BIN_S))
    return bins


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of the axis of latency: powers of ten around all but the lowest twentieth of the values (s)."""
    ordered = sorted(value for value in values if value > 0) or [0.01, 0.1]
    low = ordered[len(ordered) // 20]
    return 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(ordered[-1]) + 1e-9)


def _x(at: float, length: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(max(at / length, 0.0), 1.0)


def _legend(title: str) -> list[str]:
    items = [
        (ITL, "inter-token latency"),
        (TTFT, "time to first token"),
        (EXTRACTION, "extraction, tokens/s"),
        (BURST, "burst of production"),
    ]
    parts = [_text(LEFT, 20, title, size=14)]
    x = float(LEFT)
    for colour, words in items:
        parts.append(f'<rect x="{x:.0f}" y="33" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(x + 16, 43, words))
        x += 30 + 6.6 * len(words)
    return parts


def _strip(one: Pass, length: float, top: float, *, bounds: tuple[float, float], most: float) -> list[str]:
    bottom = top + STRIP
    parts = [_text(8, top + STRIP / 2 + 4, one["mode"], size=13)]
    for start, end in one["bursts"]:
        left, right = _x(start, length), _x(end, length)
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{STRIP}" fill="{BURST}"/>'
        )
    parts.append(_steps(_area(one), length, bottom, most))
    parts.append(_dots(_itl(one), length, bottom, bounds, colour=ITL, width=2.0))
    parts.append(_dots(_ttft(one), length, bottom, bounds, colour=TTFT, width=4.5))
    low, high = (round(math.log10(bound)) for bound in bounds)
    for power in range(low, high + 1):
        y = bottom - STRIP * (power - low) / (high - low)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, colour="#d5d5d5"))
        parts.append(_text(LEFT - 6, y + 4, _seconds(10.0**power), size=10, anchor="end", fill=PALE))
    parts.append(_text(WIDTH - RIGHT + 6, top + 8, f"{most:,.0f}", size=10, fill=EXTRACTION))
    parts.append(_text(WIDTH - RIGHT + 6, bottom, "0 tok/s", size=10, fill=EXTRACTION))
    return parts


def _steps(bins: Iterable[tuple[float, float]], length: float, bottom: float, most: float) -> str:
    points = [f"M{LEFT} {bottom:.1f}"]
    for left, rate in bins:
        y = bottom - STRIP * min(rate / most, 1.0)
        points.append(f"H{_x(left, length):.1f}V{y:.1f}H{_x(left + BIN_S, length):.1f}")
    points.append(f"V{bottom:.1f}Z")
    return f'<path d="{"".join(points)}" fill="{EXTRACTION}" fill-opacity="0.45"/>'


def _dots(
    found: Sequence[tuple[float, float]],
    length: float,
    bottom: float,
    bounds: tuple[float, float],
    *,
    colour: str,
    width: float,
) -> str:
    low, high = (math.log10(bound) for bound in bounds)
    points = []
    for at, value in _thinned([item for item in found if item[0] <= length]):
        share = (math.log10(max(value, bounds[0])) - low) / (high - low)
        points.append(f"M{_x(at, length):.1f} {bottom - STRIP * min(share, 1.0):.1f}h.1")
    style = f'stroke="{colour}" stroke-width="{width}" stroke-linecap="round" stroke-opacity="0.7"'
    return f'<path d="{"".join(points)}" fill="none" {style}/>'


def _thinned(found: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about `MOST_DOTS` of them: the highest twentieth all, of the others each n-th."""
    if len(found) <= MOST_DOTS:
        return list(found)
    ordered = sorted(found, key=lambda item: item[1])
    tail = max(1, min(len(found) // 20, MOST_DOTS // 2))
    rest = sorted(ordered[:-tail])
    return rest[:: math.ceil(len(rest) / (MOST_DOTS - tail))] + ordered[-tail:]


def _time_axis(length: float, y: float) -> list[str]:
    every = next(step for step in (1, 2, 5, 10, 20, 60, 600) if length / step <= 14 or step == 600)
    parts = [
        _text(_x(at, length), y + 16, f"{at}", size=10, anchor="middle", fill=PALE)
        for at in range(0, int(length) + 1, every)
    ]
    return [*parts, _text(WIDTH - RIGHT + 6, y + 16, "s", size=10, fill=PALE)]


def _bars(rows: Mapping[str, dict[str, Any]], y: float) -> tuple[list[str], float]:
    """p95 of both latencies beside `none`, on a logarithmic axis that begins at 0.8."""
    names = (("itl_p95_ms_ratio", ITL), ("ttft_p95_ms_ratio", TTFT))
    shown = [(mode, row) for mode, row in rows.items() if row.get(names[0][0]) is not None]
    most = max([1.5, *(row[name] or 1.0 for _, row in shown for name, _ in names)])
    low, span = math.log(0.8), math.log(most * 1.1) - math.log(0.8)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * max(0.0, math.log(max(value, 0.8)) - low) / span

    parts = [_text(LEFT, y, "production's p95 in bursts, beside none (1.00)", size=14)]
    top = y + 14
    y = top + 6
    for mode, row in shown:
        parts.append(_text(8, y + BAR + 3, mode, size=13))
        for name, colour in names:
            value = row[name]
            if value is not None:
                parts.append(
                    f'<rect x="{LEFT}" y="{y:.1f}" width="{x(value) - LEFT:.1f}" height="{BAR - 3}" '
                    f'fill="{colour}" fill-opacity="0.8"/>'
                )
                parts.append(_text(x(value) + 5, y + BAR - 5, f"{value:.2f}", size=11))
            y += BAR
        y += 8
    for bound, dashes in ((1.0, ""), (1.1, ' stroke-dasharray="3 3"')):
        parts.append(_line(x(bound), top, x(bound), y, colour=INK, more=dashes))
    parts.append(_text(x(1.1) + 3, y + 10, "1.10", size=10, fill=PALE))
    return parts, y + 24


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"


def _line(x1: float, y1: float, x2: float, y2: float, *, colour: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{more}/>'


def _text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", fill: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">'
        f"{escape(words)}</text>"
    )
