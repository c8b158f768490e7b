"""The routes of the tap. `Endpoint._capture` and `_run` are the way of one request, top to bottom.

=======  ==============================  ==========================================
method   path (with and without /v1)     answer
=======  ==============================  ==========================================
POST     /v1/hidden_states               slices as JSON, or a stream
GET      /v1/hidden_states/status        what this engine captures, and how it goes
POST     /v1/hidden_states/canary        the result of a canary run now
PUT      /v1/hidden_states/quota         the quota of extraction that is in force now
=======  ==============================  ==========================================
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from taphouse import slices
from taphouse_tap.api.admission import StreamRoom
from taphouse_tap.api.auth import KeyRing
from taphouse_tap.api.collect import Capture
from taphouse_tap.api.delivery import header, slices_answer, stream_answer
from taphouse_tap.api.proof import TOP
from taphouse_tap.api.refusals import CaptureOff, Disproved, Refusal, TooLarge
from taphouse_tap.api.rendering import render
from taphouse_tap.api.requests import CaptureRequest, Prompt, parse_request
from taphouse_tap.api.service import Service, Tap
from taphouse_tap.api.status import status

logger = logging.getLogger("vllm.taphouse")

PREFIXES = ("/v1/hidden_states", "/hidden_states")
T = TypeVar("T")


class Endpoint:
    """ASGI application that answers the tap's paths. Without a service it answers 503 with the reason."""

    def __init__(self) -> None:
        self.service: Service | None = None
        self.keys: KeyRing | None = None
        self.problem = "the server has not finished starting"
        self._routes: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {}
        for prefix in PREFIXES:
            self._routes["POST", prefix] = self._hidden_states
            self._routes["GET", f"{prefix}/status"] = self._status
            self._routes["POST", f"{prefix}/canary"] = self._canary
            self._routes["PUT", f"{prefix}/quota"] = self._quota

    def takes(self, method: str, path: str) -> bool:
        """Whether a request is for the tap."""
        return (method, path) in self._routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every error becomes an answer here."""
        request = Request(scope, receive)
        try:
            response = await self._answer(request, route_path(scope))
        except ClientDisconnect:
            return
        except Refusal as refusal:
            response = JSONResponse(refusal.body(), refusal.status, refusal.headers())
        except Exception:
            logger.exception("Taphouse: a request failed")
            response = JSONResponse(
                Refusal("internal error of the tap; the server's log says more").body(), 500
            )
        await response(scope, receive, send)

    async def _answer(self, request: Request, path: str) -> Response:
        if self.keys is None:
            raise CaptureOff(f"capture is off: {self.problem}")
        self.keys.check(request.headers.get("authorization"))
        return await self._routes[request.method, path](request)

    async def _hidden_states(self, request: Request) -> Response:
        """Count how a request ends."""
        metrics = self._require().metrics
        metrics.add("requests")
        try:
            return await self._capture(request)
        except ClientDisconnect:
            metrics.add("aborted")
            raise
        except Disproved:
            metrics.add("failed")
            self._require().doubt()
            raise
        except Refusal as refusal:
            metrics.add("failed" if refusal.status == 500 else "refused")
            raise
        except Exception:
            metrics.add("failed")
            raise

    async def _capture(self, request: Request) -> Response:
        service = self._require()
        tap = service.open()
        tap.isolation.check()
        wanted = parse_request(await read_body(request, service.settings.max_body_bytes))
        wanted.check(tap.model, service.settings.max_prompts)
        prompts = await render(wanted, tap.tokenizer, tap.model)
        room = None
        if wanted.delivery == "stream":
            layers = len(wanted.asked_layers(tap.model))
            room = tap.admission.admit_stream(prompts, wanted.max_tokens, layers)
        try:
            captures, response = await self._run(request, tap, wanted, prompts, room)
        except BaseException:
            if room is not None:
                room.give_back()
            raise
        self._count(service, tap, captures)
        return response

    async def _run(
        self,
        request: Request,
        tap: Tap,
        wanted: CaptureRequest,
        prompts: list[Prompt],
        room: StreamRoom | None,
    ) -> tuple[list[Capture], Response]:
        """Claim, capture, deliver; whatever is not handed over to the caller is released."""
        claims = await tap.admission.admit(prompts, wanted.max_tokens, tap.collector)
        whole = kept = False
        try:
            captures = await while_connected(request, _captures(tap, wanted, prompts, claims))
            whole = True
            answer = header(
                wanted,
                tap.model,
                captures,
                start_id=tap.start.start_id,
                fingerprint=tap.fingerprint,
                weights_epoch=tap.weights_epoch,
            )
            if room is not None:
                return captures, await asyncio.to_thread(stream_answer, answer, captures, room)
            response = slices_answer(answer, captures)
            kept = True
            return captures, response
        finally:
            if not kept:
                tap.collector.release(claims, unfinished=not whole)

    def _count(self, service: Service, tap: Tap, captures: list[Capture]) -> None:
        rows = sum(capture.rows for capture in captures)
        service.metrics.add("captures", len(captures))
        service.metrics.add("rows", rows)
        service.metrics.add("bytes", rows * tap.model.row_bytes)

    async def _status(self, _request: Request) -> Response:
        assert self.keys is not None
        return JSONResponse(await asyncio.to_thread(status, self._require(), self.keys))

    async def _canary(self, request: Request) -> Response:
        """Run a canary now. 200 with the result when it passed, 503 with the result when not."""
        tap = await self._require().connect()
        result = await while_connected(request, tap.canary.run())
        passed = result.state == "passed"
        body = {"object": "hidden_states.canary", **result.as_dict()}
        if not passed:
            body.update(CaptureOff(f"canary {result.state}: {result.reason}").body())
        return JSONResponse(body, 200 if passed else 503)

    async def _quota(self, request: Request) -> Response:
        """Set what extraction may use now."""
        service = self._require()
        tap = await service.connect()
        body = await read_body(request, service.settings.max_body_bytes)
        quota = await asyncio.to_thread(tap.isolation.set, body)
        return JSONResponse({"object": "hidden_states.quota", **quota.as_dict()})

    def _require(self) -> Service:
        if self.service is None:
            raise CaptureOff(f"capture is off: {self.problem}")
        return self.service


async def _captures(
    tap: Tap, wanted: CaptureRequest, prompts: list[Prompt], claims: list[slices.Claim]
) -> list[Capture]:
    """Capture every prompt; now and then prove the first one."""
    if not tap.proofs.due():
        return await tap.collector.capture_all(wanted, prompts, claims)
    first, *others = await tap.collector.capture_all(wanted, prompts, claims, top=TOP)
    return [replace(first, witness=await tap.proofs.prove(first)), *others]


def route_path(scope: Scope) -> str:
    """The path below the server's root path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def read_body(request: Request, limit: int) -> bytes:
    """Read the body, never more than ``limit`` bytes of it.

    Raises: `TooLarge`.
    """
    message = f"the body is over the limit of {limit} bytes"
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise TooLarge(message)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise TooLarge(message)
    return bytes(body)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; when the caller leaves before it is done, cancel it.

    A caller that is seen to have left gets no answer, though it be done: nobody would take the slices away.
    The body must have been read. Raises: `ClientDisconnect`.
    """
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)  # a starved server sees both at once: the answer, and that the caller left
        if leaving.done() or not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        leaving.cancel()
        task.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
