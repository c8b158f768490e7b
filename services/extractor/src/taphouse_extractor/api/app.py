"""Builds the FastAPI application."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import Depends, FastAPI

from taphouse_extractor import __version__
from taphouse_extractor.api import dashboard, events, extract, governor, jobs, ops, samples, shards
from taphouse_extractor.api.audit import Audit
from taphouse_extractor.api.context import Context, with_store
from taphouse_extractor.api.docs_page import add_docs_page
from taphouse_extractor.api.door import Door, Pace, check_rules
from taphouse_extractor.api.failures import RESPONSES, add_failures
from taphouse_extractor.api.guards import BodyLimit, BodyTimeout, LocalOnly, Names
from taphouse_extractor.tokens import Tokens

__all__ = ["create_app"]


def create_app(
    context: Context,
    *,
    tokens: Tokens,
    requests_per_minute: int,
    open_metrics: bool,
    max_request_bytes: int,
    body_timeout_s: float,
    names: Names,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """The API around `context`, which goes by `names` where it asks for no token.

    `lifespan` runs what runs beside it (the feeder, the engine's monitor).
    """
    app = FastAPI(
        title="Taphouse extractor",
        version=__version__,
        summary="Hidden states of a live vLLM server, as compressed shards",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load their scripts from another site
        redoc_url=None,
    )
    app.state.context = context
    if tokens.open:
        app.add_middleware(LocalOnly, names=names)
    app.add_middleware(BodyLimit, max_bytes=max_request_bytes)
    app.add_middleware(BodyTimeout, seconds=body_timeout_s)
    app.add_middleware(Audit)
    add_failures(app)
    add_docs_page(app)
    guard = [Depends(Door(tokens, Pace(requests_per_minute)))]
    for router in (extract.router, ops.guarded, governor.router, events.router):
        app.include_router(router, dependencies=guard, responses=RESPONSES)
    for router in (jobs.router, shards.router, samples.router):
        app.include_router(router, dependencies=[*guard, Depends(with_store)], responses=RESPONSES)
    app.include_router(ops.open_router)
    app.include_router(dashboard.router)
    if open_metrics:
        app.include_router(ops.metrics_router)
    else:
        app.include_router(ops.metrics_router, dependencies=guard, responses=RESPONSES)
    check_rules(app)
    return app
