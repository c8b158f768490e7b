"""The ledger: the ordered record of sealed shards that trainers consume.

Entries are files `ledger/<seq>.json` in the store, numbered from 1 without gaps. A second
name of the same file, `ledger/by-shard/<shard>.json`, says that a shard has its entry. A cursor is a
sequence number.

Appending, under the lock: (1) names that a killed writer may have made are flushed, and the newest entry's
by-shard name is made if it is missing, (2) a shard that has an entry gets that one back, (3) the entry is
written to a temporary file, flushed, linked to its number and the directory flushed, (4) linked by shard. A
writer killed between 3 and 4 leaves only the newest entry without its second name, which 1 repairs. Then
(5) `ledger/last` is set to the number. It may lag, never lead: when it names more than there is, an entry
was removed, and its number is not given again, since consumers may be past it. Readers need no lock: entry
`seq + 1` is there, whole, or isn't yet.

An entry changes in three cases only, each by one rename, and keeps its number: its shard was written anew
without some samples (`replaces` names the one before), or taken away (`gone` says why), or was lost before
its batch had an outcome, and made again. Consumers that are past the number see nothing; the others get what
is left. Whoever finds that a shard isn't there reads its entry again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationError

from taphouse.errors import LedgerError, NotInStore, ShardError, StoreBusy, UnsafePath
from taphouse.shards.header import ShardFacts
from taphouse.shards.reader import describe_shard
from taphouse.shards.writer import SHARD_DIRECTORY, SUFFIX, shard_path
from taphouse.store import Store, last_number, to_json

_DIRECTORY = "ledger"
_BY_SHARD = f"{_DIRECTORY}/by-shard"
_LOCK = f"{_DIRECTORY}/lock"
_LAST = f"{_DIRECTORY}/last"


class LedgerEntry(ShardFacts):
    """A shard's facts and its place in the order. `created_at` is in unix seconds.

    `gone` says why there is no such shard any more, `replaces` which shard had the entry before.
    """

    version: Literal[1] = 1
    seq: int = Field(ge=1)
    created_at: float
    gone: str | None = None
    replaces: str | None = None


@dataclass(frozen=True)
class Reconciliation:
    """What `Ledger.reconcile` did and found.

    `added`: entries of sealed shards that had none. `missing`: entries whose shard is gone. `refused`:
    names of files that are no whole shards, each with the reason; they get no entry.
    """

    added: tuple[LedgerEntry, ...]
    missing: tuple[LedgerEntry, ...]
    refused: tuple[tuple[str, str], ...]


class Ledger:
    """The ledger of a store. Any number of processes and threads may append and read at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known_head = 0

    def append(self, facts: ShardFacts, *, created_at: float | None = None) -> LedgerEntry:
        """Record a sealed shard; durable when this returns.

        A shard that has an entry keeps it, and that entry is returned; of one that was made again because its
        file was lost, the entry says now what `facts` say. Raises `StoreError` when the store
        can't be written (no entry was made, or the one made is found by the next append), `LedgerError`
        when the newest entry can't be read or one was removed.
        """
        with self._store.lock(_LOCK):
            head = self._repair()
            existing = self.find(facts.shard)
            if existing is not None:
                current = self.entry(existing.seq)
                if current != existing and not _changed(existing, current):
                    raise LedgerError(
                        f"shard {facts.shard} has ledger entry {existing.seq}, which is not in the ledger",
                        advice=_RESTORE,
                    )
                return self._remade(current or existing, facts)
            last = self._last()
            if last > head:
                raise LedgerError(
                    f"ledger entry {head + 1} is missing, numbers up to {last} were given", advice=_RESTORE
                )
            entry = LedgerEntry(
                seq=head + 1,
                created_at=time.time() if created_at is None else created_at,
                **{name: getattr(facts, name) for name in ShardFacts.model_fields},
            )
            if not self._store.put_new(_entry_path(entry.seq), _to_json(entry)):
                raise LedgerError(
                    f"ledger entry {entry.seq} appeared while the lock was held",
                    advice="The store's file system must support flock: check how it is mounted",
                )
            self._store.link(_entry_path(entry.seq), _shard_entry_path(entry.shard))
            self._store.put(_LAST, str(entry.seq).encode(), durable=False)
            self._known_head = entry.seq
            return entry

    def entries(self, after: int = 0) -> Iterator[LedgerEntry]:
        """Entries with a number over `after`, in order, as far as there are any now.

        To follow the ledger, call it again with the last entry's `seq`. Raises `LedgerError` for an
        unreadable entry, for one missing below the head, and for a cursor past the head (another store's, or
        one that was reset).
        """
        if after and self.entry(after) is None:
            raise LedgerError(
                f"cursor {after} is past the ledger's head {self.head()}",
                advice="The store was reset or is another one: begin again at cursor 0 or use the old store",
            )
        seq = after + 1
        while (entry := self.entry(seq)) is not None:
            yield entry
            seq += 1
        if self._exists(seq + 1) and not self._exists(seq):
            raise LedgerError(f"ledger entry {seq} is missing and {seq + 1} is there", advice=_RESTORE)

    def entry(self, seq: int) -> LedgerEntry | None:
        """Entry number `seq` (from 1), or None when there is none yet."""
        try:
            return self._read(seq)
        except NotInStore:
            return None

    def replace(self, seq: int, shard: str, seal: Callable[[], ShardFacts]) -> LedgerEntry:
        """Give entry `seq` another shard, which `seal` seals under the name `shard`; durable on return.

        The name is known before the file is there, so that no crash makes an entry of its own for it. The
        old file is the caller's to delete, afterwards. Doing it again after a crash is safe.
        """
        with self._store.lock(_LOCK):
            old = self._read(seq)
            self._store.link(_entry_path(seq), _shard_entry_path(shard))
            facts = {name: getattr(made, name) for made in [seal()] for name in ShardFacts.model_fields}
            new = LedgerEntry(seq=seq, created_at=old.created_at, replaces=old.shard, **facts)
            self._store.put(_entry_path(seq), _to_json(new))
            self._store.put(_shard_entry_path(shard), _to_json(new))
            return new

    def remove(self, seq: int, why: str) -> LedgerEntry:
        """Say that the shard of entry `seq` is gone; durable on return. Deleting its file comes after."""
        with self._store.lock(_LOCK):
            gone = self._read(seq).model_copy(update={"gone": why})
            self._store.put(_entry_path(seq), _to_json(gone))
            return gone

    def find(self, shard: str) -> LedgerEntry | None:
        """The entry of a shard (its file name), or None; for one that was replaced, as it was."""
        try:
            found = _parse(self._store.read(_shard_entry_path(shard)), f"of shard {shard}")
        except NotInStore:
            return None
        current = self.entry(found.seq)
        return current if current is not None and current.shard == shard else found

    def head(self) -> int:
        """The newest entry's number; 0 when there are none.

        Entries have no gaps, so it is found in a few dozen look-ups however many there are.
        """
        self._known_head = last_number(self._exists, self._known_head)
        return self._known_head

    def takes_entries(self, patience_s: float) -> bool:
        """Whether one could be made within `patience_s`; False while somebody holds the lock that long."""
        until, head = time.monotonic() + patience_s, self.head()
        while True:
            try:
                with self._store.lock(_LOCK, wait=False):
                    return True
            except StoreBusy:
                if self.head() > head:
                    return True
                if time.monotonic() >= until:
                    return False
            time.sleep(0.02)

    def reconcile(self) -> Reconciliation:
        """Give every sealed shard its entry, in order of its name, and name entries whose shard is gone.

        For after a crash between sealing and appending, or when a ledger was lost. Goes through two
        directories, a name at a time, and reads shards without an entry whole.
        """
        added, refused, missing = [], [], []
        head = self.head()
        present = (name for name in self._store.scan(SHARD_DIRECTORY) if name.endswith(SUFFIX))
        for name in sorted(name for name in present if not self._recorded(name)):
            path = shard_path(name)
            try:
                facts = describe_shard(self._store.local_path(path), path=path)
            except ShardError as error:
                refused.append((name, error.detail))
            except NotInStore:
                continue
            else:
                entry = self.append(facts)
                if entry.seq > head:  # otherwise it had one, and only its second name was missing
                    added.append(entry)
        for name in (recorded.removesuffix(".json") for recorded in self._store.scan(_BY_SHARD)):
            gone = None if self._store.exists(shard_path(name)) else self.find(name)
            if gone is not None and gone.gone is None and not self._was_replaced(name, gone):
                missing.append(gone)
        missing.sort(key=lambda entry: entry.seq)
        return Reconciliation(tuple(added), tuple(missing), tuple(refused))

    def _remade(self, entry: LedgerEntry, facts: ShardFacts) -> LedgerEntry:
        """The entry, brought up to the file that has its shard's name now; the lock is held."""
        if entry.gone is not None or entry.shard != facts.shard or entry.sha256 == facts.sha256:
            return entry
        new = entry.model_copy(update={name: getattr(facts, name) for name in ShardFacts.model_fields})
        self._store.put(_entry_path(entry.seq), _to_json(new))
        self._store.put(_shard_entry_path(new.shard), _to_json(new))
        return new

    def _recorded(self, name: str) -> bool:
        """Whether a file among the shards has an entry; one with too long a name has none."""
        with suppress(UnsafePath):
            return self._store.exists(_shard_entry_path(name))
        return False

    def _repair(self) -> int:
        """Finish what a killed writer may have left undone; the lock is held. Returns the head."""
        self._store.flush(_DIRECTORY)
        head = self.head()
        if head:
            self._store.link(_entry_path(head), _shard_entry_path(self._read(head).shard))
        return head

    def _was_replaced(self, name: str, entry: LedgerEntry) -> bool:
        """Whether an entry's shard has another name now, or `name` was meant to become it and did not."""
        current = self.entry(entry.seq)
        return current is not None and current.shard != name

    def _last(self) -> int:
        """The largest number that was surely given; 0 when none was, or a lost write left no number."""
        try:
            return int(self._store.read(_LAST))
        except (NotInStore, ValueError):
            return 0

    def _exists(self, seq: int) -> bool:
        return self._store.exists(_entry_path(seq))

    def _read(self, seq: int) -> LedgerEntry:
        entry = _parse(self._store.read(_entry_path(seq)), str(seq))
        if entry.seq != seq:
            raise LedgerError(f"ledger entry {seq} calls itself {entry.seq}", advice=_RESTORE)
        return entry


_RESTORE = "Restore the ledger directory from a copy, or move it away and run reconcile"


def _changed(before: LedgerEntry, now: LedgerEntry | None) -> bool:
    """Whether `now` is what became of `before` when its shard was replaced, taken away or made again."""
    if now is None or (now.job_id, now.batch) != (before.job_id, before.batch):
        return False
    return now.gone is not None or now.replaces is not None or now.shard == before.shard


def _entry_path(seq: int) -> str:
    return f"{_DIRECTORY}/{seq:012d}.json"


def _shard_entry_path(shard: str) -> str:
    return f"{_BY_SHARD}/{shard}.json"


def _to_json(entry: LedgerEntry) -> bytes:
    """The entry as it lies in the store: without what says nothing."""
    silent = {name for name in ("gone", "replaces") if getattr(entry, name) is None}
    return to_json(entry.model_dump(exclude=silent))


def _parse(data: bytes, name: str) -> LedgerEntry:
    try:
        return LedgerEntry.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise LedgerError(
            f"ledger entry {name} can't be read ({where}: {first['msg']})", advice=_RESTORE
        ) from error
