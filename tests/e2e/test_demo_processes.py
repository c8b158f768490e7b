"""What one `make demo KEEP=1` left running, another process ends as gently as itself would."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "deploy" / "local"))

import processes
import profiles

SLOW = """#!{python}
import pathlib, signal, sys, time
def end(*_):
    time.sleep(0.5)
    pathlib.Path({said!r}).write_text("cleaned up")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
pathlib.Path({said!r}).write_text("running")
signal.pause()
"""


@pytest.fixture
def run() -> Iterator[Path]:
    """A directory of a name that is short enough for a socket in it."""
    with tempfile.TemporaryDirectory(prefix="demo") as directory:
        (Path(directory) / "logs").mkdir()
        yield Path(directory)


def test_what_takes_its_time_to_end_is_given_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_LEFT_BEHIND_S", 0.1)
    said, program = run / "said", run / "taphouse-extractor"
    program.write_text(SLOW.format(python=sys.executable, said=str(said)))
    program.chmod(0o700)
    values = {"TAPHOUSE_DEMO_RUN": str(run), "TAPHOUSE_DEMO_BIN": str(run)}
    environment = profiles.load("smoke", values, {}, move_ports=False).environment(os.environ)
    first, second = (processes.Processes(run, environment) for _ in range(2))
    first.start()
    try:
        first.up("api")
        while not said.exists():
            first.check()
            time.sleep(0.05)
        assert second.stop() == []
        assert said.read_text() == "cleaned up" and not second.answers()
    finally:
        first.stop()
