"""The directory of one engine start: its lock, secret, claims, rank records, and the slices in it.

Every process of an engine (API servers, worker ranks) opens the same start, in any order, and holds a shared
lock on it. A start whose lock nobody holds is dead, and whoever comes next sweeps it away.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DirectoryFull, TooManyInFlight, UnsafeDirectory
from .files import space_error
from .opt_in import is_tag
from .private import check_private, locked, make_private, read_text, write_atomically
from .spares import Spares

_START_PREFIX = "start-"
_NEWBORN_S = 60.0
"""A start directory younger than this and without a lock file is being made, not dead."""

_SPARE_S = 60.0
"""Spare files that nobody took for so long are removed: the memory is the machine's again."""

_RECORD = re.compile(r"d(\d+)-t(\d+)\.json")


def start_id_of(instance_id: str) -> str:
    """Return the start's id for vLLM's `instance_id`: without its `_dp<N>` suffix, safe as a file name."""
    start_id = re.sub(r"_dp\d+$", "", instance_id)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", start_id):
        raise ValueError(
            f"instance id {instance_id!r} can't name a directory (letters, digits, '.', '_', '-')"
        )
    return start_id


@dataclass(frozen=True)
class Claim:
    """Space reserved for one capture at admission; `nbytes` is over all ranks, `created_at` Unix seconds."""

    tag: str
    nbytes: int
    created_at: float
    prompt_len: int
    max_rows: int


class Start:
    """One engine start's open directory; made by `open_start`, closed by `close`."""

    def __init__(self, directory: Path, secret: bytes, lock_fd: int) -> None:
        self.directory = directory
        self.start_id = directory.name[len(_START_PREFIX) :]
        self.secret = secret
        self.spares = Spares(directory)
        self._lock_fd = lock_fd

    def reserve(self, claim: Claim, limit_bytes: int) -> None:
        """Claim room for one capture before it runs; raises as `reserve_all`."""
        self.reserve_all([claim], limit_bytes)

    def reserve_all(
        self, claims: Sequence[Claim], limit_bytes: int, max_in_flight: int | None = None
    ) -> None:
        """Claim room for all of `claims` or for none, before they run, against all other processes.

        Raises `DirectoryFull` past `limit_bytes` over all claims or when the file system could not hold every
        claim in full, and `TooManyInFlight` past `max_in_flight` captures that rank 0 has not sealed yet.
        """
        needed = sum(c.nbytes for c in claims)
        with locked(self.directory / "admission.lock"):
            held = self.claims()
            used = sum(c.nbytes for c in held)
            self.spares.drop(used + needed + self.spares.total() - limit_bytes)
            if used + needed > limit_bytes:
                raise DirectoryFull(
                    f"{used} of {limit_bytes} bytes of slices are reserved, {needed} more don't fit"
                )
            unsealed = sum(not (self.directory / f"{c.tag}.t0.slice").exists() for c in held)
            if max_in_flight is not None and unsealed + len(claims) > max_in_flight:
                raise TooManyInFlight(
                    f"{unsealed} captures are in flight, {len(claims)} more pass the limit {max_in_flight}"
                )
            free = self._free(used)
            if needed > free:
                self.spares.drop(needed - free)
                free = self._free(used)
            if needed > free:
                raise DirectoryFull(
                    f"the slice file system has {max(0, free)} unreserved bytes left, {needed} are needed"
                )
            try:
                for claim in claims:
                    self._write_claim(claim)
            except OSError as error:
                for claim in claims:
                    self.release(claim.tag)
                raise space_error(error, self.directory) from error

    def _write_claim(self, claim: Claim) -> None:
        body = {
            "bytes": claim.nbytes,
            "created_at": claim.created_at,
            "prompt_len": claim.prompt_len,
            "max_rows": claim.max_rows,
        }
        write_atomically(self.directory / f"{claim.tag}.claim", json.dumps(body))

    def _free(self, claimed: int) -> int:
        """Bytes of the file system that no claim (`claimed` bytes in all) will need."""
        space = os.statvfs(self.directory)
        return space.f_bavail * space.f_frsize - max(0, claimed - self._written())

    def _written(self) -> int:
        """Bytes that slices and parts take on the file system now."""
        total = 0
        for entry in os.scandir(self.directory):
            if entry.name.endswith((".part", ".slice")):
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
        return total

    def claims(self) -> list[Claim]:
        """Return every claim in force."""
        found = []
        for path in self.directory.glob("*.claim"):
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                body = json.loads(read_text(path))
                found.append(
                    Claim(
                        path.name.removesuffix(".claim"),
                        int(body["bytes"]),
                        float(body["created_at"]),
                        int(body["prompt_len"]),
                        int(body["max_rows"]),
                    )
                )
        return found

    def touch(self, tag: str) -> None:
        """Renew a claim's age, for a request that still waits its turn."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.directory / f"{tag}.claim")

    def release(self, tag: str, *, keep: bool = True) -> None:
        """Remove a capture: its slices, parts and claim. Idempotent. See `release`."""
        release(self.directory, tag, keep=keep)

    def expire(self, ttl_s: float) -> list[str]:
        """Remove captures none of whose files changed for `ttl_s` seconds; return their tags.

        Spare files that nobody took for a minute go too.
        """
        self.spares.expire(_SPARE_S)
        newest: dict[str, float] = {}
        for entry in os.scandir(self.directory):
            tag = entry.name.split(".", 1)[0]
            if is_tag(tag):
                with contextlib.suppress(FileNotFoundError):
                    newest[tag] = max(newest.get(tag, 0.0), entry.stat(follow_symlinks=False).st_mtime)
        old = [tag for tag, mtime in newest.items() if time.time() - mtime > ttl_s]
        for tag in old:
            self.release(tag, keep=False)  # somebody may still read what nobody took away
        return old

    def slice_paths(self, tag: str) -> list[Path]:
        """Return the sealed slices of `tag`, by rank."""
        return sorted(
            self.directory.glob(f"{tag}.t*.slice"), key=lambda p: int(p.name.split(".")[1].removeprefix("t"))
        )

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Publish a rank's record, atomically, under its `dp_rank` and `tp_rank`."""
        name = f"d{int(record['dp_rank'])}-t{int(record['tp_rank'])}.json"
        write_atomically(self.directory / name, json.dumps(dict(record)))

    def records(self) -> list[dict[str, Any]]:
        """Return the ranks' records, ordered by DP and TP rank."""
        return read_records(self.directory)

    def close(self) -> None:
        """Let go of the start's lock; the directory is removed if no other process holds it."""
        if self._lock_fd < 0:
            return
        os.close(self._lock_fd)
        self._lock_fd = -1
        _remove_if_dead(self.directory)


def open_start(slice_dir: str | os.PathLike[str], instance_id: str) -> Start:
    """Open (or make) the directory of an engine start, sweeping dead ones first.

    Idempotent: any number of processes, in any order, get the same directory and secret.
    Raises `UnsafeDirectory` if the slice directory or the start's is a symbolic link, owned by someone else,
    or open to others, and `ValueError` for an instance id that can't name a directory.
    """
    root = Path(slice_dir)
    make_private(root)
    sweep_dead_starts(root)
    directory = root / f"{_START_PREFIX}{start_id_of(instance_id)}"
    for _ in range(100):
        make_private(directory)
        try:
            lock_fd = _hold(directory / "lock")
        except FileNotFoundError:
            continue
        if lock_fd is not None:
            return Start(directory, _shared_secret(directory), lock_fd)
    raise UnsafeDirectory(f"{directory} keeps disappearing while it is opened")


def sweep_dead_starts(slice_dir: str | os.PathLike[str]) -> list[str]:
    """Remove the directories of starts that no process holds; return their ids."""
    gone = []
    for directory in Path(slice_dir).glob(f"{_START_PREFIX}*"):
        if _remove_if_dead(directory):
            gone.append(directory.name[len(_START_PREFIX) :])
    return gone


def release(start_dir: str | os.PathLike[str], tag: str, *, keep: bool = True) -> None:
    """Remove everything of one capture from a start's directory. Idempotent; the claim goes first.

    Sealed slices become spare files of the next captures, so nobody may read them any more; `keep` False
    leaves what somebody may still read as it is.
    """
    if not is_tag(tag):
        raise ValueError(f"{tag!r} is not a tag")
    directory = Path(start_dir)
    (directory / f"{tag}.claim").unlink(missing_ok=True)
    spares = Spares(directory)
    for path in directory.glob(f"{tag}.*"):
        # A part may still be written to: only what is sealed is nobody's.
        if not (keep and path.suffix == ".slice" and spares.put(path)):
            path.unlink(missing_ok=True)


def read_records(start_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rank records in a start's directory, ordered by DP and TP rank."""
    found = []
    for path in Path(start_dir).glob("d*-t*.json"):
        match = _RECORD.fullmatch(path.name)
        if match:
            with contextlib.suppress(FileNotFoundError, ValueError):
                found.append(((int(match[1]), int(match[2])), json.loads(read_text(path))))
    return [record for _, record in sorted(found, key=lambda pair: pair[0])]


def _hold(lock: Path) -> int | None:
    """Take the shared lock; None if a sweeper removed the file in between."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), lock.lstat()):
            return fd
    os.close(fd)
    return None


def _shared_secret(directory: Path) -> bytes:
    """Return the start's secret; the first process to link its own makes it everybody's."""
    path = directory / "secret"
    if not path.exists():
        mine = directory / f".secret.{os.getpid()}.{secrets.token_hex(4)}"
        fd = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
        mine.unlink()
    return bytes.fromhex(read_text(path))


def _remove_if_dead(directory: Path) -> bool:
    try:
        check_private(directory)
        fd = os.open(directory / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - directory.lstat().st_mtime > _NEWBORN_S:
                shutil.rmtree(directory, ignore_errors=True)
                return True
        return False
    except (UnsafeDirectory, OSError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        shutil.rmtree(directory, ignore_errors=True)
        return True
    finally:
        os.close(fd)
