"""What the outcomes of a segment add up to, kept beside them: a start reads one file in place of a thousand.

::

    jobs/<job id>/outcomes/<segment>.sum    the sha256 of what follows, a line of JSON (`Sum`)

A sum is made from the outcomes as they lie, and never believed over them. It names the stamp (time and inode)
that their directory had: whatever is made, replaced or removed there gives it another. One of another stamp
or digest, of a form that is not ours, or none at all: the outcomes are read. It holds numbers only; rows that
failed are read from their outcomes, so nothing of a person has to be taken out of it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from taphouse.errors import StoreError, TaphouseError
from taphouse.store import Listing
from taphouse_extractor.counts import Counts
from taphouse_extractor.job_progress import JobProgress
from taphouse_extractor.records import SEGMENT, BatchRef, Outcome, Records, batches_in
from taphouse_extractor.tally import Tally
from taphouse_extractor.trouble import Trouble

__all__ = ["Sum", "SumKeeper", "Sums", "whole_segments"]

log = logging.getLogger(__name__)
Stamp = tuple[int, int]
Part = tuple[str, int, int]
"""A job, a segment, and where its batches end: the job may get more."""
READ_AT_ONCE = 16
RESTS = 9.0
"""Times what reading those took: no request is held up, and it takes a tenth of a core at most."""


@dataclass
class Sum:
    """Of the outcomes of `batches`, all of one segment, rising.

    `failing` are those with rows that failed or were skipped. `moved`: rows of theirs stand elsewhere now.
    `first_at`: when the first of them ended, in seconds since the epoch.
    """

    job_id: str
    segment: int
    stamp: Stamp
    batches: list[int] = field(default_factory=list)
    failing: list[int] = field(default_factory=list)
    moved: bool = False
    first_at: float | None = None
    counts: Counts = field(default_factory=Counts)
    tally: Tally = field(default_factory=Tally)

    def add(self, outcome: Outcome) -> None:
        """Add the outcome of the next batch."""
        self.batches.append(outcome.batch)
        if outcome.failures:
            self.failing.append(outcome.batch)
        self.moved = self.moved or outcome.moved > 0
        at = outcome.finished_at
        self.first_at = at if self.first_at is None else min(self.first_at, at)
        self.counts.take(outcome)
        self.tally.add(outcome)

    def near(self, now: float, seconds: float) -> bool:
        """Whether any of them may have ended within `seconds` of `now`."""
        first, last = self.first_at or 0.0, self.counts.finished_at or 0.0
        return first < now + seconds and last > now - seconds


_SUM = TypeAdapter(Sum)


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


class Sums:
    """Reads and writes sums. Raises `StoreError`s."""

    def __init__(self, records: Records) -> None:
        self._records, self._store = records, records.store

    def listing(self, job_id: str, segment: int) -> Listing:
        """Of a segment's outcomes."""
        return Listing(self._store, self._records.segment(job_id, segment))

    def believed(self, job_id: str, segment: int) -> Sum | None:
        """A segment's sum; None where there is none, or none that can be read and relied upon."""
        try:
            digest, _, body = self._store.read(self._path(job_id, segment)).partition(b"\n")
            if digest != _digest(body):
                return None
            found = _SUM.validate_json(body)
        except (StoreError, ValidationError):
            return None
        mine = (job_id, segment, self._store.stamp(self._records.segment(job_id, segment)))
        return found if (found.job_id, found.segment, found.stamp) == mine else None

    def make(self, job_id: str, segment: int, stamp: Stamp, rest: Callable[[], bool]) -> bool:
        """Add up a segment whose directory has a stamp that is settled; False: there is no sum.

        `rest` is called every `READ_AT_ONCE` outcomes, and says when to leave it.
        """
        found = Sum(job_id, segment, stamp)
        for batch in batches_in(self._store.list(self._records.segment(job_id, segment))):
            outcome = self._records.outcome(BatchRef(job_id=job_id, batch=batch))
            if outcome is None:
                return False
            found.add(outcome)
            if len(found.batches) % READ_AT_ONCE == 0 and rest():
                return False
        if not found.batches:
            return False
        body = _SUM.dump_json(found) + b"\n"
        self._store.put(self._path(job_id, segment), _digest(body) + b"\n" + body, durable=False)
        return True

    def _path(self, job_id: str, segment: int) -> str:
        return f"{self._records.segment(job_id, segment)}.sum"


class SumKeeper:
    """Makes the sums of segments all of whose batches have their outcome. `jobs` gives what is known now."""

    def __init__(
        self,
        sums: Sums,
        jobs: Callable[[], Sequence[JobProgress]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sums, self._jobs, self._clock = sums, jobs, clock
        self._done: dict[str, int] = {}
        """Jobs all of whose whole segments were seen to, each with how many of its batches had ended then."""
        self._made = set[Part]()
        self._waiting: dict[Part, Listing] = {}

    def run(self, stop: threading.Event, every_s: float) -> None:
        """Keep them until `stop` is set."""
        trouble = Trouble(log, "sums of outcomes")
        while not stop.wait(every_s):
            try:
                self.step(stop)
                trouble.over()
            except Exception as error:
                trouble.unexpected(error)

    def step(self, stop: threading.Event) -> None:
        """Make those that are due: nothing changed in their directories over a few steps.

        A job for which that can't be done holds up no other: it is left until more of it ended, or the next
        start.
        """
        for job in self._jobs():
            job_id, ended = job.record.id, len(job.finished)
            if self._done.get(job_id) == ended:
                continue
            parts = [(job_id, segment, end) for segment, end in whole_segments(job)]
            try:
                waiting = [part for part in parts if part not in self._made and not self._see_to(part, stop)]
            except (TaphouseError, OSError) as error:
                log.warning("outcomes of job %s can't be added up: %s", job_id, error)
                waiting = []
            if not waiting:
                self._done[job_id] = ended
            if stop.is_set():
                return

    def _see_to(self, part: Part, stop: threading.Event) -> bool:
        """Whether a segment has its sum, which is made if that is due."""
        job_id, segment, _ = part
        if part not in self._waiting:
            self._waiting[part] = self._sums.listing(job_id, segment)
        if stop.is_set() or self._waiting[part].news() is not None:
            return False
        if self._sums.believed(job_id, segment) is None and not self._make(part, stop):
            return False
        del self._waiting[part]
        self._made.add(part)
        return True

    def _make(self, part: Part, stop: threading.Event) -> bool:
        began = self._clock()

        def rest() -> bool:
            nonlocal began
            stopped = stop.wait(RESTS * (self._clock() - began))
            began = self._clock()
            return stopped

        job_id, segment, _ = part
        stamp = self._waiting[part].stamp
        return stamp is not None and self._sums.make(job_id, segment, stamp, rest)


def whole_segments(job: JobProgress) -> Iterator[tuple[int, int]]:
    """Segments of a job that have all of their outcomes, and where the batches of each end."""
    for segment in range(-(-job.batches // SEGMENT)):
        if job.complete or job.finished.fills(segment):
            yield segment, min(job.batches, (segment + 1) * SEGMENT)
