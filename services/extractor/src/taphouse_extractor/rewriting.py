"""Samples taken out of sealed shards: a shard is written anew without them, or said to be gone.

The new file has a name that follows from what is kept, `<shard>.<digest>.safetensors`, and the ledger entry
names it. Other files of that shard are deleted, also what deletions left that were cut short.
"""

from __future__ import annotations

import hashlib
import re

from taphouse.errors import NotInStore, StoreError
from taphouse.ledger import Ledger, LedgerEntry
from taphouse.shards import SHARD_DIRECTORY, ShardFacts, ShardWriter, open_shard, shard_path
from taphouse.store import Store

__all__ = ["DELETED", "Rewriting"]

DELETED = "samples were deleted"
"""What ledger entries and outcomes say of them."""
REWRITTEN = re.compile(r"(.+)\.[0-9a-f]{12}\.safetensors")
SUFFIX = ".safetensors"


class Rewriting:
    """Shards are named as their batch made them. Raises `StoreError`s, `ShardError`s and `LedgerError`s."""

    def __init__(self, store: Store, ledger: Ledger) -> None:
        self._store, self._ledger = store, ledger

    def entry(self, shard: str) -> LedgerEntry | None:
        """A shard's ledger entry as it stands, None when there is none."""
        first = self._ledger.find(shard)
        return self._ledger.entry(first.seq) if first is not None else None

    def held(self, shard: str) -> tuple[LedgerEntry | None, set[str]]:
        """A shard's entry, and the ids of the samples that it holds now."""
        entry = self.entry(shard)
        while entry is not None and entry.gone is None:
            try:
                with open_shard(self._store.local_path(entry.path)) as file:
                    return entry, {sample.id for sample in file.header.samples}
            except NotInStore as error:
                before, entry = entry, self.entry(shard)  # written anew or taken away meanwhile
                if entry == before:
                    raise NotInStore(f"its file is not there: restore {before.path}") from error
        return entry, set()

    def take_out(self, shard: str, ids: set[str], *, given_up: bool = False) -> tuple[int, str | None]:
        """Take samples out: how many, and the name of the shard without them (None: nothing is left).

        `given_up`: its batch's outcome counts no shard; one without an entry was damaged, and goes whole.
        """
        entry, present = self.held(shard)
        if entry is None:
            if given_up:
                self._store.delete(shard_path(shard))
            elif self._store.exists(shard_path(shard)):
                raise StoreError(
                    "it has no ledger entry: it gets one within a minute, or the log says why not"
                )
            return 0, None
        taken, kept, name = ids & present, present - ids, entry.shard
        if taken and kept:
            digest = hashlib.sha256("\0".join(sorted(kept)).encode()).hexdigest()[:12]
            name = f"{shard.removesuffix(SUFFIX)}.{digest}{SUFFIX}"
            self._ledger.replace(entry.seq, name, lambda: self._seal(entry, name, kept))
        elif taken:
            self._ledger.remove(entry.seq, DELETED)
        return len(taken), self._clear(shard, {entry.shard, entry.replaces or shard})

    def take_away(self, shard: str) -> int:
        """Take a shard away with all that it holds, whatever state its file is in: how many samples."""
        entry = self.entry(shard)
        if entry is None:  # it was sealed and then damaged, and could get none
            self._store.delete(shard_path(shard))
            return 0
        if entry.gone is None:
            self._ledger.remove(entry.seq, DELETED)
        self._clear(shard, {entry.shard, entry.replaces or shard})
        return 0 if entry.gone is not None else entry.samples

    def clear_left(self) -> None:
        """Delete what deletions that were cut short left of shards that they wrote anew."""
        files: dict[str, set[str]] = {}
        for name in self._store.scan(SHARD_DIRECTORY):
            found = REWRITTEN.fullmatch(name)
            if found is not None:
                files.setdefault(f"{found[1]}{SUFFIX}", set()).add(name)
        for shard, names in files.items():
            self._clear(shard, names)

    def _clear(self, shard: str, names: set[str]) -> str | None:
        """Delete those of a shard's files that its entry doesn't name; returns the one that it names."""
        now = self.entry(shard)
        if now is None:
            return None
        left = now.shard if now.gone is None else None
        for old in {shard, *names} - {left}:
            self._store.delete(shard_path(old))
        return left

    def _seal(self, entry: LedgerEntry, name: str, kept: set[str]) -> ShardFacts:
        with (
            open_shard(self._store.local_path(entry.path), sha256=entry.sha256) as shard,
            self._store.create(shard_path(name)) as staged,
            ShardWriter(staged, shard.header.meta) as writer,
        ):
            for index, sample in enumerate(shard.header.samples):
                if sample.id in kept:
                    writer.add(shard[index])
            return writer.seal()
