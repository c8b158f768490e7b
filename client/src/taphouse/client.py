"""The Python client of the extractor's API.

    with Taphouse("http://127.0.0.1:8900", token="...") as taphouse:
        job = taphouse.enqueue(Path("rows.jsonl"), JobOptions(max_tokens=256))
        print(taphouse.queue().depth)

Synchronous, one connection pool, safe to share between threads. Every failure is one of `taphouse.errors`.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from taphouse import __version__
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
from taphouse.wire import (
    Check,
    ErrorBody,
    ErrorDetail,
    ExtractRequest,
    Governor,
    GovernorMode,
    GovernorOrder,
    Health,
    Job,
    JobList,
    JobOptions,
    JobRequest,
    QueueStatus,
    Ready,
    Row,
    RowFailure,
    ShardList,
)
from taphouse.wire_retention import Pruned, PruneRequest
from taphouse.wire_samples import SampleQuery, SamplesDeleted, SamplesFound

__all__ = ["Taphouse"]

CHUNK_BYTES = 1 << 18
SHA256_HEADER = "X-Taphouse-SHA256"
M = TypeVar("M", bound=BaseModel)
Progress = Callable[[int], None]
Source = Path | BinaryIO | Iterable[bytes]


class Taphouse:
    """One extractor service at `base_url`; `token` is its bearer token, `timeout` seconds without any answer.

    `extract_timeout`, or `timeout` where that is longer, is the same for `extract`, which waits for the
    engine, and for `enqueue`, which waits until every batch is on disk. `transport` replaces the network.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        extract_timeout: float = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"User-Agent": f"taphouse/{__version__}"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._timeout, self._extract_timeout = timeout, max(timeout, extract_timeout)
        self._upload_timeout = httpx.Timeout(timeout, read=self._extract_timeout)
        self._http = httpx.Client(
            base_url=base_url.rstrip("/"), headers=headers, timeout=timeout, transport=transport
        )

    def __enter__(self) -> Taphouse:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def extract(self, rows: Iterable[Row | dict[str, Any]], options: JobOptions | None = None) -> bytes:
        """Extract a few rows now; return the bytes of one shard, checked against their length and sha256."""
        request = ExtractRequest(rows=[_row(row) for row in rows], options=options or JobOptions())
        body = request.model_dump(mode="json", exclude_none=True)
        answer = self._send("POST", "/v1/extract", json=body, timeout=self._extract_timeout)
        promised = answer.headers.get(SHA256_HEADER)
        if hashlib.sha256(answer.content).hexdigest() != promised:
            raise ChecksumMismatch("the shard that arrived is not the one that was sent", source="<answer>")
        return answer.content

    def enqueue(
        self,
        source: Source,
        options: JobOptions | None = None,
        name: str | None = None,
        progress: Progress | None = None,
        *,
        again: bool = False,
        key: str | None = None,
    ) -> Job:
        """Upload a dataset (JSONL) as a stream and make a job of it.

        `source` is a file of this machine, an open binary file, or chunks of bytes. `progress` is told the
        number of bytes of every chunk that was sent. With a `key` of the caller's, sending the same again
        gives the job that is there. Rows that were enqueued before with the same options are refused, unless
        `again`.
        """
        params = {"options": (options or JobOptions()).model_dump_json(exclude_none=True)}
        if name:
            params["name"] = name
        with _chunks(source) as chunks:
            answer = self._send(
                "POST",
                "/v1/jobs",
                params={**params, **_repeated(again)},
                content=_reported(chunks, progress),
                headers={"Content-Type": "application/x-ndjson", **_keyed(key)},
                timeout=self._upload_timeout,
            )
        return _parse(answer, Job)

    def enqueue_path(
        self,
        path: str,
        options: JobOptions | None = None,
        name: str | None = None,
        *,
        again: bool = False,
        key: str | None = None,
    ) -> Job:
        """Make a job of a file that the service can read itself, under one of its dataset roots.

        `again` and `key` as for `enqueue`.
        """
        request = JobRequest(path=path, name=name, options=options or JobOptions())
        answer = self._send(
            "POST",
            "/v1/jobs",
            params=_repeated(again),
            headers=_keyed(key),
            json=request.model_dump(mode="json", exclude_none=True),
            timeout=None,
        )
        return _parse(answer, Job)

    def jobs(self, limit: int = 100) -> list[Job]:
        """List jobs, newest first."""
        return _parse(self._send("GET", "/v1/jobs", params={"limit": limit}), JobList).jobs

    def job(self, job_id: str) -> Job:
        """One job, with its first failures."""
        return _parse(self._send("GET", f"/v1/jobs/{_segment(job_id)}"), Job)

    def cancel(self, job_id: str) -> Job:
        """Cancel a job: what is sealed stays, nothing more is extracted."""
        return _parse(self._send("POST", f"/v1/jobs/{_segment(job_id)}/cancel"), Job)

    def pause(self, job_id: str) -> Job:
        """Pause a job: batches that run end, no other begins."""
        return _parse(self._send("POST", f"/v1/jobs/{_segment(job_id)}/pause"), Job)

    def resume(self, job_id: str) -> Job:
        """Let a paused job go on."""
        return _parse(self._send("POST", f"/v1/jobs/{_segment(job_id)}/resume"), Job)

    def retry(self, job_id: str) -> Job:
        """Try the failed rows of a job again."""
        return _parse(self._send("POST", f"/v1/jobs/{_segment(job_id)}/retry"), Job)

    def failures(self, job_id: str) -> Iterator[RowFailure]:
        """All rows of a job that made no sample, as they come."""
        path = f"/v1/jobs/{_segment(job_id)}/failures"
        with _reachable(), self._http.stream("GET", path) as answer:
            if answer.is_error:
                answer.read()
            _raise_for(answer)
            for line in answer.iter_lines():
                yield RowFailure.model_validate_json(line)

    def queue(self) -> QueueStatus:
        """Depth, rates, ETA, workers, engines, consumers."""
        return _parse(self._send("GET", "/v1/queue"), QueueStatus)

    def governor(self) -> Governor:
        """What extraction may use, and why."""
        return _parse(self._send("GET", "/v1/governor"), Governor)

    def govern(self, mode: GovernorMode, busy_ms: float | None = None) -> Governor:
        """Let the governor govern, pin its limit at `busy_ms` milliseconds of a step, or stop extraction."""
        order = GovernorOrder(mode=mode, busy_ms=busy_ms)
        body = order.model_dump(mode="json", exclude_none=True)
        return _parse(self._send("POST", "/v1/governor", json=body), Governor)

    def shards(self, after: int = 0, limit: int = 100) -> ShardList:
        """Ledger entries after the cursor `after`."""
        return _parse(self._send("GET", "/v1/shards", params={"after": after, "limit": limit}), ShardList)

    def download(self, name: str, target: Path, progress: Progress | None = None) -> Path:
        """Download a shard to `target` (a file or an existing directory): checked, then renamed."""
        if target.is_dir():
            target = target / name
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        digest, received = hashlib.sha256(), 0
        try:
            path, plain = f"/v1/shards/{_segment(name)}", {"Accept-Encoding": "identity"}
            with _reachable(), self._http.stream("GET", path, headers=plain) as answer:
                if answer.is_error:
                    answer.read()
                _raise_for(answer)
                with part.open("wb") as file:
                    for chunk in answer.iter_raw(CHUNK_BYTES):
                        file.write(chunk)
                        digest.update(chunk)
                        received += len(chunk)
                        if progress:
                            progress(len(chunk))
            _check_download(name, answer, received, digest.hexdigest())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return target

    def find_samples(self, query: SampleQuery) -> SamplesFound:
        """Rows of a person or a tenant, and the shards that hold their samples."""
        body = query.model_dump(exclude_none=True)
        answer = self._send("POST", "/v1/samples/find", json=body, timeout=self._extract_timeout)
        return _parse(answer, SamplesFound)

    def delete_samples(self, query: SampleQuery) -> SamplesDeleted:
        """Delete them from shards and rows, for good."""
        body = query.model_dump(exclude_none=True)
        answer = self._send("POST", "/v1/samples/delete", json=body, timeout=self._extract_timeout)
        return _parse(answer, SamplesDeleted)

    def prune_shards(self, request: PruneRequest) -> Pruned:
        """Take shards away that consumers have acknowledged, or more by force."""
        body = request.model_dump(exclude_none=True)
        answer = self._send("POST", "/v1/shards/prune", json=body, timeout=self._extract_timeout)
        return _parse(answer, Pruned)

    def health(self) -> Health:
        """Whether the service answers at all."""
        return _parse(self._send("GET", "/health"), Health)

    def ready(self) -> Ready:
        """Whether it can take work, and if not, which check says so."""
        return _parse(self._send("GET", "/ready", accept=(503,)), Ready)

    def doctor(self) -> list[Check]:
        """What the service finds when it looks at each of its links."""
        answer = self._send("GET", "/v1/doctor", timeout=max(60.0, self._timeout))
        try:
            return TypeAdapter(list[Check]).validate_json(answer.content)
        except ValidationError as error:
            raise _not_taphouse(answer) from error

    def _send(
        self, method: str, path: str, *, accept: tuple[int, ...] = (), **request: Any
    ) -> httpx.Response:
        with _reachable():
            answer = self._http.request(method, path, **request)
        if answer.status_code not in accept:
            _raise_for(answer)
        return answer


@contextmanager
def _reachable() -> Iterator[None]:
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
    except httpx.InvalidURL as error:
        raise Unreachable(
            f"not a usable URL: {error}", advice="Give one such as http://127.0.0.1:8900."
        ) from error


def _url_of(error: httpx.RequestError) -> str:
    try:
        return str(error.request.url.copy_with(query=None, userinfo=b""))
    except RuntimeError:
        return "the service"


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


def _raise_for(answer: httpx.Response) -> None:
    """Turn a 4xx or 5xx answer into its error; an answer of something else than Taphouse is said so."""
    status = answer.status_code
    if status < 400:
        if status >= 300:
            raise _not_taphouse(answer)
        return
    try:
        detail = ErrorBody.model_validate_json(answer.content).error
    except ValidationError as error:
        if status < 500 and status not in _PROXIES:
            raise _not_taphouse(answer) from error
        detail = ErrorDetail(message=f"HTTP {status} without an explanation", type="unknown")
    kind = _ERRORS.get(status, BadRequest if status < 500 else Unavailable)
    raise kind(
        detail.message,
        status=status,
        code=detail.code,
        param=detail.param,
        retry_after=_seconds(answer.headers.get("Retry-After")),
    )


def _parse(answer: httpx.Response, model: type[M]) -> M:
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        raise _not_taphouse(answer) from error


def _not_taphouse(answer: httpx.Response) -> Unavailable:
    return Unavailable(
        f"{answer.request.url.copy_with(query=None)} did not answer like Taphouse's API",
        status=answer.status_code,
        advice="Check the URL and both versions.",
    )


def _check_download(name: str, answer: httpx.Response, received: int, sha256: str) -> None:
    length = answer.headers.get("Content-Length")
    if length is not None and int(length) != received:
        raise TruncatedShard(f"{received} of {length} bytes of {name} arrived", source=name)
    if answer.headers.get(SHA256_HEADER) != sha256:
        raise ChecksumMismatch(f"{name} is not what its ledger entry says", source=name)


def _seconds(value: str | None) -> float | None:
    try:
        return float(value) if value is not None else None
    except ValueError:
        return None


def _row(row: Row | dict[str, Any]) -> Row:
    return row if isinstance(row, Row) else Row.model_validate(row)


def _repeated(again: bool) -> dict[str, str]:
    return {"again": "true"} if again else {}


def _keyed(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Idempotency-Key": key}


def _segment(value: str) -> str:
    """One path segment: a name can't lead to another route."""
    if not value or any(c in value for c in "/?#%") or value in (".", ".."):
        raise BadRequest(f"{value!r} is not a name", status=0)
    return value


@contextmanager
def _chunks(source: Source) -> Iterator[Iterable[bytes]]:
    if isinstance(source, Path):
        with source.open("rb") as file:
            yield iter(lambda: file.read(CHUNK_BYTES), b"")
    elif hasattr(source, "read"):
        yield iter(lambda: source.read(CHUNK_BYTES), b"")
    else:
        yield source


def _reported(chunks: Iterable[bytes], progress: Progress | None) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        if progress:
            progress(len(chunk))
