"""A dataset → a file of its rows and an index of its batches, as it streams in; little is held in memory.

Both are flushed to disk once, at the end, whatever the number of batches; the job exists after that.

Lines that aren't JSON objects, or are over a limit, refuse the whole dataset, and the message names the line.
A row that is an object but no usable prompt is taken: it becomes a failed row, so that one bad row costs one
row; but where the first failed row ends the job, it refuses the dataset too.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from taphouse.errors import StoreBusy
from taphouse.store import to_json
from taphouse.wire import JobOptions
from taphouse_extractor.errors import BadRow, InvalidRequest, TooLarge
from taphouse_extractor.records import MAX_BATCHES, OFFSET, JobRecord, Records, new_job_id
from taphouse_extractor.rows import Numbered, parse_row, to_prompt, too_long
from taphouse_extractor.spooling import end_spooling, spooling
from taphouse_extractor.tokens import ANONYMOUS, Caller

__all__ = ["Limits", "Spool", "open_dataset", "spool_file"]

CHUNK_BYTES = 1 << 18
ADMIT_BYTES = 8 << 20


@dataclass(frozen=True)
class Limits:
    """Bounds of one dataset: bytes, rows, bytes of a row."""

    max_bytes: int
    max_rows: int
    max_row_bytes: int


class Spool:
    """Takes a dataset in chunks: `feed`, then `finish` or `abort`. Raises `InvalidRequest`, `TooLarge`.

    `longest` is how many tokens a row's prompt may have, where that is known. `admit` is asked now and then
    whether there is still room, and raises where there isn't.
    """

    def __init__(
        self,
        records: Records,
        limits: Limits,
        options: JobOptions,
        name: str | None,
        *,
        by: Caller = ANONYMOUS,
        longest: int | None = None,
        admit: Callable[[], None] = lambda: None,
    ) -> None:
        self._admit, self._admitted = admit, 0
        self._records, self._limits, self._longest = records, limits, longest
        self._held = ExitStack()
        self.job = self._begin(name, options, by)
        self._max_rows = min(limits.max_rows, MAX_BATCHES * options.batch_size)
        self._tail, self._received, self._line, self._rows = bytearray(), 0, 0, 0
        rows, index = records.rows_paths(self.job.id)
        self._file, self._buffer, self._written = records.store.create(rows), bytearray(), 0
        self._index, self._offsets = records.store.create(index), bytearray()
        self._digest = hashlib.sha256(to_json([by.tenant, options.model_dump(mode="json")]))

    def _begin(self, name: str | None, options: JobOptions, by: Caller) -> JobRecord:
        """A new job, of an id that no other has, held until its rows are in the store."""
        while True:
            now = time.time()
            job = JobRecord(
                id=new_job_id(now),
                name=name,
                options=options,
                owner=by.name,
                tenant=by.tenant,
                created_at=now,
            )
            with suppress(StoreBusy):
                self._held.enter_context(spooling(self._records, job.id))
                if self._records.put_new_job(job):
                    return job
                end_spooling(self._records, job.id)
                self._held.close()

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the dataset."""
        self._received += len(chunk)
        if self._received > self._limits.max_bytes:
            raise TooLarge(f"the dataset is over {self._limits.max_bytes} bytes: split it", param="body")
        if self._received - self._admitted >= ADMIT_BYTES:
            self._admit()
            self._admitted = self._received
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            self._tail += line
            self._take_line(bytes(self._tail))
            self._tail.clear()
        self._tail += rest
        self._check_length(len(self._tail), self._line + 1)

    def finish(self, check: Callable[[JobRecord], None] = lambda _: None) -> JobRecord:
        """The dataset is complete: make it a job. Durable when this returns.

        `check` is asked before, with the job and its digest, and may raise.
        """
        if self._tail:
            self._take_line(bytes(self._tail))
        if not self._rows:
            raise InvalidRequest("the dataset has no rows", param="body")
        self._offsets += OFFSET.pack(self._written)
        self._flush()
        self.job = self.job.model_copy(update={"rows": self._rows, "digest": self._digest.hexdigest()})
        check(self.job)
        self._file.seal()
        self._index.seal()
        self._records.job(self.job.id)  # not there any more: somebody removed it
        self.job = self.job.model_copy(update={"spooled": True})
        self._records.put_job(self.job)
        end_spooling(self._records, self.job.id)
        self._held.close()
        return self.job

    def abort(self) -> None:
        """Drop all of it."""
        self._file.abort()
        self._index.abort()
        self._records.drop_unspooled(self.job.id)
        end_spooling(self._records, self.job.id)
        self._held.close()

    def _take_line(self, line: bytes) -> None:
        self._line += 1
        self._check_length(len(line), self._line)
        line = (line.removeprefix(codecs.BOM_UTF8) if self._line == 1 else line).strip()
        if not line:
            return
        try:
            value = json.loads(line.decode())  # of bytes it would guess the encoding
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"line {self._line} is not JSON: {_short(error)}", param=self._where()
            ) from error
        if not isinstance(value, dict):
            raise InvalidRequest(f"line {self._line} is not a JSON object", param=self._where())
        if self._rows == self._max_rows:
            raise TooLarge(f"line {self._line}: over {self._max_rows} rows; split the dataset", param="body")
        if self.job.options.on_error == "fail":
            self._check_row(line)
        if self._rows % self.job.options.batch_size == 0:
            self._offsets += OFFSET.pack(self._written)
        self._rows += 1
        self._digest.update(line + b"\n")
        self._buffer += line + b"\n"
        self._written += len(line) + 1
        if len(self._buffer) >= CHUNK_BYTES:
            self._flush()

    def _check_length(self, length: int, line: int) -> None:
        if length > self._limits.max_row_bytes + 1:  # one for a carriage return
            raise TooLarge(f"line {line} is over {self._limits.max_row_bytes} bytes", param=f"line {line}")

    def _check_row(self, line: bytes) -> None:
        """Raise `InvalidRequest` for a row that is sure to fail, where that would end the job."""
        options = self.job.options
        try:
            tokens = to_prompt(Numbered(self._rows, "", line), parse_row(line), options).tokens
        except BadRow as error:
            raise InvalidRequest(f"line {self._line}: {error}", param=self._where()) from error
        if self._longest is not None and tokens > self._longest and too_long(tokens, options) is None:
            raise InvalidRequest(
                f"line {self._line}: {tokens} tokens, and the engine takes {self._longest} "
                f"with max_tokens {options.max_tokens}",
                param=self._where(),
            )

    def _where(self) -> str:
        return f"line {self._line}"

    def _flush(self) -> None:
        """Write both files, so that neither looks as if its writer had died."""
        self._file.write(bytes(self._buffer))
        self._index.write(bytes(self._offsets))
        self._buffer.clear()
        self._offsets.clear()


def spool_file(
    file: BinaryIO, spool: Spool, check: Callable[[JobRecord], None] = lambda _: None
) -> JobRecord:
    """Spool an open file; `check` as in `Spool.finish`."""
    while chunk := file.read(CHUNK_BYTES):
        spool.feed(chunk)
    return spool.finish(check)


def open_dataset(path: str, roots: tuple[Path, ...]) -> BinaryIO:
    """Open a dataset of this machine: a regular file below one of `roots`, once links are followed.

    `path` is absolute, or a `file://` URI. Raises `InvalidRequest`, with one message for all that is outside.
    """
    if not roots:
        raise InvalidRequest(
            "this service reads no local datasets (dataset_roots is empty): upload it", param="path"
        )
    outside = InvalidRequest(
        f"{path!r:.200} is no file below the service's dataset roots, or none it may read", param="path"
    )
    try:
        if path.startswith("file:"):
            parts = urlsplit(path)
            if parts.netloc not in ("", "localhost"):
                raise outside
            path = unquote(parts.path)
        real = Path(path).resolve(strict=True)
        above = [root for given in roots if real.is_relative_to(root := given.resolve())]
        if not Path(path).is_absolute() or not above:
            raise outside
        descriptor = _open_below(above[0], real.relative_to(above[0]))
    except (OSError, ValueError, RuntimeError) as error:  # the last: links in a circle
        raise outside from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise outside
    return os.fdopen(descriptor, "rb")


def _open_below(root: Path, relative: Path) -> int:
    """Open a file step by step, following no link: one put in a directory's place since isn't entered."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    held = os.open(root, flags | os.O_DIRECTORY)
    try:
        for part in relative.parts[:-1]:
            below = os.open(part, flags | os.O_DIRECTORY, dir_fd=held)
            os.close(held)
            held = below
        return os.open(relative.name, flags, dir_fd=held)
    finally:
        os.close(held)


def _short(error: Exception) -> str:
    return str(error)[:120] if isinstance(error, ValueError) else "nested too deeply"
