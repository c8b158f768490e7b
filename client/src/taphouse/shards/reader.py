"""Reading shards: the header at once, samples as they are asked for, each checked as it is read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from taphouse.errors import ChecksumMismatch, MalformedShard, ShardError, TruncatedShard
from taphouse.samples import Sample, check_values
from taphouse.shards.codec import decode
from taphouse.shards.container import Extent, Source, parse_header
from taphouse.shards.header import TENSORS, ShardFacts, ShardHeader, parse_metadata, tensor_name
from taphouse.store import os_errors

#: Decoded bytes of one sample that a reader accepts when it isn't told otherwise.
MAX_SAMPLE_BYTES = 16 << 30
_HASH_BYTES = 1 << 20

ShardSource = str | os.PathLike[str] | bytes | bytearray | memoryview


class _BytesSource:
    """Bytes in memory."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self.name = "<bytes>"
        self._view = memoryview(data).cast("B")
        self.size = len(self._view)

    def read_at(self, offset: int, length: int) -> memoryview:
        return self._view[offset : offset + length]

    def close(self) -> None:
        self._view = memoryview(b"")


class _FileSource:
    """A file, read with `pread`: no shared position, and no SIGBUS when the file shrinks."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = str(path)
        self._descriptor = -1
        with os_errors(self.name):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self._descriptor).st_size

    def read_at(self, offset: int, length: int) -> bytes:
        parts = []
        with os_errors(self.name):
            while length and (part := os.pread(self._descriptor, length, offset)):
                parts.append(part)
                offset += len(part)
                length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


class Shard:
    """An open shard: `header`, `len()`, `[index]`, iteration, `find(id)`. Threads may read at once.

    A sample is decoded when it is asked for. With `verify` (the default) its bytes are checked against the
    header's sha256 and its values for NaN, infinity and rows of zeros. An error names file, sample and
    tensor, and the other samples stay readable. A context manager; `close` lets go of the file.
    """

    def __init__(
        self,
        source: Source,
        *,
        sha256: str | None = None,
        verify: bool = True,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
    ) -> None:
        self._source = source
        self._verify = verify
        self._max_sample_bytes = max_sample_bytes
        self.name = source.name
        try:
            if sha256 is not None and _digest(source) != sha256:
                raise ChecksumMismatch(
                    "the file's sha256 is not the expected one", advice="Copy or download the file again"
                )
            metadata, self._extents = parse_header(source)
            self.header: ShardHeader = parse_metadata(metadata)
            _check_extents(self.header, self._extents)
        except ShardError as error:
            source.close()
            raise error.at(source=source.name) from error
        self._index = {sample.id: index for index, sample in enumerate(self.header.samples)}

    @classmethod
    def from_bytes(
        cls, data: bytes | bytearray | memoryview, *, sha256: str | None = None, verify: bool = True
    ) -> Shard:
        """A shard in memory, such as the body of an HTTP answer; see `open_shard`."""
        return cls(_BytesSource(data), sha256=sha256, verify=verify)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._source.size

    def __len__(self) -> int:
        return len(self.header.samples)

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` (negative counts from the end). Raises `IndexError` and `ShardError`."""
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"{self.name} has {count} samples, there is no {index}")
        index %= count
        try:
            return self._read(index)
        except ShardError as error:
            raise error.at(source=self.name, index=index, sample=self.header.samples[index].id) from error

    def __iter__(self) -> Iterator[Sample]:
        for index in range(len(self)):
            yield self[index]

    def find(self, sample_id: str) -> Sample:
        """The sample of this id. Raises `KeyError` when there is none."""
        return self[self._index[sample_id]]

    def close(self) -> None:
        """Let go of the file."""
        self._source.close()

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, index: int) -> Sample:
        info = self.header.samples[index]
        raw_bytes = sum(tensor.raw_bytes for tensor in info.tensors.values())
        if raw_bytes > self._max_sample_bytes:
            raise MalformedShard(
                f"it would take {raw_bytes} bytes, the limit is {self._max_sample_bytes}",
                advice="Raise max_sample_bytes if you trust this shard",
            )
        arrays = {}
        for name in TENSORS:
            tensor = info.tensors[name]
            try:
                arrays[name] = decode(
                    self._blob(tensor_name(index, name)),
                    codec=tensor.codec,
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    planes=tensor.planes,
                    sha256=tensor.sha256 if self._verify else None,
                )
            except ShardError as error:
                raise error.at(tensor=name) from error
        sample = Sample(
            id=info.id,
            dtype=self.header.dtype,
            prompt_len=info.prompt_len,
            next_token_id=info.next_token_id,
            finish_reason=info.finish_reason,
            witness=info.witness.witness() if info.witness else None,
            **arrays,
        )
        if self._verify:
            check_values(sample, self.header.layers)
        return sample

    def _blob(self, name: str) -> bytes | memoryview:
        extent = self._extents[name]
        blob = self._source.read_at(extent.offset, extent.nbytes)
        if len(blob) != extent.nbytes:
            raise TruncatedShard(f"{len(blob)} bytes left of {extent.nbytes}")
        return blob


def open_shard(
    source: ShardSource,
    *,
    sha256: str | None = None,
    verify: bool = True,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
) -> Shard:
    """Open a shard: a path, or the bytes of one.

    Container and header are checked now, samples when they are read. `sha256` is the file's (a ledger entry
    has it): given, the whole file is read and compared first. Raises `ShardError` for what isn't a whole
    shard of a known version, `StoreError` when the file can't be read.
    """
    opened: Source
    if isinstance(source, (bytes, bytearray, memoryview)):
        opened = _BytesSource(source)
    else:
        opened = _FileSource(source)
    return Shard(opened, sha256=sha256, verify=verify, max_sample_bytes=max_sample_bytes)


def describe_shard(file: str | os.PathLike[str], *, path: str | None = None) -> ShardFacts:
    """Facts of a sealed shard from its header and a hash of the whole file; samples are not decoded.

    `path` is what the facts call it (a store's relative path); the file's own path when not given.
    """
    source = _FileSource(file)
    with Shard(source) as shard:
        header = shard.header
        return ShardFacts(
            shard=Path(file).name,
            path=str(file) if path is None else path,
            bytes=shard.nbytes,
            raw_bytes=header.raw_bytes,
            sha256=_digest(source),
            samples=len(header.samples),
            tokens=header.tokens,
            layers=header.layers,
            num_layers=header.num_layers,
            hidden_size=header.hidden_size,
            dtype=header.dtype,
            fingerprint_id=header.fingerprint_id,
            job_id=header.job_id,
            batch=header.batch,
        )


def _digest(source: Source) -> str:
    digest = hashlib.sha256()
    for offset in range(0, source.size, _HASH_BYTES):
        digest.update(source.read_at(offset, _HASH_BYTES))
    return digest.hexdigest()


def _check_extents(header: ShardHeader, extents: dict[str, Extent]) -> None:
    """The container must hold the tensors that the header names, in its sizes, and no others."""
    sizes = {
        tensor_name(index, name): sample.tensors[name].bytes
        for index, sample in enumerate(header.samples)
        for name in TENSORS
    }
    for name in sorted(sizes.keys() | extents.keys()):
        if name not in extents:
            raise MalformedShard("the header names it and the file has none", tensor=name)
        if name not in sizes:
            raise MalformedShard("the file has it and the header doesn't name it", tensor=name)
        if extents[name].nbytes != sizes[name]:
            raise MalformedShard(
                f"{extents[name].nbytes} bytes where the header says {sizes[name]}", tensor=name
            )
