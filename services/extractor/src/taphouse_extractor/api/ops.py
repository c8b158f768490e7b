"""Routes for whoever runs the service: queue, doctor, health, readiness, metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from taphouse.errors import TaphouseError
from taphouse.wire import Check, Consumer, Health, QueueStatus, Ready
from taphouse_extractor import __version__, metrics
from taphouse_extractor.api.context import Context, Here
from taphouse_extractor.api.threads import on_its_own

__all__ = ["guarded", "metrics_router", "open_router"]

guarded = APIRouter(tags=["operations"])
open_router = APIRouter(tags=["operations"])
metrics_router = APIRouter(tags=["operations"])


@guarded.get("/v1/queue")
@on_its_own("looks")
def queue(here: Here) -> QueueStatus:
    """Depth by state, rates, ETA, workers, engines with recent latency, consumers."""
    return here.overview.queue(here.gate.paused())


@guarded.get("/v1/doctor")
async def doctor(here: Here) -> list[Check]:
    """Looks at every link now; who asks while it looks gets the same answer."""
    return await here.threads.once("doctor", here.doctor.examine)


@guarded.post("/v1/doctor")
async def doctor_with_canary(here: Here) -> list[Check]:
    """The same, once every engine has run its canary: a few tokens captured and compared."""
    return await here.threads.once("canary", partial(here.doctor.examine, canary=True))


@open_router.get("/health")
async def health() -> Health:
    """The process answers."""
    return Health(version=__version__)


@open_router.get("/ready", responses={503: {"model": Ready}})
async def ready(here: Here, response: Response) -> Ready:
    """Whether it can take work: 200, or 503 with what is wrong."""
    checks = await here.threads.once("ready", here.doctor.ready)
    answer = Ready(ready=all(check.ok for check in checks), checks=checks)
    if not answer.ready:
        response.status_code = 503
    return answer


@metrics_router.get("/metrics", response_class=Response)
async def prometheus(here: Here, request: Request) -> Response:
    """Prometheus text."""
    text = await here.threads.once("metrics", partial(_metrics, here, request.app.state.refused))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _metrics(here: Context, refused: Counter[str]) -> bytes:
    figures = here.overview.figures(here.gate.paused())
    moment = metrics.Moment(
        figures=figures,
        free_bytes=here.store.free_bytes(),
        refused=refused,
        lag_s=dict(_lags_s(here, figures.queue.consumers)),
    )
    return metrics.render(moment)


def _lags_s(here: Context, consumers: list[Consumer]) -> Iterator[tuple[str, float]]:
    """Age of the first entry after each consumer's cursor; 0 when there is none."""
    for consumer in consumers:
        with suppress(TaphouseError):  # an entry that can't be read: others say so
            entry = here.ledger.entry((consumer.cursor or 0) + 1)
            yield consumer.name, max(0.0, time.time() - entry.created_at) if entry is not None else 0.0
