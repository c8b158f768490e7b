"""Engines, their latency, and the governor that decides what extraction may use of them."""

from __future__ import annotations

from enum import Enum

from pydantic import Field, model_validator

from taphouse.wire.base import Answer, Request

__all__ = ["Engine", "Governor", "GovernorMode", "GovernorOrder", "Latency"]


class Latency(Answer):
    """Latency of an engine's recent requests: production's own, or of all.

    `requests` says which: "production" where the tap times both classes apart, "all" (production's and
    extraction's together, as the engine's own histograms give them) where it does not. Seconds, over the
    requests of the last `window_s`; None while there were none.
    """

    window_s: float
    requests: str = "all"
    ttft_p50: float | None = None
    ttft_p95: float | None = None
    itl_p50: float | None = None
    itl_p95: float | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None


class Engine(Answer):
    """One engine as the service sees it. `capture` is "on", "off" or "unreachable"; `detail` says why.

    `in_flight` counts captures, `held` extraction's requests that its scheduler holds back for production:
    their sum is the load by which a batch's engine is chosen. `set_aside` says why workers prefer others now.
    `max_model_len` bounds prompt and answer together; `seeds` is False where seeded sampling is refused.
    """

    url: str
    capture: str
    detail: str | None = None
    set_aside: str | None = None
    start_id: str | None = None
    layers: list[int] | None = None
    num_layers: int | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    seeds: bool | None = None
    fingerprint_id: str | None = None
    in_flight: int | None = None
    held: int | None = None
    latency: Latency | None = None


class GovernorMode(str, Enum):
    """`auto`: by production's latency; `pinned`: the operator's limit; `stopped`: no extraction."""

    AUTO = "auto"
    PINNED = "pinned"
    STOPPED = "stopped"


class GovernorOrder(Request):
    """`POST /v1/governor`: what the operator wants. `busy_ms` is for `pinned`, which needs it."""

    mode: GovernorMode
    busy_ms: float | None = Field(
        default=None,
        ge=0.0,
        le=60_000.0,
        allow_inf_nan=False,
        description="Milliseconds that extraction may add to a step while production runs or waits.",
    )

    @model_validator(mode="after")
    def _limit_where_pinned(self) -> GovernorOrder:
        if (self.mode is GovernorMode.PINNED) != (self.busy_ms is not None):
            raise ValueError("busy_ms goes with mode pinned, and with no other")
        return self


class Governor(Answer):
    """What extraction may use at present, and why. None where nothing is known.

    Latencies are production's own p95 in seconds over the last seconds, beside what they are without
    extraction at the same load (or the SLO of the settings); `slowdown` is the worse of the two ratios.
    """

    mode: GovernorMode
    busy_ms: float | None = Field(
        default=None, description="Milliseconds that extraction may add to a step while production is there."
    )
    stopped: bool = Field(default=False, description="Nothing of extraction runs.")
    reason: str
    slowdown: float | None = None
    itl_p95_s: float | None = None
    itl_p95_baseline_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_p95_baseline_s: float | None = None
    updated_at: float | None = None
