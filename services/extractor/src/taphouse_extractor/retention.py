"""Takes shards away to free their space, when the settings or an admin say so.

An entry keeps its number and says that its shard is gone, and only then is the file deleted. A shard stays

- until every registered consumer has acknowledged it (unless forced); without a consumer nothing is consumed,
- until its batch has an outcome: before, a worker may still look for it (not where its job was removed),
- while somebody deletes samples.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from taphouse.errors import StoreBusy, TaphouseError, WrongStore
from taphouse.ledger import Ledger, LedgerEntry
from taphouse.wire import Pruned, PruneRequest
from taphouse.wire import Retention as View
from taphouse_extractor.consumers import named, registered
from taphouse_extractor.errors import NotFound
from taphouse_extractor.records import DELETING, BatchRef, Records
from taphouse_extractor.trouble import Trouble

__all__ = ["Retention", "RetentionPolicy"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetentionPolicy:
    """`keep` all; or delete what is `consumed`, or at an `age` of `age_s` seconds and not still awaited."""

    mode: Literal["keep", "consumed", "age"] = "keep"
    age_s: float = 0.0


@dataclass(frozen=True)
class _Limit:
    """Entries up to `seq` may go; `why` says what holds the next, `by` which consumers do."""

    seq: int
    why: str | None
    by: tuple[str, ...] = ()


class Retention:
    """Prunes by a policy, again and again, or once by request. `clock` gives unix seconds.

    `wrong` says why the store is not the service's, or None.
    """

    def __init__(
        self,
        records: Records,
        ledger: Ledger,
        policy: RetentionPolicy,
        clock: Callable[[], float] = time.time,
        *,
        wrong: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._records, self._ledger, self._policy, self._clock = records, ledger, policy, clock
        self._wrong = wrong
        self._clean = 0

    def run(self, stop: threading.Event, every_s: float) -> None:
        """Prune by the policy until `stop` is set; what is in the way is logged, and tried again."""
        trouble = Trouble(log, "retention")
        while not stop.wait(every_s):
            try:
                self.step()
                trouble.over()
            except StoreBusy:
                continue  # another API process prunes, or samples are being deleted
            except (TaphouseError, OSError) as error:
                trouble.met(error)
            except Exception as error:
                trouble.unexpected(error)

    def step(self) -> Pruned:
        """Prune by the policy, once. Raises `StoreBusy` while another prunes, and the store's errors."""
        if self._policy.mode == "keep":
            return Pruned(shards=0, bytes=0)
        wrong = self._wrong()
        if wrong is not None:
            raise WrongStore(wrong)
        by_age = self._policy.mode == "age"
        limit = self._acknowledged(without_consumers=by_age)
        before = self._clock() - self._policy.age_s if by_age else None
        why = f"older than {self._policy.age_s:g} s" if by_age else "consumed"
        with self._records.store.lock(DELETING, wait=False):
            return self._prune(limit, before, f"deleted by retention: {why}")

    def shown(self) -> View | None:
        """The policy, and which consumers hold what it would delete; None where it can't be told."""
        mode, limit = self._policy.mode, _Limit(0, None)
        try:
            if mode != "keep":
                limit = self._acknowledged(without_consumers=mode == "age")
        except TaphouseError:
            return None
        age_s = self._policy.age_s if mode == "age" else None
        return View(mode=mode, age_s=age_s, held=limit.why, held_by=list(limit.by))

    def prune(self, request: PruneRequest) -> Pruned:
        """Prune what is asked for; waits for another's pruning."""
        with self._records.store.lock(DELETING):
            limit = _Limit(self._ledger.head(), None) if request.force else self._acknowledged()
            before = None if request.older_than_s is None else self._clock() - request.older_than_s
            why = "pruned, by force" if request.force else "pruned once consumed"
            return self._prune(limit, before, why, dry_run=request.dry_run)

    def _acknowledged(self, *, without_consumers: bool = False) -> _Limit:
        """Up to where all consumers need nothing more; all `without_consumers`, or nothing."""
        head, consumers = self._ledger.head(), registered(self._records.store)
        if not consumers:
            return _Limit(head, None) if without_consumers else _Limit(0, "no consumer is registered")
        done = min(consumer.acknowledged or 0 for consumer in consumers)
        if done >= head:
            return _Limit(head, None)
        holding = [consumer for consumer in consumers if (consumer.acknowledged or 0) == done]
        why = f"consumer {named(holding, self._clock())} acknowledged {done} of {head} entries"
        return _Limit(done, why, tuple(consumer.name for consumer in holding))

    def _prune(self, limit: _Limit, before: float | None, why: str, *, dry_run: bool = False) -> Pruned:
        shards, size, held, clean = 0, 0, limit.why, True
        for entry in self._ledger.entries(self._clean if self._clean <= self._ledger.head() else 0):
            if entry.seq > limit.seq:
                break
            if before is not None and entry.gone is None and entry.created_at > before:
                held = f"entry {entry.seq} is younger"
                break  # entries are in order of time, so are all after it
            if not self._settled(entry):
                held, clean = f"the batch of entry {entry.seq} has no outcome yet", False
                continue
            if entry.gone is None:
                shards, size = shards + 1, size + entry.bytes
            if not dry_run:
                self._take_away(entry, why)
                self._clean = entry.seq if clean else self._clean
        if shards and not dry_run:
            log.info("%d shards of %d bytes %s", shards, size, why)
        return Pruned(shards=shards, bytes=size, dry_run=dry_run, held=held)

    def _settled(self, entry: LedgerEntry) -> bool:
        if entry.job_id is None or entry.batch is None:
            return True
        if self._records.outcome(BatchRef(job_id=entry.job_id, batch=entry.batch)) is not None:
            return True
        try:
            self._records.job(entry.job_id)
        except NotFound:  # it was removed: nobody runs a batch of it
            return True
        return False

    def _take_away(self, entry: LedgerEntry, why: str) -> None:
        """Say so in the ledger, then delete the file; one that a crash left behind is deleted now."""
        if entry.gone is None:
            self._ledger.remove(entry.seq, why)
        self._records.store.delete(entry.path)
