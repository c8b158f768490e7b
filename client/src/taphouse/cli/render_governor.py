"""The governor as rich renderables and as a line. Pure functions."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.text import Text

from taphouse.cli.render import facts_grid
from taphouse.cli.units import age, milliseconds
from taphouse.wire import Governor, GovernorMode

__all__ = ["governor_body", "governor_facts", "governor_line", "governor_text", "governor_view"]


def _limit(governor: Governor) -> tuple[str, str]:
    """What extraction may use while production is there, and its style."""
    mode = "" if governor.mode is GovernorMode.AUTO else f" ({governor.mode.value})"
    if governor.stopped:
        return "extraction stopped", "bold red"
    if governor.busy_ms is None:
        return f"unknown{mode}", "yellow"
    if governor.busy_ms <= 0:
        return f"nothing beside production{mode}", "yellow"
    return f"{governor.busy_ms:.3g} ms a step beside production{mode}", "green"


def governor_text(governor: Governor) -> Text:
    """Limit and reason."""
    text, style = _limit(governor)
    return Text(text, style).append(f" – {governor.reason}", "default")


def governor_facts(governor: Governor) -> list[tuple[str, RenderableType]]:
    """Limit, reason, and production's p95 beside what it is held to."""
    return [
        ("governor", governor_text(governor)),
        ("p95 / baseline", _p95(governor)),
    ]


def governor_view(governor: Governor, now: float | None = None) -> RenderableType:
    """The governor, for one look."""
    now = time.time() if now is None else now
    slowdown = "–" if governor.slowdown is None else f"{governor.slowdown:.2f}×"
    facts: list[tuple[str, RenderableType]] = [("mode", governor.mode.value), *governor_facts(governor)]
    facts += [("slowdown", slowdown), ("updated", age(governor.updated_at, now))]
    return facts_grid(facts)


def governor_line(governor: Governor) -> str:
    """One line, for logs and pipes."""
    return f"governor {_limit(governor)[0]} ({governor.reason}) {_p95(governor)}"


def _p95(governor: Governor) -> str:
    """Production's p95 and, behind a slash, what it is without extraction."""
    return (
        f"itl {milliseconds(governor.itl_p95_s)} / {milliseconds(governor.itl_p95_baseline_s)}, "
        f"ttft {milliseconds(governor.ttft_p95_s)} / {milliseconds(governor.ttft_p95_baseline_s)}"
    )


def governor_body(governor: Governor) -> RenderableType:
    """Two lines: limit and reason; production's p95 beside its baseline."""
    limit = governor_text(governor)
    limit.no_wrap, limit.overflow = True, "ellipsis"
    p95 = Text(f"production p95 / baseline: {_p95(governor)}", no_wrap=True, overflow="ellipsis")
    return Group(limit, p95)
