"""What Taphouse asks of a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol


class StagedFile(Protocol):
    """An object in the making: invisible until `seal`, gone if that never comes. A context manager."""

    path: str

    def write(self, data: bytes | memoryview) -> None:
        """Append."""

    def scratch(self) -> BinaryIO:
        """An unnamed file beside it for working data, gone when closed."""

    def seal(self) -> bool:
        """Make it durable and visible. False when the name was taken: that object stays."""

    def local_path(self) -> Path:
        """Local file of the object that has the name after `seal`."""

    def abort(self) -> None:
        """Drop it."""

    def __enter__(self) -> StagedFile: ...

    def __exit__(self, *exc: object) -> None: ...


class Store(Protocol):
    """What Taphouse needs of a store. Every method raises `StoreError`s only."""

    def read(self, path: str) -> bytes:
        """All bytes of an object. Raises `NotInStore`."""

    def open(self, path: str) -> BinaryIO:
        """The object, for reading. Raises `NotInStore`."""

    def put(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Create or replace an object. `durable=False` skips the flush to disk only."""

    def put_new(self, path: str, data: bytes) -> bool:
        """Create an object. False, and nothing changed, when there is one."""

    def create(self, path: str) -> StagedFile:
        """Begin an object that is written in pieces."""

    def link(self, source: str, target: str) -> bool:
        """Give an object a second name. False, and nothing changed, when the name is taken."""

    def flush(self, directory: str) -> None:
        """Make the names in a directory durable, also those another process made. Raises `NotInStore`."""

    def exists(self, path: str) -> bool:
        """Whether there is an object or directory."""

    def size(self, path: str) -> int:
        """Bytes of an object. Raises `NotInStore`."""

    def modified(self, path: str) -> float:
        """When an object was written, in unix seconds. Raises `NotInStore`."""

    def stamp(self, directory: str) -> tuple[int, int] | None:
        """Another one once a name in the directory was made, replaced or removed; None without the directory.

        Changes within a tick of the store's clock may leave the same: `Listing` knows what to make of that.
        """

    def scan(self, directory: str) -> Iterator[str]:
        """Names in a directory as `list` has them, in any order and one at a time."""

    def list(self, directory: str) -> list[str]:
        """Names in a directory, sorted, without temporary files; empty when there is no such directory."""

    def delete(self, path: str) -> bool:
        """Remove an object. False when there was none."""

    def drop(self, directory: str) -> bool:
        """Remove a directory that holds nothing but what killed writers left. False without one."""

    def lock(self, path: str, *, wait: bool = True) -> AbstractContextManager[None]:
        """Hold a lock of this name; freed when its holder dies, however it dies.

        Held by somebody else, it is waited for; raises `StoreBusy` with `wait=False`.
        """

    def local_path(self, path: str) -> Path:
        """A local file that holds the object."""

    def free_bytes(self) -> int:
        """Bytes that can still be written."""

    def sweep_temporaries(self, older_than_s: float = 3600.0) -> int:
        """Remove what killed writers left, untouched for that long; walks the store. Returns how many."""
