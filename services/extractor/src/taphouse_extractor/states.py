"""The rules of a job's state, as tables: the first rule that holds gives the state.

A state is never stored. It follows from what the store holds of the job and from what runs now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from taphouse.wire import JobState

__all__ = ["ACTIONS", "RULES", "Action", "Facts", "Standing", "refusal", "state_of"]


@dataclass(frozen=True)
class Facts:
    """What a job's state follows from. Counts are rows where they say so, batches otherwise.

    `stops`: the job ends with its first failed row.
    """

    spooled: bool
    cancelled: bool
    batches: int
    finished: int
    running: int
    succeeded_rows: int
    failed_rows: int
    paused: bool = False
    stops: bool = False

    @property
    def complete(self) -> bool:
        """Every batch has its outcome."""
        return self.spooled and self.finished >= self.batches


RULES: tuple[tuple[JobState, Callable[[Facts], bool]], ...] = (
    # complete first: cancelling a job that is complete changes nothing
    (JobState.FAILED, lambda f: f.complete and f.succeeded_rows == 0 and f.failed_rows > 0),
    (JobState.FAILED, lambda f: f.stops and f.failed_rows > 0),
    (JobState.DONE, lambda f: f.complete),
    (JobState.CANCELLED, lambda f: f.cancelled),
    (JobState.SPOOLING, lambda f: not f.spooled),
    (JobState.PAUSED, lambda f: f.paused),
    (JobState.RUNNING, lambda f: f.running > 0 or f.finished > 0),
    (JobState.QUEUED, lambda _: True),
)


def state_of(facts: Facts) -> JobState:
    """The job's state."""
    return next(state for state, holds in RULES if holds(facts))


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a job is: its state, its batches as `Batches` counts them, and rows that were left out."""

    state: JobState
    batches: dict[str, int]
    skipped: int


class Action(str, Enum):
    """What an operator may do to a job, by the name of its route: `POST /v1/jobs/{id}/<action>`."""

    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"
    RETRY = "retry"


ACTIONS: dict[JobState, tuple[Action, ...]] = {
    JobState.SPOOLING: (Action.CANCEL,),
    JobState.QUEUED: (Action.PAUSE, Action.CANCEL, Action.RETRY),
    JobState.RUNNING: (Action.PAUSE, Action.CANCEL, Action.RETRY),
    JobState.PAUSED: (Action.RESUME, Action.CANCEL, Action.RETRY),
    JobState.CANCELLED: (),
    JobState.FAILED: (Action.RETRY,),
    JobState.DONE: (Action.RETRY,),
}
"""What changes a job in each state; a retry needs failed rows."""

ONCE = frozenset(
    {
        (Action.PAUSE, JobState.PAUSED),
        (Action.RESUME, JobState.QUEUED),
        (Action.RESUME, JobState.RUNNING),
        (Action.CANCEL, JobState.CANCELLED),
    }
)
"""What changes nothing, and may be asked for all the same: twice is once."""


def refusal(action: Action, state: JobState, failed_rows: int) -> str | None:
    """Why an action is not allowed now; None when it is."""
    if action not in ACTIONS[state] and (action, state) not in ONCE:
        return f"it is {state.value}: {action.value} does nothing for it"
    if action is Action.RETRY and failed_rows == 0:
        return "none of its rows has failed: there is nothing to retry"
    return None
