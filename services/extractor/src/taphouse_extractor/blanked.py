"""Rows that were blanked in a job's file: every offset stays, and so do the ids of the rows that are left.

::

    jobs/<job id>/ids/<batch>.json   ids of rows left, by number, that are not what the row itself says

Such an id followed from an earlier row of the batch, which may be blanked now. It is written before that is.
"""

from __future__ import annotations

from collections.abc import Iterator

from taphouse.errors import StoreError
from taphouse.store import put_json, read_json
from taphouse_extractor.records import BatchRef, JobRecord, Records
from taphouse_extractor.rows import Numbered, number_rows, plain_id

__all__ = ["blank_rows", "numbered_rows"]


def numbered_rows(records: Records, job: JobRecord, batch: int) -> Iterator[Numbered]:
    """Rows of a batch of the dataset with their sample ids, the same whatever was blanked."""
    ref, first = BatchRef(job_id=job.id, batch=batch), job.rows_of(batch).start
    return number_rows(records.row_lines(ref), first_row=first, job_id=job.id, kept=_kept(records, ref))


def blank_rows(records: Records, job: JobRecord, rows: set[int]) -> None:
    """Write a job's rows anew, with `{}` and spaces in place of `rows`. Needs as much space again."""
    for batch in sorted({row // job.options.batch_size for row in rows}):
        _keep_ids(records, job, batch, rows)
    store, (path, _) = records.store, records.rows_paths(job.id)
    new = f"{path}.new"
    store.delete(new)
    with store.open(path) as old, store.create(new) as staged:
        for row, line in enumerate(old):
            staged.write(b"{}" + b" " * (len(line) - 3) + b"\n" if row in rows else line)
        staged.seal()
    store.local_path(new).replace(store.local_path(path))
    store.flush(f"jobs/{job.id}")


def _keep_ids(records: Records, job: JobRecord, batch: int, blanked: set[int]) -> None:
    left = (row for row in numbered_rows(records, job, batch) if row.row not in blanked)
    kept = {row.row: row.id for row in left if row.id != plain_id(row.line, row.row, job.id)}
    path = _path(BatchRef(job_id=job.id, batch=batch))
    if kept or records.store.exists(path):
        put_json(records.store, path, kept)


def _kept(records: Records, ref: BatchRef) -> dict[int, str]:
    path = _path(ref)
    if not records.store.exists(path):
        return {}
    found = read_json(records.store, path)
    try:
        return {int(row): str(name) for row, name in found.items()}
    except (AttributeError, ValueError) as error:
        raise StoreError(f"{path} is no list of ids", path=path) from error


def _path(ref: BatchRef) -> str:
    return f"jobs/{ref.job_id}/ids/{ref.batch:06d}.json"
