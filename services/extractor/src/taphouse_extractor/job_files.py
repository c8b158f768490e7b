"""What is new among one job's files: a look costs what changed, not what there is."""

from __future__ import annotations

from collections.abc import Iterator

from taphouse.store import Listing
from taphouse_extractor.finished import Finished
from taphouse_extractor.records import SEGMENT, Records, batches_in, segments_in

__all__ = ["JobFiles"]


class JobFiles:
    """Follows the directories of a job that may change. After an error, begin with another one.

    Of a job that has `begun` (its rows are there, and its pin) only its outcomes change.
    """

    __slots__ = ("_job_id", "_outcomes", "_records", "_seen", "_segments", "_top", "begun")

    def __init__(self, records: Records, job_id: str) -> None:
        self._records, self._job_id, self.begun = records, job_id, False
        self._top = Listing(records.store, f"jobs/{job_id}")
        self._outcomes: Listing | None = None
        self._segments: dict[int, Listing] = {}
        self._seen = 0

    def quiet(self, end: int) -> bool:
        """Whether surely nothing is new of a job that has batches up to `end`: one question a segment."""
        whole = self.begun and self._seen * SEGMENT >= end
        return whole and all(listing.quiet() for listing in self._segments.values())

    def names(self) -> list[str] | None:
        """Names in the job's directory; None when they are those of the last time."""
        if self.begun and self._outcomes is not None:
            return None
        names = self._top.news()
        if names is not None and "outcomes" in names and self._outcomes is None:
            self._outcomes = Listing(self._records.store, f"jobs/{self._job_id}/outcomes")
        return names

    def segments(self, finished: Finished, end: int) -> list[int]:
        """Segments with outcomes that weren't seen before, and are not all in `finished`.

        The job has batches up to `end`: once each of their segments was seen, no other is looked for.
        """
        if self._outcomes is None or self._seen * SEGMENT >= end:
            return []
        names = segments_in(self._outcomes.news() or [])
        self._seen = max(self._seen, len(names))
        new = [name for name in names if name not in self._segments and not finished.fills(name)]
        for segment in new:
            directory = self._records.segment(self._job_id, segment)
            self._segments[segment] = Listing(self._records.store, directory)
        return new

    def batches(self, finished: Finished) -> Iterator[int]:
        """Batches of those with an outcome that are not in `finished`; put each there before the next."""
        for segment, listing in list(self._segments.items()):
            if not finished.fills(segment):
                for batch in batches_in(listing.news() or []):
                    if batch not in finished:
                        yield batch
            if finished.fills(segment):
                del self._segments[segment]
