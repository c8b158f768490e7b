"""Every state of a job can be shown."""

from __future__ import annotations

import pytest

from taphouse.cli.render_jobs import STATE_STYLE, state_text
from taphouse.wire import JobState


@pytest.mark.parametrize("state", JobState)
def test_a_state_has_a_style(state: JobState) -> None:
    text = state_text(state)
    assert text.plain == state.value and text.style == STATE_STYLE[state]
