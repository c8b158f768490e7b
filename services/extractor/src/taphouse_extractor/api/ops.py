"""Routes for whoever runs the service: queue, doctor, health, readiness, metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from taphouse.wire import Check, Health, QueueStatus, Ready
from taphouse_extractor import __version__, metrics
from taphouse_extractor.api.context import Here

__all__ = ["guarded", "metrics_router", "open_router"]

ALL = 1_000_000
guarded = APIRouter(tags=["operations"])
open_router = APIRouter(tags=["operations"])
metrics_router = APIRouter(tags=["operations"])


@guarded.get("/v1/queue")
def queue(here: Here) -> QueueStatus:
    """Depth by state, rates, ETA, workers, engines with recent latency, consumers."""
    return here.overview.queue(here.gate.paused())


@guarded.get("/v1/doctor")
def doctor(here: Here) -> list[Check]:
    """Looks at every link now."""
    return here.doctor.examine()


@open_router.get("/health")
def health() -> Health:
    """The process answers."""
    return Health(version=__version__)


@open_router.get("/ready", responses={503: {"model": Ready}})
def ready(here: Here, response: Response) -> Ready:
    """Whether it can take work: 200, or 503 with what is wrong."""
    checks = here.doctor.ready()
    answer = Ready(ready=all(check.ok for check in checks), checks=checks)
    if not answer.ready:
        response.status_code = 503
    return answer


@metrics_router.get("/metrics", response_class=Response)
def prometheus(here: Here) -> Response:
    """Prometheus text."""
    status = here.overview.queue(here.gate.paused())
    text = metrics.render(status, here.overview.jobs(ALL), here.store.free_bytes())
    return Response(text, media_type=CONTENT_TYPE_LATEST)
