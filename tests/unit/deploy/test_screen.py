"""What the demo's screen says where there is no terminal."""

from __future__ import annotations

import io

import pytest
import screen
from rich.console import Console


@pytest.mark.parametrize(
    ("done", "total", "note", "line"),
    [
        (3, 8, "", "held-out prompts: 3 of 8"),
        (3, None, "", "held-out prompts: 3"),
        (3, 8, "three of them", "held-out prompts: three of them"),
    ],
)
def test_a_line_in_a_pipe_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, done: int, total: int | None, note: str, line: str
) -> None:
    monkeypatch.setattr(screen, "_PLAIN_EVERY_S", -1.0)
    written = io.StringIO()
    screen.Screen(Console(file=written, width=200)).bar("held-out prompts", done, total, note)
    assert written.getvalue().endswith(f"  {line}\n")
