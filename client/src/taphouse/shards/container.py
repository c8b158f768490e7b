"""The safetensors container of a shard: u64 header length, JSON header, tensors' bytes.

Written and parsed here and not by the safetensors library, because its bytes must be the same each time
(the library orders `__metadata__` by a hash map), because blobs are written as they are made and read one
at a time, and because every size has to be checked before anything of that size is allocated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from taphouse.errors import MalformedShard, TruncatedShard

#: Bytes of JSON a shard's container header may have. 16,384 samples with long ids stay below it.
MAX_HEADER_BYTES = 64 << 20
_ALIGNMENT = 8
_LENGTH_BYTES = 8
_FETCH_AGAIN = "Copy or download the file again"


class Source(Protocol):
    """Bytes that can be read at any offset."""

    name: str
    size: int

    def read_at(self, offset: int, length: int) -> bytes | memoryview:
        """`length` bytes from `offset`; fewer at the end."""

    def close(self) -> None:
        """Let go of the file, if there is one."""


@dataclass(frozen=True)
class Extent:
    """Where a tensor's bytes lie, counted from the start of the file."""

    offset: int
    nbytes: int


def pack_header(metadata: Mapping[str, str], sizes: Iterable[tuple[str, int]]) -> bytes:
    """The first bytes of a container whose U8 tensors (name, bytes) follow in this order, without gaps."""
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for name, nbytes in sizes:
        entries[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise MalformedShard(
            f"the header would have {len(text)} bytes, the limit is {MAX_HEADER_BYTES}",
            advice="Put fewer samples into one shard",
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def parse_header(source: Source) -> tuple[dict[str, str], dict[str, Extent]]:
    """Metadata and tensor extents of a container, checked against each other and the source's size.

    Raises `TruncatedShard` when the source is shorter or longer than its header says, `MalformedShard` when
    it is no safetensors file of U8 tensors that cover the data without gap or overlap.
    """
    if source.size < _LENGTH_BYTES:
        raise TruncatedShard(f"{source.size} bytes are too few for a shard", advice=_FETCH_AGAIN)
    length = int.from_bytes(source.read_at(0, _LENGTH_BYTES), "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise MalformedShard(f"not a shard: it declares a header of {length} bytes")
    start = _LENGTH_BYTES + length
    if source.size < start:
        raise TruncatedShard(
            f"{source.size} bytes, and the header alone should end at {start}", advice=_FETCH_AGAIN
        )
    try:
        entries = json.loads(bytes(source.read_at(_LENGTH_BYTES, length)).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise MalformedShard(f"not a shard: its header is no JSON ({error})") from error
    if not isinstance(entries, dict):
        raise MalformedShard("not a shard: its header is no JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MalformedShard("not a shard: its metadata are not strings")
    return metadata, _extents(entries, start, source.size)


def _extents(entries: dict[str, Any], start: int, size: int) -> dict[str, Extent]:
    extents = {}
    for name, entry in entries.items():
        match entry:
            case {"dtype": "U8", "shape": [int(count)], "data_offsets": [int(begin), int(end)]}:
                pass
            case _:
                raise MalformedShard("its entry is not one of a U8 tensor [n]", tensor=name)
        if not 0 <= begin <= end or end - begin != count:
            raise MalformedShard(f"offsets {begin}..{end} don't hold {count} bytes", tensor=name)
        extents[name] = Extent(start + begin, count)
    at = start
    for name, extent in sorted(extents.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if extent.offset != at:
            raise MalformedShard(f"it begins at byte {extent.offset}, {at} is due", tensor=name)
        at += extent.nbytes
    if at != size:
        raise TruncatedShard(f"{size} bytes, {at} are declared", advice=_FETCH_AGAIN)
    return extents
