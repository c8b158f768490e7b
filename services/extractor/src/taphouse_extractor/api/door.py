"""The door of the API: which route asks for which role (`RULES`, the one table), and who is let in.

A caller of a tenant is let in where a path names a job or shard of that tenant, and where the rule is not
`wide`: a wide route tells of everybody's. What isn't theirs is answered as if it wasn't there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool

from taphouse_extractor.api.context import Context
from taphouse_extractor.errors import Forbidden, InvalidRequest, NotFound, TooBusy, Unauthorized
from taphouse_extractor.tokens import ANONYMOUS, Caller, Role, Tokens

__all__ = ["RULES", "Asking", "Door", "Pace", "Rule", "check_rules", "sees_job"]


@dataclass(frozen=True)
class Rule:
    """What a route asks for: at least `role` (None: nothing); `wide` ones are closed to tenants."""

    role: Role | None
    wide: bool = False


OPEN = Rule(None)
RULES: dict[tuple[str, str], Rule] = {
    ("GET", "/health"): OPEN,
    ("GET", "/ready"): OPEN,
    ("GET", "/docs"): OPEN,
    ("GET", "/"): OPEN,  # the dashboard: no data in it
    ("GET", "/dashboard/{file}"): OPEN,
    ("GET", "/metrics"): Rule(Role.READ, wide=True),  # open where the settings say so
    ("GET", "/v1/queue"): Rule(Role.READ, wide=True),
    ("GET", "/v1/events"): Rule(Role.READ, wide=True),
    ("GET", "/v1/history"): Rule(Role.READ, wide=True),
    ("GET", "/v1/doctor"): Rule(Role.READ, wide=True),
    ("POST", "/v1/doctor"): Rule(Role.SUBMIT, wide=True),
    ("GET", "/v1/governor"): Rule(Role.READ, wide=True),
    ("POST", "/v1/governor"): Rule(Role.ADMIN, wide=True),
    ("GET", "/v1/jobs"): Rule(Role.READ),
    ("GET", "/v1/jobs/{job_id}"): Rule(Role.READ),
    ("POST", "/v1/jobs"): Rule(Role.SUBMIT),
    ("GET", "/v1/jobs/{job_id}/failures"): Rule(Role.READ),
    ("POST", "/v1/jobs/{job_id}/pause"): Rule(Role.SUBMIT),
    ("POST", "/v1/jobs/{job_id}/resume"): Rule(Role.SUBMIT),
    ("POST", "/v1/jobs/{job_id}/cancel"): Rule(Role.SUBMIT),
    ("POST", "/v1/jobs/{job_id}/retry"): Rule(Role.SUBMIT),
    ("POST", "/v1/extract"): Rule(Role.SUBMIT),
    ("POST", "/v1/samples/find"): Rule(Role.ADMIN, wide=True),
    ("POST", "/v1/samples/delete"): Rule(Role.ADMIN, wide=True),
    ("GET", "/v1/shards"): Rule(Role.READ),
    ("GET", "/v1/shards/{name}"): Rule(Role.READ),
    ("POST", "/v1/shards/prune"): Rule(Role.ADMIN, wide=True),
    ("POST", "/v1/consumers/{consumer}/forget"): Rule(Role.ADMIN, wide=True),
}


def check_rules(app: FastAPI) -> None:
    """Every route has its rule; raises LookupError naming one that has none, so none is served by mistake."""
    for route in app.routes:
        if isinstance(route, APIRoute):
            for method in route.methods:
                if (method, route.path) not in RULES:
                    raise LookupError(f"{method} {route.path} has no rule in {__name__}.RULES")


class Pace:
    """Requests a minute of one caller, as many at once; more are refused. 0 bounds nothing.

    Kept in this process: two API processes let twice as many through. Callers are those of the token file,
    so what is kept is bounded.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, name: str) -> None:
        """Count one request; raises `TooBusy`, which says when there is room again."""
        if not self._per_minute:
            return
        now, a_second = self._clock(), self._per_minute / 60
        left, then = self._left.get(name, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - then) * a_second)
        if left < 1:
            self._left[name] = (left, now)
            raise TooBusy(
                f"more than {self._per_minute} requests a minute with this token",
                retry_after=ceil((1 - left) / a_second),
            )
        self._left[name] = (left - 1, now)


class Door(HTTPBearer):
    """A dependency that lets callers in by `RULES`, and leaves who they are in the request's state."""

    def __init__(self, tokens: Tokens, pace: Pace) -> None:
        super().__init__(auto_error=False, scheme_name="token", description="A token of the service.")
        self._tokens, self._pace = tokens, pace

    async def __call__(self, request: Request) -> None:
        """Raise what stands in the way, `NotFound` for what is another tenant's."""
        caller = await self._caller(request)
        request.state.caller = caller
        self._pace.take(caller.name)
        route = request.scope["route"]
        _check_query(request, route)
        rule = RULES[request.method, route.path]
        if rule.role is not None and not caller.role.includes(rule.role):
            raise Forbidden(f"this needs the role {rule.role.value}; this token's is {caller.role.value}")
        if caller.tenant is not None:
            if rule.wide:
                raise Forbidden("this tells of all tenants, and the token is one tenant's")
            await run_in_threadpool(_check_path, request, caller)

    async def _caller(self, request: Request) -> Caller:
        given = await super().__call__(request)
        if self._tokens.open:
            return ANONYMOUS
        if given is None:
            raise Unauthorized("send the service's token: Authorization: Bearer <token>")
        caller = self._tokens.caller(given.credentials)
        if caller is None:
            raise Unauthorized("this is none of the service's tokens")
        return caller


def _check_query(request: Request, route: APIRoute) -> None:
    """Raise `InvalidRequest` for a query parameter that the route hasn't: a misspelt one would do nothing."""
    documented = request.app.openapi()["paths"].get(route.path, {}).get(request.method.lower(), {})
    known = {given["name"] for given in documented.get("parameters", ()) if given["in"] == "query"}
    for name in request.query_params:
        if name not in known:
            there = ", ".join(sorted(known)) or "none"
            raise InvalidRequest(
                f"there is no query parameter {name!r:.40} (there is: {there})", param="query"
            )


def _check_path(request: Request, caller: Caller) -> None:
    """Raise `NotFound` when the path names a job or shard of others, with the words for one that isn't."""
    context: Context = request.app.state.context
    job_id, name = request.path_params.get("job_id"), request.path_params.get("name")
    if job_id is not None and not sees_job(context, caller, job_id):
        raise NotFound(f"there is no job {job_id!r:.80}", param="job_id")
    if name is not None:
        entry = context.shard(name)
        if entry is None or entry.job_id is None or not sees_job(context, caller, entry.job_id):
            raise NotFound(f"there is no shard {name!r:.120}", param="name")


def sees_job(context: Context, caller: Caller, job_id: str) -> bool:
    """Whether the job is there and the caller may know of it."""
    if caller.tenant is None:
        return True
    try:
        return context.records.job(job_id).tenant == caller.tenant
    except NotFound:
        return False


async def _asking(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


Asking = Annotated[Caller, Depends(_asking)]
