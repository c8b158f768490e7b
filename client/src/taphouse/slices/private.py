"""Files and directories that are ours alone: read without following links, replaced whole, locked."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from .errors import UnsafeDirectory


def read_text(path: Path) -> str:
    """Return the text of one of a start's files; a symbolic link in its place raises `OSError`."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), encoding="utf-8") as file:
        return file.read()


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` with `text`: readers see the old file or the new one, never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def check_private(path: Path) -> None:
    """Raise `UnsafeDirectory` unless `path` is a real directory of ours that nobody else can enter."""
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(info.st_mode) else "not a directory"
        raise UnsafeDirectory(f"{path} is {kind}; remove it or set another slice directory")
    if info.st_uid != os.geteuid():
        raise UnsafeDirectory(f"{path} belongs to user {info.st_uid}, not to us ({os.geteuid()})")
    if info.st_mode & 0o077:
        raise UnsafeDirectory(f"{path} is open to others (mode {stat.S_IMODE(info.st_mode):o}); chmod 700 it")


def make_private(path: Path) -> None:
    """Make `path` if need be; raise as `check_private` does."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    check_private(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock of a file, against all processes."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
