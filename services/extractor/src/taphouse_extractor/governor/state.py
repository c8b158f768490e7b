"""What the control law takes and gives: an interval, the operator's order, its state."""

from __future__ import annotations

from dataclasses import dataclass, field

from taphouse.wire import GovernorMode
from taphouse_extractor.governor.baseline import NO_SCALE, Baseline, Window
from taphouse_extractor.governor.histograms import ByLoad, Scale
from taphouse_extractor.governor.verdicts import Verdict

__all__ = ["AUTO", "RETRY_S", "Observation", "Order", "State"]

RETRY_S = 5.0
"""First wait before the floor is tried again after the limit fell to 0."""


@dataclass(frozen=True)
class Order:
    """What the operator wants: `auto`, a limit pinned at `busy_ms`, or `stopped` for the reason `why`."""

    mode: GovernorMode = GovernorMode.AUTO
    busy_ms: float = 0.0
    why: str = "stopped by the operator"


AUTO = Order()


@dataclass(frozen=True)
class Observation:
    """One interval of `dt` seconds.

    `itl` and `ttft` are production's new samples by load bin; `extracted` says whether extraction ran;
    `failed` is how many production requests failed in it, `running` how many are in flight at its end;
    `wanted` says whether extraction has more to do, `from_quiet` that no production was there at its
    beginning.
    """

    dt: float
    scale: Scale = NO_SCALE
    itl: ByLoad = field(default_factory=dict)
    ttft: ByLoad = field(default_factory=dict)
    extracted: bool = False
    failed: int = 0
    running: int = 0
    wanted: bool = False
    from_quiet: bool = False

    @property
    def silent(self) -> bool:
        """No token of production came."""
        return not self.itl and not self.ttft

    @property
    def production(self) -> bool:
        """Production was there."""
        return self.running > 0 or not self.silent


@dataclass(frozen=True)
class State:
    """What the law knows after an interval. `limit_ms` is the quota's `busy_ms`; times are of `clock_s`.

    `clock_s` is the sum of all `dt`. `window` is what was measured under the present limit, `recent` the last
    two seconds whatever the limit was. A probe keeps the limit to go on with in `resume_ms`.
    """

    limit_ms: float
    reason: str = "no interval was seen yet"
    stopped: bool = False
    mode: GovernorMode = GovernorMode.AUTO
    baseline: Baseline = field(default_factory=Baseline)
    window: Window = field(default_factory=Window)
    recent: Window = field(default_factory=Window)
    verdicts: tuple[Verdict, ...] = ()
    clock_s: float = 0.0
    extracted: bool = False
    silent_s: float = 0.0
    hold_until: float = 0.0
    settle_until: float = 0.0
    probe_until: float = 0.0
    next_probe_at: float = 0.0
    resume_ms: float = 0.0
    retry_at: float = 0.0
    retry_s: float = RETRY_S
