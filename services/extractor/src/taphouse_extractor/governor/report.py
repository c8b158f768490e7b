"""What an engine's status says of production and extraction, and what came between two looks at it.

A status is foreign input. It is the tap's (`GET /v1/hidden_states/status`, sections `isolation` and
`latency`). A section that is missing is None; one that can't be read is None too, with the reason in
`problem`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from taphouse_extractor.governor.histograms import Scale, grown, loads_added
from taphouse_extractor.governor.state import Observation
from taphouse_extractor.rows import describe

__all__ = ["ClassLatency", "Follower", "Isolation", "LatencySection", "Report", "merged", "read_report"]

MAX_GAP_S = 5.0
"""Samples that came over a longer time than this belong to no one state of extraction."""

S = TypeVar("S", bound=BaseModel)
Load = Annotated[int, Field(ge=0, le=32)]
Bucket = Annotated[int, Field(ge=0, le=4096)]
Number = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Loads = dict[Load, dict[Bucket, Number]]
Count = Annotated[int, Field(ge=0)]


class _Foreign(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ClassLatency(_Foreign):
    """One class of requests since the engine's start: samples by load bin and bucket, and requests."""

    ttft: Loads = {}
    itl: Loads = {}
    finished: Count = 0
    failed: Count = 0
    running: Count = 0


class LatencySection(_Foreign):
    """Both classes, and where the buckets lie (`first_bound_s` in seconds)."""

    bucket_ratio: float = Field(gt=1.0, le=16.0)
    first_bound_s: float = Field(gt=0.0, le=60.0)
    production: ClassLatency
    extraction: ClassLatency = ClassLatency()

    @property
    def scale(self) -> Scale:
        """Where the buckets lie."""
        return Scale(self.bucket_ratio, self.first_bound_s)


class Steps(_Foreign):
    """Sums since the engine's start."""

    extraction_tokens: Count = 0


class Isolation(_Foreign):
    """The scheduler ("on", "off", "absent"), extraction's requests; `quiet`: no production is there."""

    scheduler: str = "absent"
    reason: str | None = None
    steps: Steps = Steps()
    running: Count = 0
    held: Count = 0
    quiet: bool = False


class Report(_Foreign):
    """One look at one engine."""

    start_id: str | None = None
    isolation: Isolation | None = None
    latency: LatencySection | None = None
    problem: str | None = None

    @property
    def scheduled(self) -> bool:
        """The two-class scheduler keeps the quota."""
        return self.isolation is not None and self.isolation.scheduler == "on"

    @property
    def lacks(self) -> str | None:
        """What can't be governed on this engine, or None."""
        if self.problem is not None:
            return self.problem
        if self.latency is None:
            return "its status has no latency of production: nothing can be judged"
        if not self.scheduled:
            said = f" ({self.isolation.reason})" if self.isolation and self.isolation.reason else ""
            return f"it runs without the two-class scheduler{said}: extraction is only stopped and allowed"
        return None


def read_report(status: dict[str, Any]) -> Report:
    """Read a status; never raises."""
    problems: list[str] = []
    start_id = status.get("start_id")
    return Report(
        start_id=start_id if isinstance(start_id, str) else None,
        isolation=_section(status, "isolation", Isolation, problems),
        latency=_section(status, "latency", LatencySection, problems),
        problem="; ".join(problems) or None,
    )


def _section(status: dict[str, Any], name: str, model: type[S], problems: list[str]) -> S | None:
    found = status.get(name)
    if found is None:
        return None
    try:
        return model.model_validate(found)
    except ValidationError as error:
        problems.append(f"its status can't be read: {name}: {describe(error)}")
        return None


class Follower:
    """Turns the reports of one engine into observations, by differences of what it counts."""

    def __init__(self) -> None:
        self._last: Report | None = None
        self._at = 0.0

    def take(self, report: Report, at: float) -> Observation | None:
        """What came since the last report; `at` is monotonic, in seconds.

        None for the first report, after an engine's restart (another start id, or a count that went down),
        after a gap, and without a latency section.
        """
        last, dt = self._last, at - self._at
        self._last, self._at = report, at
        if last is None or last.start_id != report.start_id or not 0 < dt <= MAX_GAP_S:
            return None
        if report.latency is None or last.latency is None or report.latency.scale != last.latency.scale:
            return None
        now, before = report.latency.production, last.latency.production
        itl, ttft = grown(now.itl, before.itl), grown(now.ttft, before.ttft)
        failed, extracted = now.failed - before.failed, _extracted(report, last)
        if itl is None or ttft is None or extracted is None or failed < 0 or now.finished < before.finished:
            return None
        quiet = last.isolation.quiet if last.isolation is not None and last.scheduled else before.running == 0
        return Observation(
            dt=dt,
            scale=report.latency.scale,
            itl=itl,
            ttft=ttft,
            extracted=extracted,
            failed=failed,
            running=now.running,
            wanted=_waits(report) if report.scheduled else extracted,
            from_quiet=quiet,
        )


def _waits(report: Report) -> bool:
    isolation = report.isolation
    return report.scheduled and isolation is not None and isolation.running + isolation.held > 0


def _extracted(now: Report, before: Report) -> bool | None:
    """Whether extraction ran between two reports; None when a count went down.

    The scheduler counts extraction's tokens. Without it, a request of extraction in flight or ended counts.
    """
    if now.scheduled and before.scheduled:
        assert now.isolation is not None and before.isolation is not None
        more = now.isolation.steps.extraction_tokens - before.isolation.steps.extraction_tokens
        return None if more < 0 else more > 0
    assert now.latency is not None and before.latency is not None
    here, there = now.latency.extraction, before.latency.extraction
    ended = here.finished + here.failed - there.finished - there.failed
    return None if ended < 0 else ended > 0 or here.running > 0 or there.running > 0


def merged(observations: Sequence[Observation]) -> Observation | None:
    """All engines as one; those whose buckets lie elsewhere than the first one's are left out."""
    if not observations:
        return None
    result = observations[0]
    for other in observations[1:]:
        if other.scale == result.scale:
            result = replace(
                result,
                dt=max(result.dt, other.dt),
                itl=loads_added(result.itl, other.itl),
                ttft=loads_added(result.ttft, other.ttft),
                extracted=result.extracted or other.extracted,
                failed=result.failed + other.failed,
                running=result.running + other.running,
                wanted=result.wanted or other.wanted,
                from_quiet=result.from_quiet and other.from_quiet,
            )
    return result
