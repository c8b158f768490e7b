"""One batch, from prompts to a ledger entry. Start reading here.

    rows → prompts → engine → samples → shard → store → ledger → outcome

Every step may be repeated: a shard that is sealed wins over a second one, the ledger takes a shard once, and
the first outcome stays. So a worker may die anywhere, or two may run the same batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from taphouse.errors import InvalidSample, ShardError, StoreError
from taphouse.ledger import Ledger
from taphouse.samples import Sample
from taphouse.shards import (
    ShardFacts,
    ShardWriter,
    describe_shard,
    open_shard,
    shard_path,
)
from taphouse.wire import JobOptions, RowFailure
from taphouse_extractor.captured import pin_of, to_sample
from taphouse_extractor.engine import Capture, Engine, in_order, meta_of
from taphouse_extractor.engines import Engines
from taphouse_extractor.errors import (
    BadRow,
    CaptureFailed,
    Conflict,
    EngineChanged,
    EngineFailing,
    JobCancelled,
    RowRefused,
    error_code,
)
from taphouse_extractor.fill import Fill
from taphouse_extractor.fitting import Needs
from taphouse_extractor.moves import Moves, in_halves
from taphouse_extractor.records import BatchRef, JobRecord, Outcome, Records
from taphouse_extractor.rows import Numbered, parse_row, to_prompt, too_long
from taphouse_extractor.stages import StageClock
from taphouse_extractor.stands import Stands

__all__ = ["Pipeline"]

log = logging.getLogger(__name__)
GIVEN_UP = "given_up"
LOST = "made no sample when its batch was sealed; a worker that died since knew why"
LOCKS = 16
"""Lock files of a job: batches share them, so that a job of many batches leaves few."""


@dataclass
class _Run:
    """What a run finds out beside its shard: reasons by row number, and the engine that served it."""

    clock: StageClock
    fill: Fill
    failures: dict[int, RowFailure] = field(default_factory=dict)
    engine: str | None = None


class Pipeline:
    """Runs batches. `concurrency` rows of a batch are with the engine at once."""

    def __init__(self, records: Records, ledger: Ledger, engines: Engines, concurrency: int) -> None:
        self._records, self._ledger, self._engines = records, ledger, engines
        self._moves = Moves(records.store)
        self._stands = Stands(records, self._moves)
        self._concurrency = concurrency

    def run(self, ref: BatchRef, *, waited_s: float | None = None) -> Outcome:
        """Run a batch to its outcome; one that has an outcome or a sealed shard isn't run again.

        `waited_s` is how long it was queued, for the outcome's stages.

        Raises `EngineUnavailable`, `EngineChanged`, `EngineTimeout`, `EngineFailing` and `StoreError`s
        (nothing is decided: run it again), and `JobCancelled`.
        """
        known = self._records.outcome(ref)
        if known is not None:
            return known
        job = self._records.job(ref.job_id)
        if self._stands.halved(job, ref):
            return self._put_moved(ref, len(self._stands.numbers(job, ref)))  # who moved its rows died since
        run = _Run(StageClock(waited_s), Fill(job.options.max_shard_bytes, self._usual(job, ref)))
        return self._end(job, ref, self._shard(job, ref, run), run)

    def close(self, job: JobRecord, ref: BatchRef) -> Outcome | None:
        """End a batch that nobody may run any more: a sealed shard gets its entry, and makes the outcome.

        None where none is sealed; of a cancelled job none will be, whoever lives on. Raises `StoreBusy` while
        somebody seals.
        """
        known, path = self._records.outcome(ref), shard_path(job.shard_of(ref.batch))
        if known is not None:
            return known
        with self._deciding(ref, wait=False):
            if not self._records.store.exists(path):
                return None
        facts = describe_shard(self._records.store.local_path(path), path=path)
        return self._end(job, ref, facts, _Run(StageClock(None), Fill(None, None)))

    def _end(self, job: JobRecord, ref: BatchRef, facts: ShardFacts | None, run: _Run) -> Outcome:
        """Entry, then outcome."""
        gone = None
        if facts is not None:
            with run.clock.stage("ledger"):
                gone = self._ledger.append(facts).gone
        outcome = self._record(job, ref, facts, run)
        if facts is not None and gone is not None:  # another run's shard was consumed and taken away since
            self._records.store.delete(facts.path)
        return outcome

    def _shard(self, job: JobRecord, ref: BatchRef, run: _Run) -> ShardFacts | None:
        """Seal the batch's shard, or find it sealed; None when no row makes a sample."""
        store, path = self._records.store, shard_path(job.shard_of(ref.batch))
        if store.exists(path):
            return describe_shard(store.local_path(path), path=path)
        clock, samples = run.clock, run.clock.waiting("capture", self._samples(job, ref, run))
        first = next(samples, None)
        if first is None:
            return None
        meta = meta_of(first[1], job_id=ref.job_id, batch=ref.batch)
        with store.create(path) as staged, ShardWriter(staged, meta) as writer:
            for row, _, sample in chain([first], samples):
                if not run.fill.takes(sample.raw_bytes):
                    continue
                try:
                    with clock.stage("encode"):
                        writer.add(sample)
                    run.fill.add(sample.raw_bytes)
                except InvalidSample as error:
                    run.failures[row.row] = _failure(row, error.detail, error_code(error))
            with self._deciding(ref), clock.stage("seal"):
                if self._records.outcome(ref) is not None or self._stands.halved(job, ref):
                    raise JobCancelled(f"batch {ref} was decided while it ran")
                if self._records.cancelled(job.id):  # its samples may be deleted already
                    raise JobCancelled(f"job {job.id} was cancelled")
                return writer.seal() if run.fill.samples else None

    def _samples(
        self, job: JobRecord, ref: BatchRef, run: _Run
    ) -> Iterator[tuple[Numbered, Capture, Sample]]:
        """The batch's rows as samples, in order, all from one engine; rows that make none become failures."""
        needs = Needs(job.options, self._records.pinned(job.id))
        with self._engines.using(needs) as engine:
            run.engine, to_engine = engine.url, partial(self._run_row, engine, job.options)
            rows = self._stands.rows(job, ref, cut=True)
            for row, result in in_order(to_engine, rows, self._concurrency, run.fill.room):
                if self._records.cancelled(job.id):
                    raise JobCancelled(f"job {job.id} was cancelled")
                if run.fill.full:
                    continue
                if isinstance(result, RowFailure):
                    run.failures[row.row] = result
                    continue
                capture, sample = result
                here = pin_of(capture)
                changed = self._records.pin(job.id, here).differs(here)
                if changed:
                    raise EngineChanged(f"engine {engine.url} is not the job's any more: {changed}")
                yield row, capture, sample
            _check_engine(run.failures, self._stands.numbers(job, ref))

    def _run_row(
        self, engine: Engine, options: JobOptions, row: Numbered
    ) -> tuple[Numbered, RowFailure | tuple[Capture, Sample]]:
        """One row through the engine; what is the row's own fault becomes its `RowFailure`."""
        try:
            prompt = to_prompt(row, parse_row(row.line), options)
            long = too_long(prompt.tokens, options)
            if long is None:
                capture = engine.capture(prompt.body)
                long = too_long(capture.prompt_len, options)
            if long is not None:
                return row, _failure(row, long, "too_long", skipped=True)
            return row, (capture, to_sample(prompt, capture))
        except RowRefused as error:
            long = too_long(error.prompt_tokens or 0, options)
            if long is not None:  # longer than the engine takes, too
                return row, _failure(row, long, "too_long", skipped=True)
            return row, _failure(row, str(error), error_code(error))
        except (BadRow, CaptureFailed) as error:
            return row, _failure(row, str(error), error_code(error))
        except InvalidSample as error:
            return row, _failure(row, error.detail, error_code(error))

    def _record(self, job: JobRecord, ref: BatchRef, facts: ShardFacts | None, run: _Run) -> Outcome:
        """Record the outcome: what the sealed shard really holds has succeeded, the rest has failed."""
        with self._deciding(ref):
            return self._records.outcome(ref) or self._outcome(job, ref, facts, run)

    def _outcome(self, job: JobRecord, ref: BatchRef, facts: ShardFacts | None, run: _Run) -> Outcome:
        rows = list(self._stands.rows(job, ref))
        sealed, codec = set[str](), None
        if facts is not None:
            with open_shard(self._records.store.local_path(facts.path)) as shard:
                sealed, codec = {sample.id for sample in shard.header.samples}, shard.header.codec
        cut = self._cut(job, ref, rows, sealed, run) if sealed and job.options.max_shard_bytes else 0
        missing = [row for row in rows[: len(rows) - cut] if not _take(sealed, row.id)]
        for row in missing:  # why stands in the outcome: a reason may quote the row
            log.info("a row made no sample", extra={"row": row.row, "sample": row.id})
        return self._records.put_outcome(
            Outcome(
                job_id=ref.job_id,
                batch=ref.batch,
                rows=len(rows),
                succeeded=len(rows) - len(missing) - cut,
                moved=cut,
                failures=tuple(run.failures.get(row.row) or _failure(row, LOST, "lost") for row in missing),
                shard=facts.shard if facts else None,
                tokens=facts.tokens if facts else 0,
                bytes=facts.bytes if facts else 0,
                raw_bytes=facts.raw_bytes if facts else 0,
                fingerprint_id=facts.fingerprint_id if facts else None,
                codec=codec,
                engine=run.engine if facts else None,
                stages={name: round(seconds, 6) for name, seconds in run.clock.seconds.items()},
                finished_at=time.time(),
            )
        )

    def _cut(self, job: JobRecord, ref: BatchRef, rows: list[Numbered], sealed: set[str], run: _Run) -> int:
        """Move the rows after the last one that is sealed or failed into a batch of their own: how many.

        Its shard was full before they came. Where who sealed it died, those that failed are tried again.
        """
        move = self._stands.move(ref)
        if move is not None:
            return move.rows
        tried = [at for at, row in enumerate(rows) if row.id in sealed or row.row in run.failures]
        rest = [row.row for row in rows[tried[-1] + 1 :]]
        try:
            return self._moves.add(job, ref.batch, rest, [len(rest)]).rows if rest else 0
        except Conflict as error:  # there may be no more batches
            run.failures |= {row.row: _failure(row, str(error), GIVEN_UP) for row in rows[tried[-1] + 1 :]}
            return 0

    def _usual(self, job: JobRecord, ref: BatchRef) -> float | None:
        """Bytes of a sample in the batch before, or in the one that these rows were cut from."""
        if job.options.max_shard_bytes is None or not ref.batch:
            return None
        moved = ref.batch >= job.batches
        before = self._moves.holding(job.id, ref.batch).of if moved else ref.batch - 1
        known = self._records.outcome(BatchRef(job_id=job.id, batch=before)) if before is not None else None
        return known.raw_bytes / known.succeeded if known is not None and known.succeeded else None

    def fail(self, job: JobRecord, ref: BatchRef, reason: str) -> Outcome:
        """Record that a batch was given up: no row of it made a sample, all for one reason."""
        try:
            failures = tuple(_failure(row, reason, GIVEN_UP) for row in self._stands.rows(job, ref, cut=True))
        except StoreError as error:  # its rows are lost: what is left of them is their numbers
            reason, left = f"{reason} ({error.message})", self._stands.numbers(job, ref, cut=True)
            failures = tuple(RowFailure(row=row, reason=reason, kind=GIVEN_UP) for row in left)
        rows = len(self._stands.numbers(job, ref))
        return self._records.put_outcome(
            Outcome(
                job_id=job.id,
                batch=ref.batch,
                rows=rows,
                succeeded=0,
                moved=rows - len(failures),
                failures=failures,
                finished_at=time.time(),
            )
        )

    def give_up(self, job: JobRecord, ref: BatchRef, reason: str) -> Outcome:
        """End a batch whose runs crash: its halves are tried apart, so that one bad row fails alone.

        A run of it that lives on seals nothing afterwards. A sealed shard is recorded as it is.
        """
        with self._deciding(ref):
            if not self._records.store.exists(shard_path(job.shard_of(ref.batch))):
                numbers, before = self._stands.numbers(job, ref), self._stands.move(ref)
                if len(numbers) < 2 or (before is not None and before.rows < len(numbers)):
                    return self.fail(job, ref, reason)
                try:
                    move = self._moves.add(job, ref.batch, numbers, in_halves(len(numbers)))
                except Conflict as error:  # there may be no more batches
                    return self.fail(job, ref, f"{reason} ({error})")
                log.warning("its halves are tried apart, as batches %d to %d", move.first, move.end - 1)
                return self._put_moved(ref, len(numbers))
        try:
            return self.run(ref)
        except ShardError as error:
            return self.fail(job, ref, f"{reason} (its shard can't be used: {error})")

    def _deciding(self, ref: BatchRef, *, wait: bool = True) -> AbstractContextManager[None]:
        """Held to seal a batch's shard, to move its rows or to close it: it is one of these."""
        return self._records.store.lock(f"jobs/{ref.job_id}/locks/{ref.batch % LOCKS}.lock", wait=wait)

    def _put_moved(self, ref: BatchRef, rows: int) -> Outcome:
        return self._records.put_outcome(
            Outcome(
                job_id=ref.job_id,
                batch=ref.batch,
                rows=rows,
                succeeded=0,
                moved=rows,
                finished_at=time.time(),
            )
        )


def _check_engine(failures: dict[int, RowFailure], rows: Sequence[int]) -> None:
    """Raise `EngineFailing` when the engine captured not one of several rows: that is hardly the rows' fault.

    So the batch is run again; given up at last, it is halved until rows stand alone.
    """
    lost = [failure for failure in failures.values() if failure.kind == error_code(CaptureFailed(""))]
    if 1 < len(lost) == len(rows):
        raise EngineFailing(f"none of {len(lost)} rows was captured", said=lost[0].reason)


def _take(sealed: set[str], name: str) -> bool:
    """Take an id out of those sealed; False for a second row of the same id, which made no sample."""
    try:
        sealed.remove(name)
    except KeyError:
        return False
    return True


def _failure(row: Numbered, reason: str, kind: str, *, skipped: bool = False) -> RowFailure:
    return RowFailure(row=row.row, id=row.id, reason=reason, kind=kind, skipped=skipped)
