"""One extractor service over HTTP: a method for every route."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from taphouse import __version__
from taphouse.client.answers import (
    SHA256_HEADER,
    check_download,
    check_url,
    not_taphouse,
    parse,
    raise_for,
    reachable,
)
from taphouse.client.bodies import (
    CHUNK_BYTES,
    Progress,
    Source,
    as_row,
    chunks_of,
    keyed,
    repeated,
    reported,
    segment,
)
from taphouse.errors import ChecksumMismatch
from taphouse.wire import (
    Check,
    Consumer,
    ExtractRequest,
    Governor,
    GovernorMode,
    GovernorOrder,
    Health,
    Job,
    JobList,
    JobOptions,
    JobRequest,
    Pruned,
    PruneRequest,
    QueueStatus,
    Ready,
    Row,
    RowFailure,
    SampleQuery,
    SamplesDeleted,
    SamplesFound,
    ShardList,
)

__all__ = ["Taphouse"]


class Taphouse:
    """One extractor service at `base_url`; `token` is its bearer token, `timeout` seconds without any answer.

    `extract_timeout`, or `timeout` where that is longer, is the same for `extract`, which waits for the
    engine, and for `enqueue`, which waits until every batch is on disk. `transport` replaces the network.
    A `base_url` that is no URL raises `BadRequest`.
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
        check_url(base_url)
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
        request = ExtractRequest(rows=[as_row(row) for row in rows], options=options or JobOptions())
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
        with chunks_of(source) as chunks:
            answer = self._send(
                "POST",
                "/v1/jobs",
                params={**params, **repeated(again)},
                content=reported(chunks, progress),
                headers={"Content-Type": "application/x-ndjson", **keyed(key)},
                timeout=self._upload_timeout,
            )
        return parse(answer, Job)

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
            params=repeated(again),
            headers=keyed(key),
            json=request.model_dump(mode="json", exclude_none=True),
            timeout=None,
        )
        return parse(answer, Job)

    def jobs(self, limit: int = 100) -> list[Job]:
        """List jobs, newest first."""
        return parse(self._send("GET", "/v1/jobs", params={"limit": limit}), JobList).jobs

    def job(self, job_id: str) -> Job:
        """One job, with its first failures."""
        return parse(self._send("GET", f"/v1/jobs/{segment(job_id)}"), Job)

    def cancel(self, job_id: str) -> Job:
        """Cancel a job: what is sealed stays, nothing more is extracted."""
        return parse(self._send("POST", f"/v1/jobs/{segment(job_id)}/cancel"), Job)

    def pause(self, job_id: str) -> Job:
        """Pause a job: batches that run end, no other begins."""
        return parse(self._send("POST", f"/v1/jobs/{segment(job_id)}/pause"), Job)

    def resume(self, job_id: str) -> Job:
        """Let a paused job go on."""
        return parse(self._send("POST", f"/v1/jobs/{segment(job_id)}/resume"), Job)

    def retry(self, job_id: str) -> Job:
        """Try the failed rows of a job again."""
        return parse(self._send("POST", f"/v1/jobs/{segment(job_id)}/retry"), Job)

    def failures(self, job_id: str, *, skip: int = 0, limit: int | None = None) -> Iterator[RowFailure]:
        """Rows of a job that made no sample, as they come: all, or `limit` after the first `skip`."""
        path, page = f"/v1/jobs/{segment(job_id)}/failures", {"skip": skip, "limit": limit}
        params = {name: value for name, value in page.items() if value}
        with reachable(), self._http.stream("GET", path, params=params) as answer:
            if answer.is_error:
                answer.read()
            raise_for(answer)
            for line in answer.iter_lines():
                try:
                    yield RowFailure.model_validate_json(line)
                except ValidationError as error:
                    raise not_taphouse(answer) from error

    def queue(self) -> QueueStatus:
        """Depth, rates, ETA, workers, engines, consumers."""
        return parse(self._send("GET", "/v1/queue"), QueueStatus)

    def governor(self) -> Governor:
        """What extraction may use, and why."""
        return parse(self._send("GET", "/v1/governor"), Governor)

    def govern(self, mode: GovernorMode, busy_ms: float | None = None) -> Governor:
        """Let the governor govern, pin its limit at `busy_ms` milliseconds of a step, or stop extraction."""
        order = GovernorOrder(mode=mode, busy_ms=busy_ms)
        body = order.model_dump(mode="json", exclude_none=True)
        return parse(self._send("POST", "/v1/governor", json=body), Governor)

    def shards(self, after: int = 0, limit: int = 100) -> ShardList:
        """Ledger entries after the cursor `after`."""
        return parse(self._send("GET", "/v1/shards", params={"after": after, "limit": limit}), ShardList)

    def download(self, name: str, target: Path, progress: Progress | None = None) -> Path:
        """Download a shard to `target` (a file, a link to one, or a directory): checked, then renamed."""
        if target.is_dir():
            target = target / name
        real = Path(os.path.realpath(target))  # what a link points to is what is written
        part = real.with_name(f".{real.name}.{secrets.token_hex(4)}.part")
        digest, received = hashlib.sha256(), 0
        try:
            path, plain = f"/v1/shards/{segment(name)}", {"Accept-Encoding": "identity"}
            with reachable(), self._http.stream("GET", path, headers=plain) as answer:
                if answer.is_error:
                    answer.read()
                raise_for(answer)
                with part.open("wb") as file:
                    for chunk in answer.iter_raw(CHUNK_BYTES):
                        file.write(chunk)
                        digest.update(chunk)
                        received += len(chunk)
                        if progress:
                            progress(len(chunk))
            check_download(name, answer, received, digest.hexdigest())
            part.replace(real)
        finally:
            part.unlink(missing_ok=True)
        return target

    def find_samples(self, query: SampleQuery) -> SamplesFound:
        """Rows of a person or a tenant, and the shards that hold their samples."""
        body = query.model_dump(exclude_none=True)
        answer = self._send("POST", "/v1/samples/find", json=body, timeout=self._extract_timeout)
        return parse(answer, SamplesFound)

    def delete_samples(self, query: SampleQuery) -> SamplesDeleted:
        """Delete them from shards and rows, for good."""
        body = query.model_dump(exclude_none=True)
        answer = self._send("POST", "/v1/samples/delete", json=body, timeout=self._extract_timeout)
        return parse(answer, SamplesDeleted)

    def prune_shards(self, request: PruneRequest) -> Pruned:
        """Take shards away that consumers have acknowledged, or more by force."""
        body = request.model_dump(exclude_none=True)
        answer = self._send("POST", "/v1/shards/prune", json=body, timeout=self._extract_timeout)
        return parse(answer, Pruned)

    def forget_consumer(self, name: str) -> Consumer:
        """Forget a consumer that will not go on: feeding and retention wait for it no more."""
        return parse(self._send("POST", f"/v1/consumers/{segment(name)}/forget"), Consumer)

    def health(self) -> Health:
        """Whether the service answers at all."""
        return parse(self._send("GET", "/health"), Health)

    def ready(self) -> Ready:
        """Whether it can take work, and if not, which check says so."""
        return parse(self._send("GET", "/ready", accept=(503,)), Ready)

    def doctor(self, *, canary: bool = False) -> list[Check]:
        """What the service finds when it looks at each link; with `canary` every engine ran its own first."""
        method = "POST" if canary else "GET"
        answer = self._send(method, "/v1/doctor", timeout=max(60.0, self._timeout))
        try:
            return TypeAdapter(list[Check]).validate_json(answer.content)
        except ValidationError as error:
            raise not_taphouse(answer) from error

    def _send(
        self, method: str, path: str, *, accept: tuple[int, ...] = (), **request: Any
    ) -> httpx.Response:
        with reachable():
            answer = self._http.request(method, path, **request)
        if answer.status_code not in accept:
            raise_for(answer)
        return answer
