from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taphouse.wire import JobState
from taphouse_extractor.states import ACTIONS, RULES, Action, Facts, refusal, state_of

SPOOLED = Facts(
    spooled=True,
    cancelled=False,
    batches=4,
    finished=0,
    running=0,
    succeeded_rows=0,
    failed_rows=0,
)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"spooled": False, "batches": 0}, "spooling"),
        ({}, "queued"),
        ({"running": 1}, "running"),
        ({"finished": 1, "succeeded_rows": 2}, "running"),
        ({"finished": 4, "succeeded_rows": 8}, "done"),
        ({"finished": 4, "succeeded_rows": 7, "failed_rows": 1}, "done"),
        ({"finished": 4, "failed_rows": 8}, "failed"),
        ({"finished": 4}, "done"),
        ({"cancelled": True}, "cancelled"),
        ({"cancelled": True, "running": 1, "finished": 1}, "cancelled"),
        ({"cancelled": True, "finished": 4, "succeeded_rows": 8}, "done"),
        ({"cancelled": True, "spooled": False}, "cancelled"),
        ({"paused": True}, "paused"),
        ({"paused": True, "running": 1, "finished": 1}, "paused"),
        ({"paused": True, "cancelled": True}, "cancelled"),
        ({"paused": True, "finished": 4, "succeeded_rows": 8}, "done"),
        ({"stops": True, "finished": 1, "succeeded_rows": 1, "failed_rows": 1}, "failed"),
        ({"stops": True, "finished": 1, "succeeded_rows": 2}, "running"),
    ],
)
def test_states(changes: dict[str, int], state: str) -> None:
    assert state_of(replace(SPOOLED, **changes)).value == state


facts = st.builds(
    Facts,
    spooled=st.booleans(),
    cancelled=st.booleans(),
    batches=st.integers(0, 5),
    finished=st.integers(0, 5),
    running=st.integers(0, 3),
    succeeded_rows=st.integers(0, 9),
    failed_rows=st.integers(0, 9),
    paused=st.booleans(),
    stops=st.booleans(),
)


@settings(deadline=None)
@given(facts)
def test_every_job_has_a_state_and_final_ones_stay(at: Facts) -> None:
    state = state_of(at)
    assert any(rule is state for rule, _ in RULES)
    if state in (JobState.DONE, JobState.FAILED):
        assert refusal(Action.CANCEL, state, 0)
        assert state_of(replace(at, cancelled=True, paused=True, running=0)) is state
    if state is JobState.CANCELLED:
        assert state_of(replace(at, running=at.running + 1)) is state


def test_the_table_of_actions_knows_every_state() -> None:
    assert set(ACTIONS) == set(JobState)
    assert all(Action.CANCEL in allowed for state, allowed in ACTIONS.items() if not state.final)
    assert refusal(Action.RETRY, JobState.DONE, 0) and refusal(Action.RETRY, JobState.DONE, 1) is None
    assert refusal(Action.PAUSE, JobState.DONE, 3) and refusal(Action.RESUME, JobState.CANCELLED, 3)
