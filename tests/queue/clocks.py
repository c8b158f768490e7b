"""The wall clock of real processes, set forward and back while they run."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """Processes that are started with `settings` go by it."""

    def __init__(self, directory: Path) -> None:
        library, self._file = directory / "clock.so", directory / "clock"
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)]
        if subprocess.run(command, check=False).returncode:
            pytest.fail("a clock that can be set needs a C compiler (cc)")
        self.set(0)
        self.settings = {"LD_PRELOAD": str(library), "TAPHOUSE_TEST_CLOCK": str(self._file)}

    def set(self, seconds: int) -> None:
        """So many seconds ahead of the machine's clock from now on; negative: behind."""
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("=q", seconds))
