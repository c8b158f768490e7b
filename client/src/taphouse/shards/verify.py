"""Checking a whole shard: every sample is decoded, and everything wrong is named."""

from __future__ import annotations

import os
from dataclasses import dataclass

from taphouse.errors import ShardError
from taphouse.shards.reader import ShardSource, open_shard


@dataclass(frozen=True)
class Finding:
    """One bad sample: where it is, the kind of error (its class's name) and what is wrong."""

    index: int
    id: str
    tensor: str | None
    kind: str
    problem: str


@dataclass(frozen=True)
class Report:
    """What `verify_shard` found. `problem` is set when the shard can't be opened at all; `bad` names samples.

    `samples` and `tokens` count what the header declares, `good` the samples that are as they were written,
    `witnessed` those that carry the engine's own top tokens (a trainer compares them with the states);
    `bytes` and `raw_bytes` are those of the file and of its tensors decoded. All are 0 when it can't be
    opened.
    """

    source: str
    problem: str | None = None
    kind: str | None = None
    samples: int = 0
    good: int = 0
    witnessed: int = 0
    tokens: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    bad: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every byte and value is as it should be."""
        return self.problem is None and not self.bad


def verify_shard(source: ShardSource, *, sha256: str | None = None) -> Report:
    """Decode and check every sample of a shard: a path, or the bytes of one.

    `sha256`, when given, must be the file's. A bad shard is reported, never raised. Raises `StoreError`
    when the file can't be read.
    """
    name = str(source) if isinstance(source, (str, os.PathLike)) else "<bytes>"
    try:
        shard = open_shard(source, sha256=sha256)
    except ShardError as error:
        return Report(name, problem=error.at(source=name).detail, kind=type(error).__name__)
    with shard:
        bad = []
        for index, info in enumerate(shard.header.samples):
            try:
                shard[index]
            except ShardError as error:
                bad.append(Finding(index, info.id, error.tensor, type(error).__name__, error.detail))
        return Report(
            name,
            samples=len(shard),
            good=len(shard) - len(bad),
            witnessed=sum(info.witness is not None for info in shard.header.samples),
            tokens=shard.header.tokens,
            bytes=shard.nbytes,
            raw_bytes=shard.header.raw_bytes,
            bad=tuple(bad),
        )
