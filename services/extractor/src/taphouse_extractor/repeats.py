"""Whether a dataset was enqueued before: by the caller's idempotency key, and by what the dataset holds.

::

    keys/<sha256 of caller and key>.json    the job that the key made
    datasets/<digest>.json                  the last job of these rows and options

A job's digest is the SHA-256 of its tenant, its options and its rows. The key's record is made before the
rows are spooled and goes with them when that fails, so that a request that is repeated after any crash makes
one job, and a job that is there is never made again.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack

from taphouse.errors import StoreBusy
from taphouse.store import put_json, put_json_new, read_json
from taphouse_extractor.errors import Conflict, InvalidRequest, NotFound
from taphouse_extractor.records import JobRecord, Records
from taphouse_extractor.spooling import end_spooling

__all__ = ["Repeated", "Repeats"]

KEY = "Idempotency-Key"


class Repeated(Exception):
    """The job is there already: `job`."""

    def __init__(self, job: JobRecord) -> None:
        super().__init__(job.id)
        self.job = job


class Repeats:
    """Looks after one request, as a context. `again`: the caller knows that the dataset was enqueued before.

    Raises `StoreError`s.
    """

    def __init__(self, records: Records, caller: str, key: str | None, *, again: bool) -> None:
        self._records, self._again = records, again
        name = hashlib.sha256(f"{caller}\0{key}".encode()).hexdigest()
        self._key = None if key is None else f"keys/{name}.json"
        self._before: JobRecord | None = None
        self._held, self._mine = ExitStack(), False

    def __enter__(self) -> Repeats:
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.close()

    def made_a_job(self) -> bool:
        """Whether the key has made a job already: then none is made now."""
        before = self._job_in(self._key) if self._key and self._records.store.exists(self._key) else None
        self._before = before if before is not None and before.spooled else None
        return self._before is not None

    def begin(self, job_id: str) -> None:
        """Claim the key for a new job. Raises `Conflict` while another request with it is under way."""
        if self._key is None or self._before is not None:
            return
        try:
            self._held.enter_context(self._records.store.lock(f"{self._key}.lock", wait=False))
        except StoreBusy as error:
            raise Conflict("a request with this idempotency key is under way", param=KEY) from error
        claim = {"job_id": job_id}
        if put_json_new(self._records.store, self._key, claim):
            self._mine = True
            return
        before = self._job_in(self._key)
        if before is not None and before.spooled:
            self._before = before
            return
        if before is not None:  # whoever made it died, or it would hold the lock
            self._records.drop_unspooled(before.id)
            end_spooling(self._records, before.id)
        put_json(self._records.store, self._key, claim)
        self._mine = True

    def check(self, job: JobRecord) -> None:
        """All rows are there, and `job.digest` with them; the job is not yet.

        Raises: `Repeated` when the key has this job, `InvalidRequest` when it has another, `Conflict` when
        the same rows and options were enqueued before.
        """
        if self._before is not None:
            if self._before.digest == job.digest:
                raise Repeated(self._before)
            raise InvalidRequest(
                f"the idempotency key made job {self._before.id} of other rows or options", param=KEY
            )
        path, claim = f"datasets/{job.digest}.json", {"job_id": job.id}
        self._held.enter_context(self._records.store.lock(f"{path}.lock"))
        if put_json_new(self._records.store, path, claim):
            return
        before = self._job_in(path)
        made = before is not None and before.spooled  # who died before that holds no lock
        if before is not None and made and not self._again and not self._records.cancelled(before.id):
            raise Conflict(
                f"these rows were enqueued with the same options before, as job {before.id}, "
                "and this request doesn't say `again`",
                param="again",
            )
        put_json(self._records.store, path, claim)

    def drop(self) -> None:
        """The job wasn't made: let go of the key."""
        if self._key is not None and self._mine:
            self._records.store.delete(self._key)

    def _job_in(self, path: str) -> JobRecord | None:
        try:
            return self._records.job(str(read_json(self._records.store, path)["job_id"]))
        except (NotFound, KeyError, TypeError):
            return None
