"""The service itself: whether it works, and what went wrong with a request."""

from __future__ import annotations

from taphouse.wire.base import Answer

__all__ = ["Check", "ErrorBody", "ErrorDetail", "Health", "Ready"]


class Check(Answer):
    """One link that `doctor` or `/ready` looked at."""

    check: str
    ok: bool
    detail: str
    advice: str | None = None


class Health(Answer):
    """`GET /health`: the process answers."""

    status: str = "ok"
    version: str


class Ready(Answer):
    """`GET /ready`: 200 when store and Redis can be used, 503 otherwise."""

    ready: bool
    checks: list[Check]


class ErrorDetail(Answer):
    """What went wrong. `param` names the field or line, `code` is stable for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Answer):
    """Body of every 4xx and 5xx answer."""

    error: ErrorDetail
