"""Released slices kept for reuse: their pages are there already, and fresh pages are most of a write's cost.

They lie in `spare/` of a start's directory, each named `<bytes>-<random>`; the file `limit` beside them says
how many bytes may lie there. Without it nothing is kept. They give way to whoever reserves room.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from pathlib import Path

_NAME = re.compile(r"(\d+)-[0-9a-f]{16}")
_MOST = 256
"""More files than this are not kept: taking one lists them all."""

_LEAST_BYTES = 1 << 16
"""Smaller slices (those that hold an error, for one) are not worth a rename."""


class Spares:
    """The spare files of one start. Any process of ours may put, take and drop at any time."""

    def __init__(self, start_dir: Path) -> None:
        self.directory = start_dir / "spare"

    def allow(self, limit_bytes: int) -> None:
        """Keep up to `limit_bytes` bytes from now on."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        temporary = self.directory / f".limit.{secrets.token_hex(4)}"
        temporary.write_text(str(limit_bytes))
        temporary.replace(self.directory / "limit")

    def put(self, path: Path) -> bool:
        """Keep the file at `path`, which nobody writes to any more; False if it has to be removed instead."""
        try:
            limit = int((self.directory / "limit").read_text())
            size = path.lstat().st_size
            held = self._held()
            if size < _LEAST_BYTES or len(held) >= _MOST or sum(held.values()) + size > limit:
                return False
            path.rename(self.directory / f"{size}-{secrets.token_hex(8)}")
        except (OSError, ValueError):
            return False
        return True

    def take(self, part: Path, nbytes: int) -> int | None:
        """Make a spare file the new `part`, cut to at most `nbytes`; return it open, or None.

        Its content is old: whoever takes it writes every byte that is read later.
        """
        held = self._held()
        larger = sorted((size, name) for name, size in held.items() if size >= nbytes)
        smaller = sorted(((size, name) for name, size in held.items() if size < nbytes), reverse=True)
        for size, name in larger + smaller:
            try:
                (self.directory / name).rename(part)
            except FileNotFoundError:
                continue  # somebody else was quicker
            fd = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            if size > nbytes:
                os.ftruncate(fd, nbytes)
            return fd
        return None

    def total(self) -> int:
        """Bytes of all spare files."""
        return sum(self._held().values())

    def drop(self, nbytes: int) -> None:
        """Remove spare files until at least `nbytes` bytes of them are gone, or all."""
        for name, size in self._held().items():
            if nbytes <= 0:
                return
            (self.directory / name).unlink(missing_ok=True)
            nbytes -= size

    def expire(self, age_s: float) -> None:
        """Remove those that nobody took for `age_s` seconds."""
        for name in self._held():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - (self.directory / name).stat().st_ctime > age_s:
                    (self.directory / name).unlink(missing_ok=True)

    def _held(self) -> dict[str, int]:
        """The bytes of each spare file by name."""
        try:
            names = [path.name for path in self.directory.iterdir()]
        except FileNotFoundError:
            return {}
        return {name: int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
