"""Routes of jobs: enqueue, list, look at, cancel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from taphouse.wire import Job, JobList, JobOptions, JobRequest
from taphouse_extractor.api.audit import Notes
from taphouse_extractor.api.context import Context, Here
from taphouse_extractor.api.door import Asking
from taphouse_extractor.api.guards import NDJSON
from taphouse_extractor.errors import Conflict, InvalidRequest, TooBusy, UnsupportedMedia
from taphouse_extractor.records import JobRecord
from taphouse_extractor.rows import describe
from taphouse_extractor.spool import Spool, open_dataset, spool_file
from taphouse_extractor.states import may_cancel
from taphouse_extractor.tokens import Caller

__all__ = ["router"]

log = logging.getLogger(__name__)
router = APIRouter(tags=["jobs"])
DRAIN_BYTES = 64 << 20
DRAIN_S = 10.0
JOBS_RETRY_S = 60
_SCHEMA = JobRequest.model_json_schema(ref_template="#/components/schemas/{model}")
_SCHEMA.pop("$defs", None)
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A dataset as it is, one JSON object a line, with its options in the query; or "
        "JSON that names a file which the service can read.",
        "content": {
            NDJSON: {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": _SCHEMA},
        },
    }
}


@router.post("/v1/jobs", status_code=202, openapi_extra=_BODY)
async def enqueue(
    request: Request,
    here: Here,
    who: Asking,
    notes: Notes,
    *,
    options: Annotated[str, Query(description="JobOptions as JSON; for an uploaded dataset.")] = "{}",
    name: Annotated[str | None, Query(max_length=200)] = None,
) -> Job:
    """Enqueue a dataset. When this answers, the job is durable: no crash loses it.

    Rows have `messages`, `prompt` or `text` (taken in this order), optionally `id` and `tools`; other fields
    are ignored. A line that is no JSON object refuses the dataset; an object that is no usable row becomes a
    failed row.
    """
    _check_name(name)
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    await run_in_threadpool(here.gate.admit)
    await run_in_threadpool(_check_jobs, here, who)
    if kind == NDJSON:
        record = await _upload(request, here, who, _parse_options(options), name)
    elif kind == "application/json":
        record = await run_in_threadpool(_read_path, here, who, _parse_request(await request.body()))
    else:
        raise UnsupportedMedia(f"Content-Type {kind or 'missing'}: send {NDJSON} or application/json")
    notes |= {"job": record.id, "rows": record.rows}
    log.info("enqueued: %d rows in %d batches", record.rows, record.batches, extra={"job": record.id})
    return await run_in_threadpool(here.overview.job, record.id)


@router.get("/v1/jobs")
def list_jobs(here: Here, who: Asking, limit: Annotated[int, Query(ge=1, le=10_000)] = 100) -> JobList:
    """Jobs, newest first; for a tenant's token those of its tenant."""
    return JobList(jobs=here.overview.jobs(limit, tenant=who.tenant))


@router.get("/v1/jobs/{job_id}")
def get_job(here: Here, job_id: str) -> Job:
    """One job, with its first failures."""
    return here.overview.job(job_id)


@router.post("/v1/jobs/{job_id}/cancel")
def cancel(here: Here, job_id: str) -> Job:
    """Cancel a job: sealed shards stay, rows that have no outcome are skipped. Twice is once."""
    job = here.overview.job(job_id)
    if not may_cancel(job.state):
        raise Conflict(f"job {job_id} is {job.state.value} already", param="job_id")
    here.records.cancel(job_id)
    return here.overview.job(job_id)


def _check_jobs(here: Context, who: Caller) -> None:
    if here.max_jobs and here.overview.unfinished(who.name) >= here.max_jobs:
        raise TooBusy(
            f"this token has {here.max_jobs} unfinished jobs already: wait for one, or cancel one",
            retry_after=JOBS_RETRY_S,
        )


def _parse_options(text: str) -> JobOptions:
    try:
        return JobOptions.model_validate_json(text)
    except ValidationError as error:
        raise InvalidRequest(f"options: {describe(error)}", param="options") from error


def _parse_request(body: bytes) -> JobRequest:
    try:
        wanted = JobRequest.model_validate_json(body)
    except ValidationError as error:
        raise InvalidRequest(describe(error), param="body") from error
    _check_name(wanted.name)
    return wanted


def _check_name(name: str | None) -> None:
    """Names are shown in terminals, which obey control characters."""
    if name is not None and not name.isprintable():
        raise InvalidRequest("name: holds characters that can't be printed", param="name")


async def _upload(
    request: Request, here: Context, who: Caller, options: JobOptions, name: str | None
) -> JobRecord:
    """Spool the body as it arrives; whatever ends it early leaves no job."""
    spool = await run_in_threadpool(Spool, here.records, here.limits, options, name, by=who)
    chunks = request.stream()
    try:
        async for chunk in chunks:
            await run_in_threadpool(spool.feed, chunk)
        return await run_in_threadpool(spool.finish)
    except BaseException:
        await run_in_threadpool(spool.abort)
        await _drain(chunks)
        raise


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    """A client that still sends reads our answer only if it isn't cut off; a silent one isn't waited for."""
    left = DRAIN_BYTES
    with suppress(TimeoutError, HTTPException):  # what it was refused for is answered
        async with asyncio.timeout(DRAIN_S):
            async for chunk in chunks:
                left -= len(chunk)
                if left < 0:
                    return


def _read_path(here: Context, who: Caller, wanted: JobRequest) -> JobRecord:
    with open_dataset(wanted.path, here.dataset_roots) as file:
        spool = Spool(here.records, here.limits, wanted.options, wanted.name, by=who)
        try:
            return spool_file(file, spool)
        except BaseException:
            spool.abort()
            raise
