"""The panels of `taphouse watch`. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from taphouse.cli.render import facts_grid, plain, table
from taphouse.cli.render_consumers import heard, number_text
from taphouse.cli.render_governor import governor_body, governor_text
from taphouse.cli.render_jobs import eta_text, rows_done, state_text
from taphouse.cli.render_queue import capture_text, engine_load, latency_of, queue_eta
from taphouse.cli.units import age, count, duration, milliseconds, per_second, ratio, size, spark
from taphouse.wire import Consumer, Governor, Job, Latency, QueueStatus, Rate, ShardInfo

__all__ = [
    "JOBS_SHOWN",
    "TALL",
    "engine_panel",
    "governor_panel",
    "jobs_panel",
    "queue_panel",
    "rate_panel",
    "shards_panel",
    "side_by_side",
    "trainer_panel",
]

JOBS_SHOWN = 4
TALL = 28
"""Rows from which on the governor has a panel; on fewer it has one line."""
NAME_WIDTH = 28
STALE_AFTER_S = 60.0
SPARK_WIDTH = 30


def side_by_side(left: RenderableType, right: RenderableType) -> Table:
    """Two of equal width."""
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(left, right)
    return grid


def _panel(title: str, body: RenderableType, alarm: bool = False) -> Panel:
    return Panel(
        body, title=plain(title), title_align="left", box=box.ROUNDED, border_style="red" if alarm else "dim"
    )


def queue_panel(status: QueueStatus) -> Panel:
    """Depth by state."""
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
    grid.add_row("rows left", count(status.rows_left), "eta", queue_eta(status))
    return _panel("queue, in batches", grid, alarm=not status.workers)


def rate_panel(status: QueueStatus, rates: tuple[float, ...]) -> Panel:
    """What was sealed lately; `rates` are earlier samples a second, oldest first."""
    last = status.rates[0] if status.rates else Rate(window_s=60)
    longer = "".join(f"  ({per_second(r.samples)} in {duration(r.window_s)})" for r in status.rates[1:])
    facts: list[tuple[str, RenderableType]] = [
        ("samples", per_second(last.samples) + longer),
        ("tokens", per_second(last.tokens)),
        ("stored", f"{size(last.bytes)}/s ({ratio(last.bytes, last.raw_bytes)} of raw)"),
    ]
    body = Group(facts_grid(facts), Text(spark(list(rates), SPARK_WIDTH) or " ", "blue"))
    return _panel(f"throughput, last {duration(last.window_s)}", body)


def engine_panel(status: QueueStatus) -> Panel:
    """Each engine, and production's latency on it."""
    if not status.engines:
        return _panel("engine", Text("no engine is configured"), alarm=True)
    several = len(status.engines) > 1
    parts: list[RenderableType] = []
    for engine in status.engines:
        why = f" – {engine.detail}" if engine.detail else ""
        facts: list[tuple[str, RenderableType]] = [("engine", plain(engine.url))] if several else []
        load = f", {engine_load(engine, ' in flight')}" if engine.capture == "on" else ""
        facts.append(("capture", capture_text(engine.capture).append(f"{load}{why}", "")))
        if engine.set_aside:
            facts.append(("set aside", Text(engine.set_aside, "yellow")))
        parts.append(facts_grid(facts + _latency_facts(engine.latency)))
    whose = sorted({latency_of(engine.latency) for engine in status.engines})
    parts.append(Text(f"latency: {' and '.join(whose)}{' of the engine' if len(whose) == 1 else ''}", "dim"))
    title = "engines" if several else f"engine {status.engines[0].url}"
    return _panel(title, Group(*parts), alarm=all(engine.capture != "on" for engine in status.engines))


def governor_panel(governor: Governor, height: int) -> RenderableType:
    """What extraction may use, in as much room as there is."""
    if height >= TALL:
        return _panel("governor", governor_body(governor), alarm=governor.stopped)
    return Text.assemble("governor ", governor_text(governor), no_wrap=True, overflow="ellipsis")


def _latency_facts(latency: Latency | None) -> list[tuple[str, RenderableType]]:
    if latency is None:
        return [("latency", "–")]
    return [
        ("itl p50 / p95", f"{milliseconds(latency.itl_p50)} / {milliseconds(latency.itl_p95)}"),
        ("ttft p50 / p95", f"{milliseconds(latency.ttft_p50)} / {milliseconds(latency.ttft_p95)}"),
        (latency_of(latency), _requests(latency)),
    ]


def _requests(latency: Latency) -> str:
    """How many there are; the tap's own count tells nothing of waiting ones."""
    waiting = latency.requests_waiting
    return f"{number_text(latency.requests_running)} running" + (
        "" if waiting is None else f", {number_text(waiting)} waiting"
    )


def trainer_panel(consumers: Sequence[Consumer], now: float) -> Panel:
    """Who learns from the shards, and how far each is."""
    if not consumers:
        return _panel("trainer", Text("none has been heard of: start `taphouse-trainer`", "dim"))
    several = len(consumers) > 1
    parts: list[RenderableType] = []
    stale = False
    for consumer in consumers:
        silent = consumer.updated_at is not None and now - consumer.updated_at > STALE_AFTER_S
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
                Text(heard(consumer, now), "bold red" if old else ""),
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


def jobs_panel(jobs: Sequence[Job], narrow: bool) -> Panel:
    """The first of the jobs, each with its progress."""
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", max_width=NAME_WIDTH, ratio=1 if narrow else None)
    grid.add_column(no_wrap=True, min_width=8)
    if not narrow:
        grid.add_column(ratio=1, min_width=8)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    for job in jobs[:JOBS_SHOWN]:
        ended = rows_done(job)
        done = Text(f"{count(ended)}/{count(job.rows)}")
        if job.failed:
            done.append(f" ({count(job.failed)} failed)", "bold red")
        bar = [] if narrow else [ProgressBar(total=max(job.rows, 1), completed=ended)]
        grid.add_row(plain(job.name or job.id), state_text(job.state), *bar, done, eta_text(job))
    if len(jobs) > JOBS_SHOWN:
        grid.add_row(Text(f"and {len(jobs) - JOBS_SHOWN} more", "dim"))
    return _panel("jobs", grid)


def shards_panel(shards: Sequence[ShardInfo], head: int, now: float) -> Panel:
    """The newest `shards` (oldest first) of `head` in all."""
    title = f"shards as they land, {count(head)} in all"
    if not shards:
        return _panel(title, Text("none yet", "dim"))
    numbers = ("samples", "tokens", "stored", "of raw")
    landed = table("seq", *numbers, "sealed", "shard", right=("seq", *numbers))
    landed.columns[-2].no_wrap = True
    for shard in reversed(shards):
        landed.add_row(
            str(shard.seq),
            count(shard.samples),
            count(shard.tokens),
            size(shard.bytes),
            ratio(shard.bytes, shard.raw_bytes),
            age(shard.created_at, now),
            Text(shard.shard.removesuffix(".safetensors"), no_wrap=True, overflow="ellipsis"),
        )
    return _panel(title, landed)
