"""Jobs as rich renderables, and what a dry run says of one that isn't there yet. Pure functions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from taphouse.cli.render import facts_grid, plain, table
from taphouse.cli.units import age, count, duration, per_second, ratio, size
from taphouse.wire import Job, JobOptions, JobState

if TYPE_CHECKING:
    from taphouse.cli.dataset import DatasetReport

__all__ = [
    "STATE_STYLE",
    "cut_short",
    "dry_run",
    "eta_text",
    "job_details",
    "job_line",
    "jobs_table",
    "rows_done",
    "state_text",
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


def state_text(state: JobState) -> Text:
    """A job's state in its colour."""
    return Text(state.value, STATE_STYLE[state])


def cut_short(job: Job) -> bool:
    """Whether it ended before its rows did: the rows that it didn't come to count as skipped."""
    return job.state is JobState.CANCELLED or (
        job.state is JobState.FAILED and job.options.on_error == "fail"
    )


def rows_done(job: Job) -> int:
    """Rows with an outcome of their own; of a job that was cut short, those that were tried."""
    return job.succeeded + job.failed + (0 if cut_short(job) else job.skipped)


def eta_text(job: Job) -> str:
    """When it will be done, where it runs."""
    return "–" if job.state is JobState.PAUSED else duration(job.eta_s)


def options_text(options: JobOptions) -> str:
    """Options that are not the defaults, by the names that the command gives them."""
    set_ones = options.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    named = [
        "stop-on-error" if k == "on_error" else f"{k.replace('_', '-')}={v}" for k, v in set_ones.items()
    ]
    return ", ".join(named) or "defaults"


def _percent(job: Job) -> str:
    return f"{100 * rows_done(job) // job.rows}%" if job.rows else "–"


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
            per_second(job.rate) if not job.state.final and job.state is not JobState.PAUSED else "–",
            eta_text(job),
            age(job.created_at, now),
        )
    return result


def job_details(job: Job, now: float | None = None) -> RenderableType:
    """Everything about one job, with the rows that failed."""
    now = time.time() if now is None else now
    facts: list[tuple[str, RenderableType]] = [
        ("job", plain(job.id)),
        ("name", plain(job.name or "–")),
        ("state", state_text(job.state)),
    ]
    if job.reason:
        facts.append(("reason", plain(job.reason)))
    if cut_short(job):
        facts.append(
            ("reached", f"{count(rows_done(job))} of {count(job.rows)} rows; the others count as skipped")
        )
    facts += [
        (
            "rows",
            f"{count(job.rows)} = {count(job.succeeded)} succeeded + {count(job.failed)} failed"
            f" + {count(job.skipped)} skipped{_unfinished(job)}",
        ),
        ("batches", _batches(job)),
        (
            "extracted",
            f"{count(job.succeeded)} sample{'' if job.succeeded == 1 else 's'} of {count(job.tokens)} tokens "
            f"in {count(job.shards)} shard{'' if job.shards == 1 else 's'}",
        ),
        ("stored", f"{size(job.bytes)} of {size(job.raw_bytes)} raw ({ratio(job.bytes, job.raw_bytes)})"),
        ("rate", _rate(job)),
        ("created", age(job.created_at, now)),
        ("options", plain(options_text(job.options))),
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
    if job.state is JobState.PAUSED:
        return "– while it is paused"
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


TOO_LONG = "over 4 MiB, which a service refuses unless its TAPHOUSE_EXTRACTOR_MAX_ROW_BYTES allows more"


def dry_run(report: DatasetReport, options: JobOptions, batches: int) -> RenderableType:
    """What a dataset holds and what would be sent."""
    kinds = ", ".join(f"{count(number)} {kind}" for kind, number in report.kinds.items())
    facts: list[tuple[str, RenderableType]] = [
        ("rows", count(report.rows) + (f" ({kinds})" if kinds else "")),
        ("bad lines", Text(count(report.bad), "bold red" if report.bad else "")),
        ("size", size(report.bytes)),
        ("batches", f"{count(batches)} of up to {options.batch_size} rows"),
        ("options", plain(options_text(options))),
        ("not checked", "what service and engine refuse: their limits, layers, max tokens, long prompts"),
        ("sent", "nothing: this was a dry run"),
    ]
    if report.long:
        lines = f"{count(report.long)}, first line {report.first_long}"
        facts.insert(2, ("too long", Text(f"{lines}: {TOO_LONG}", "bold yellow")))
    if not report.problems:
        return facts_grid(facts)
    problems = table("line", "problem", right=("line",))
    for problem in report.problems:
        problems.add_row(str(problem.line), plain(problem.reason))
    return Group(facts_grid(facts), "", problems)
