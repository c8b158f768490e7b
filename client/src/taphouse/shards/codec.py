"""How one tensor becomes one blob of a shard, and back.

Codecs (`FORMAT.md` has them byte by byte):

- `stored`: the elements as they are, little-endian.
- `raw-zstd`: one zstd frame of the same bytes.
- `planes-zstd1`: the elements' bytes split into planes, most significant first. A plane is one zstd frame
  (level 1) where that made it smaller, and the plain bytes otherwise, so a plane of as many bytes as there
  are elements is plain. In floats of real activations the top plane (sign and exponent) compresses and the
  mantissa doesn't.

Frames carry their content size and no dictionary; one blob or plane is exactly one frame.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from taphouse.errors import ChecksumMismatch, MalformedShard, UnsupportedShard
from taphouse.samples import STORAGE_DTYPES

STORED = "stored"
RAW_ZSTD = "raw-zstd"
PLANES_ZSTD1 = "planes-zstd1"
CODECS = (STORED, RAW_ZSTD, PLANES_ZSTD1)

#: dtype name in a shard → numpy dtype in memory
TENSOR_DTYPES: dict[str, np.dtype[Any]] = {
    "int32": np.dtype("<i4"),
    "uint8": np.dtype("u1"),
    **STORAGE_DTYPES,
}

_LEVEL = 1
_PROBE_BYTES = 1 << 16
_PROBE_RATIO = 0.95

Blob = bytes | memoryview


@dataclass(frozen=True)
class Encoded:
    """A tensor's blob in parts to be written one after the other, and what its header entry says."""

    codec: str
    parts: tuple[Blob, ...]
    planes: tuple[int, ...] | None
    raw_bytes: int
    sha256: str

    @property
    def nbytes(self) -> int:
        """Bytes of the blob."""
        return sum(len(part) for part in self.parts)


def encode(array: NDArray[Any], codec: str) -> Encoded:
    """Encode a little-endian array of any shape.

    `raw-zstd` that doesn't make it smaller comes out as `stored`. Raises `UnsupportedShard` for an unknown
    codec.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    raw = flat.view(np.uint8)
    digest = hashlib.sha256(raw.data).hexdigest()
    if codec == PLANES_ZSTD1:
        parts = _encode_planes(raw.reshape(flat.size, flat.itemsize))
        return Encoded(codec, parts, tuple(len(part) for part in parts), raw.nbytes, digest)
    if codec == RAW_ZSTD:
        frame = _compressor().compress(raw.data)
        if len(frame) < raw.nbytes:
            return Encoded(codec, (frame,), None, raw.nbytes, digest)
    elif codec != STORED:
        raise unknown_codec(codec)
    return Encoded(STORED, (raw.data,), None, raw.nbytes, digest)


def decode(
    blob: Blob,
    *,
    codec: str,
    dtype: str,
    shape: Sequence[int],
    planes: Sequence[int] | None = None,
    sha256: str | None = None,
) -> NDArray[Any]:
    """Decode a blob to a fresh, writable array of `shape`.

    Memory is bounded by `shape`: a frame that says it holds anything else is refused before it is opened.
    Raises `MalformedShard` where blob, planes and shape don't fit each other, `UnsupportedShard` for an
    unknown codec or dtype, and `ChecksumMismatch` when the decoded bytes don't have the digest `sha256`.
    """
    kind = TENSOR_DTYPES.get(dtype)
    if kind is None:
        raise UnsupportedShard(f"dtype {dtype!r} is unknown", advice=_UPGRADE)
    count = math.prod(shape)
    raw_bytes = count * kind.itemsize
    view = memoryview(blob)
    if codec == PLANES_ZSTD1:
        raw = _decode_planes(view, count, kind.itemsize, planes)
    elif codec == RAW_ZSTD:
        raw = np.frombuffer(bytearray(_decompress(view, raw_bytes)), dtype=np.uint8)
    elif codec == STORED:
        if len(view) != raw_bytes:
            raise MalformedShard(f"{len(view)} bytes are stored where {raw_bytes} are due")
        raw = np.frombuffer(bytearray(view), dtype=np.uint8)
    else:
        raise unknown_codec(codec)
    if sha256 is not None and hashlib.sha256(raw.data).hexdigest() != sha256:
        raise ChecksumMismatch("the decoded bytes are not the ones that were written", advice=_DAMAGED)
    return raw.view(kind).reshape(tuple(shape))


def unknown_codec(codec: str) -> UnsupportedShard:
    """The error for a codec this version doesn't have."""
    return UnsupportedShard(f"codec {codec!r} is unknown (known: {', '.join(CODECS)})", advice=_UPGRADE)


_UPGRADE = "Install a newer taphouse to read this shard"
_DAMAGED = "The file is damaged: delete the shard and run its batch again"


def _compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False, threads=0)


def _encode_planes(elements: NDArray[np.uint8]) -> tuple[Blob, ...]:
    """Planes of `elements` [n, itemsize] (little-endian bytes), most significant first."""
    compressor = _compressor()
    count, itemsize = elements.shape
    parts: list[Blob] = []
    for byte in reversed(range(itemsize)):
        plane = np.ascontiguousarray(elements[:, byte])
        if byte == itemsize - 1 or _is_compressible(compressor, plane):
            frame = compressor.compress(plane.data)
            if len(frame) < count:
                parts.append(frame)
                continue
        parts.append(plane.data)
    return tuple(parts)


def _is_compressible(compressor: zstandard.ZstdCompressor, plane: NDArray[np.uint8]) -> bool:
    """Whether the middle of a plane compresses at all: mantissa planes of real activations don't."""
    start = max(0, (plane.size - _PROBE_BYTES) // 2)
    probe = plane[start : start + _PROBE_BYTES]
    return len(compressor.compress(probe.data)) < _PROBE_RATIO * probe.size


def _decode_planes(
    view: memoryview, count: int, itemsize: int, planes: Sequence[int] | None
) -> NDArray[np.uint8]:
    if planes is None or len(planes) != itemsize or sum(planes) != len(view):
        raise MalformedShard(f"planes {planes} don't make {itemsize} planes of {len(view)} bytes")
    out = np.empty((count, itemsize), dtype=np.uint8)
    start = 0
    for byte, size in zip(reversed(range(itemsize)), planes, strict=True):
        part = view[start : start + size]
        start += size
        if size == count:
            out[:, byte] = np.frombuffer(part, dtype=np.uint8)
        else:
            out[:, byte] = np.frombuffer(_decompress(part, count), dtype=np.uint8)
    return out.reshape(-1)


def _decompress(frame: memoryview, size: int) -> bytes:
    """Open exactly one frame of exactly `size` bytes."""
    try:
        declared = zstandard.frame_content_size(frame)
        if declared != size:
            raise MalformedShard(f"a zstd frame declares {declared} bytes where {size} are due")
        opened: bytes = zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ChecksumMismatch(f"a zstd frame can't be decoded ({error})", advice=_DAMAGED) from error
    if len(opened) != size:
        raise MalformedShard(f"a zstd frame held {len(opened)} bytes where {size} are due")
    return opened
