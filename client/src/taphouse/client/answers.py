"""How an answer becomes what was asked for, or an error of `taphouse.errors`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from taphouse.errors import (
    ApiError,
    BadRequest,
    BodyTimeout,
    ChecksumMismatch,
    Conflict,
    NotFound,
    TooBusy,
    TooLarge,
    TruncatedShard,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from taphouse.wire import ErrorBody, ErrorDetail

__all__ = ["SHA256_HEADER", "check_download", "check_url", "not_taphouse", "parse", "raise_for", "reachable"]

SHA256_HEADER = "X-Taphouse-SHA256"
M = TypeVar("M", bound=BaseModel)
_URL = "Give one such as http://127.0.0.1:8900."


_ERRORS: dict[int, type[ApiError]] = {
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    408: BodyTimeout,
    409: Conflict,
    413: TooLarge,
    429: TooBusy,
}


_PROXIES = (401, 403, 413, 429)
"""What also a proxy before Taphouse's API answers, in its own words."""


@contextmanager
def reachable() -> Iterator[None]:
    """Run a request: a service that could not be asked raises `Unreachable`."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise Unreachable(
            f"no answer in time from {_url_of(error)}", advice="Raise the timeout or try again."
        ) from error
    except httpx.TransportError as error:
        raise Unreachable(
            f"can't reach {_url_of(error)}: {error}", advice="Check the URL and that the service runs."
        ) from error


def check_url(url: str) -> None:
    """Raise `BadRequest` for what is no URL of a service."""
    try:
        usable = bool(httpx.URL(url).host)
    except (httpx.InvalidURL, UnicodeError) as error:
        raise BadRequest(f"not a usable URL: {error}", status=0, advice=_URL) from error
    if not usable:
        raise BadRequest(f"not a usable URL: {url!r:.80} names no host", status=0, advice=_URL)


def raise_for(answer: httpx.Response) -> None:
    """Turn a 4xx or 5xx answer into its error; an answer of something else than Taphouse is said so."""
    status = answer.status_code
    if status < 400:
        if status >= 300:
            raise not_taphouse(answer)
        return
    try:
        detail = ErrorBody.model_validate_json(answer.content).error
    except ValidationError as error:
        if status < 500 and status not in _PROXIES:
            raise not_taphouse(answer) from error
        detail = ErrorDetail(message=f"HTTP {status} without an explanation", type="unknown")
    kind = _ERRORS.get(status, BadRequest if status < 500 else Unavailable)
    raise kind(
        detail.message,
        status=status,
        code=detail.code,
        param=detail.param,
        retry_after=_seconds(answer.headers.get("Retry-After")),
    )


def parse(answer: httpx.Response, model: type[M]) -> M:
    """Read an answer as `model`; raise `Unavailable` for what is something else."""
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        raise not_taphouse(answer) from error


def not_taphouse(answer: httpx.Response) -> Unavailable:
    """Make the error for an answer that is not Taphouse's."""
    return Unavailable(
        f"{answer.request.url.copy_with(query=None)} did not answer like Taphouse's API",
        status=answer.status_code,
        advice="Check the URL and both versions.",
    )


def check_download(name: str, answer: httpx.Response, received: int, sha256: str) -> None:
    """Raise `TruncatedShard` or `ChecksumMismatch` unless all of shard `name` came, as it was promised."""
    length = answer.headers.get("Content-Length")
    if length is not None and int(length) != received:
        raise TruncatedShard(f"{received} of {length} bytes of {name} arrived", source=name)
    if answer.headers.get(SHA256_HEADER) != sha256:
        raise ChecksumMismatch(f"{name} is not what its ledger entry says", source=name)


def _url_of(error: httpx.RequestError) -> str:
    try:
        return str(error.request.url.copy_with(query=None, userinfo=b""))
    except RuntimeError:
        return "the service"


def _seconds(value: str | None) -> float | None:
    try:
        return float(value) if value is not None else None
    except ValueError:
        return None
