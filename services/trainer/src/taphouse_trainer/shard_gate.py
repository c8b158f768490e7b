"""What may be trained on: every shard is examined once, whole, before its first sample is used.

A shard that is damaged, or whose states another checkpoint or other layers made, is refused with a reason;
its samples are never seen, not even the good ones before the damage, so that the same data always gives the
same training run. Refusals are remembered for the life of the process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from taphouse import errors
from taphouse.ledger import LedgerEntry
from taphouse.samples import Sample
from taphouse.shards import Shard, ShardHeader, open_shard
from taphouse.store import Store
from taphouse_trainer.errors import (
    SettingsConflict,
    ShardDamaged,
    ShardRefused,
    WitnessContradicts,
    WrongLayers,
    WrongTokens,
)
from taphouse_trainer.verifier import Verifier
from taphouse_trainer.witness import contradiction

log = logging.getLogger(__name__)

_REASONS: dict[type[errors.TaphouseError], str] = {
    errors.TruncatedShard: "truncated",
    errors.ChecksumMismatch: "checksum",
    errors.UnsupportedShard: "unsupported",
    errors.MalformedShard: "malformed",
    errors.NotFinite: "not-finite",
    errors.ZeroRow: "zero-row",
    errors.InvalidSample: "sample",
    errors.NotInStore: "missing",
}


@dataclass(frozen=True)
class Counted:
    """Of one sample: its id, token ids and loss mask (both ``[T]``)."""

    id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class Accepted:
    """A shard that may be trained on.

    ``columns``: where the draft's layers, then the final stream, stand on the layer axis. ``trainable[i]``:
    whether sample ``i`` has a token to train on.
    """

    entry: LedgerEntry
    columns: tuple[int, ...]
    sample_ids: tuple[str, ...]
    trainable: tuple[bool, ...]


@dataclass(frozen=True)
class Refused:
    """A shard that is left out, and why."""

    seq: int
    shard: str
    reason: str
    detail: str


class ShardGate:
    """Examines shards against the target.

    ``layers``: the auxiliary layer ids, ``None`` to take those of the first shard that is accepted.
    """

    def __init__(self, store: Store, verifier: Verifier, layers: tuple[int, ...] | None = None) -> None:
        if layers is not None:
            check_layers(layers, verifier.num_layers)
        self.layers = layers
        self.refused: list[Refused] = []
        self._store = store
        self._verifier = verifier
        self._verdicts: dict[tuple[int, str], Accepted | None] = {}
        self._fingerprints: set[str] = set()

    def examine(self, entry: LedgerEntry) -> Accepted | None:
        """The verdict on a shard: ``None`` when it is refused (see ``refused``)."""
        if (entry.seq, entry.shard) not in self._verdicts:
            self.inspect(entry)
        return self._verdicts[entry.seq, entry.shard]

    def inspect(self, entry: LedgerEntry) -> list[Counted]:
        """Examine a shard, and return the tokens of its samples; none when it is refused or gone."""
        if entry.gone is not None:
            self._verdicts[entry.seq, entry.shard] = None
            log.info("shard %s (ledger entry %d) is gone: %s", entry.shard, entry.seq, entry.gone)
            return []
        try:
            self._verdicts[entry.seq, entry.shard], counted = self._examine(entry)
        except ShardRefused as e:
            self.refuse(entry, e)
            return []
        return counted

    def refuse(self, entry: LedgerEntry, error: ShardRefused) -> None:
        """Leave a shard out from now on."""
        log.warning(
            "shard %s (ledger entry %d) refused: %s: %s",
            entry.shard,
            entry.seq,
            error.reason,
            error,
            extra={"shard": entry.shard, "seq": entry.seq, "job": entry.job_id, "batch": entry.batch},
        )
        self.refused.append(Refused(entry.seq, entry.shard, error.reason, str(error)))
        self._verdicts[entry.seq, entry.shard] = None

    def read(self, entry: LedgerEntry, index: int) -> Sample:
        """One verified sample of a shard.

        Raises:
            ShardDamaged: it changed since it was examined.
        """
        with _damage(), self._open(entry) as shard:
            return shard[index]

    @contextmanager
    def reading(self, entry: LedgerEntry) -> Iterator[Shard]:
        """The open shard, for several samples.

        Raises:
            ShardDamaged: it changed since it was examined.
        """
        with _damage(), self._open(entry) as shard:
            yield shard

    def _open(self, entry: LedgerEntry, sha256: str | None = None) -> Shard:
        return open_shard(self._store.local_path(entry.path), sha256=sha256)

    def _examine(self, entry: LedgerEntry) -> tuple[Accepted, list[Counted]]:
        with _damage(), self._open(entry):
            pass  # a cut file says so here; its checksum alone would only say that it is another one
        with _damage(), self._open(entry, entry.sha256) as shard:
            header = shard.header
            self._check_header(header)
            layers = self.layers or tuple(i for i in header.layers if i != header.num_layers)
            counted = []
            for i in range(len(shard)):
                sample = shard[i]
                if int(sample.token_ids.max()) >= self._verifier.vocab_size:
                    raise WrongTokens(
                        f"sample {sample.id} has token {int(sample.token_ids.max())}, "
                        f"the target knows {self._verifier.vocab_size}"
                    )
                if problem := contradiction(sample, header.layers.index(header.num_layers), self._verifier):
                    raise WitnessContradicts(f"sample {sample.id}: {problem}")
                counted.append(Counted(sample.id, sample.token_ids, sample.loss_mask))
        self.layers = layers
        if header.fingerprint_id not in self._fingerprints:
            self._fingerprints.add(header.fingerprint_id)
            log.info(
                "accepting states of fingerprint %s (layers %s)", header.fingerprint_id, list(header.layers)
            )
        wanted = (*layers, header.num_layers)
        accepted = Accepted(
            entry,
            columns=tuple(header.layers.index(i) for i in wanted),
            sample_ids=tuple(c.id for c in counted),
            trainable=tuple(bool(c.loss_mask[1:].any()) for c in counted),
        )
        return accepted, counted

    def _check_header(self, header: ShardHeader) -> None:
        target = self._verifier
        if (header.num_layers, header.hidden_size) != (target.num_layers, target.hidden_size):
            raise WrongLayers(
                f"{header.num_layers} layers of width {header.hidden_size}, the target has "
                f"{target.num_layers} of {target.hidden_size}"
            )
        if header.num_layers not in header.layers:
            raise WrongLayers(
                f"layers {list(header.layers)} lack {header.num_layers}, the stream entering the final norm"
            )
        missing = [i for i in self.layers or () if i not in header.layers]
        if missing:
            raise WrongLayers(f"layers {list(header.layers)} lack {missing}, which the draft is built on")
        if len(header.layers) < 2:
            raise WrongLayers(f"layers {list(header.layers)} leave the draft no layer to look at")
        target.check_fingerprint(header.fingerprint, header.dtype)


@contextmanager
def _damage() -> Iterator[None]:
    """Turn what reading a shard can raise into a refusal."""
    try:
        yield
    except errors.TaphouseError as e:
        reason = next((word for kind, word in _REASONS.items() if isinstance(e, kind)), "unreadable")
        raise ShardDamaged(str(e), reason) from e
    except FileNotFoundError as e:
        raise ShardDamaged("the ledger names it, but the file is gone", "missing") from e
    except OSError as e:
        raise ShardDamaged(f"can't be read: {e}", "unreadable") from e


def check_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """Refuse auxiliary layer ids that the target doesn't have.

    Raises:
        SettingsConflict: an id is repeated or outside ``0 … num_layers - 1``.
    """
    if not layers or len(set(layers)) != len(layers) or not all(0 <= i < num_layers for i in layers):
        raise SettingsConflict(f"layers {list(layers)} must be distinct ids from 0 to {num_layers - 1}")
