"""Answers of the service and shard files as rich renderables. Pure functions: models in, renderables out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taphouse.cli.units import age, count, duration, per_second, ratio, size
from taphouse.wire import Check, Job, JobOptions, JobState, ShardInfo

if TYPE_CHECKING:
    from taphouse.cli.dataset import DatasetReport

__all__ = [
    "STATE_STYLE",
    "checks_table",
    "dry_run",
    "extract_summary",
    "facts_grid",
    "job_details",
    "job_line",
    "jobs_table",
    "plain",
    "shards_table",
    "state_text",
    "table",
]

STATE_STYLE = {
    JobState.SPOOLING: "cyan",
    JobState.QUEUED: "cyan",
    JobState.RUNNING: "bold blue",
    JobState.PAUSED: "yellow",
    JobState.CANCELLED: "yellow",
    JobState.FAILED: "bold red",
    JobState.DONE: "green",
}


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """An empty table in the manner of `kubectl get`; the columns in `right` hold numbers."""
    right = set(right)
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        result.add_column(
            column.upper(),
            justify="right" if column in right else "left",
            no_wrap=column in right,
            overflow="fold",
        )
    return result


def facts_grid(facts: Iterable[tuple[str, RenderableType]]) -> Table:
    """Names and values in two columns."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(name, value)
    return grid


def plain(text: object) -> Text:
    """Text of other people: never read as markup."""
    return Text(str(text))


# --- jobs


def state_text(state: JobState) -> Text:
    """A job's state in its colour."""
    return Text(state.value, STATE_STYLE[state])


def _percent(job: Job) -> str:
    ended = job.succeeded + job.failed + job.skipped
    return f"{100 * ended // job.rows}%" if job.rows else "–"


def job_line(job: Job) -> RenderableType:
    """What was just queued, in one line."""
    rows = f"{count(job.rows)} row{'' if job.rows == 1 else 's'}"
    line = Text.assemble("job ", (job.id, "bold"), f": {rows}, ", state_text(job.state))
    line.no_wrap, line.overflow = True, "ignore"
    return line


def jobs_table(jobs: list[Job], now: float | None = None) -> RenderableType:
    """One line a job."""
    if not jobs:
        return Text("no jobs")
    now = time.time() if now is None else now
    numbers = ("done", "rows", "failed", "skipped", "shards", "stored", "rate")
    result = table("job", "name", "state", *numbers, "eta", "created", right=numbers)
    for job in jobs:
        result.add_row(
            plain(job.id),
            plain(job.name or "–"),
            state_text(job.state),
            _percent(job),
            count(job.rows),
            Text(count(job.failed), "bold red" if job.failed else ""),
            count(job.skipped),
            count(job.shards),
            size(job.bytes),
            per_second(job.rate) if not job.state.final else "–",
            duration(job.eta_s),
            age(job.created_at, now),
        )
    return result


def job_details(job: Job, now: float | None = None) -> RenderableType:
    """Everything about one job, with the rows that failed."""
    now = time.time() if now is None else now
    options = job.options.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    facts: list[tuple[str, RenderableType]] = [
        ("job", plain(job.id)),
        ("name", plain(job.name or "–")),
        ("state", state_text(job.state)),
    ]
    if job.reason:
        facts.append(("reason", plain(job.reason)))
    facts += [
        (
            "rows",
            f"{count(job.rows)} = {count(job.succeeded)} succeeded + {count(job.failed)} failed"
            f" + {count(job.skipped)} skipped{_unfinished(job)}",
        ),
        ("batches", _batches(job)),
        ("samples", f"{count(job.tokens)} tokens in {count(job.shards)} shards"),
        ("stored", f"{size(job.bytes)} of {size(job.raw_bytes)} raw ({ratio(job.bytes, job.raw_bytes)})"),
        ("rate", _rate(job)),
        ("created", age(job.created_at, now)),
        ("options", plain(", ".join(f"{k}={v}" for k, v in options.items()) or "defaults")),
        ("fingerprint", plain(job.fingerprint_id or "–")),
    ]
    if not job.failures:
        return facts_grid(facts)
    failures = table("row", "id", "what", "reason", right=("row",))
    for failure in job.failures:
        what = Text("skipped", "yellow") if failure.skipped else Text("failed", "bold red")
        failures.add_row(str(failure.row), plain(failure.id or "–"), what, plain(failure.reason))
    more = job.failed + job.skipped - len(job.failures)
    parts: list[RenderableType] = [facts_grid(facts), "", failures]
    if more > 0:
        parts.append(Text(f"and {count(more)} more", "dim"))
    return Group(*parts)


def _rate(job: Job) -> str:
    if not job.state.final:
        return f"{per_second(job.rate, 'samples')}, {duration(job.eta_s)} left"
    took = (job.finished_at or 0.0) - job.created_at
    return f"{per_second(job.succeeded / took, 'samples')} over {duration(took)}" if took > 0 else "–"


def _unfinished(job: Job) -> str:
    left = job.rows - job.succeeded - job.failed - job.skipped
    return f" + {count(left)} to do" if left > 0 else ""


def _batches(job: Job) -> str:
    depth = job.batches
    named = {
        "pending": depth.pending,
        "queued": depth.queued,
        "waiting for a retry": depth.waiting,
        "running": depth.running,
        "finished": depth.finished,
    }
    return ", ".join(f"{count(number)} {name}" for name, number in named.items() if number) or "none"


# --- shards


def shards_table(shards: list[ShardInfo], head: int, now: float | None = None) -> RenderableType:
    """One line a ledger entry, in the ledger's order."""
    if not shards:
        return Text("no shards" if not head else f"no shards after this one; the newest is {head}")
    now = time.time() if now is None else now
    numbers = ("seq", "samples", "tokens", "stored", "of raw")
    result = table("seq", "shard", *numbers[1:], "layers", "dtype", "sealed", right=numbers)
    for shard in shards:
        result.add_row(
            str(shard.seq),
            plain(shard.shard),
            count(shard.samples),
            count(shard.tokens),
            size(shard.bytes),
            ratio(shard.bytes, shard.raw_bytes),
            ",".join(map(str, shard.layers)),
            shard.dtype,
            age(shard.created_at, now) if shard.gone is None else "gone",
        )
    return result


def extract_summary(facts: dict[str, Any]) -> RenderableType:
    """What `extract` wrote."""
    layers = ",".join(map(str, facts["layers"]))
    return facts_grid(
        [
            ("shard", Text(facts["path"], "bold")),
            ("samples", f"{count(facts['samples'])}, {count(facts['tokens'])} tokens"),
            ("states", f"layers {layers} × {facts['hidden_size']} × {facts['dtype']}"),
            (
                "stored",
                f"{size(facts['bytes'])} of {size(facts['raw_bytes'])} raw "
                f"({ratio(facts['bytes'], facts['raw_bytes'])})",
            ),
            ("fingerprint", facts["fingerprint_id"]),
            ("look inside", plain(f"taphouse shards show {PurePath(facts['path'])}")),
        ]
    )


# --- doctor, dry run


def checks_table(checks: list[Check]) -> RenderableType:
    """One line a link, and what to do about the ones that fail."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    result.add_column("")
    for column in ("CHECK", "WHAT IT FOUND", "DO THIS"):
        result.add_column(column, overflow="fold")
    for check in checks:
        mark = Text("ok", "green") if check.ok else Text("FAIL", "bold red")
        advice = plain(check.advice) if check.advice and not check.ok else ""
        result.add_row(mark, plain(check.check), plain(check.detail), advice)
    return result


def dry_run(report: DatasetReport, options: JobOptions, batches: int) -> RenderableType:
    """What a dataset holds and what would be sent."""
    kinds = ", ".join(f"{count(number)} {kind}" for kind, number in report.kinds.items())
    set_ones = options.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    facts: list[tuple[str, RenderableType]] = [
        ("rows", count(report.rows) + (f" ({kinds})" if kinds else "")),
        ("bad lines", Text(count(report.bad), "bold red" if report.bad else "")),
        ("size", size(report.bytes)),
        ("batches", f"{count(batches)} of up to {options.batch_size} rows"),
        ("options", plain(", ".join(f"{k}={v}" for k, v in set_ones.items()) or "defaults")),
        ("sent", "nothing: this was a dry run"),
    ]
    if not report.problems:
        return facts_grid(facts)
    problems = table("line", "problem", right=("line",))
    for problem in report.problems:
        problems.add_row(str(problem.line), plain(problem.reason))
    return Group(facts_grid(facts), "", problems)
