"""The queue's status as rich renderables: one look (`queue`), and the words and numbers `watch` shares."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.text import Text

from taphouse.cli.render import facts_grid, plain, table
from taphouse.cli.render_consumers import consumers_table, retention_text, unconsumed_text
from taphouse.cli.render_governor import governor_facts
from taphouse.cli.units import age, count, duration, milliseconds, per_second, ratio, size
from taphouse.wire import Engine, JobState, Latency, QueueStatus, Rate

__all__ = [
    "capture_text",
    "depth_text",
    "engine_load",
    "engine_problem",
    "extraction_state",
    "latency_of",
    "queue_eta",
    "queue_view",
    "rate_text",
]

MAY_RUN = (JobState.SPOOLING, JobState.QUEUED, JobState.RUNNING)
"""States of jobs whose batches are taken, or will be."""


def latency_of(latency: Latency | None) -> str:
    """Whose latency it is."""
    return "production" if latency is not None and latency.requests == "production" else "all requests"


def extraction_state(status: QueueStatus) -> tuple[str, str, str | None]:
    """What extraction is doing: a word, its style, and the reason where there is one."""
    depth = status.depth
    todo = depth.pending + depth.queued + depth.waiting + depth.running
    if status.paused:
        return "paused", "bold yellow", status.paused
    if not todo:
        return "idle", "dim", None
    held = status.jobs.get(JobState.PAUSED) and not any(status.jobs.get(state) for state in MAY_RUN)
    if held and not depth.running:
        return "paused", "yellow", "every unfinished job is: `taphouse jobs resume`"
    stuck = _stuck(status)
    if stuck or depth.running:
        return ("stalled", "bold red", stuck) if stuck else ("running", "bold green", None)
    if status.unfit and not depth.queued:
        jobs = f"{count(status.unfit_jobs)} job{'' if status.unfit_jobs == 1 else 's'}"
        return "waiting", "bold yellow", f"{jobs} for an engine: {status.unfit}"
    return (
        "waiting",
        "yellow",
        "for a retry" if depth.waiting and not depth.queued else "for a worker to take a batch",
    )


def queue_eta(status: QueueStatus) -> str:
    """When no row is left; "–" where none is, or while extraction is paused."""
    paused = extraction_state(status)[0] == "paused"
    return "–" if paused or not status.rows_left else duration(status.eta_s)


def _stuck(status: QueueStatus) -> str | None:
    if not status.workers:
        return "no worker: start `taphouse-extractor worker`"
    if status.engines and all(engine.capture != "on" for engine in status.engines):
        more = f" (and {count(others)} more)" if (others := len(status.engines) - 1) else ""
        return engine_problem(status.engines[0]) + more
    return None


def engine_problem(engine: Engine) -> str:
    """What is wrong with an engine that captures nothing."""
    what = "engine unreachable" if engine.capture == "unreachable" else f"engine capture {engine.capture}"
    return f"{what}: {engine.detail}" if engine.detail else what


def engine_load(engine: Engine, unit: str = "") -> str:
    """What an engine has of extraction: captures in flight (`unit` says so), and requests held back."""
    held = f" + {count(engine.held)} held" if engine.held else ""
    return f"{'–' if engine.in_flight is None else count(engine.in_flight)}{unit}{held}"


def depth_text(status: QueueStatus) -> Text:
    """Queue depth by state, in one line."""
    depth = status.depth
    parts = [
        (depth.pending, "pending", "cyan"),
        (depth.queued, "queued", "cyan"),
        (depth.waiting, "retrying", "yellow"),
        (depth.running, "running", "bold blue"),
        (depth.finished, "finished", "green"),
    ]
    text = Text()
    for number, name, style in parts:
        if text:
            text.append("  ")
        text.append(count(number), style if number else "dim").append(f" {name}", "" if number else "dim")
    return text


def queue_view(status: QueueStatus, now: float | None = None) -> RenderableType:
    """The whole queue, for one look."""
    now = time.time() if now is None else now
    word, style, reason = extraction_state(status)
    jobs = ", ".join(f"{count(n)} {state.value}" for state, n in status.jobs.items() if n) or "none"
    facts: list[tuple[str, RenderableType]] = [
        ("extraction", Text(word, style).append(f" – {reason}" if reason else "", "")),
        ("batches", depth_text(status)),
        ("jobs", jobs),
        (
            "rows left",
            count(status.rows_left) + ("" if (eta := queue_eta(status)) == "–" else f", about {eta}"),
        ),
        *((f"last {duration(rate.window_s)}", rate_text(rate)) for rate in status.rates),
        ("ledger head", count(status.ledger_head)),
    ]
    if status.unconsumed is not None:
        facts.append(("unconsumed", plain(unconsumed_text(status.unconsumed))))
    if status.retention is not None:
        facts.append(("retention", plain(retention_text(status.retention))))
    if status.governor is not None:
        facts += governor_facts(status.governor)
    parts: list[RenderableType] = [facts_grid(facts), "", _workers(status, now), "", _engines(status.engines)]
    if status.consumers:
        parts += ["", consumers_table(status, now)]
    return Group(*parts)


def rate_text(rate: Rate) -> str:
    """Throughput in samples, tokens and stored bytes a second."""
    return (
        f"{per_second(rate.samples, 'samples')}, {per_second(rate.tokens, 'tokens')}, "
        f"{size(rate.bytes)}/s stored ({ratio(rate.bytes, rate.raw_bytes)} of raw)"
    )


def _workers(status: QueueStatus, now: float) -> RenderableType:
    if not status.workers:
        return Text("no workers", "yellow")
    result = table("worker", "state", "batch", "heard")
    for worker in status.workers:
        batch = plain(worker.batch or "–")
        result.add_row(plain(worker.name), worker.state, batch, age(worker.last_heartbeat, now))
    return result


def capture_text(capture: str) -> Text:
    """An engine's capture state in its colour."""
    return Text(capture, "green" if capture == "on" else "bold red")


def _engines(engines: list[Engine]) -> RenderableType:
    if not engines:
        return Text("no engines", "yellow")
    result = table(
        "engine", "capture", "layers", "in flight", "itl p50", "itl p95", "ttft p50", "ttft p95", "detail"
    )
    for engine in engines:
        latency = engine.latency
        times = (
            (latency.itl_p50, latency.itl_p95, latency.ttft_p50, latency.ttft_p95) if latency else (None,) * 4
        )
        result.add_row(
            plain(engine.url),
            capture_text(engine.capture),
            ",".join(map(str, engine.layers or ())) or "–",
            engine_load(engine),
            *(milliseconds(value) for value in times),
            plain(engine.detail or (f"set aside: {engine.set_aside}" if engine.set_aside else "–")),
        )
    whose = " and ".join(sorted({latency_of(e.latency) for e in engines if e.latency})) or "all requests"
    return Group(result, Text(f"latencies are those of {whose}", "dim"))
