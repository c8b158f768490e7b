"""The rules of a job's state, as a table: the first rule that holds gives the state.

A state is never stored. It follows from what the store holds of the job and from what runs now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from taphouse.wire import JobState

__all__ = ["ACTIONS", "RULES", "Facts", "may_cancel", "state_of"]


@dataclass(frozen=True)
class Facts:
    """What a job's state follows from. Counts are rows where they say so, batches otherwise."""

    spooled: bool
    cancelled: bool
    batches: int
    finished: int
    running: int
    succeeded_rows: int
    failed_rows: int
    fatal: bool

    @property
    def complete(self) -> bool:
        """Every batch has its outcome."""
        return self.spooled and self.finished >= self.batches


RULES: tuple[tuple[JobState, Callable[[Facts], bool]], ...] = (
    # complete first: cancelling a job that is complete changes nothing
    (JobState.FAILED, lambda f: f.complete and f.fatal),
    (JobState.FAILED, lambda f: f.complete and f.succeeded_rows == 0 and f.failed_rows > 0),
    (JobState.DONE, lambda f: f.complete),
    (JobState.CANCELLED, lambda f: f.cancelled),
    (JobState.SPOOLING, lambda f: not f.spooled),
    (JobState.RUNNING, lambda f: f.running > 0 or f.finished > 0),
    (JobState.QUEUED, lambda _: True),
)


ACTIONS: dict[JobState, tuple[str, ...]] = {
    JobState.SPOOLING: ("cancel",),
    JobState.QUEUED: ("cancel",),
    JobState.RUNNING: ("cancel",),
    JobState.CANCELLED: (),
    JobState.FAILED: (),
    JobState.DONE: (),
}
"""What changes a job in each state, by the name of its route: `POST /v1/jobs/{id}/<action>`."""


def state_of(facts: Facts) -> JobState:
    """The job's state."""
    return next(state for state, holds in RULES if holds(facts))


def may_cancel(state: JobState) -> bool:
    """Whether cancelling may be asked for: unless the job is complete; twice is once."""
    return "cancel" in ACTIONS[state] or state is JobState.CANCELLED
