"""What production's latest latency says: each of its two figures against what it is held to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from taphouse_extractor.governor.baseline import Baseline, Comparison, Window, compare, compare_with
from taphouse_extractor.governor.histograms import ByLoad, Scale

__all__ = ["TTFT_SHARE", "TTFT_WINDOWS", "Bounds", "Verdict", "judge"]

TTFT_WINDOWS = 5
"""Requests are rarer than tokens: times to first token are judged over so many windows,"""
TTFT_SHARE = 4
"""and from a fourth of the samples."""
COVERED = 0.5
"""Share of the samples that must have a baseline."""


@dataclass(frozen=True)
class Bounds:
    """The law's settings. Limits in milliseconds of a step, objectives in seconds at p95."""

    tolerance: float = 0.05
    itl_slo_s: float | None = None
    ttft_slo_s: float | None = None
    start_ms: float = 1.0
    step_ms: float = 0.1
    floor_ms: float = 0.25
    max_ms: float = 20.0
    trip_factor: float = 2.0
    hold_s: float = 30.0
    half_life_s: float = 600.0
    window_s: float = 3.0
    min_samples: int = 40


@dataclass(frozen=True)
class Verdict:
    """One figure ("ITL" or "TTFT") and its target, from at least `need` samples; `objective`: an SLO's."""

    name: str
    found: Comparison
    target: float
    need: int
    objective: bool

    @property
    def enough(self) -> bool:
        """Enough samples to judge by."""
        return self.found.samples >= self.need

    @property
    def unknown(self) -> bool:
        """Enough samples, most of them without a baseline."""
        return self.found.total >= self.need and self.found.samples < COVERED * self.found.total

    @property
    def over(self) -> bool:
        """Surely over its target."""
        return self.enough and self.found.surely > self.target

    @property
    def far_over(self) -> float:
        """How many times over what it is held to it is beyond chance."""
        return self.found.by_far if self.enough else 0.0

    @property
    def pressure(self) -> float:
        """Above 1 where the figure is over its target."""
        return self.found.ratio / self.target

    @property
    def text(self) -> str:
        """For people."""
        against = "its SLO" if self.objective else "its baseline"
        return f"production's {self.name} p95 is {self.found.ratio:.2f} of {against}"


def judge(bounds: Bounds, window: Window, baseline: Baseline, now: float) -> tuple[Verdict, ...]:
    """The verdicts there are samples for."""
    short, long = now - bounds.window_s, now - bounds.window_s * TTFT_WINDOWS
    rare = max(5, bounds.min_samples // TTFT_SHARE)
    itl = window.itl(short, extracted=bounds.itl_slo_s is None)
    ttft = window.ttft(long, extracted=bounds.ttft_slo_s is None)
    figures = (
        ("ITL", itl, baseline.itl, bounds.itl_slo_s, bounds.min_samples),
        ("TTFT", ttft, baseline.ttft, bounds.ttft_slo_s, rare),
    )
    found = []
    for name, latest, base, slo, need in figures:
        against = _compared(latest, base, slo, need, baseline.scale, shared=name == "ITL")
        if against is not None:
            target = 1.0 + bounds.tolerance if slo is None else 1.0
            found.append(Verdict(name, against, target, need, slo is not None))
    return tuple(found)


def _compared(
    latest: ByLoad, base: ByLoad, objective_s: float | None, need: int, scale: Scale, *, shared: bool
) -> Comparison | None:
    if objective_s is not None:
        return compare_with(latest, objective_s, scale, shared=shared)
    return compare(latest, base, need, scale, shared=shared)
