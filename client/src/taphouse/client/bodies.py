"""What a request is made of: a body that is streamed, headers, and one segment of a path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from taphouse.errors import BadRequest
from taphouse.wire import Row

__all__ = [
    "CHUNK_BYTES",
    "Progress",
    "Source",
    "as_row",
    "chunks_of",
    "keyed",
    "repeated",
    "reported",
    "segment",
]

CHUNK_BYTES = 1 << 18
KEY_LENGTH = 255
NAME_LENGTH = 200
Progress = Callable[[int], None]
Source = Path | BinaryIO | Iterable[bytes]


@contextmanager
def chunks_of(source: Source) -> Iterator[Iterable[bytes]]:
    """Open what is to be uploaded, as chunks of bytes."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            yield iter(lambda: file.read(CHUNK_BYTES), b"")
    elif hasattr(source, "read"):
        yield iter(lambda: source.read(CHUNK_BYTES), b"")
    else:
        yield source


def reported(chunks: Iterable[bytes], progress: Progress | None) -> Iterator[bytes]:
    """Tell `progress` the bytes of every chunk that was sent."""
    for chunk in chunks:
        yield chunk
        if progress:
            progress(len(chunk))


def as_row(row: Row | dict[str, Any]) -> Row:
    """Check a row."""
    return row if isinstance(row, Row) else Row.model_validate(row)


def repeated(again: bool) -> dict[str, str]:
    """Make the query parameter that allows the same job twice."""
    return {"again": "true"} if again else {}


def keyed(key: str | None) -> dict[str, str]:
    """Make the header of an idempotency key; raises `BadRequest` for one that a header can't carry."""
    if key is None:
        return {}
    if not (0 < len(key) <= KEY_LENGTH and key.isascii() and key.isprintable() and key == key.strip()):
        raise BadRequest(
            f"a key is 1 to {KEY_LENGTH} printable ASCII characters, without blanks at its ends", status=0
        )
    return {"Idempotency-Key": key}


def segment(value: str) -> str:
    """One path segment: a name can't lead to another route."""
    usable = value.isprintable() and not any(c in value for c in "/?#%") and value not in (".", "..")
    if not 0 < len(value) <= NAME_LENGTH or not usable:
        raise BadRequest(f"{value!r:.80} is not a name", status=0)
    return value
