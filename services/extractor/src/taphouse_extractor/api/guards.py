"""With how much a request may come in, and how long it may take: bounds on its body."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["NDJSON", "BodyLimit", "BodyTimeout"]

NDJSON = "application/x-ndjson"


class BodyLimit:
    """Refuses bodies over `max_bytes` with 413 while they arrive; datasets are the spool's to bound.

    Encoded bodies are refused with 415: nothing here inflates anything.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting its body."""
        if scope["type"] == "http" and (encoding := _encoding(scope)) is not None:

            async def refused() -> Message:
                raise HTTPException(415, f"Content-Encoding {encoding!r:.40}: send the body as it is")

            await self._app(scope, refused, send)
            return
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


def _encoding(scope: Scope) -> str | None:
    found = [value.strip().lower() for name, value in scope["headers"] if name == b"content-encoding"]
    return next((value.decode("latin-1") for value in found if value not in (b"", b"identity")), None)


def _is_dataset(scope: Scope) -> bool:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    here = scope["path"] == "/v1/jobs" and scope["method"] == "POST"
    return here and any(kind.split(b";")[0].strip().lower() == NDJSON.encode() for kind in kinds)
