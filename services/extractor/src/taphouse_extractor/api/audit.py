"""The audit log: a line for every request that changes or takes away something, or was refused at the door.

It says who (the token's name), from where, what (the route, and what an order says), of which job or shards,
how many rows, how it was answered and when. Looking (other GETs that are let in) makes no line. No row, no
person, no token and no query is in it.
"""

from __future__ import annotations

import logging
import os
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taphouse.logs import JsonFormatter

__all__ = ["Audit", "Notes", "write_to"]

log = logging.getLogger("taphouse_extractor.audit")
TAKES_AWAY = frozenset({"/v1/shards/{name}", "/v1/jobs/{job_id}/failures"})
REFUSED = frozenset({401, 403, 429})


def write_to(file: Path | None) -> None:
    """Append the audit's lines to `file`, which may be moved away by whoever rotates it; None: to the log."""
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = file is None
    log.setLevel(logging.INFO)
    if file is not None:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        handler = WatchedFileHandler(file, encoding="utf-8")
        handler.setFormatter(JsonFormatter())
        log.addHandler(handler)


class Audit:
    """Writes the line of a request as its answer begins."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and write its line."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["audit"] = {}

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                _write(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            _write(scope, 500)
            raise


def _write(scope: Scope, status: int) -> None:
    route = getattr(scope.get("route"), "path", None)
    takes = scope["method"] not in ("GET", "HEAD", "OPTIONS") or route in TAKES_AWAY
    if not takes and status not in REFUSED:
        return
    caller, client = scope["state"].get("caller"), scope.get("client")
    named = {"job_id": "job", "name": "shard"}
    facts: dict[str, Any] = {
        "who": caller.name if caller else None,
        "role": caller.role.value if caller else None,
        "tenant": caller.tenant if caller else None,
        "from": client[0] if client else None,
        "what": f"{scope['method']} {route or 'no route'}",
        "status": status,
        **{named.get(key, key): str(value)[:200] for key, value in scope.get("path_params", {}).items()},
        **scope["state"]["audit"],
    }
    log.info("audit", extra={name: value for name, value in facts.items() if value is not None})


async def _notes(request: Request) -> dict[str, Any]:
    notes: dict[str, Any] = request.state.audit
    return notes


Notes = Annotated[dict[str, Any], Depends(_notes)]
"""What a route adds to its request's line, such as `job` and `rows`."""
