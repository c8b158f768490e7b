"""Processes killed and frozen at random moments: briefly here, for minutes by `make soak`."""

from __future__ import annotations

from pathlib import Path

from tests.queue.soak import run


def test_nothing_is_lost_or_doubled_whatever_dies_when(tmp_path: Path) -> None:
    said = run(tmp_path, seed=20261130, seconds=8.0)
    assert "none lost or doubled" in said
    assert "killed" in said
