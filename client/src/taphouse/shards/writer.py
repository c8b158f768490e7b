"""Writing shards: samples in, one sealed file (or the bytes of one) out.

The same samples and meta give the same bytes, for one version of the zstd library.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from taphouse.errors import InvalidSample, MalformedShard
from taphouse.samples import Sample, check_values
from taphouse.shards.codec import RAW_ZSTD, Blob, encode
from taphouse.shards.container import pack_header
from taphouse.shards.header import (
    MAX_SAMPLES,
    MAX_TOKENS,
    TENSORS,
    SampleInfo,
    ShardFacts,
    ShardMeta,
    TensorInfo,
    WitnessInfo,
    pack_metadata,
    tensor_name,
    tensor_specs,
)
from taphouse.shards.reader import describe_shard
from taphouse.store import LocalStagedFile, StagedFile, Store, os_errors

SHARD_DIRECTORY = "shards"
SUFFIX = ".safetensors"
_COPY_BYTES = 1 << 20


def shard_name(job_id: str, batch: int, prefix: str = "") -> str:
    """File name of the shard that a batch makes."""
    return f"{prefix}-{job_id}-{batch:06d}{SUFFIX}" if prefix else f"{job_id}-{batch:06d}{SUFFIX}"


def shard_path(name: str) -> str:
    """Path of a shard inside a store."""
    return f"{SHARD_DIRECTORY}/{name}"


class _Encoder:
    """Encodes samples one after the other and keeps what the header will say of them."""

    def __init__(self, meta: ShardMeta) -> None:
        self.meta = meta
        self.samples: list[SampleInfo] = []
        self._ids: set[str] = set()

    def add(self, sample: Sample) -> list[Blob]:
        """The sample's blobs, in the order they are stored. Raises `InvalidSample`."""
        self._check(sample)
        specs = tensor_specs(self.meta, sample.tokens)
        tensors: dict[str, TensorInfo] = {}
        blobs: list[Blob] = []
        for name in TENSORS:
            dtype, shape = specs[name]
            array = getattr(sample, name)
            encoded = encode(array, self.meta.codec if name == "hidden_states" else RAW_ZSTD)
            tensors[name] = TensorInfo(
                codec=encoded.codec,
                dtype=dtype,
                shape=shape,
                bytes=encoded.nbytes,
                raw_bytes=encoded.raw_bytes,
                sha256=encoded.sha256,
                planes=encoded.planes,
            )
            blobs.extend(encoded.parts)
        self.samples.append(
            SampleInfo(
                id=sample.id,
                tokens=sample.tokens,
                prompt_len=sample.prompt_len,
                next_token_id=sample.next_token_id,
                finish_reason=sample.finish_reason,
                witness=WitnessInfo.model_validate(asdict(sample.witness)) if sample.witness else None,
                tensors=tensors,
            )
        )
        self._ids.add(sample.id)
        return blobs

    def head(self) -> bytes:
        """The container's first bytes; the blobs follow it as they came."""
        if not self.samples:
            raise MalformedShard("a shard has at least one sample")
        sizes = (
            (tensor_name(index, name), sample.tensors[name].bytes)
            for index, sample in enumerate(self.samples)
            for name in TENSORS
        )
        return pack_header(pack_metadata(self.meta, self.samples), sizes)

    def _check(self, sample: Sample) -> None:
        problem = None
        expected = (len(self.meta.layers), self.meta.hidden_size)
        if len(self.samples) == MAX_SAMPLES:
            problem = f"a shard has at most {MAX_SAMPLES} samples"
        elif sample.id in self._ids:
            problem = "the shard has a sample of this id"
        elif sample.tokens > MAX_TOKENS:
            problem = f"{sample.tokens} tokens, at most {MAX_TOKENS} are allowed"
        elif sample.dtype != self.meta.dtype:
            problem = f"dtype {sample.dtype}, the shard's is {self.meta.dtype}"
        elif sample.hidden_states.shape[1:] != expected:
            problem = f"states are {list(sample.hidden_states.shape)}, not [T, {expected[0]}, {expected[1]}]"
        if problem:
            raise InvalidSample(problem, index=len(self.samples), sample=sample.id)
        try:
            check_values(sample, self.meta.layers)
        except InvalidSample as error:
            raise error.at(index=len(self.samples)) from None


class ShardWriter:
    """Writes one shard, a sample at a time, and seals it.

    A context manager: leaving it without `seal` leaves no trace. Encoded samples wait in an unnamed file
    beside the target, because the header stands first and is known last.
    """

    def __init__(self, target: str | os.PathLike[str] | StagedFile, meta: ShardMeta) -> None:
        self._file: StagedFile = (
            LocalStagedFile(Path(target)) if isinstance(target, (str, os.PathLike)) else target
        )
        self._encoder = _Encoder(meta)
        try:
            self._blobs = self._file.scratch()
        except BaseException:
            self._file.abort()
            raise

    def add(self, sample: Sample) -> None:
        """Encode a sample and append it. Raises `InvalidSample` (nothing was added) and `StoreFull`."""
        blobs = self._encoder.add(sample)
        with os_errors(self._file.path):
            for blob in blobs:
                self._blobs.write(blob)

    def seal(self) -> ShardFacts:
        """Make the shard durable and visible under its name.

        When that name holds a sealed shard already, that one stays and its facts are returned; it raises
        `ShardError` when it isn't a whole shard.
        """
        head = self._encoder.head()
        digest = hashlib.sha256(head)
        size = len(head)
        self._file.write(head)
        with os_errors(self._file.path):
            self._blobs.seek(0)
            while chunk := self._blobs.read(_COPY_BYTES):
                digest.update(chunk)
                size += len(chunk)
                self._file.write(chunk)
            self._blobs.close()
        if not self._file.seal():
            return describe_shard(self._file.local_path(), path=self._file.path)
        meta, samples = self._encoder.meta, self._encoder.samples
        return ShardFacts(
            shard=Path(self._file.path).name,
            path=self._file.path,
            bytes=size,
            raw_bytes=sum(info.raw_bytes for sample in samples for info in sample.tensors.values()),
            sha256=digest.hexdigest(),
            samples=len(samples),
            tokens=sum(sample.tokens for sample in samples),
            layers=meta.layers,
            num_layers=meta.num_layers,
            hidden_size=meta.hidden_size,
            dtype=meta.dtype,
            fingerprint_id=meta.fingerprint_id,
            job_id=meta.job_id,
            batch=meta.batch,
        )

    def abort(self) -> None:
        """Drop what was written. Does nothing after `seal`."""
        self._blobs.close()
        self._file.abort()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()


def write_shard(store: Store, name: str, samples: Iterable[Sample], meta: ShardMeta) -> ShardFacts:
    """Write a shard into a store under `shards/<name>`, holding one sample in memory at a time.

    An existing sealed shard of that name wins: its facts are returned and `samples` is not touched.
    """
    path = shard_path(name)
    if store.exists(path):
        return describe_shard(store.local_path(path), path=path)
    with store.create(path) as staged, ShardWriter(staged, meta) as writer:
        for sample in samples:
            writer.add(sample)
        return writer.seal()


def encode_shard(samples: Iterable[Sample], meta: ShardMeta) -> bytes:
    """The bytes of a shard, made in memory: for a few samples."""
    encoder = _Encoder(meta)
    blobs = [blob for sample in samples for blob in encoder.add(sample)]
    return b"".join([encoder.head(), *blobs])
