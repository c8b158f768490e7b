"""Which engine can serve which job: what an engine's status says, against what a job asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from taphouse.wire import Engine as EngineView
from taphouse.wire import JobOptions, Latency
from taphouse_extractor.governor.report import read_report
from taphouse_extractor.records import Pin
from taphouse_extractor.rows import describe

__all__ = [
    "Needs",
    "Refusal",
    "load_of",
    "longest_prompt",
    "misfit",
    "none_fits",
    "refusal",
    "refused_by_all",
    "trouble",
    "view_of",
]


REASON_LENGTH = 500
Count = Annotated[int, Field(ge=0, lt=2**53)]
Word = Annotated[str, Field(max_length=200)]


class _Said(BaseModel):
    """What of an engine's status is believed: a load below zero would draw all batches to it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    reason: str | None = None
    start_id: Word | None = None
    layers: Annotated[list[Count], Field(max_length=4096)] | None = None
    num_layers: Count | None = None
    dtype: Word | None = None
    max_model_len: Count | None = None
    seeds: bool | None = None
    fingerprint_id: Word | None = None
    in_flight: Count | None = None


@dataclass(frozen=True)
class Needs:
    """What an extraction asks of an engine: by its options, and by the engine that its job began with."""

    options: JobOptions = field(default_factory=JobOptions)
    pin: Pin | None = None


@dataclass(frozen=True)
class Refusal:
    """The option (`options.<name>`) for which an engine would refuse every row, and why."""

    param: str
    why: str


def view_of(url: str, status: dict[str, Any], latency: Latency | None = None) -> EngineView:
    """An engine by its status, which is foreign input: one of another kind is an engine that is off."""
    in_flight, isolation = status.get("in_flight"), read_report(status).isolation
    claims = in_flight.get("claims") if isinstance(in_flight, dict) else None
    try:
        said = _Said.model_validate({**status, "in_flight": claims})
        return EngineView(
            url=url,
            capture="on" if status.get("capture") == "on" else "off",
            detail=f"{said.reason:.{REASON_LENGTH}}" if said.reason is not None else None,
            held=isolation.held if isolation is not None else None,
            latency=latency,
            **said.model_dump(exclude={"reason"}),
        )
    except ValidationError as error:
        detail = f"its status is none of this version ({describe(error)})"
        return EngineView(url=url, capture="off", detail=detail, latency=latency)


def load_of(engine: EngineView) -> int:
    """Captures that are in flight, and requests that its scheduler holds back for production."""
    return (engine.in_flight or 0) + (engine.held or 0)


def trouble(engine: EngineView) -> str | None:
    """Why an engine captures nothing, or None."""
    return None if engine.capture == "on" else f"engine {engine.url} ({engine.capture}): {engine.detail}"


def misfit(engine: EngineView, needs: Needs) -> str | None:
    """Why an engine can't serve an extraction now, or None. What its status leaves open is no reason."""
    sick = trouble(engine)
    if sick is not None:
        return sick
    refused = refusal(engine, needs.options)
    if refused is not None:
        return refused.why
    if needs.pin is None:
        return None
    for name in ("fingerprint_id", "num_layers", "dtype"):
        here, began = getattr(engine, name), getattr(needs.pin, name)
        if here is not None and here != began:
            now, then = (f"{value:.16}" if isinstance(value, str) else value for value in (here, began))
            return f"engine {engine.url}: {name} is {now}, the job began with {then}"
    if (
        needs.options.layers is None
        and engine.layers is not None
        and set(engine.layers) != set(needs.pin.layers)
    ):
        now, then = (",".join(map(str, layers)) for layers in (engine.layers, needs.pin.layers))
        return f"engine {engine.url}: layers are {now}, the job began with {then}"
    return None


def none_fits(engines: Sequence[EngineView], needs: Needs) -> str | None:
    """Why none of these engines can serve an extraction now; None when one can."""
    reasons = list[str]()
    for engine in engines:
        reason = misfit(engine, needs)
        if reason is None:
            return None
        reasons.append(reason)
    return "no engine fits: " + "; ".join(reasons)


def refusal(engine: EngineView, options: JobOptions) -> Refusal | None:
    """Why an engine would refuse every row with these options; None when it would not, or isn't known to.

    Sick or well: this says what the engine is, not how it is.
    """
    missing = sorted(set(options.layers or ()) - set(engine.layers)) if engine.layers is not None else []
    if missing and engine.layers is not None:
        tapped, wanted = (", ".join(map(str, layers)) for layers in (engine.layers, missing))
        return Refusal("options.layers", f"engine {engine.url} taps {tapped}, not {wanted}")
    if options.seed is not None and options.temperature and engine.seeds is False:
        why = f"engine {engine.url} refuses seeded sampling: leave out seed, or set temperature to 0"
        return Refusal("options.seed", why)
    if engine.max_model_len is not None and options.max_tokens >= engine.max_model_len:
        why = f"engine {engine.url} has room for {engine.max_model_len} tokens, prompt and answer together"
        return Refusal("options.max_tokens", why)
    return None


def refused_by_all(engines: Sequence[EngineView], options: JobOptions) -> Refusal | None:
    """Why each of these engines would refuse every row with these options; None while one would not."""
    found = [one for engine in engines if (one := refusal(engine, options)) is not None]
    if not found or len(found) < len(engines):
        return None
    params = {one.param for one in found}
    return Refusal(params.pop() if len(params) == 1 else "options", "; ".join(one.why for one in found))


def longest_prompt(engines: Sequence[EngineView], options: JobOptions) -> int | None:
    """Tokens that a row's prompt may have where it may have most; None where an engine doesn't say."""
    rooms = [engine.max_model_len for engine in engines if refusal(engine, options) is None]
    known = [room for room in rooms if room is not None]
    return max(known) - options.max_tokens if known and len(known) == len(rooms) else None
