"""Every failure as an `ErrorBody`, by the one table in `taphouse_extractor.errors`."""

from __future__ import annotations

import logging
from collections import Counter
from math import ceil

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from taphouse.errors import TaphouseError
from taphouse.wire import ErrorBody, ErrorDetail
from taphouse_extractor.errors import ExtractorError, error_code, http_answer

__all__ = ["RESPONSES", "add_failures", "answer_to"]

log = logging.getLogger(__name__)
LEFT = 499
"""What proxies say of such a request. Nobody is there to read it."""

RESPONSES: dict[int | str, dict[str, object]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The body can't be read",
        401: "No token, or not one of ours",
        403: "The token's role or tenant doesn't allow this; without tokens: another site's request",
        404: "No such job or shard",
        408: "The body stood still",
        409: "The job's state, or the service's, doesn't allow it",
        413: "Over a limit, which the message names",
        415: "Not a kind of body that the route takes",
        422: "A field, line or option is wrong; `param` names it",
        429: "Too many at once; see Retry-After",
        502: "The engine's states can't be used",
        503: "Not now; see Retry-After",
        504: "The engine gave no answer in time",
        507: "The store is full",
    }.items()
}


def add_failures(app: FastAPI) -> None:
    """Install the handlers; how often each code was answered is in `app.state.refused`."""
    app.state.refused = Counter[str]()
    app.add_exception_handler(ExtractorError, answer_to)
    app.add_exception_handler(TaphouseError, answer_to)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_exception_handler(Exception, _unknown)


def _body(
    request: Request, status: int, detail: ErrorDetail, headers: dict[str, str] | None = None
) -> JSONResponse:
    request.app.state.refused[detail.code] += 1
    return JSONResponse(ErrorBody(error=detail).model_dump(), status, headers)


async def answer_to(request: Request, error: Exception) -> JSONResponse:
    """What an error of ours is over HTTP."""
    answer = http_answer(error)
    if answer.status >= 500:
        log.warning("answered %d: %s", answer.status, error)
    wait_s = getattr(error, "retry_after", None) or answer.retry_after
    headers = {"Retry-After": str(ceil(wait_s))} if wait_s else {}
    if answer.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    detail = ErrorDetail(
        message=str(error), type=answer.type, param=getattr(error, "param", None), code=error_code(error)
    )
    return _body(request, answer.status, detail, headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":  # whose place is a character, which names nothing
        found = first.get("ctx", {}).get("error", "it can't be read")
        message = f"the body is not JSON: {found}"
        detail = ErrorDetail(
            message=message, type="invalid_request_error", param="body", code="invalid_request"
        )
        return _body(request, 422, detail)
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    where = ".".join(place) or str(first["loc"][0])
    message = f"{where}: {first['msg']}"
    detail = ErrorDetail(message=message, type="invalid_request_error", param=where, code="invalid_request")
    return _body(request, 422, detail)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    detail = ErrorDetail(message=str(error.detail), type=kind, code=f"http_{error.status_code}")
    return _body(request, error.status_code, detail, dict(error.headers or {}))


async def _left(request: Request, _: Exception) -> JSONResponse:
    """A caller that left in the middle of its body reads no answer; the audit's line has its status."""
    detail = ErrorDetail(message="the caller left", type="invalid_request_error", code="client_left")
    return _body(request, LEFT, detail)


async def _unknown(request: Request, error: Exception) -> JSONResponse:
    log.error("unexpected %s", type(error).__name__, exc_info=error)
    detail = ErrorDetail(
        message="unexpected error, see the service's log", type="server_error", code="unexpected"
    )
    return _body(request, 500, detail)
