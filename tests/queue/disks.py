"""Small disks of real memory, in a mount namespace of their own: they run full and turn read-only for real.

A process holds the namespace; everybody reaches its disks through /proc/<pid>/root, with no right but that of
being the same user. They are gone when it is, however the test ends.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

HOLD = """
for at in "$@"; do
    mkdir -p "$at" && mount -t tmpfs -o size="$SIZE",mode=0700 tmpfs "$at" || exit 1
done
echo up
exec cat
"""
NEEDS = "small disks need unshare(1), and a machine that lets this user make mount namespaces"


@dataclass
class Disks:
    """Disks by name. `close` takes them away."""

    holder: subprocess.Popen[bytes]
    base: Path

    @classmethod
    def make(cls, base: Path, *names: str, size: str = "3m") -> Disks:
        """Mount a disk of `size` at `base`/<name> for each name."""
        user = [] if os.geteuid() == 0 else ["--map-root-user"]
        command = [
            "unshare",
            *user,
            "--mount",
            "sh",
            "-c",
            HOLD,
            "hold",
            *(str(base / name) for name in names),
        ]
        holder = subprocess.Popen(
            command, env={**os.environ, "SIZE": size}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        if holder.stdout.readline() != b"up\n":
            pytest.fail(NEEDS)
        return cls(holder, base)

    def path(self, name: str) -> Path:
        """Where a disk is, for every process of this user."""
        return Path(f"/proc/{self.holder.pid}/root{self.base / name}")

    def fill(self, name: str) -> Path:
        """Write a file until the disk is full, and return it."""
        ballast = self.path(name) / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        return ballast

    def remount(self, name: str, how: str, within_s: float = 10.0) -> None:
        """Make a disk `ro` or `rw`; it is busy for as long as a file on it is open for writing."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        enter = ["nsenter", "--target", str(self.holder.pid), "--mount", *user]
        command = [*enter, "mount", "-o", f"remount,{how}", str(self.base / name)]
        deadline = time.monotonic() + within_s
        while (done := subprocess.run(command, capture_output=True, check=False)).returncode:
            assert time.monotonic() < deadline, done.stderr
            time.sleep(0.02)

    def close(self) -> None:
        assert self.holder.stdin is not None
        self.holder.stdin.close()
        self.holder.wait(timeout=10)
