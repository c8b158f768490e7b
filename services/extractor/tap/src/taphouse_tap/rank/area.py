"""The memory that a rank's engine process and its writer process share.

::

    words     int64 [512]                  see `Word`; each is written by one side alone
    prompts   int32 [prompt_tokens]        prompts of new captures on their way to the writer
    marks     int64 [rows, 2]              position and token id of each row
    rows      uint8 [rows, row_bytes]      rows on their way to the writer

It lies in a memfd, so it has no name and goes when both processes are gone. Each part begins a page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

MARK_BYTES = 16
"""A mark is two int64: the position and the token id of a row."""

_PAGE = 4096
_WORDS = _PAGE // 8


class Word(IntEnum):
    """What stands where among the words. Durations are nanoseconds."""

    ARRIVED = 0
    """Steps whose rows and marks are all here: counted up by the GPU (by the engine on a CPU)."""

    # All others are the writer's.
    HANDLED = 16
    """Messages done: what they referred to is the engine's again."""
    ALIVE = 17
    """When the writer last went round its loop, on the monotonic clock."""
    ROWS = 18
    BYTES = 19
    SEALED = 20
    FAILED = 21
    FORGED = 22
    WAIT = 23
    """Waiting for rows to arrive."""
    WRITE = 24
    """Checking, summing and writing rows."""
    CHECKSUM = 25
    """The part of `WRITE` that is checksums, summed over threads."""
    COPY = 26
    """The part of `WRITE` that is copying to the file system, summed over threads."""
    SEAL = 27


@dataclass(frozen=True)
class Layout:
    """Sizes of the parts: rows (of `row_bytes` bytes each) with their marks, and prompt tokens."""

    rows: int
    row_bytes: int
    prompt_tokens: int

    @property
    def marks_at(self) -> int:
        """Byte offset of the marks."""
        return _PAGE + _pages(4 * self.prompt_tokens)

    @property
    def rows_at(self) -> int:
        """Byte offset of the rows."""
        return self.marks_at + _pages(MARK_BYTES * self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        return self.rows_at + _pages(self.row_bytes * self.rows)


class Area:
    """The shared memory as numpy arrays: `words`, `prompts`, `marks`, `rows`."""

    def __init__(self, layout: Layout, fd: int) -> None:
        self.layout, self.fd = layout, fd
        self.map = mmap.mmap(fd, layout.nbytes)
        self.words = np.frombuffer(self.map, np.int64, _WORDS)
        self.prompts = np.frombuffer(self.map, np.int32, layout.prompt_tokens, _PAGE)
        self.marks = np.frombuffer(self.map, np.int64, 2 * layout.rows, layout.marks_at).reshape(-1, 2)
        size = layout.rows * layout.row_bytes
        rows = np.frombuffer(self.map, np.uint8, size, layout.rows_at)
        self.rows = rows.reshape(layout.rows, layout.row_bytes)

    @classmethod
    def create(cls, layout: Layout) -> Area:
        """Make the memory; its pages come when they are first touched."""
        fd = os.memfd_create("taphouse-rows", os.MFD_CLOEXEC)
        os.ftruncate(fd, layout.nbytes)
        return cls(layout, fd)

    @property
    def address(self) -> int:
        """Where it lies in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def close(self) -> None:
        """Let go of the file; the memory stays mapped while anything refers to it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _pages(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // _PAGE) * _PAGE
