"""What `taphouse watch` draws: a `Moment` in, a live view or one line out. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from taphouse.cli.render_consumers import number_text, pressure_line, unconsumed_text
from taphouse.cli.render_governor import governor_line
from taphouse.cli.render_panels import (
    JOBS_SHOWN,
    TALL,
    engine_panel,
    governor_panel,
    jobs_panel,
    queue_panel,
    rate_panel,
    shards_panel,
    side_by_side,
    trainer_panel,
)
from taphouse.cli.render_queue import engine_load, engine_problem, extraction_state, latency_of, queue_eta
from taphouse.cli.units import duration, milliseconds, per_second, size
from taphouse.wire import Consumer, Engine, Governor, Job, QueueStatus, ShardInfo

__all__ = ["HISTORY", "SHARDS_SHOWN", "Moment", "follow", "watch_line", "watch_view"]

HISTORY = 120
SHARDS_SHOWN = 6
NARROW = 76
ROWS_ABOVE = 15
"""Rows of header and panels above jobs and shards, with one engine and one trainer side by side."""


@dataclass(frozen=True)
class Moment:
    """All that is known at `now` (seconds since the epoch).

    `status` is the newest answer (None before the first), `problem` why a newer one is missing, `jobs` the
    unfinished jobs, `shards` the newest entries (oldest first), `new_shards` how many came since the last
    moment, `rates` samples a second of earlier moments (oldest first).
    """

    url: str
    now: float
    status: QueueStatus | None = None
    problem: str | None = None
    jobs: tuple[Job, ...] = ()
    shards: tuple[ShardInfo, ...] = ()
    new_shards: int = 0
    rates: tuple[float, ...] = ()


def follow(
    before: Moment, now: float, status: QueueStatus, jobs: list[Job], shards: list[ShardInfo]
) -> Moment:
    """The moment after `before`, with a new answer and the ledger entries that came since."""
    rate = status.rates[0].samples if status.rates else 0.0
    return replace(
        before,
        now=now,
        status=status,
        problem=None,
        jobs=tuple(job for job in jobs if not job.state.final),
        shards=(*before.shards, *shards)[-SHARDS_SHOWN:],
        new_shards=len(shards) if before.status is not None else 0,
        rates=(*before.rates, rate)[-HISTORY:],
    )


def watch_view(moment: Moment, width: int = 100, height: int = 50) -> RenderableType:
    """The live view: panels beside each other from `NARROW` columns on, shards in the rows that are left."""
    header = _header(moment)
    status = moment.status
    if status is None:
        return Group(header, Panel(Text(moment.problem or "waiting for the first answer"), box=box.ROUNDED))
    boxes = [
        queue_panel(status),
        rate_panel(status, moment.rates),
        engine_panel(status),
        trainer_panel(status.consumers, moment.now),
    ]
    parts: list[RenderableType] = [header]
    if width < NARROW:
        parts += boxes
    else:
        parts += [side_by_side(boxes[0], boxes[1]), side_by_side(boxes[2], boxes[3])]
    if status.governor is not None:
        parts.append(governor_panel(status.governor, height))
    pressure = pressure_line(status)
    if pressure is not None:
        parts.append(pressure)
    if moment.jobs:
        parts.append(jobs_panel(moment.jobs, width < NARROW))
    left = (
        height
        - 1
        - ROWS_ABOVE
        - (2 if moment.problem else 0)
        - ((4 if height >= TALL else 1) if status.governor is not None else 0)
        - (pressure is not None)
        - (min(len(moment.jobs), JOBS_SHOWN + 1) + 2 if moment.jobs else 0)
    )
    shown = moment.shards[-max(1, min(SHARDS_SHOWN, left - 3)) :]
    parts.append(shards_panel(shown, status.ledger_head, moment.now))
    return Group(*parts)


def watch_line(moment: Moment) -> str:
    """The same in one line, for logs and pipes."""
    status = moment.status
    if status is None or moment.problem:
        return f"{_clock(moment.now)} {moment.problem or 'waiting for the first answer'}"
    word, _, reason = extraction_state(status)
    depth = status.depth
    parts = [
        f"extraction {word}{f' ({reason})' if reason else ''}",
        f"batches {depth.pending} pending {depth.queued} queued {depth.waiting} retrying "
        f"{depth.running} running {depth.finished} finished",
        f"rows left {status.rows_left} eta {queue_eta(status)}",
    ]
    if status.rates:
        rate = status.rates[0]
        parts.append(
            f"{per_second(rate.samples, 'samples')} {per_second(rate.tokens, 'tokens')} {size(rate.bytes)}/s"
        )
    parts.append(f"shards {status.ledger_head}{f' (+{moment.new_shards})' if moment.new_shards else ''}")
    if status.unconsumed is not None:
        parts.append(f"unconsumed {unconsumed_text(status.unconsumed)}")
    parts += [_consumer_line(consumer) for consumer in status.consumers] or ["no trainer"]
    several = len(status.engines) > 1
    said = reason or ""
    for engine in status.engines:
        parts.append(_engine_line(engine, named=several, said=said))
        said += parts[-1]
    if not status.engines:
        parts.append("no engine")
    if status.governor is not None:
        parts.append(governor_line(_without(status.governor, status.engines)))
    return f"{_clock(moment.now)} " + " | ".join(parts)


def _consumer_line(consumer: Consumer) -> str:
    loss = "–" if consumer.loss is None else f"{consumer.loss:.3f}"
    accuracy = "–" if consumer.accuracy is None else f"{consumer.accuracy:.1%}"
    return (
        f"{consumer.name} step {number_text(consumer.step)} loss {loss} accuracy {accuracy} "
        f"lag {number_text(consumer.lag)}{f' ended ({consumer.ended})' if consumer.ended else ''}"
    )


def _without(governor: Governor, engines: list[Engine]) -> Governor:
    """The governor without what the engines say themselves: it repeats why each is unreachable."""
    reason = governor.reason
    for engine in engines:
        if engine.capture != "on" and engine.detail:
            reason = reason.replace(f"; {engine.detail}", "")
    return governor.model_copy(update={"reason": reason})


def _engine_line(engine: Engine, *, named: bool, said: str) -> str:
    """What is `said` in the same line already isn't repeated."""
    name = f"{engine.url}: " if named else ""
    if engine.capture != "on":
        if engine.detail and engine.detail in said:
            engine = engine.model_copy(update={"detail": None})
        return f"{name}{engine_problem(engine)}"
    aside = " (set aside)" if engine.set_aside else ""
    state = f"{name}engine on{aside}, {engine_load(engine, ' in flight')}"
    latency = engine.latency
    if latency is None:
        return state
    return (
        f"{state}, {latency_of(latency)}: itl p50 {milliseconds(latency.itl_p50)} "
        f"p95 {milliseconds(latency.itl_p95)} "
        f"ttft p50 {milliseconds(latency.ttft_p50)} p95 {milliseconds(latency.ttft_p95)}"
    )


def _clock(now: float) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(now).strftime("%H:%M:%S")


def _header(moment: Moment) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    left = Text.assemble(("taphouse", "bold"), f" {moment.url}")
    grid.add_row(left, Text(_clock(moment.now), "dim"))
    lines: list[RenderableType] = [grid]
    if moment.status is not None:
        word, style, reason = extraction_state(moment.status)
        lines.append(Text.assemble("extraction ", (word, style), f" – {reason}" if reason else ""))
    if moment.problem and moment.status is not None:
        since = duration(max(0.0, moment.now - moment.status.updated_at))
        lines.append(Text(f"{moment.problem}; this is {since} old, asking again", "bold red"))
    return Group(*lines)
