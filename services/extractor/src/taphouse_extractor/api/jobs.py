"""Routes of jobs: enqueue, list, look at, and what may be done to them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Annotated, Any, TypeVar

from anyio.to_thread import run_sync
from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from taphouse.wire import Job, JobList, JobOptions, JobRequest
from taphouse_extractor.api.audit import Notes
from taphouse_extractor.api.context import Context, Here
from taphouse_extractor.api.door import Asking
from taphouse_extractor.api.guards import NDJSON
from taphouse_extractor.api.threads import on_its_own
from taphouse_extractor.errors import Conflict, InvalidRequest, TooBusy, UnsupportedMedia
from taphouse_extractor.records import JobRecord
from taphouse_extractor.repeats import Repeated, Repeats
from taphouse_extractor.rows import describe
from taphouse_extractor.spool import Spool, open_dataset, spool_file
from taphouse_extractor.states import Action, refusal
from taphouse_extractor.tokens import Caller

__all__ = ["router"]

log = logging.getLogger(__name__)
T = TypeVar("T")
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
    response: Response,
    *,
    options: Annotated[str, Query(description="JobOptions as JSON; for an uploaded dataset.")] = "{}",
    name: Annotated[str | None, Query(max_length=200)] = None,
    again: Annotated[
        bool, Query(description="Make a job although these rows and options were enqueued before.")
    ] = False,
    key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            min_length=1,
            max_length=255,
            description="A request that is repeated with its key makes no second job: 200, and the first.",
        ),
    ] = None,
) -> Job:
    """Enqueue a dataset. When this answers, the job is durable: no crash loses it.

    Rows have `messages`, `prompt` or `text` (taken in this order), optionally `id` and `tools`; other fields
    are ignored. A line that is no JSON object refuses the dataset; an object that is no usable row becomes a
    failed row, or refuses the dataset where the first failed row would end the job (`on_error` fail). So do
    options with which no engine takes any row.
    """
    _check_name(name)
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    await run_in_threadpool(here.gate.admit)
    try:
        with Repeats(here.records, who.name, key, again=again) as repeats:
            made = await run_in_threadpool(repeats.made_a_job)
            spool = partial(_spool, here, who, not made)
            if kind == NDJSON:
                begin = partial(spool, _parse_options(options), name)
                record = await _upload(here, request.stream(), repeats, begin)
            elif kind == "application/json":
                wanted = _parse_request(await request.body())
                record = await _on_dataset(here, _read_path, here, repeats, spool, wanted)
            else:
                raise UnsupportedMedia(f"Content-Type {kind or 'missing'}: send {NDJSON} or application/json")
    except Repeated as repeated:
        record, response.status_code = repeated.job, 200
        response.headers["Idempotent-Replayed"] = "true"
    notes |= {"job": record.id, "rows": record.rows}
    log.info("enqueued: %d rows in %d batches", record.rows, record.batches, extra={"job": record.id})
    return await run_in_threadpool(here.overview.job, record.id)


@router.get("/v1/jobs")
@on_its_own("looks")
def list_jobs(here: Here, who: Asking, limit: Annotated[int, Query(ge=1, le=10_000)] = 100) -> JobList:
    """Jobs, newest first; for a tenant's token those of its tenant."""
    return JobList(jobs=here.overview.jobs(limit, tenant=who.tenant))


@router.get("/v1/jobs/{job_id}")
@on_its_own("looks")
def get_job(here: Here, job_id: str) -> Job:
    """One job, with its first failures."""
    return here.overview.job(job_id)


@router.post("/v1/jobs/{job_id}/cancel")
def cancel(here: Here, job_id: str) -> Job:
    """Cancel a job: sealed shards stay, rows that have no outcome are skipped. Twice is once."""
    _check_action(here, job_id, Action.CANCEL)
    here.records.cancel(job_id)
    return here.overview.job(job_id)


@router.post("/v1/jobs/{job_id}/pause")
def pause(here: Here, job_id: str) -> Job:
    """Pause a job: batches that run end, no other begins until it is resumed. Twice is once."""
    _check_action(here, job_id, Action.PAUSE)
    here.records.pause(job_id)
    return here.overview.job(job_id)


@router.post("/v1/jobs/{job_id}/resume")
def resume(here: Here, job_id: str) -> Job:
    """Let a paused job go on. Twice is once."""
    _check_action(here, job_id, Action.RESUME)
    here.records.resume(job_id)
    return here.overview.job(job_id)


@router.post("/v1/jobs/{job_id}/retry")
@on_its_own("long")
def retry(here: Here, job_id: str) -> Job:
    """Try the rows that failed again, in new batches of the same job; skipped rows stay skipped."""
    _check_action(here, job_id, Action.RETRY)
    here.retries.retry(here.records.job(job_id))
    return here.overview.job(job_id)


@router.get(
    "/v1/jobs/{job_id}/failures",
    response_class=StreamingResponse,
    responses={200: {"content": {NDJSON: {}}, "description": "A RowFailure a line"}},
)
def failures(
    here: Here,
    job_id: str,
    skip: Annotated[int, Query(ge=0, le=10**9, description="Leave out so many of the first.")] = 0,
    limit: Annotated[
        int | None, Query(ge=1, le=10**9, description="At most so many; all without it.")
    ] = None,
) -> StreamingResponse:
    """Rows that were tried and made no sample, as JSONL, without those that are tried again."""
    here.records.job(job_id)
    found = islice(here.retries.failures(job_id), skip, None if limit is None else skip + limit)
    lines = (failure.model_dump_json() + "\n" for failure in found)
    return StreamingResponse(lines, media_type=NDJSON)


def _check_action(here: Context, job_id: str, action: Action) -> None:
    job = here.overview.job(job_id)
    why = refusal(action, job.state, job.failed)
    if why is not None:
        raise Conflict(f"job {job_id}: {why}", param="job_id")


def _spool(here: Context, who: Caller, new: bool, options: JobOptions, name: str | None) -> Spool:
    """Begin a job; what made a job before is not checked against engines and bounds again."""
    longest = here.gate.check(options) if new else None
    begin = partial(
        Spool, here.records, here.limits, options, name, by=who, longest=longest, admit=here.gate.admit
    )
    if not new or not here.max_jobs:
        return begin()
    token = hashlib.sha256(who.name.encode()).hexdigest()[:32]
    with here.store.lock(f"jobs/counting/{token}.lock"):  # many requests at once are counted one by one
        _check_jobs(here, who)
        return begin()


def _check_jobs(here: Context, who: Caller) -> None:
    if here.overview.unfinished(who.name) >= here.max_jobs:
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


async def _on_dataset(here: Context, work: Callable[..., T], *given: Any) -> T:
    """Run what may wait for a lock, or for a disk, for long."""
    return await run_sync(work, *given, limiter=here.threads.datasets)


async def _upload(
    here: Context, chunks: AsyncIterator[bytes], repeats: Repeats, make: Callable[[], Spool]
) -> JobRecord:
    """Spool the body as it arrives; whatever ends it early leaves no job."""
    spool = await _on_dataset(here, make)
    try:
        await run_in_threadpool(repeats.begin, spool.job.id)
        async for chunk in chunks:
            await run_in_threadpool(spool.feed, chunk)
        return await _on_dataset(here, spool.finish, repeats.check)
    except BaseException:
        await run_in_threadpool(spool.abort)
        await run_in_threadpool(repeats.drop)
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


def _read_path(here: Context, repeats: Repeats, make: Callable[..., Spool], wanted: JobRequest) -> JobRecord:
    with open_dataset(wanted.path, here.dataset_roots) as file:
        spool = make(wanted.options, wanted.name)
        try:
            repeats.begin(spool.job.id)
            return spool_file(file, spool, repeats.check)
        except BaseException:
            spool.abort()
            repeats.drop()
            raise
