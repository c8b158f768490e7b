"""By what name a request may come in, with how much, and how long it may take."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from taphouse_extractor.api.failures import answer_to
from taphouse_extractor.errors import Forbidden
from taphouse_extractor.settings import is_loopback

__all__ = ["NDJSON", "BodyLimit", "BodyTimeout", "LocalOnly", "Names"]

NDJSON = "application/x-ndjson"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Names:
    """Names that a service without tokens goes by.

    `allowed` are those of a proxy before it; `addresses`: also every IP address, not only loopback's.
    """

    own: frozenset[str]
    allowed: frozenset[str] = frozenset()
    addresses: bool = False

    @classmethod
    def of(cls, host: str, allowed: Iterable[str] = ()) -> Names:
        """Of a service that listens on `host`; only there for everybody, it goes by every address."""
        own = frozenset({"localhost", "127.0.0.1", "::1", host.lower()} - {"0.0.0.0", "::"})
        return cls(own, frozenset(name.lower() for name in allowed), addresses=not is_loopback(host))

    def include(self, host: str) -> bool:
        """Whether a `Host` header, `name`, `name:port` or `[address]:port`, is one of them."""
        name = _name(host)
        if name in self.own | self.allowed:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback or self.addresses
        except ValueError:
            return False


class LocalOnly:
    """Keeps other web sites out of an API that asks for no token: a browser that reaches it may show theirs.

    A site that gave its own name our address (DNS rebinding) is known by `Host`, one that sends a form or a
    script's request to us by `Origin`.
    """

    def __init__(self, app: ASGIApp, names: Names) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        wrong = self._wrong(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        if wrong is None:
            await self._app(scope, receive, send)
        else:
            await (await answer_to(Request(scope), Forbidden(wrong)))(scope, receive, send)

    def _wrong(self, method: str, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._names.include(host):
            own = ", ".join(sorted(self._names.own))
            return (
                f"without tokens this service goes by {own}, not by {host!r:.80}: "
                "set a token, or name it in allowed_hosts"
            )
        if method in SAFE or origin is None or origin.partition("://")[2] == host:
            return None
        if _name(origin.partition("://")[2]) in self._names.allowed:
            return None
        return f"without tokens this service takes no orders from other sites, such as {origin!r:.80}"


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


def _name(host: str) -> str:
    """The name of `name:port`, in small letters; "" where there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _encoding(scope: Scope) -> str | None:
    found = [value.strip().lower() for name, value in scope["headers"] if name == b"content-encoding"]
    return next((value.decode("latin-1") for value in found if value not in (b"", b"identity")), None)


def _is_dataset(scope: Scope) -> bool:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    here = scope["path"] == "/v1/jobs" and scope["method"] == "POST"
    return here and any(kind.split(b";")[0].strip().lower() == NDJSON.encode() for kind in kinds)
