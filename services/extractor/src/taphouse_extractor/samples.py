"""Samples of a person or a tenant, found by id and deleted.

Deleting, each step safe to repeat. First every batch of the jobs concerned is settled: it has its outcome, or
it was closed for good (a job that was left unfinished counts as cancelled, and then none of it is sealed any
more; what was sealed before gets its entry and outcome). Then, a batch at a time:

1. the batch's shard is written anew without them, under a name that follows from what is kept, and its ledger
   entry gets the new one; a shard of which nothing is left is said to be gone,
2. the old file is deleted,
3. their ids are taken out of the batch's outcome, where they had failed,

and for a job at last 4. their rows are blanked, in a new file of the same offsets. Until then they are
found again, so a deletion that was cut short is finished by the next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from taphouse.errors import NotInStore, StoreBusy
from taphouse.ledger import Ledger, LedgerEntry
from taphouse.shards import ShardFacts, ShardWriter, open_shard, shard_path
from taphouse.wire import FoundSample, SampleQuery, SamplesDeleted, SamplesFound
from taphouse_extractor.blanked import blank_rows, numbered_rows
from taphouse_extractor.errors import Conflict, NotFound
from taphouse_extractor.moves import Move, Moves
from taphouse_extractor.records import DELETING, BatchRef, JobRecord, Records

__all__ = ["Samples"]

SHOWN = 1000
DELETED = "samples were deleted"


@dataclass(frozen=True)
class _Row:
    """A row's number, its sample's id, and what it says of itself."""

    row: int
    id: str
    own_id: str | None
    user: str | None

    def is_meant(self, query: SampleQuery) -> bool:
        ids = query.ids or ()
        return (
            query.tenant is not None
            or self.id in ids
            or self.own_id in ids
            or (self.user is not None and self.user == query.user)
        )


class Samples:
    """Finds and deletes. `settled` says whether nothing of a job runs or will run, `close` ends a batch."""

    def __init__(
        self,
        records: Records,
        ledger: Ledger,
        settled: Callable[[str], bool],
        close: Callable[[JobRecord, BatchRef], object],
    ) -> None:
        self._records, self._ledger, self._settled, self._close = records, ledger, settled, close
        self._moves = Moves(records.store)

    def find(self, query: SampleQuery) -> SamplesFound:
        """All rows that the query names, counted, and the first of them. Reads the rows of all jobs."""
        count, shown = 0, list[FoundSample]()
        for job in self._jobs(query):
            for batch, matches, moves in self._with_moves(job, query):
                if len(shown) < SHOWN:
                    shown += self._found(job, batch, matches, moves)
                count += len(matches)
        return SamplesFound(rows=count, samples=shown[:SHOWN])

    def delete(self, query: SampleQuery) -> SamplesDeleted:
        """Delete them; raises `Conflict`, before anything is done, while a job of theirs may run."""
        with self._records.store.lock(DELETING):
            jobs = [job for job in self._jobs(query) if any(True for _ in self._matches(job, query))]
            for job in jobs:
                if not self._settled(job.id):
                    raise Conflict(f"job {job.id} has some and may still run: cancel it, or wait for its end")
            for job in jobs:
                self._close_all(job)
            rows, samples = 0, 0
            rewritten, removed = list[str](), list[str]()
            for job in jobs:
                blank = set[int]()
                for batch, matches, moves in self._with_moves(job, query):
                    ids = {match.id for match in matches}
                    for ref in self._places(job, batch, matches, moves):
                        taken, name = self._take_out(job, ref, ids)
                        self._forget_failures(ref, ids)
                        samples += taken
                        if taken:
                            (rewritten if name else removed).append(name or job.shard_of(ref.batch))
                    blank |= {match.row for match in matches}
                blank_rows(self._records, job, blank)
                rows += len(blank)
            return SamplesDeleted(rows=rows, samples=samples, rewritten=rewritten, removed=removed)

    def _jobs(self, query: SampleQuery) -> Iterator[JobRecord]:
        for job_id in self._records.job_ids():
            try:
                job = self._records.job(job_id)
            except NotFound:  # an upload that was refused or cut short leaves its directory
                continue
            if job.spooled and (query.tenant is None or job.tenant == query.tenant):
                yield job

    def _close_all(self, job: JobRecord) -> None:
        """Settle the batches that have no outcome. Raises `Conflict` while somebody seals one."""
        moves, finished = self._moves.of(job.id), set(self._records.finished(job.id))
        left = [batch for batch in range(moves[-1].end if moves else job.batches) if batch not in finished]
        if left:
            self._records.cancel(job.id)
        for batch in left:
            try:
                self._close(job, BatchRef(job_id=job.id, batch=batch))
            except StoreBusy as error:
                raise Conflict(f"a worker seals a shard of job {job.id}: ask again in a moment") from error

    def _matches(self, job: JobRecord, query: SampleQuery) -> Iterator[tuple[int, list[_Row]]]:
        """Rows that the query names, by batch; rows that were blanked before match nothing.

        Rows of one batch that have the same id go together: their samples' ids follow from each other.
        """
        for batch in range(job.batches):
            rows = [
                _Row(numbered.row, numbered.id, **fields)
                for numbered in numbered_rows(self._records, job, batch)
                if (fields := _fields(numbered.line)) is not None
            ]
            named = {row.own_id or row.id for row in rows if row.is_meant(query)}
            found = [row for row in rows if (row.own_id or row.id) in named]
            if found:
                yield batch, found

    def _with_moves(
        self, job: JobRecord, query: SampleQuery
    ) -> Iterator[tuple[int, list[_Row], Sequence[Move]]]:
        """As `_matches`, with the job's moves, which are read once if at all."""
        moves: Sequence[Move] | None = None
        for batch, matches in self._matches(job, query):
            moves = self._moves.of(job.id) if moves is None else moves
            yield batch, matches, moves

    def _places(
        self, job: JobRecord, batch: int, matches: list[_Row], moves: Sequence[Move]
    ) -> Iterator[BatchRef]:
        """The batch that rows stand in, and those they were moved into."""
        yield BatchRef(job_id=job.id, batch=batch)
        for move in moves:
            for number in self._moves.batches_with(job.id, move, (match.row for match in matches)):
                yield BatchRef(job_id=job.id, batch=number)

    def _found(
        self, job: JobRecord, batch: int, matches: list[_Row], moves: Sequence[Move]
    ) -> list[FoundSample]:
        entries = [self._entry(job, ref) for ref in self._places(job, batch, matches, moves)]
        held = [(entry, self._ids(entry)) for entry in entries]
        return [
            _found(job, match, next((entry for entry, ids in held if match.id in ids), None))
            for match in matches
        ]

    def _entry(self, job: JobRecord, ref: BatchRef) -> LedgerEntry | None:
        """The ledger entry of a batch as it stands, None when it made no shard."""
        first = self._ledger.find(job.shard_of(ref.batch))
        return self._ledger.entry(first.seq) if first is not None else None

    def _ids(self, entry: LedgerEntry | None) -> set[str]:
        if entry is None or entry.gone is not None:
            return set()
        try:
            with open_shard(self._records.store.local_path(entry.path)) as shard:
                return {sample.id for sample in shard.header.samples}
        except NotInStore:
            return set()

    def _take_out(self, job: JobRecord, ref: BatchRef, ids: set[str]) -> tuple[int, str | None]:
        """Take samples out of a batch's shard: how many, and the new shard's name (None: nothing is left)."""
        store, original = self._records.store, job.shard_of(ref.batch)
        entry = self._entry(job, ref)
        if entry is None:
            return 0, None
        taken, name = ids & self._ids(entry), entry.shard
        if taken:
            kept = self._ids(entry) - ids
            if kept:
                digest = hashlib.sha256("\0".join(sorted(kept)).encode()).hexdigest()[:12]
                name = f"{original.removesuffix('.safetensors')}.{digest}.safetensors"
                self._ledger.replace(entry.seq, name, lambda: self._seal(entry, name, kept))
            else:
                self._ledger.remove(entry.seq, DELETED)
        now = self._ledger.entry(entry.seq)
        left = now.shard if now is not None and now.gone is None else None
        for old in {original, entry.shard, entry.replaces or original} - {left}:
            store.delete(shard_path(old))
        return len(taken), left

    def _seal(self, entry: LedgerEntry, name: str, kept: set[str]) -> ShardFacts:
        store, path = self._records.store, shard_path(name)
        with (
            open_shard(store.local_path(entry.path), sha256=entry.sha256) as shard,
            store.create(path) as staged,
            ShardWriter(staged, shard.header.meta) as writer,
        ):
            for index, sample in enumerate(shard.header.samples):
                if sample.id in kept:
                    writer.add(shard[index])
            return writer.seal()

    def _forget_failures(self, ref: BatchRef, ids: set[str]) -> None:
        outcome = self._records.outcome(ref)
        if outcome is not None and any(failure.id in ids for failure in outcome.failures):
            cleared = tuple(
                failure.model_copy(update={"id": None, "reason": DELETED}) if failure.id in ids else failure
                for failure in outcome.failures
            )
            self._records.change_outcome(outcome.model_copy(update={"failures": cleared}))


def _fields(line: bytes) -> dict[str, str | None] | None:
    """A row's `id` and `user` as text; None for one that was blanked, or is no row."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not value:
        return None
    own, user = value.get("id"), value.get("user")
    return {
        "own_id": str(own) if isinstance(own, (str, int)) else None,
        "user": str(user) if isinstance(user, (str, int)) else None,
    }


def _found(job: JobRecord, match: _Row, entry: LedgerEntry | None) -> FoundSample:
    return FoundSample(
        job_id=job.id,
        row=match.row,
        id=match.id,
        user=match.user,
        shard=entry.shard if entry is not None else None,
        seq=entry.seq if entry is not None else None,
    )
