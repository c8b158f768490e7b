"""Routes of those who watch: server-sent events, and the last hour."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from functools import partial
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Header
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from taphouse.errors import TaphouseError
from taphouse.ledger import LedgerEntry
from taphouse.live import Hello, History, Moment, Problem
from taphouse.wire import JobList, ShardInfo
from taphouse_extractor import __version__
from taphouse_extractor.api.context import Context, Here
from taphouse_extractor.api.door import Asking
from taphouse_extractor.errors import TooBusy
from taphouse_extractor.pulse import Look, Watchers
from taphouse_extractor.states import ACTIONS
from taphouse_extractor.tokens import Caller

__all__ = ["Watched", "event", "router"]

log = logging.getLogger(__name__)
router = APIRouter(tags=["operations"])
EVERY_S = 1.0
LEAVING_S = 0.2
GRACE_S = 2.0
HEARTBEAT_S = 5.0
FIRST_SHARDS = 60
SHARDS_A_ROUND = 200


@router.get("/v1/history")
async def history(here: Here) -> History:
    """The last hour in numbers, as this process saw it."""
    return here.pulse.history()


@router.get(
    "/v1/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "Server-sent events"}},
)
async def events(
    here: Here,
    who: Asking,
    last_event_id: Annotated[
        str | None,
        Header(max_length=20, pattern=r"^\d{1,18}$", description="Shards after this sequence number."),
    ] = None,
) -> StreamingResponse:
    """The service as it goes on: `hello`, then `moment`, `jobs`, `shard` and `problem` as they come.

    Begins with the newest shards, or after `Last-Event-ID`. Ends after some minutes, so that a token that was
    taken away sees no more: connect again with the last id.
    """
    after = int(last_event_id) if last_event_id is not None else None
    full = here.watchers.enter(who.name)
    if full is not None:
        raise TooBusy(full, retry_after=10)
    return Watched(
        _stream(here, who, after),
        here.watchers,
        who.name,
        here.pulse.leaving,
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


class Watched(StreamingResponse):
    """A stream that was counted as `name`'s before it began; its place is free by its deadline.

    Also where the caller has left, and nothing is streamed; or reads nothing, and a send stands still.
    """

    def __init__(
        self,
        content: AsyncIterator[str],
        watchers: Watchers,
        name: str,
        leaving: threading.Event,
        **more: Any,
    ) -> None:
        super().__init__(content, **more)
        self._watchers, self._name, self._leaving = watchers, name, leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until its end, or until it is to end and doesn't."""
        streaming = asyncio.ensure_future(super().__call__(scope, receive, send))
        loop = asyncio.get_running_loop()
        end, told = loop.time() + self._watchers.longest_s + GRACE_S, False
        try:
            while not streaming.done() and loop.time() < end:
                if self._leaving.is_set() and not told:
                    end, told = loop.time() + GRACE_S, True
                await asyncio.wait({streaming}, timeout=LEAVING_S)
            if streaming.done():
                await streaming
        finally:
            streaming.cancel()
            self._watchers.leave(self._name)


def event(name: str, said: BaseModel, number: int | None = None) -> str:
    """One event as text; JSON has no line ends, so it is one line of data."""
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {name}\ndata: {said.model_dump_json()}\n\n"


async def _stream(here: Context, who: Caller, after: int | None) -> AsyncIterator[str]:
    yield "retry: 2000\n\n" + event("hello", _hello(here, who))
    told, loop = "", asyncio.get_running_loop()
    end = loop.time() + here.watchers.longest_s
    while loop.time() < end and not here.pulse.leaving.is_set():
        began = loop.time()
        work = asyncio.ensure_future(_round(here, after))
        while not (await asyncio.wait({work}, timeout=HEARTBEAT_S))[0]:
            yield ": still looking\n\n"
        try:
            look, shards, after = work.result()
        except (TaphouseError, OSError) as error:
            yield event("problem", Problem(message=str(error)))
        else:
            yield event("moment", Moment(status=look.status, point=look.point))
            jobs = event("jobs", JobList(jobs=look.jobs))
            if jobs != told:
                told = jobs
                yield jobs
            for entry in shards:
                info = ShardInfo.model_validate(entry.model_dump())
                yield event("shard", info, entry.seq)
        await asyncio.sleep(max(0.05, EVERY_S - (loop.time() - began)))


async def _round(here: Context, after: int | None) -> tuple[Look, list[LedgerEntry], int]:
    """A look, the next shards, and the number that the next round begins after."""
    look = await here.threads.once("look", partial(here.pulse.look, EVERY_S * 0.9))
    return look, *await run_in_threadpool(_next_shards, here, after)


def _next_shards(here: Context, after: int | None) -> tuple[list[LedgerEntry], int]:
    head = here.ledger.head()
    first = max(0, head - FIRST_SHARDS) if after is None or after > head else after
    entries = list(islice(here.ledger.entries(first), SHARDS_A_ROUND)) if first < head else []
    return entries, entries[-1].seq if entries else first


def _hello(here: Context, who: Caller) -> Hello:
    return Hello(
        version=__version__,
        name=who.name,
        role=who.role.value,
        governor=here.governor.enabled,
        job_actions={state: [action.value for action in actions] for state, actions in ACTIONS.items()},
    )
