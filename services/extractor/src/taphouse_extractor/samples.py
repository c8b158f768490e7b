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

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from taphouse.errors import (
    LedgerError,
    ShardError,
    StoreBusy,
    StoreError,
    StoreFull,
    TaphouseError,
    WrongStore,
)
from taphouse.ledger import Ledger, LedgerEntry
from taphouse.wire import FoundSample, SampleQuery, SamplesDeleted, SamplesFound
from taphouse_extractor.blanked import blank_rows, numbered_rows
from taphouse_extractor.errors import Conflict, NotFound
from taphouse_extractor.moves import Move, Moves
from taphouse_extractor.records import DELETING, BatchRef, JobRecord, Records
from taphouse_extractor.rewriting import DELETED, Rewriting

__all__ = ["Samples"]

SHOWN = 1000


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


@dataclass
class _Done:
    """What was deleted so far, and what could not be."""

    rows: int = 0
    samples: int = 0
    rewritten: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def take(self, shard: str, taken: int, left: str | None) -> None:
        """So many samples were taken out of a shard, which is called `left` now."""
        self.samples += taken
        if taken:
            (self.rewritten if left else self.removed).append(left or shard)


class Samples:
    """Finds and deletes. `settled` says whether nothing of a job runs or will run, `close` ends a batch."""

    def __init__(
        self,
        records: Records,
        ledger: Ledger,
        settled: Callable[[str], bool],
        close: Callable[[JobRecord, BatchRef], object],
    ) -> None:
        self._records, self._settled, self._close = records, settled, close
        self._moves, self._rewriting = Moves(records.store), Rewriting(records.store, ledger)

    def find(self, query: SampleQuery) -> SamplesFound:
        """All rows that the query names, counted, and the first of them. Reads the rows of all jobs."""
        count, shown, problems = 0, list[FoundSample](), list[str]()
        for job in self._jobs(query, problems):
            with _noting(problems, f"job {job.id}"):
                if not job.spooled:
                    raise StoreError("its rows still come in")
                for batch, matches, moves in self._with_moves(job, query):
                    if len(shown) < SHOWN:
                        shown += self._found(job, batch, matches, moves, problems)
                    count += len(matches)
        return SamplesFound(rows=count, samples=shown[:SHOWN], problems=problems)

    def delete(self, query: SampleQuery) -> SamplesDeleted:
        """Delete them; raises `Conflict`, before anything is done, while a job of theirs may run.

        Damaged files keep it from what they hold, which is named, and from nothing else.
        """
        with self._records.store.lock(DELETING):
            done = _Done()
            jobs = self._jobs_to_delete_from(query, done.problems)
            failed = dict[str, dict[int, TaphouseError]]()
            for job in jobs:
                with _noting(done.problems, f"job {job.id}"):
                    failed[job.id] = self._close_all(job)
            for job in jobs:
                with _noting(done.problems, f"job {job.id}"):
                    if job.id in failed:
                        self._delete_of(job, query, failed[job.id], done)
            with _noting(done.problems, "what was left of deletions that were cut short"):
                self._rewriting.clear_left()
            return SamplesDeleted(
                rows=done.rows,
                samples=done.samples,
                rewritten=done.rewritten,
                removed=done.removed,
                problems=done.problems,
            )

    def _jobs(self, query: SampleQuery, problems: list[str]) -> Iterator[JobRecord]:
        """Jobs that may have some; those of a tenant also while their rows come in."""
        for job_id in self._records.job_ids():
            with _noting(problems, f"job {job_id}"):
                try:
                    job = self._records.job(job_id)
                except NotFound:  # an upload that was refused or cut short leaves its directory
                    continue
                if job.tenant == query.tenant if query.tenant is not None else job.spooled:
                    yield job

    def _jobs_to_delete_from(self, query: SampleQuery, problems: list[str]) -> list[JobRecord]:
        jobs = list[JobRecord]()
        for job in self._jobs(query, problems):
            if not job.spooled:
                raise Conflict(f"job {job.id} still comes in: wait for its end")
            with _noting(problems, f"job {job.id}"):
                if any(True for _ in self._matches(job, query)):
                    if not self._settled(job.id):
                        raise Conflict(
                            f"job {job.id} has some and may still run: cancel it, or wait for its end"
                        )
                    jobs.append(job)
        return jobs

    def _delete_of(
        self, job: JobRecord, query: SampleQuery, failed: dict[int, TaphouseError], done: _Done
    ) -> None:
        """Of one job. `failed`: why batches could not be settled."""
        blank = set[int]()
        for batch, matches, moves in self._with_moves(job, query):
            ids, before = {match.id for match in matches}, len(done.problems)
            for ref in self._places(job, batch, matches, moves):
                shard = job.shard_of(ref.batch)
                with _noting(done.problems, f"shard {shard}"):
                    if query.tenant is not None:  # all of it goes, whatever state its file is in
                        done.take(shard, self._rewriting.take_away(shard), None)
                    elif ref.batch in failed:
                        raise failed[ref.batch]
                    else:
                        outcome = self._records.outcome(ref)
                        given_up = outcome is not None and outcome.shard is None
                        done.take(shard, *self._rewriting.take_out(shard, ids, given_up=given_up))
                    self._forget_failures(ref, ids)
            if len(done.problems) == before:
                blank |= {match.row for match in matches}
        if blank:
            blank_rows(self._records, job, blank)
            done.rows += len(blank)

    def _close_all(self, job: JobRecord) -> dict[int, TaphouseError]:
        """Settle the batches that have no outcome: why some can't be.

        Raises `Conflict` while somebody seals one.
        """
        failed = dict[int, TaphouseError]()
        moves, finished = self._moves.of(job.id), set(self._records.finished(job.id))
        left = [batch for batch in range(moves[-1].end if moves else job.batches) if batch not in finished]
        if left:
            self._records.cancel(job.id)
        for batch in left:
            try:
                self._close(job, BatchRef(job_id=job.id, batch=batch))
            except StoreBusy as error:
                raise Conflict(
                    f"a worker seals a shard of job {job.id}: wait for it, or end it, should it be frozen"
                ) from error
            except StoreFull:
                raise
            except (StoreError, ShardError, LedgerError) as error:
                failed[batch] = error
        return failed

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
        self,
        job: JobRecord,
        batch: int,
        matches: list[_Row],
        moves: Sequence[Move],
        problems: list[str],
    ) -> list[FoundSample]:
        held = list[tuple[LedgerEntry | None, set[str]]]()
        for ref in self._places(job, batch, matches, moves):
            shard = job.shard_of(ref.batch)
            with _noting(problems, f"shard {shard}"):
                held.append(self._rewriting.held(shard))
        return [
            _found(job, match, next((entry for entry, ids in held if match.id in ids), None))
            for match in matches
        ]

    def _forget_failures(self, ref: BatchRef, ids: set[str]) -> None:
        outcome = self._records.outcome(ref)
        if outcome is not None and any(failure.id in ids for failure in outcome.failures):
            cleared = tuple(
                failure.model_copy(update={"id": None, "reason": DELETED}) if failure.id in ids else failure
                for failure in outcome.failures
            )
            self._records.change_outcome(outcome.model_copy(update={"failures": cleared}))


@contextmanager
def _noting(problems: list[str], what: str) -> Iterator[None]:
    """Damage in the way is noted, with what it is in; a store that can't be used at all ends it."""
    try:
        yield
    except (StoreFull, StoreBusy, WrongStore):
        raise
    except ShardError as error:
        problems.append(f"{what}: {error.detail}")
    except (StoreError, LedgerError) as error:
        problems.append(f"{what}: {error.message}")


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
