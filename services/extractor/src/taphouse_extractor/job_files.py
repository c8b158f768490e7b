"""What is new among one job's files: a look costs what changed, not what there is."""

from __future__ import annotations

from collections.abc import Iterator

from taphouse.store import Listing
from taphouse_extractor.finished import Finished
from taphouse_extractor.records import Records, batches_in, segments_in

__all__ = ["JobFiles"]


class JobFiles:
    """Follows the directories of a job that may change. After an error, begin with another one."""

    __slots__ = ("_job_id", "_outcomes", "_records", "_segments", "_top")

    def __init__(self, records: Records, job_id: str) -> None:
        self._records, self._job_id = records, job_id
        self._top = Listing(records.store, f"jobs/{job_id}")
        self._outcomes: Listing | None = None
        self._segments: dict[int, Listing] = {}

    def names(self) -> list[str] | None:
        """Names in the job's directory; None when they are those of the last time."""
        names = self._top.news()
        if names is not None and "outcomes" in names and self._outcomes is None:
            self._outcomes = Listing(self._records.store, f"jobs/{self._job_id}/outcomes")
        return names

    def batches(self, finished: Finished) -> Iterator[int]:
        """Batches with an outcome that are not in `finished`; each is put there before the next is taken."""
        segments = self._outcomes.news() if self._outcomes is not None else None
        for segment in segments_in(segments or []):
            if segment not in self._segments and not finished.fills(segment):
                directory = self._records.segment(self._job_id, segment)
                self._segments[segment] = Listing(self._records.store, directory)
        for segment, listing in list(self._segments.items()):
            for batch in batches_in(listing.news() or []):
                if batch not in finished:
                    yield batch
            if finished.fills(segment):
                del self._segments[segment]
