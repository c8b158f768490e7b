"""The modes: what stands between extraction and production while the same trace runs.

Two engines of one build are up, one at work at a time. `plain` has vLLM's own scheduler with
`--scheduling-policy priority`; requests of one priority are served first come, first served there, as without
that flag. `classes` has the scheduler of `taphouse_tap`. Each has a `none` of its own, which its other modes
are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PLAIN, CLASSES = "plain", "classes"
LOW_PRIORITY = 1_000_000


@dataclass(frozen=True)
class Mode:
    """`base` is the mode that its figures are compared with; `busy_ms` is a fixed quota."""

    name: str
    engine: str
    base: str = "none"
    extraction: bool = True
    priority: int = 0
    busy_ms: float | None = None
    governed: bool = False


NONE = Mode("none", CLASSES, extraction=False)
NONE_AGAIN = Mode("none, again", CLASSES, extraction=False)
NONE_PLAIN = Mode("none, vLLM's scheduler", PLAIN, extraction=False)
UNPROTECTED = Mode("unprotected", PLAIN, NONE_PLAIN.name)
PRIORITY = Mode("priority", PLAIN, NONE_PLAIN.name, priority=LOW_PRIORITY)
GOVERNED = Mode("governed", CLASSES, governed=True)


def warm_up(engine: str) -> Mode:
    """What an engine does before it is measured."""
    return Mode("warm-up", engine, busy_ms=1000.0 if engine == CLASSES else None)


def quota(busy_ms: float) -> Mode:
    """Extraction under a fixed quota of `busy_ms` a step while production runs or waits."""
    return Mode(f"quota {busy_ms:g} ms", CLASSES, busy_ms=busy_ms)


def rank(name: str) -> int:
    """Where a mode stands in tables and pictures: from no extraction to governed extraction."""
    names = ("none", "unprotected", "priority", "quota", "governed")
    return next((at for at, start in enumerate(names) if name.startswith(start)), len(names))


def order(number: int, sweep: Sequence[float], *, governed: bool = True) -> list[Mode]:
    """The passes of round `number`, in order: all modes once, then `none` and `governed` again and again.

    Odd rounds run backwards, so that neither is always the first.
    """
    governor = [GOVERNED] if governed else []
    if number:
        pair = [NONE, *governor]
        return pair[::-1] if number % 2 else pair
    classes = [NONE, *governor, *map(quota, sweep), NONE_AGAIN]
    return [*classes, NONE_PLAIN, UNPROTECTED, PRIORITY]
