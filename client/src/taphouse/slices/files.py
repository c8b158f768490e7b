"""Slice files: one TP rank's columns of one capture.

::

    payload    rows * L * W elements, little endian: [T, L, W], so row t starts at t * L * W * itemsize
    token ids  rows * int32, little endian: the token that the model was fed at each row
    trailer    JSON, UTF-8 (`Trailer`)
    u32 LE     length of the trailer in bytes
    u32 LE     crc32 of the trailer (those of payload and token ids stand inside it)
    8 bytes    b"TAPSLIC1"

The payload comes first, so that a chunk of rows is one `pwrite` and surplus rows are one truncation.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ChecksumMismatch, DirectoryFull, MissingRows, TruncatedSlice, UnsupportedSlice
from .spares import Spares
from .sums import Sums

MAGIC = b"TAPSLIC1"
VERSION = 2
RAW_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}
"""numpy dtype of each state dtype's raw elements; numpy has no bfloat16, so its bits travel as uint16."""

ALGORITHM = "crc32-4MiB"
TOKEN_BYTES = 4
"""Bytes of a token id in a slice."""

_NUMBERS = (
    *("tp_rank", "tp_size", "dp_rank", "hidden_size", "column_offset", "width"),
    *("rows", "prompt_len", "weights_epoch"),
)
_TOKEN = np.dtype(f"<i{TOKEN_BYTES}")
_TAIL = struct.Struct("<II8s")
_MAX_TRAILER = 1 << 20
BLOCK_BYTES = 1 << 22
"""The payload's checksum is taken in blocks of so many bytes, so that threads can share it."""

_CHUNK_BYTES = 1 << 20
"""Bytes that are summed and then written: few enough that they are still in the processor's cache."""


@dataclass(frozen=True)
class Trailer:
    """What a slice says of itself.

    `layers` are the ids of axis 1 in order; `column_offset` and `width` place this rank's columns in
    `hidden_size`; `rows` may exceed what the client got; `weights_epoch` counts how often the engine's
    weights changed since its start; `error` says why a capture has no rows, `retry` that it may work later.
    """

    tag: str
    start_id: str
    tap_version: str
    tp_rank: int
    tp_size: int
    dp_rank: int
    layers: tuple[int, ...]
    dtype: str
    hidden_size: int
    column_offset: int
    width: int
    rows: int
    prompt_len: int
    weights_epoch: int
    crc32: int
    token_crc32: int
    error: str | None = None
    retry: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of this slice."""
        return len(self.layers) * self.width * RAW_DTYPES[self.dtype].itemsize

    def to_json(self) -> str:
        """Return the trailer as it stands in the file."""
        body = asdict(self)
        checksums = {"payload": body.pop("crc32"), "token_ids": body.pop("token_crc32")}
        body["checksum"] = {"algorithm": ALGORITHM, **checksums}
        return json.dumps({"version": VERSION, **body})

    @classmethod
    def from_json(cls, text: bytes) -> Trailer:
        """Parse a trailer; raise `TruncatedSlice` if it isn't one, `UnsupportedSlice` if it is newer."""
        try:
            body = json.loads(text)
            version = body.pop("version")
            if version != VERSION:
                raise UnsupportedSlice(f"slice version {version!r}; this reader knows {VERSION}")
            checksum = body.pop("checksum")
            if checksum["algorithm"] != ALGORITHM:
                raise UnsupportedSlice(
                    f"slice checksum {checksum['algorithm']!r}; this reader knows {ALGORITHM}"
                )
            known = {f.name for f in fields(cls)}
            trailer = cls(
                **{k: v for k, v in body.items() if k in known and k != "layers" and "crc32" not in k},
                layers=tuple(int(i) for i in body["layers"]),
                crc32=int(checksum["payload"]),
                token_crc32=int(checksum["token_ids"]),
            )
            wrong = [n for n in _NUMBERS if type(getattr(trailer, n)) is not int]
            if wrong or type(trailer.dtype) is not str:
                raise TypeError(f"{', '.join(wrong) or 'dtype'} is of a wrong type")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TruncatedSlice(f"unreadable slice trailer: {error}") from error
        if trailer.dtype not in RAW_DTYPES:
            raise UnsupportedSlice(f"slice dtype {trailer.dtype!r}; this reader knows {sorted(RAW_DTYPES)}")
        return trailer


class SliceWriter:
    """Writes one slice: rows in any order, by any threads, with `write`, then `seal` (or `abort`).

    The file is `<tag>.t<rank>.part` until it is sealed: a spare one where there is one, else a new one. The
    checksum is taken of rows as they are written; blocks that were not written in order are read back.
    """

    def __init__(self, directory: Path, trailer: Trailer, capacity: int) -> None:
        self.part = directory / f"{trailer.tag}.t{trailer.tp_rank}.part"
        self.final = self.part.with_suffix(".slice")
        self.capacity = capacity
        self.checksum_s = self.copy_s = 0.0
        self._claim = directory / f"{trailer.tag}.claim"
        self._trailer = trailer
        self._sums = Sums()
        fd = None
        if capacity and not self.part.exists():
            fd = Spares(directory).take(self.part, capacity * trailer.row_bytes)
        if fd is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(self.part, flags, 0o600)
        self._fd = fd

    def write(self, row: int, rows: NDArray[Any]) -> None:
        """Write `rows` [n, L, W] (raw elements, C order) at row number `row`; later writes win.

        Raises `DirectoryFull` when the file system is full.
        """
        count, row_bytes = rows.shape[0], self._trailer.row_bytes
        data = rows.reshape(-1).view(np.uint8)
        if len(data) != count * row_bytes:
            raise ValueError(f"{count} rows take {count * row_bytes} bytes, got {len(data)}")
        if row < 0 or row + count > self.capacity:
            raise ValueError(f"rows [{row}, {row + count}) lie outside the {self.capacity} reserved")
        for piece in cut(row * row_bytes, data):
            self.write_piece(*piece)

    def write_piece(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Write bytes [n] of the payload at byte `offset`, all of one block of the checksum (see `cut`)."""
        block, at = divmod(offset, BLOCK_BYTES)
        before = self._sums.before(block)
        crc = before.crc if before.covered == at else 0
        for first in range(0, len(data), _CHUNK_BYTES):
            chunk = data[first : first + _CHUNK_BYTES].data
            began = time.perf_counter()
            crc = zlib.crc32(chunk, crc)
            summed = time.perf_counter()
            try:
                _pwrite_all(self._fd, chunk, offset + first)
            except OSError as error:
                raise space_error(error, self.part) from error
            self.checksum_s += summed - began
            self.copy_s += time.perf_counter() - summed
        self._sums.after(block, before, at, at + len(data), crc)

    def seal(
        self, token_ids: NDArray[Any], error: str | None = None, *, retry: bool = False
    ) -> Trailer | None:
        """Cut the file to the rows of `token_ids` [T], add these and the trailer, give it its final name.

        Returns the trailer, or None when the claim went away meanwhile (the client left): then nothing stays.
        """
        rows = len(token_ids)
        if rows > self.capacity:
            raise ValueError(f"{rows} rows don't fit the {self.capacity} reserved")
        size = rows * self._trailer.row_bytes
        crc = _checksum(size, self._block_crc)
        ids = np.ascontiguousarray(token_ids, _TOKEN).tobytes()
        trailer = replace(
            self._trailer, rows=rows, crc32=crc, token_crc32=zlib.crc32(ids), error=error, retry=retry
        )
        text = trailer.to_json().encode()
        tail = ids + text + _TAIL.pack(len(text), zlib.crc32(text), MAGIC)
        try:
            os.ftruncate(self._fd, size)
            _pwrite_all(self._fd, memoryview(tail), size)
        except OSError as error_:
            raise space_error(error_, self.part) from error_
        self._close()
        with contextlib.suppress(FileNotFoundError):
            self.part.rename(self.final)
        if not self._claim.exists():
            self.final.unlink(missing_ok=True)
            return None
        return trailer

    def abort(self) -> None:
        """Drop the part. Idempotent."""
        self._close()
        self.part.unlink(missing_ok=True)

    def _block_crc(self, offset: int, length: int) -> int:
        known = self._sums.before(offset // BLOCK_BYTES)
        if known.covered == length:
            return known.crc
        return zlib.crc32(_block(self._fd, self.part, offset, length))

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def cut(offset: int, data: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Cut bytes [n] that begin at byte `offset` of a payload where the blocks of its checksum end."""
    at = 0
    while at < len(data):
        length = min(len(data) - at, BLOCK_BYTES - (offset + at) % BLOCK_BYTES)
        yield offset + at, data[at : at + length]
        at += length


def seal_error(directory: Path, trailer: Trailer, error: str, *, retry: bool = False) -> Trailer | None:
    """Seal a slice without rows that says why the capture failed, in place of any part there is."""
    (directory / f"{trailer.tag}.t{trailer.tp_rank}.part").unlink(missing_ok=True)
    return SliceWriter(directory, trailer, capacity=0).seal(np.empty(0, _TOKEN), error, retry=retry)


def read_trailer(path: str | os.PathLike[str]) -> Trailer:
    """Read a slice's trailer; raises the `BadSlice` errors. The payload is not looked at."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _trailer_of(fd, path)
    finally:
        os.close(fd)


def read_slice(
    path: str | os.PathLike[str], *, rows: int | None = None, verify: bool = True
) -> tuple[Trailer, NDArray[Any]]:
    """Read a slice: its trailer and its first `rows` rows (all if None) as raw elements [T, L, W].

    `verify` checks the checksum over the whole payload; the token ids' is always checked. Raises the
    `BadSlice` errors; `MissingRows` if the slice has fewer than `rows` rows.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        trailer = _trailer_of(fd, path)
        payload = np.empty(trailer.rows * trailer.row_bytes, np.uint8)
        _pread_all(fd, payload.data, path)
        _token_ids_of(fd, path, trailer)
    finally:
        os.close(fd)
    if (
        verify
        and _checksum(payload.nbytes, lambda o, n: zlib.crc32(payload.data[o : o + n])) != trailer.crc32
    ):
        raise ChecksumMismatch(f"{path}: the payload's crc32 differs from the trailer's")
    wanted = trailer.rows if rows is None else rows
    if wanted > trailer.rows:
        raise MissingRows(f"{path} holds {trailer.rows} rows, {wanted} are needed")
    shape = (trailer.rows, len(trailer.layers), trailer.width)
    return trailer, payload.view(RAW_DTYPES[trailer.dtype]).reshape(shape)[:wanted]


def read_token_ids(path: str | os.PathLike[str]) -> NDArray[np.int32]:
    """Read the token ids [T] that the model was fed at the slice's rows; raises the `BadSlice` errors."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _token_ids_of(fd, path, _trailer_of(fd, path))
    finally:
        os.close(fd)


def read_rows(path: str | os.PathLike[str], first: int, count: int) -> NDArray[Any]:
    """Read rows [first, first + count) alone, raw [count, L, W]: no checksum covers a part of a payload.

    Raises the `BadSlice` errors, and `MissingRows` when the slice does not hold them.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        trailer = _trailer_of(fd, path)
        if first + count > trailer.rows:
            raise MissingRows(f"{path} holds {trailer.rows} rows, {first + count} are needed")
        payload = np.empty(count * trailer.row_bytes, np.uint8)
        _pread_all(fd, payload.data, path, first * trailer.row_bytes)
    finally:
        os.close(fd)
    return payload.view(RAW_DTYPES[trailer.dtype]).reshape(count, len(trailer.layers), trailer.width)


def _token_ids_of(fd: int, path: str | os.PathLike[str], trailer: Trailer) -> NDArray[np.int32]:
    ids = np.empty(trailer.rows * TOKEN_BYTES, np.uint8)
    _pread_all(fd, ids.data, path, trailer.rows * trailer.row_bytes)
    if zlib.crc32(ids.data) != trailer.token_crc32:
        raise ChecksumMismatch(f"{path}: the token ids' crc32 differs from the trailer's")
    return ids.view(_TOKEN)


def _trailer_of(fd: int, path: str | os.PathLike[str]) -> Trailer:
    size = os.fstat(fd).st_size
    if size < _TAIL.size:
        raise TruncatedSlice(f"{path} is {size} bytes: too short to be a slice")
    length, crc, magic = _TAIL.unpack(os.pread(fd, _TAIL.size, size - _TAIL.size))
    if magic != MAGIC:
        raise TruncatedSlice(f"{path} does not end in a slice trailer (cut, or not a slice)")
    if length > min(_MAX_TRAILER, size - _TAIL.size):
        raise TruncatedSlice(f"{path} says its trailer is {length} bytes, which does not fit")
    text = os.pread(fd, length, size - _TAIL.size - length)
    if zlib.crc32(text) != crc:
        raise ChecksumMismatch(f"{path}: the trailer is not what was written")
    trailer = Trailer.from_json(text)
    row_bytes = trailer.row_bytes + _TOKEN.itemsize
    if trailer.rows < 0 or trailer.rows * row_bytes + length + _TAIL.size != size:
        raise TruncatedSlice(f"{path} is {size} bytes, not what its trailer says ({trailer.rows} rows)")
    return trailer


_scratch = threading.local()


def _block(fd: int, path: Path, offset: int, length: int) -> memoryview:
    """Read a block into this thread's own memory: fresh memory for each would be unmapped under the GIL."""
    if len(getattr(_scratch, "block", b"")) < length:
        _scratch.block = bytearray(BLOCK_BYTES)
    into = memoryview(_scratch.block)[:length]
    _pread_all(fd, into, path, offset)
    return into


def _checksum(size: int, block_crc: Callable[[int, int], int]) -> int:
    """crc32 over the crc32 (u32 LE) of each block of a payload: `block_crc(offset, length)`."""
    offsets = range(0, size, BLOCK_BYTES)
    return zlib.crc32(b"".join(struct.pack("<I", block_crc(o, min(BLOCK_BYTES, size - o))) for o in offsets))


def _pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _pread_all(fd: int, into: memoryview, path: str | os.PathLike[str], offset: int = 0) -> None:
    done = 0
    while done < len(into):
        got = os.preadv(fd, [into[done:]], offset + done)
        if not got:
            raise TruncatedSlice(f"{path} ended at {done} of {len(into)} bytes")
        done += got


def space_error(error: OSError, path: Path) -> Exception:
    """Return a `DirectoryFull` for an error that says so, any other error as it is."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DirectoryFull(f"no room for {path.name}: {error.strerror}")
    return error
