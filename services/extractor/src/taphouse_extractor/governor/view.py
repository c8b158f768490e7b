"""What people are shown of a tick. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from taphouse.wire import Governor as View
from taphouse_extractor.governor.baseline import Comparison, compare
from taphouse_extractor.governor.state import Order, State
from taphouse_extractor.governor.verdicts import TTFT_WINDOWS, Bounds

__all__ = ["view_of"]


def view_of(bounds: Bounds, state: State, order: Order, problems: Sequence[str], now: float) -> View:
    """The state as the wire has it; `problems` follow the reason, `now` is in seconds since the epoch.

    While extraction runs, the latencies are those of that time; else those of the same last seconds.
    """
    judged = {verdict.name: verdict.found for verdict in state.verdicts}
    ratios = [verdict.found.ratio for verdict in state.verdicts if verdict.enough]
    short, long = state.clock_s - bounds.window_s, state.clock_s - bounds.window_s * TTFT_WINDOWS
    window, base, scale = state.window, state.baseline, state.baseline.scale
    itl = judged.get("ITL") or compare(window.itl(short, extracted=False), base.itl, 1, scale)
    ttft = judged.get("TTFT") or compare(window.ttft(long, extracted=False), base.ttft, 1, scale)
    return View(
        mode=order.mode,
        busy_ms=state.limit_ms,
        stopped=state.stopped,
        reason="; ".join([state.reason, *problems]),
        slowdown=max(ratios, default=None),
        itl_p95_s=itl.p95_s if itl else None,
        itl_p95_baseline_s=_base(itl),
        ttft_p95_s=ttft.p95_s if ttft else None,
        ttft_p95_baseline_s=_base(ttft),
        updated_at=now,
    )


def _base(found: Comparison | None) -> float | None:
    return found.base_s or None if found is not None else None
