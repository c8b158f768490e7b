"""Numbers for people: sizes in decimal units, durations, ages, rates. Programs read `-o json` instead."""

from __future__ import annotations

__all__ = ["age", "count", "duration", "milliseconds", "per_second", "ratio", "size", "spark"]

_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")
_BLOCKS = "▁▂▃▄▅▆▇█"


def size(value: float) -> str:
    """Bytes in decimal units: 57344 → "57.3 kB"."""
    for unit in _SIZES:
        if abs(value) < 999.95 or unit == _SIZES[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def count(value: float) -> str:
    """A number of things: 1234567 → "1,234,567"."""
    return f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Seconds as at most two units: 3725 → "1h 02m", 300 → "5m", 2.34 → "2.3s"; None → "–"."""
    if seconds is None:
        return "–"
    if 0 < seconds < 10 and seconds != round(seconds):
        return f"{seconds:.1f}s"
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    for large, unit, small, below in (
        (days, "d", hours, "h"),
        (hours, "h", minutes, "m"),
        (minutes, "m", secs, "s"),
    ):
        if large:
            return f"{large}{unit} {small:02d}{below}" if small else f"{large}{unit}"
    return f"{secs}s"


def age(then: float | None, now: float) -> str:
    """How long ago `then` was (both seconds since the epoch): "12s ago"; None → "–"."""
    return "–" if then is None else f"{duration(max(0, round(now - then)))} ago"


def per_second(value: float, unit: str = "") -> str:
    """A rate: 0.0416 → "0.042/s", 1234.5 with "tok" → "1,234 tok/s"."""
    if value == 0:
        text = "0"
    elif value >= 100:
        text = count(value)
    else:
        text = f"{value:.1f}" if value >= 1 else f"{value:.3f}"
    return f"{text} {unit}/s" if unit else f"{text}/s"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds: 0.0213 → "21.3 ms"; None → "–"."""
    if seconds is None:
        return "–"
    value = seconds * 1000
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def ratio(stored: float, raw: float) -> str:
    """Stored bytes over raw bytes: "0.70×"; "–" when there is nothing to compare."""
    return f"{stored / raw:.2f}×" if raw > 0 else "–"


def spark(values: list[float], width: int) -> str:
    """The last `width` values as a line of blocks, scaled from 0 to their maximum."""
    shown = values[-width:]
    top = max(shown, default=0.0)
    if top <= 0:
        return _BLOCKS[0] * len(shown)
    return "".join(_BLOCKS[min(7, int(value / top * 7.999))] for value in shown)
