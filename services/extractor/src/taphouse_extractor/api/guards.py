"""Who may come in, and with how much: the bearer token, and the bound on a request's body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac

from fastapi import Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taphouse_extractor.errors import Unauthorized

__all__ = ["NDJSON", "BodyLimit", "BodyTimeout", "TokenGuard"]

NDJSON = "application/x-ndjson"


class TokenGuard(HTTPBearer):
    """A dependency that lets only `token` in, compared in constant time; None lets everybody in."""

    def __init__(self, token: str | None) -> None:
        super().__init__(auto_error=False, scheme_name="token", description="The service's token.")
        self._expected = _digest(token) if token else None

    async def __call__(self, request: Request) -> HTTPAuthorizationCredentials | None:
        """Raise `Unauthorized` unless the request carries the token."""
        given = await super().__call__(request)
        if self._expected is None:
            return given
        if given is None:
            raise Unauthorized("send the service's token: Authorization: Bearer <token>")
        if not hmac.compare_digest(_digest(given.credentials), self._expected):
            raise Unauthorized("this is not the service's token")
        return given


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class BodyLimit:
    """Refuses bodies over `max_bytes` with 413 while they arrive; datasets are the spool's to bound."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting its body."""
        if scope["type"] != "http" or _is_dataset(scope):
            await self._app(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, f"the body is over {self._max_bytes} bytes")
            return message

        await self._app(scope, counted, send)


class BodyTimeout:
    """Refuses bodies that stand still for `seconds` with 408, and ends their connections."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; waiting for the client to go away, once its body is whole, has no end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        whole = False

        async def timed() -> Message:
            nonlocal whole
            if whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self._seconds)
            except TimeoutError:
                raise HTTPException(
                    408,
                    f"the body stood still for {self._seconds:g} s: send it without pauses",
                    {"Connection": "close"},
                ) from None
            whole = not message.get("more_body", False)
            return message

        await self._app(scope, timed, send)


def _is_dataset(scope: Scope) -> bool:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    here = scope["path"] == "/v1/jobs" and scope["method"] == "POST"
    return here and any(kind.split(b";")[0].strip().lower() == NDJSON.encode() for kind in kinds)
