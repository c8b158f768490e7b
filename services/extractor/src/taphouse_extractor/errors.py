"""Every error that the extractor raises on purpose, and what each is over HTTP (`HTTP`, the one table).

    ExtractorError
    ├── RequestError               the caller's to mend
    │   ├── InvalidRequest             a field, a line or an option is wrong; `param` names it
    │   ├── UnsupportedMedia           a body of a kind that the route doesn't take
    │   ├── Unauthorized               no token, or not one of ours
    │   ├── Forbidden                  a token of ours that may not do this
    │   ├── NotFound                   no such job or shard
    │   ├── TooLarge                   over a limit, which the message names
    │   ├── TooBusy                    too many at once: try again soon
    │   └── Conflict                   the job's state doesn't allow it
    ├── NotAccepting               no new work now (disk, Redis): try again later
    ├── BadRow                     a row of a dataset can't become a prompt
    ├── EngineError
    │   ├── RowRefused                 the engine won't take this row, whatever we do
    │   ├── CaptureFailed              the engine took the row, and its states can't be had
    │   ├── EngineUnavailable          down, full, capture off: not the row's fault; wait
    │   │   └── NoEngine                   none of the engines can serve it now
    │   ├── EngineTimeout              no answer in time
    │   ├── EngineFailing              it captured no row of a batch
    │   └── EngineChanged              other weights or layers than the job began with: wait for such
    ├── BatchBusy                  another worker holds the batch
    ├── JobCancelled               the job was cancelled while a batch of it ran
    ├── RefusedFunction            the queue named a function that workers don't run
    └── MissingExtra               a setting needs packages that aren't installed

Messages say what was wrong and what to do. Errors of the store, ledger and shards are `taphouse.errors`'.
"""

from __future__ import annotations

from dataclasses import dataclass

from taphouse.errors import LedgerError, StoreError, StoreFull


class ExtractorError(Exception):
    """Base of the tree."""


class RequestError(ExtractorError):
    """The request can't be served as it is. `param` names the field, option or line, where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field, a line or an option is wrong."""


class UnsupportedMedia(RequestError):
    """The body's Content-Type is none that the route takes."""


class Unauthorized(RequestError):
    """No bearer token, or not one of ours."""


class Forbidden(RequestError):
    """A token of ours, whose role or tenant doesn't allow this."""


class NotFound(RequestError):
    """No such job or shard."""


class TooLarge(RequestError):
    """Over a limit, which the message names."""


class TooBusy(RequestError):
    """Too many at once, or in a minute. `retry_after` is in seconds, where it is known."""

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class Conflict(RequestError):
    """The job's state doesn't allow what was asked."""


class NotAccepting(ExtractorError):
    """No new work is taken now."""


class BadRow(ExtractorError):
    """A row can't become a prompt."""


class EngineError(ExtractorError):
    """Base of what the engine, or the way to it, does to us."""


class RowRefused(EngineError):
    """The engine refuses this row (4xx): it will refuse it again.

    `prompt_tokens` is how long its prompt is, where that is why.
    """

    def __init__(self, message: str, *, prompt_tokens: int | None = None) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens


class CaptureFailed(EngineError):
    """The engine ran the row, but its hidden states are missing or damaged."""


class EngineUnavailable(EngineError):
    """The engine is down, full, or doesn't capture. `retry_after` is in seconds, where it said so."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoEngine(EngineUnavailable):
    """No engine can serve this now: each is away, or has other layers or weights than are asked for."""


class EngineTimeout(EngineError):
    """The engine did not answer in time."""


class EngineFailing(EngineError):
    """The engine captured not one row of a batch. `said` is its reason for one, which may quote the row."""

    def __init__(self, message: str, *, said: str) -> None:
        super().__init__(message)
        self.said = said


class EngineChanged(EngineError):
    """The engine's weights or layers are not those that the job began with."""


class BatchBusy(ExtractorError):
    """Another worker holds the batch's lease."""


class ExtractionStopped(ExtractorError):
    """The operator stopped extraction: a batch waits for the next order."""


class JobCancelled(ExtractorError):
    """The job was cancelled while a batch of it ran."""


class MissingExtra(ExtractorError):
    """A setting needs packages that aren't installed."""


class RefusedFunction(ExtractorError):
    """The queue named a function that workers don't run."""


@dataclass(frozen=True)
class HttpAnswer:
    """What an error is over HTTP: status, OpenAI-style type, and seconds for Retry-After."""

    status: int
    type: str
    retry_after: int | None = None


HTTP: dict[type[Exception], HttpAnswer] = {
    InvalidRequest: HttpAnswer(422, "invalid_request_error"),
    UnsupportedMedia: HttpAnswer(415, "invalid_request_error"),
    Unauthorized: HttpAnswer(401, "authentication_error"),
    Forbidden: HttpAnswer(403, "permission_error"),
    NotFound: HttpAnswer(404, "not_found_error"),
    TooLarge: HttpAnswer(413, "invalid_request_error"),
    TooBusy: HttpAnswer(429, "rate_limit_error", 2),
    Conflict: HttpAnswer(409, "conflict_error"),
    NotAccepting: HttpAnswer(503, "unavailable_error", 30),
    BadRow: HttpAnswer(422, "invalid_request_error"),
    RowRefused: HttpAnswer(422, "invalid_request_error"),
    CaptureFailed: HttpAnswer(502, "engine_error"),
    EngineUnavailable: HttpAnswer(503, "engine_error", 5),
    EngineTimeout: HttpAnswer(504, "engine_error"),
    EngineFailing: HttpAnswer(502, "engine_error"),
    EngineChanged: HttpAnswer(503, "engine_error", 5),
    StoreFull: HttpAnswer(507, "store_error"),
    StoreError: HttpAnswer(503, "store_error", 30),
    LedgerError: HttpAnswer(503, "store_error", 30),
}


def http_answer(error: Exception) -> HttpAnswer:
    """The nearest entry of the table on the error's line of classes; 500 when it has none."""
    for kind in type(error).__mro__:
        if kind in HTTP:
            return HTTP[kind]
    return HttpAnswer(500, "server_error")


def error_code(error: Exception) -> str:
    """Stable name for programs: the class in snake case, such as `too_large`."""
    name = type(error).__name__
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
