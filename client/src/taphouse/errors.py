"""Every error that `taphouse` raises on purpose. One tree:

    TaphouseError
    ├── ShardError                            a shard, or a sample for one, is not what it should be
    │   ├── TruncatedShard                    fewer or more bytes than it declares
    │   ├── MalformedShard                    not a shard, or its header contradicts itself
    │   ├── UnsupportedShard                  a format, version, codec or dtype this version doesn't know
    │   ├── ChecksumMismatch                  bytes are not the ones that were written
    │   └── InvalidSample                     shape, dtype, ids, mask or id of a sample
    │       ├── NotFinite                     NaN or infinity among the hidden states
    │       └── ZeroRow                       a row of hidden states that is all zeros
    ├── StoreError                            the store can't do what was asked
    │   ├── UnsafePath                        a path that could leave the store, or hide in it
    │   ├── NotInStore                        nothing under that path
    │   ├── StoreFull                         no space, quota or file-size limit
    │   ├── StoreDenied                       read-only or no permission
    │   ├── StoreBusy                         somebody else holds the lock
    │   └── WrongStore                        of another version, or not the one that is meant
    ├── LedgerError                           an entry is unreadable, or the ledger has a gap
    ├── ApiError                              the extractor API answered with an error
    │   ├── BadRequest                        400, 422
    │   ├── Unauthorized                      401, 403
    │   ├── NotFound                          404
    │   ├── BodyTimeout                       408
    │   ├── Conflict                          409
    │   ├── TooLarge                          413
    │   ├── TooBusy                           429, with `retry_after`
    │   └── Unavailable                       5xx
    ├── Unreachable                           no answer from the server
    └── PartialFailure                        some rows were done and some failed

`taphouse.slices` runs inside vLLM, imports nothing of this package and has errors of its own.

An error carries what was wrong (`message`) and what to do about it (`advice`, may be empty). `str()` gives
both in one line. What exit status the command ends with stands in `taphouse.cli.boundary`.
"""

from __future__ import annotations


class TaphouseError(Exception):
    """Base of all errors here. `message` says what was wrong, `advice` what to do."""

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message, advice)
        self.message = message
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.message}. {self.advice}" if self.advice else self.message


class ShardError(TaphouseError):
    """A shard or a sample was refused.

    `source` is the file (or "<bytes>"), `index` and `sample` the sample's place and id, `tensor` its tensor;
    each is None where the error isn't that particular. `detail` is the message without them.
    """

    def __init__(
        self,
        detail: str,
        *,
        source: str | None = None,
        index: int | None = None,
        sample: str | None = None,
        tensor: str | None = None,
        advice: str = "",
    ) -> None:
        self.detail = detail
        self.source = source
        self.index = index
        self.sample = sample
        self.tensor = tensor
        super().__init__(_place(source, index, sample, tensor) + detail, advice=advice)

    def at(
        self,
        *,
        source: str | None = None,
        index: int | None = None,
        sample: str | None = None,
        tensor: str | None = None,
    ) -> ShardError:
        """The same error with its place filled in where it was not known; what is known stays."""
        return type(self)(
            self.detail,
            source=self.source if source is None else source,
            index=self.index if index is None else index,
            sample=self.sample if sample is None else sample,
            tensor=self.tensor if tensor is None else tensor,
            advice=self.advice,
        )


def _place(source: str | None, index: int | None, sample: str | None, tensor: str | None) -> str:
    parts = []
    if source is not None:
        parts.append(source)
    if index is not None or sample is not None:
        number = "" if index is None else f" {index}"
        name = "" if sample is None else f" {sample!r}"
        parts.append(f"sample{number}{name}")
    if tensor is not None:
        parts.append(tensor)
    return ": ".join([*parts, ""]) if parts else ""


class TruncatedShard(ShardError):
    """The file or body has fewer or more bytes than it declares."""


class MalformedShard(ShardError):
    """Not a shard, or a header that contradicts itself or the file."""


class UnsupportedShard(ShardError):
    """A format, version, codec or dtype that this version of taphouse doesn't know."""


class ChecksumMismatch(ShardError):
    """A tensor, the header or the file is not the one that was written."""


class InvalidSample(ShardError):
    """A sample whose shapes, dtypes, ids or mask are wrong."""


class NotFinite(InvalidSample):
    """NaN or infinity among the hidden states."""


class ZeroRow(InvalidSample):
    """A row of hidden states that is all zeros: what a capture that never happened looks like."""


class StoreError(TaphouseError):
    """The store can't do what was asked. `path` is the path inside the store, or the store's root."""

    def __init__(self, message: str, *, path: str = "", advice: str = "") -> None:
        super().__init__(message, advice=advice)
        self.path = path


class UnsafePath(StoreError):
    """A path that could leave the store or be taken for a temporary file."""


class NotInStore(StoreError):
    """Nothing is stored under this path."""


class StoreFull(StoreError):
    """No space left, or a quota or size limit reached. Nothing half-written is visible."""


class StoreDenied(StoreError):
    """The store is read-only, or this user may not read or write there."""


class StoreBusy(StoreError):
    """Somebody else holds the lock, and it was not to be waited for."""


class WrongStore(StoreError):
    """The store is of another version, or not the one that is meant."""


class LedgerError(TaphouseError):
    """An entry can't be read, or one below the head is missing."""


class ApiError(TaphouseError):
    """The extractor API answered with an error status.

    `code` and `param` are the body's, where it has them; `retry_after` is in seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        advice: str = "",
    ) -> None:
        super().__init__(message, advice=advice)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after


class BadRequest(ApiError):
    """400 or 422: the request itself is wrong; `param` names the field."""


class Unauthorized(ApiError):
    """401: no token, or one that isn't accepted; 403: one whose role or tenant may not do this."""


class NotFound(ApiError):
    """404: no such job, shard or route."""


class BodyTimeout(ApiError):
    """408: what was sent stood still for too long."""


class Conflict(ApiError):
    """409: the job's state doesn't allow it."""


class TooLarge(ApiError):
    """413: the body is over the server's limit."""


class TooBusy(ApiError):
    """429: try again after `retry_after` seconds."""


class Unavailable(ApiError):
    """5xx: the server, or something behind it, is not working now."""


class Unreachable(TaphouseError):
    """No answer: connection refused, name not found, timeout or a cut body."""


class PartialFailure(TaphouseError):
    """Part of the work was done and part failed; the counts are in the message."""
