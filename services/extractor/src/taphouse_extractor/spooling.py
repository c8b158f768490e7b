"""Who spools a job's rows holds its lock, so that a spooling whose process died is known by no clock."""

from __future__ import annotations

from contextlib import AbstractContextManager

from taphouse.errors import StoreBusy
from taphouse_extractor.errors import NotFound
from taphouse_extractor.records import Records

__all__ = ["drop_abandoned", "end_spooling", "spooling"]


def spooling(records: Records, job_id: str) -> AbstractContextManager[None]:
    """Held as long as a job's rows come in; raises `StoreBusy` meanwhile."""
    return records.store.lock(_path(job_id), wait=False)


def end_spooling(records: Records, job_id: str) -> None:
    """Whoever holds it is about to let go for good. Of a job that was dropped nothing is left."""
    records.store.delete(_path(job_id))
    records.store.drop(f"jobs/{job_id}")


def drop_abandoned(records: Records, job_id: str) -> bool:
    """Remove a job whose spooling ended unfinished; False when it goes on, or came to its end."""
    try:
        with spooling(records, job_id):
            try:
                unfinished = not records.job(job_id).spooled
                if unfinished:
                    records.drop_unspooled(job_id)
            finally:
                end_spooling(records, job_id)
            return unfinished
    except (StoreBusy, NotFound):
        return False


def _path(job_id: str) -> str:
    return f"jobs/{job_id}/spooling.lock"
