"""What `taphouse watch` draws: a `Moment` in, a live view or one line out. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from taphouse.cli.render import STATE_STYLE, facts_grid, plain, table
from taphouse.cli.render_governor import governor_body, governor_line, governor_text
from taphouse.cli.render_queue import (
    capture_text,
    engine_problem,
    extraction_state,
    heard,
    latency_of,
    number_text,
)
from taphouse.cli.units import age, count, duration, milliseconds, per_second, ratio, size, spark
from taphouse.wire import Consumer, Engine, Governor, Job, Latency, QueueStatus, Rate, ShardInfo

__all__ = ["HISTORY", "SHARDS_SHOWN", "Moment", "follow", "watch_line", "watch_view"]

HISTORY = 120
SHARDS_SHOWN = 6
JOBS_SHOWN = 4
NARROW = 76
TALL = 28
"""Rows from which on the governor has a panel; on fewer it has one line."""
NAME_WIDTH = 28
STALE_AFTER_S = 60.0
SPARK_WIDTH = 30
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
        _queue_panel(status),
        _rate_panel(status, moment.rates),
        _engine_panel(status),
        _trainer_panel(moment),
    ]
    parts: list[RenderableType] = [header]
    if width < NARROW:
        parts += boxes
    else:
        parts += [_side_by_side(boxes[0], boxes[1]), _side_by_side(boxes[2], boxes[3])]
    if status.governor is not None:
        parts.append(_governor(status.governor, height))
    if moment.jobs:
        parts.append(_panel("jobs", _jobs(moment.jobs, width < NARROW)))
    left = (
        height
        - 1
        - ROWS_ABOVE
        - (2 if moment.problem else 0)
        - ((4 if height >= TALL else 1) if status.governor is not None else 0)
        - (min(len(moment.jobs), JOBS_SHOWN + 1) + 2 if moment.jobs else 0)
    )
    parts.append(_shards_panel(moment, rows=max(1, min(SHARDS_SHOWN, left - 3))))
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
        f"rows left {status.rows_left} eta {duration(status.eta_s)}",
    ]
    if status.rates:
        rate = status.rates[0]
        parts.append(
            f"{per_second(rate.samples, 'samples')} {per_second(rate.tokens, 'tokens')} {size(rate.bytes)}/s"
        )
    parts.append(f"shards {status.ledger_head}{f' (+{moment.new_shards})' if moment.new_shards else ''}")
    parts += [_consumer_line(consumer) for consumer in status.consumers] or ["no trainer"]
    parts += [_engine_line(engine) for engine in status.engines] or ["no engine"]
    if status.governor is not None:
        parts.append(governor_line(status.governor))
    return f"{_clock(moment.now)} " + " | ".join(parts)


def _consumer_line(consumer: Consumer) -> str:
    loss = "–" if consumer.loss is None else f"{consumer.loss:.3f}"
    accuracy = "–" if consumer.accuracy is None else f"{consumer.accuracy:.1%}"
    return (
        f"{consumer.name} step {number_text(consumer.step)} loss {loss} accuracy {accuracy} "
        f"lag {number_text(consumer.lag)}{f' ended ({consumer.ended})' if consumer.ended else ''}"
    )


def _engine_line(engine: Engine) -> str:
    if engine.capture != "on":
        return engine_problem(engine)
    latency = engine.latency
    if latency is None:
        return "engine on"
    return (
        f"engine on, {latency_of(latency)}: itl p50 {milliseconds(latency.itl_p50)} "
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


def _side_by_side(left: RenderableType, right: RenderableType) -> Table:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(left, right)
    return grid


def _panel(title: str, body: RenderableType, alarm: bool = False) -> Panel:
    return Panel(
        body, title=plain(title), title_align="left", box=box.ROUNDED, border_style="red" if alarm else "dim"
    )


def _queue_panel(status: QueueStatus) -> Panel:
    depth = status.depth
    busy = sum(worker.batch is not None for worker in status.workers)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for style in ("dim", "", "dim", ""):
        grid.add_column(style=style, no_wrap=True, overflow="ellipsis")
    left = [
        ("pending", depth.pending, "cyan"),
        ("queued", depth.queued, "cyan"),
        ("retrying", depth.waiting, "yellow"),
    ]
    right: list[tuple[str, str | Text]] = [
        ("running", Text(count(depth.running), "bold blue" if depth.running else "")),
        ("finished", Text(count(depth.finished), "green" if depth.finished else "")),
        ("workers", f"{busy}/{len(status.workers)} busy" if status.workers else Text("none", "bold red")),
    ]
    for (name, number, style), (other, value) in zip(left, right, strict=True):
        grid.add_row(name, Text(count(number), style if number else ""), other, value)
    grid.add_row(
        "rows left", count(status.rows_left), "eta", duration(status.eta_s) if status.rows_left else "–"
    )
    return _panel("queue, in batches", grid, alarm=not status.workers)


def _rate_panel(status: QueueStatus, rates: tuple[float, ...]) -> Panel:
    last = status.rates[0] if status.rates else Rate(window_s=60)
    longer = "".join(f"  ({per_second(r.samples)} in {duration(r.window_s)})" for r in status.rates[1:])
    facts: list[tuple[str, RenderableType]] = [
        ("samples", per_second(last.samples) + longer),
        ("tokens", per_second(last.tokens)),
        ("stored", f"{size(last.bytes)}/s ({ratio(last.bytes, last.raw_bytes)} of raw)"),
    ]
    body = Group(facts_grid(facts), Text(spark(list(rates), SPARK_WIDTH) or " ", "blue"))
    return _panel(f"throughput, last {duration(last.window_s)}", body)


def _engine_panel(status: QueueStatus) -> Panel:
    if not status.engines:
        return _panel("engine", Text("no engine is configured"), alarm=True)
    several = len(status.engines) > 1
    parts: list[RenderableType] = []
    for engine in status.engines:
        why = f" – {engine.detail}" if engine.detail else ""
        facts: list[tuple[str, RenderableType]] = [("engine", plain(engine.url))] if several else []
        facts.append(("capture", capture_text(engine.capture).append(why, "")))
        parts.append(facts_grid(facts + _latency_facts(engine.latency)))
    whose = sorted({latency_of(engine.latency) for engine in status.engines})
    parts.append(Text(f"latency: {' and '.join(whose)}{' of the engine' if len(whose) == 1 else ''}", "dim"))
    title = "engines" if several else f"engine {status.engines[0].url}"
    return _panel(title, Group(*parts), alarm=all(engine.capture != "on" for engine in status.engines))


def _governor(governor: Governor, height: int) -> RenderableType:
    if height >= TALL:
        return _panel("governor", governor_body(governor), alarm=governor.stopped)
    return Text.assemble("governor ", governor_text(governor), no_wrap=True, overflow="ellipsis")


def _latency_facts(latency: Latency | None) -> list[tuple[str, RenderableType]]:
    if latency is None:
        return [("latency", "–")]
    return [
        ("itl p50 / p95", f"{milliseconds(latency.itl_p50)} / {milliseconds(latency.itl_p95)}"),
        ("ttft p50 / p95", f"{milliseconds(latency.ttft_p50)} / {milliseconds(latency.ttft_p95)}"),
        (
            "requests",
            f"{number_text(latency.requests_running)} running, "
            f"{number_text(latency.requests_waiting)} waiting",
        ),
    ]


def _trainer_panel(moment: Moment) -> Panel:
    consumers = moment.status.consumers if moment.status else []
    if not consumers:
        return _panel("trainer", Text("none has been heard of: start `taphouse-trainer`", "dim"))
    several = len(consumers) > 1
    parts: list[RenderableType] = []
    stale = False
    for consumer in consumers:
        silent = consumer.updated_at is not None and moment.now - consumer.updated_at > STALE_AFTER_S
        old = silent and consumer.ended is None
        stale = stale or old
        facts: list[tuple[str, RenderableType]] = [("name", plain(consumer.name))] if several else []
        facts += [
            ("loss", Text("–" if consumer.loss is None else f"{consumer.loss:.3f}", "bold")),
            ("accuracy", "–" if consumer.accuracy is None else f"{consumer.accuracy:.1%}"),
            ("step", f"{number_text(consumer.step)}, epoch {number_text(consumer.epoch)}"),
            ("lag", _lag(consumer)),
            (
                "ended" if consumer.ended else "heard",
                Text(heard(consumer, moment.now), "bold red" if old else ""),
            ),
        ]
        parts.append(facts_grid(facts))
    name = consumers[0].name
    title = "trainers" if several else name if "trainer" in name else f"trainer {name}"
    return _panel(title, Group(*parts), alarm=stale)


def _lag(consumer: Consumer) -> str:
    if consumer.lag is None:
        return "–"
    return f"{count(consumer.lag)} shard{'' if consumer.lag == 1 else 's'} behind"


def _jobs(jobs: tuple[Job, ...], narrow: bool) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", max_width=NAME_WIDTH, ratio=1 if narrow else None)
    grid.add_column(no_wrap=True, min_width=8)
    if not narrow:
        grid.add_column(ratio=1, min_width=8)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    for job in jobs[:JOBS_SHOWN]:
        ended = job.succeeded + job.failed + job.skipped
        done = Text(f"{count(ended)}/{count(job.rows)}")
        if job.failed:
            done.append(f" ({count(job.failed)} failed)", "bold red")
        bar = [] if narrow else [ProgressBar(total=max(job.rows, 1), completed=ended)]
        state = Text(job.state.value, STATE_STYLE[job.state])
        grid.add_row(plain(job.name or job.id), state, *bar, done, duration(job.eta_s))
    if len(jobs) > JOBS_SHOWN:
        grid.add_row(Text(f"and {len(jobs) - JOBS_SHOWN} more", "dim"))
    return grid


def _shards_panel(moment: Moment, rows: int) -> Panel:
    head = moment.status.ledger_head if moment.status else 0
    title = f"shards as they land, {count(head)} in all"
    if not moment.shards:
        return _panel(title, Text("none yet", "dim"))
    numbers = ("samples", "tokens", "stored", "of raw")
    landed = table("seq", *numbers, "sealed", "shard", right=("seq", *numbers))
    landed.columns[-2].no_wrap = True
    for shard in reversed(moment.shards[-rows:]):
        landed.add_row(
            str(shard.seq),
            count(shard.samples),
            count(shard.tokens),
            size(shard.bytes),
            ratio(shard.bytes, shard.raw_bytes),
            age(shard.created_at, moment.now),
            Text(shard.shard.removesuffix(".safetensors"), no_wrap=True, overflow="ellipsis"),
        )
    return _panel(title, landed)
