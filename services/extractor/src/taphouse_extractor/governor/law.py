"""The control law: production's latency of one interval in, what extraction may add to a step out. Pure.

The limit L is the quota's `busy_ms`: milliseconds that extraction may add to a step while production runs
or waits. It moves by additive increase and multiplicative decrease, the rule that of all linear ones comes
to the bound from any start, keeps to it, and gives way at once (Chiu & Jain, "Analysis of the Increase and
Decrease Algorithms for Congestion Avoidance in Computer Networks", Computer Networks and ISDN Systems 17,
1989):

    over its target:   L <- L / 2, and 0 when that is under the floor
    under it:          L <- min(L + step, max)
    nothing to judge:  L <- L

What is judged are production's p95 inter-token latency and p95 time to first token, each against

    target = 1 + tolerance   for slowdown = p95 / p95 of the baseline at equal load   (`baseline.py`)
    target = 1               for slowdown = p95 / objective, where the settings give an SLO

"Over" is when the slowdown's lower bound is over the target, so that few samples don't cut by chance;
"under" when the slowdown itself is under it; between the two the limit stands. As in TCP, three things keep
the loop honest:

- One decrease a round trip: after a cut the window is emptied, and what comes within `SETTLE_S` is not
  counted, because the engine publishes what it measured up to half a second later.
- No increase on what was not tried (RFC 7661): the limit rises only while extraction runs and has more to
  do, or while it waits because the limit is too small for any of it.
- Zero backs off: from 0 the floor is tried again after `RETRY_S`, after twice that when the try failed, up to
  `RETRY_CAP_S`. So extraction that hurts at any limit runs a second or two in `RETRY_CAP_S`.

Where the present load has no baseline, the limit is at most `start`, and 0 for `PROBE_S` in each
`PROBE_EVERY_S` (5% of the time) until it has one. The first token of a request that came while no
production was there is not judged: it waited for a step of the quiet, which `busy_ms` does not bound.

The trip wire stops extraction for `hold_s` when production's requests failed while it ran, or when a
slowdown, under the present limit or in the last `RECENT_S`, is over `trip_factor` beyond chance (its lower
bound at three standard errors is); then the law starts anew from `start`. A pinned limit is the operator's:
latency does not move it and does not trip it, failures do.
"""

from __future__ import annotations

from dataclasses import replace

from taphouse.wire import GovernorMode
from taphouse_extractor.governor.baseline import Baseline, Interval, Window
from taphouse_extractor.governor.state import AUTO, RETRY_S, Observation, Order, State
from taphouse_extractor.governor.verdicts import TTFT_WINDOWS, Bounds, judge

__all__ = ["decide", "fresh", "unseen"]

SETTLE_S = 1.0
RETRY_CAP_S = 80.0
PROBE_S, PROBE_EVERY_S = 2.0, 40.0
PROBING = "a short probe: learns this load without extraction"
RECENT_S = 2.0
SILENT_S = 2.0
"""Production in flight, extraction running and no token for so long counts as over the target."""


def fresh(bounds: Bounds, reason: str = "starts from a cautious limit") -> State:
    """A governor that knows nothing."""
    return State(limit_ms=bounds.start_ms, reason=reason, extracted=True)


def decide(bounds: Bounds, before: State, seen: Observation, order: Order = AUTO) -> State:
    """The state after an interval."""
    state = _perceived(bounds, before, seen)
    state = replace(state, verdicts=judge(bounds, state.window, state.baseline, state.clock_s))
    if order.mode is GovernorMode.STOPPED:
        return replace(state, mode=order.mode, limit_ms=0.0, stopped=True, reason=order.why)
    if before.mode is not order.mode:
        state = _anew(bounds, state, order.mode)
    tripped = _trip(bounds, state, seen, before.extracted)
    if tripped:
        until = state.clock_s + bounds.hold_s
        why = f"{tripped}: stopped for {bounds.hold_s:g} s"
        return replace(state, limit_ms=0.0, stopped=True, hold_until=until, probe_until=0.0, reason=why)
    if state.stopped and state.clock_s < state.hold_until:
        return state
    if state.stopped:
        state = _anew(bounds, state, order.mode)
    if order.mode is GovernorMode.PINNED:
        why = f"pinned at {order.busy_ms:g} ms by the operator"
        return replace(state, limit_ms=order.busy_ms, reason=why)
    return _moved(bounds, state, seen)


def unseen(bounds: Bounds, before: State, dt: float, order: Order = AUTO) -> State:
    """The state `dt` seconds later when nothing is known of them: the limit stands, the operator is followed.

    What comes next is not taken for latency without extraction.
    """
    aged = before.baseline.aged(dt, bounds.half_life_s)
    state = replace(
        before,
        clock_s=before.clock_s + dt,
        baseline=aged,
        window=Window(),
        recent=Window(),
        verdicts=(),
        extracted=True,
    )
    if order.mode is GovernorMode.STOPPED:
        return replace(state, mode=order.mode, limit_ms=0.0, stopped=True, reason=order.why)
    held = state.stopped and state.clock_s < state.hold_until
    if before.mode is not order.mode or (state.stopped and not held):
        state = _anew(bounds, state, order.mode)
    if order.mode is GovernorMode.PINNED and not state.stopped:
        return replace(
            state, limit_ms=order.busy_ms, reason=f"pinned at {order.busy_ms:g} ms by the operator"
        )
    return state


def _anew(bounds: Bounds, state: State, mode: GovernorMode) -> State:
    """From the cautious limit, with the baseline that was learned."""
    begun = fresh(bounds)
    return replace(
        begun,
        mode=mode,
        baseline=state.baseline,
        clock_s=state.clock_s,
        extracted=state.extracted,
        next_probe_at=state.next_probe_at,
    )


def _perceived(bounds: Bounds, state: State, seen: Observation) -> State:
    """Clock, baseline and window with one more interval; the limit as it was.

    The engine's figures of steps and of latency are published apart, each up to half a second late: only an
    interval without extraction that follows another belongs to the baseline.
    """
    clock = state.clock_s + seen.dt
    old, window = state.baseline, state.window
    if old.scale != seen.scale:
        old, window = Baseline(seen.scale), Window()
        state = replace(state, recent=Window())
    baseline = old.aged(seen.dt, bounds.half_life_s)
    if not seen.extracted and not state.extracted:
        baseline = baseline.learnt(seen.itl, seen.ttft)
    ttft = {} if seen.from_quiet and seen.extracted else seen.ttft
    new = Interval(clock, seen.extracted, seen.itl, ttft)
    if clock > state.settle_until:
        window = window.moved(new, bounds.window_s * TTFT_WINDOWS)
    silent = seen.silent and seen.extracted and seen.running > 0
    return replace(
        state,
        clock_s=clock,
        baseline=baseline,
        window=window,
        recent=state.recent.moved(new, RECENT_S),
        extracted=seen.extracted,
        silent_s=state.silent_s + seen.dt if silent else 0.0,
    )


def _trip(bounds: Bounds, state: State, seen: Observation, ran_before: bool) -> str | None:
    """Why extraction must stop at once, or None."""
    if seen.failed and (seen.extracted or ran_before):
        return f"{seen.failed} production request{'s' * (seen.failed > 1)} failed while extraction ran"
    if state.mode is not GovernorMode.AUTO or state.stopped or state.limit_ms <= 0:
        return None
    ran = any(interval.extracted for interval in state.recent.intervals)
    for verdict in (*state.verdicts, *judge(bounds, state.recent, state.baseline, state.clock_s)):
        if ran and verdict.far_over > bounds.trip_factor:
            return f"{verdict.text}, far over {verdict.target:.2f}"
    return None


def _moved(bounds: Bounds, state: State, seen: Observation) -> State:
    """The limit after one interval in which nothing is stopped."""
    if state.probe_until:
        if state.clock_s < state.probe_until:
            return replace(state, limit_ms=0.0, reason=PROBING)
        state = replace(state, limit_ms=state.resume_ms, probe_until=0.0)
    if state.limit_ms <= 0:
        return _from_zero(bounds, state, seen)
    if state.silent_s >= SILENT_S:
        return _cut(bounds, state, f"production has had no token for {state.silent_s:.1f} s")
    return _judged(bounds, state, seen)


def _judged(bounds: Bounds, state: State, seen: Observation) -> State:
    """A limit above 0, moved by the verdicts."""
    if not seen.production:
        return replace(state, reason="no production: the limit stands")
    if state.clock_s <= state.settle_until:
        return replace(state, reason="waits for the last cut to show")
    over = [v for v in state.verdicts if v.over]
    if over:
        return _cut(bounds, state, max(over, key=lambda verdict: verdict.pressure).text)
    if any(v.unknown for v in state.verdicts):
        return _unknown(bounds, state, seen)
    return _raised(bounds, state, seen)


def _cut(bounds: Bounds, state: State, why: str) -> State:
    """Half of it, or nothing; what was measured under the old limit is forgotten."""
    half = state.limit_ms / 2
    cut = replace(state, window=Window(), settle_until=state.clock_s + SETTLE_S, silent_s=0.0)
    if half >= bounds.floor_ms:
        return replace(cut, limit_ms=half, reason=f"{why}: halved")
    return replace(
        cut,
        limit_ms=0.0,
        retry_at=state.clock_s + state.retry_s,
        retry_s=min(RETRY_CAP_S, state.retry_s * 2),
        reason=f"{why}: nothing while production is there, tried again in {state.retry_s:g} s",
    )


def _from_zero(bounds: Bounds, state: State, seen: Observation) -> State:
    """Try the floor when the wait is over and production, by itself, keeps its objectives."""
    if state.clock_s < state.retry_at or not seen.production:
        return state
    alone = [v for v in state.verdicts if v.objective and v.over]
    if alone:
        return replace(state, reason=f"{alone[0].text} without extraction: nothing while production is there")
    tried = min(bounds.floor_ms, bounds.max_ms)
    return replace(state, limit_ms=tried, window=Window(), reason=f"tries {tried:g} ms again")


def _unknown(bounds: Bounds, state: State, seen: Observation) -> State:
    """No baseline for a figure at this load: a probe now and then; if it is the ITL's, a cautious limit."""
    known = any(v.enough and not v.unknown for v in state.verdicts)
    cautious = not known or any(v.unknown and v.name == "ITL" for v in state.verdicts)
    limit = min(state.limit_ms, bounds.start_ms) if cautious else state.limit_ms
    if seen.extracted and state.clock_s >= state.next_probe_at:
        return replace(
            state,
            limit_ms=0.0,
            resume_ms=limit,
            probe_until=state.clock_s + PROBE_S,
            next_probe_at=state.clock_s + PROBE_EVERY_S,
            reason=PROBING,
        )
    if not cautious:
        return _raised(bounds, state, seen)
    return replace(state, limit_ms=limit, reason="no baseline for this load yet: a cautious limit")


def _raised(bounds: Bounds, state: State, seen: Observation) -> State:
    """A step more, where extraction was tried and every verdict is under its target."""
    judged = [v for v in state.verdicts if v.enough]
    if not judged:
        intervals = state.window.intervals
        long = bool(intervals) and state.clock_s - intervals[0].at >= SETTLE_S
        if seen.wanted and long and not any(interval.extracted for interval in intervals):
            limit = min(bounds.max_ms, state.limit_ms + bounds.step_ms)
            return replace(state, limit_ms=limit, reason="extraction waits, and none of it ran: raised")
        return replace(state, reason="too few samples of production: the limit stands")
    worst = max(judged, key=lambda verdict: verdict.pressure)
    if worst.pressure > 1.0:
        return replace(state, reason=f"{worst.text}, not surely over {worst.target:.2f}: the limit stands")
    if not (seen.extracted and seen.wanted):
        return replace(state, reason="extraction has no use for more: the limit stands")
    if state.limit_ms >= bounds.max_ms:
        return replace(state, limit_ms=bounds.max_ms, retry_s=RETRY_S, reason=f"{worst.text}: at the most")
    limit = min(bounds.max_ms, state.limit_ms + bounds.step_ms)
    return replace(state, limit_ms=limit, retry_s=RETRY_S, reason=f"{worst.text}: raised")
