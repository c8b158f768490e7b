"""`taphouse jobs`: list them, look at one, pause, resume, cancel, retry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from taphouse.cli.boundary import DefaultCommand
from taphouse.cli.exits import UsageProblem
from taphouse.cli.session import Session, with_session

if TYPE_CHECKING:
    from collections.abc import Callable

    from taphouse.client import Taphouse
    from taphouse.wire import Job, JobState

__all__ = ["app"]

STATES = ("spooling", "queued", "running", "paused", "cancelled", "failed", "done")
JobIds = Annotated[list[str], typer.Argument(metavar="JOB_ID...", help="Jobs to act on.", show_default=False)]

app = typer.Typer(
    cls=DefaultCommand,
    help="List jobs (`jobs`), look at one (`jobs JOB_ID`), or do something to some (`jobs pause JOB_ID`).",
)


@app.command("list")
@with_session()
def list_jobs(
    session: Session,
    job_id: Annotated[
        str | None, typer.Argument(help="Show this job with its failed rows.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many, newest first.")] = 20,
    state: Annotated[
        str | None,
        typer.Option(
            metavar="STATE", help=f"Only jobs in this state: {', '.join(STATES)}.", show_default=False
        ),
    ] = None,
) -> None:
    """List jobs, newest first; or show one. Runs when `jobs` is given no command."""
    from taphouse.cli import render_jobs
    from taphouse.wire import JobList

    wanted = _state(state)
    with session.client() as client:
        if job_id is not None:
            job = client.job(job_id)
            session.show(job, lambda: render_jobs.job_details(job))
            return
        jobs = [job for job in client.jobs(limit=limit) if wanted in (None, job.state)]
    session.show(JobList(jobs=jobs), lambda: render_jobs.jobs_table(jobs))


def _state(text: str | None) -> JobState | None:
    from taphouse.wire import JobState

    try:
        return JobState(text) if text is not None else None
    except ValueError:
        raise UsageProblem(
            f"--state: there is no state {text!r}", f"give one of {', '.join(STATES)}"
        ) from None


@app.command("pause")
@with_session()
def pause(session: Session, job_ids: JobIds) -> None:
    """Pause jobs. Batches that run end, no other begins."""
    _each(session, job_ids, lambda client, job_id: client.pause(job_id))


@app.command("resume")
@with_session()
def resume(session: Session, job_ids: JobIds) -> None:
    """Let paused jobs go on."""
    _each(session, job_ids, lambda client, job_id: client.resume(job_id))


@app.command("cancel")
@with_session()
def cancel(session: Session, job_ids: JobIds) -> None:
    """Cancel jobs. Batches that run end; sealed shards stay."""
    _each(session, job_ids, lambda client, job_id: client.cancel(job_id))


@app.command("retry")
@with_session()
def retry(session: Session, job_ids: JobIds) -> None:
    """Try the failed rows of jobs again; a cancelled job's are enqueued anew instead."""
    _each(session, job_ids, _retried)


@app.command("failures")
@with_session()
def failures(
    session: Session, job_id: Annotated[str, typer.Argument(metavar="JOB_ID", show_default=False)]
) -> None:
    """Print every row that made no sample, as JSON, one a line."""
    with session.client() as client:
        for failure in client.failures(job_id):
            typer.echo(failure.model_dump_json())


def _retried(client: Taphouse, job_id: str) -> Job:
    from taphouse.errors import Conflict, TaphouseError
    from taphouse.wire import JobState

    try:
        return client.retry(job_id)
    except Conflict as error:
        try:
            cancelled = client.job(job_id).state is JobState.CANCELLED
        except TaphouseError:
            raise error from None
        if cancelled:
            error.advice = "make another job of its rows: `taphouse enqueue DATASET --again`"
        raise


def _each(session: Session, job_ids: list[str], act: Callable[[Taphouse, str], Job]) -> None:
    """Do it to each job; those it was done to are shown, and every error is told."""
    from taphouse.cli import render_jobs
    from taphouse.cli.several import Tried
    from taphouse.client.bodies import segment
    from taphouse.wire import JobList

    if not all(job_id.strip() for job_id in job_ids):
        raise UsageProblem("a job id is empty", "see ids with `taphouse jobs`")
    for job_id in job_ids:  # what can't be sent is refused before anything is
        segment(job_id)
    tried = Tried()
    with session.client() as client:
        jobs = tried.each(job_ids, lambda job_id: act(client, job_id))
    if jobs:
        session.show(
            jobs[0] if len(job_ids) == 1 else JobList(jobs=jobs), lambda: render_jobs.jobs_table(jobs)
        )
    tried.end()
