"""Waiting for a job, and what its end means for the exit code."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from taphouse.cli.exits import JobStopped, PartialFailure
from taphouse.cli.session import Session
from taphouse.wire import Job, JobState

if TYPE_CHECKING:
    from taphouse.client import Taphouse

__all__ = ["raise_for_outcome", "wait_for"]

INTERVAL_S = 1.0
GIVE_UP_AFTER_S = 300.0
"""How long an unreachable service is asked again before waiting ends in an error."""


def wait_for(session: Session, client: Taphouse, job: Job) -> Job:
    """Ask until the job is final, through restarts of the service; a progress bar on a terminal's stderr.

    What it waits for (an engine that is away, a full disk) is said once, when it changes.

    Raises:
        Unreachable, Unavailable: the service was away for five minutes.
    """
    from taphouse.cli.terminal import items_bar
    from taphouse.errors import TooBusy, Unavailable, Unreachable

    away, said = 0.0, job.reason
    with items_bar(session.err, f"job {job.id}", job.rows) as step:
        while not job.state.final:
            time.sleep(INTERVAL_S)
            try:
                job = client.job(job.id)
                away = 0.0
            except (Unreachable, Unavailable, TooBusy):
                away += INTERVAL_S
                if away >= GIVE_UP_AFTER_S:
                    raise
            if job.reason and job.reason != said and not job.state.final:
                session.note(job.reason)
                said = job.reason
            step(job.succeeded + job.failed + job.skipped)
    return job


def raise_for_outcome(job: Job, fail_on_error: bool) -> None:
    """Nothing for a job that went well.

    Raises:
        JobStopped: it failed or was cancelled.
        PartialFailure: rows failed, and `fail_on_error` is set.
    """
    if job.state in (JobState.FAILED, JobState.CANCELLED):
        reason = f": {job.reason}" if job.reason else ""
        raise JobStopped(f"job {job.id} {_ended(job.state)}{reason}", f"see `taphouse jobs {job.id}`")
    if fail_on_error and job.failed:
        raise PartialFailure(
            f"{job.failed} of {job.rows} rows failed ({job.succeeded} succeeded, {job.skipped} skipped)",
            f"see their reasons with `taphouse jobs {job.id}`",
        )


def _ended(state: JobState) -> str:
    return "was cancelled" if state is JobState.CANCELLED else "failed"
