"""The streamed answer: one bounded body that can't look whole when it was cut.

::

    u32 LE     length of the header in bytes
    u32 LE     crc32 of the header
    header     JSON, UTF-8: the answer, with `offset`, `bytes` and `crc32` an item of `data`
    payloads   [T, L, H] raw little-endian elements an item, at `offset` from the first payload byte
    8 bytes    b"TAPSTRM1"
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BadStream
from .files import RAW_DTYPES

STREAM_MAGIC = b"TAPSTRM1"
_PREFIX = struct.Struct("<II")


@dataclass(frozen=True)
class Stream:
    """A parsed body: the header and, an item of its `data`, the states [T, L, H] (None where it failed)."""

    header: dict[str, Any]
    states: list[NDArray[Any] | None]


def encode_stream(header: Mapping[str, Any], states: Sequence[NDArray[Any] | None]) -> bytes:
    """Build a body; `header["data"]` has one item for each of `states` ([T, L, H] raw elements)."""
    return b"".join(stream_parts(header, states))


def stream_parts(
    header: Mapping[str, Any], states: Sequence[NDArray[Any] | None]
) -> list[bytes | memoryview]:
    """Return the pieces of a body in order, the states without a copy where they are contiguous."""
    items: list[dict[str, Any]] = []
    payloads: list[bytes | memoryview] = []
    offset = 0
    for item, array in zip(header["data"], states, strict=True):
        data = (
            memoryview(b"") if array is None else np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        )
        items.append({**item, "offset": offset, "bytes": len(data), "crc32": zlib.crc32(data)})
        payloads.append(data)
        offset += len(data)
    text = json.dumps({**header, "data": items}).encode()
    return [_PREFIX.pack(len(text), zlib.crc32(text)), text, *payloads, STREAM_MAGIC]


def parse_stream(body: bytes) -> Stream:
    """Parse and verify a body; raise `BadStream` if anything of it is missing or damaged."""
    try:
        length, crc = _PREFIX.unpack_from(body)
        base = _PREFIX.size + length
        text = body[_PREFIX.size : base]
        if zlib.crc32(text) != crc:
            raise BadStream("the header's crc32 is not the one before it: the body is cut or damaged")
        header = json.loads(text)
        items, dtype = header["data"], RAW_DTYPES[header["dtype"]]
        end = base + sum(int(item["bytes"]) for item in items)
        if len(body) != end + len(STREAM_MAGIC) or body[end:] != STREAM_MAGIC:
            raise BadStream(
                f"the body is {len(body)} bytes and should be {end + len(STREAM_MAGIC)}: it was cut"
            )
        states = [_payload(body, base, item, dtype) for item in items]
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise BadStream(f"unreadable stream: {error}") from error
    return Stream(header, states)


def _payload(body: bytes, base: int, item: Mapping[str, Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    start = base + int(item["offset"])
    data = memoryview(body)[start : start + int(item["bytes"])]
    if zlib.crc32(data) != item["crc32"]:
        raise BadStream(f"item {item.get('index')}: the payload's crc32 differs from the header's")
    if item.get("error") is not None or not item.get("shape"):
        return None
    return np.frombuffer(data, dtype).reshape(item["shape"])
