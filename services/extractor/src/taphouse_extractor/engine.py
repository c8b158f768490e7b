"""Client of the tap's endpoint on the live engine: a prompt in, joined hidden states out.

Bulk bytes don't pass through HTTP: the answer names sealed slices, which are read from the shared slice
directory and released. A path in an answer is never opened: slices lie below our own directory, by the names
that the slice contract gives them.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from taphouse.errors import InvalidSample
from taphouse.samples import Witness
from taphouse.shards import ShardMeta
from taphouse.slices import (
    SliceError,
    check_slices,
    fingerprint_id,
    is_tag,
    join_slices,
    release,
    start_id_of,
)
from taphouse_extractor.engine_http import ask, encode_body, error_of, explain, json_of
from taphouse_extractor.errors import CaptureFailed, EngineUnavailable
from taphouse_extractor.fitting import trouble, view_of
from taphouse_extractor.rows import describe

__all__ = ["Capture", "Engine", "in_order", "meta_of"]

CAPTURE_WAITS_S = (0.5, 2.0)
"""A capture that failed is tried again after each of these."""

CANARY_S = 30.0
"""The longest wait for a canary, which production may hold up."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Capture:
    """What the engine gave for one prompt.

    `token_ids` int32 [P+G], prompt and generated; `states` [T, L, H] raw elements (bf16 as uint16) of the
    first T tokens; `loss_mask` uint8 [P+G] where it was asked for; `num_layers` is the id of the final norm's
    stream.
    """

    token_ids: NDArray[np.int32]
    prompt_len: int
    rows: int
    finish_reason: str | None
    loss_mask: NDArray[np.uint8] | None
    states: NDArray[Any]
    layers: tuple[int, ...]
    num_layers: int
    dtype: str
    fingerprint: dict[str, Any]
    fingerprint_id: str
    witness: Witness | None = None

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.states.shape[2])


class Engine:
    """One vLLM server with the tap.

    `timeout_s` is the longest wait for a row, `patience_s` while the engine is full. `slice_dir` is the tap's
    slice directory as this process sees it. Safe to share between threads.
    """

    def __init__(
        self,
        url: str,
        *,
        slice_dir: Path,
        key: str | None = None,
        timeout_s: float = 600.0,
        patience_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self.slice_dir = slice_dir
        self._patience_s = patience_s
        self._sleep = sleep
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
            verify=not self.url.startswith("http://"),  # certificates take 0.1 s to load in each work-horse
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def capture(self, body: dict[str, Any]) -> Capture:
        """Run one prompt and return its states; `body` is the JSON of `POST /v1/hidden_states`.

        Raises `BadRow` (it can't be sent), `RowRefused` (4xx), `CaptureFailed` (when the last try fails too),
        `EngineTimeout`, and `EngineUnavailable` for all that isn't the row's fault.
        """
        content = encode_body(body)
        for wait in CAPTURE_WAITS_S:
            try:
                return self._take(self._ask(content), body.get("layers"))
            except CaptureFailed:
                self._sleep(wait)
        self._require_capture()  # an engine that died while it ran the row is not the row's fault
        return self._take(self._ask(content), body.get("layers"))

    def status(self, *, timeout_s: float = 5.0) -> dict[str, Any]:
        """`GET /v1/hidden_states/status`; raises `EngineUnavailable`, `EngineTimeout`, `CaptureFailed`."""
        answer = self._send("GET", "/v1/hidden_states/status", timeout=timeout_s)
        if answer.status_code != 200:
            raise EngineUnavailable(explain(answer))
        return json_of(answer)

    def set_quota(self, quota: dict[str, Any]) -> None:
        """`PUT /v1/hidden_states/quota`: what extraction may use; raises as `status` does."""
        answer = self._send("PUT", "/v1/hidden_states/quota", json=quota, timeout=2.0)
        if answer.status_code != 200:
            raise EngineUnavailable(explain(answer))

    def canary(self) -> dict[str, Any]:
        """`POST /v1/hidden_states/canary`: how a canary that is run now ended; raises as `status` does."""
        answer = self._send("POST", "/v1/hidden_states/canary", timeout=CANARY_S)
        found = json_of(answer) if answer.status_code in (200, 503) else {}
        if "state" not in found:
            raise EngineUnavailable(explain(answer))
        return found

    def _require_capture(self) -> None:
        sick = trouble(view_of(self.url, self.status()))
        if sick is not None:
            raise EngineUnavailable(sick)

    def metrics(self) -> str:
        """vLLM's own `/metrics`, as text; raises `EngineUnavailable`."""
        answer = self._send("GET", "/metrics", timeout=5.0)
        if answer.status_code != 200:
            raise EngineUnavailable(explain(answer))
        return answer.text

    def _ask(self, content: bytes) -> dict[str, Any]:
        deadline = time.monotonic() + self._patience_s
        kind = {"Content-Type": "application/json"}
        while True:
            answer = self._send("POST", "/v1/hidden_states", content=content, headers=kind)
            if answer.status_code == 200:
                return json_of(answer)
            error = error_of(answer)
            full = answer.status_code == 429 and isinstance(error, EngineUnavailable)
            if not full or time.monotonic() >= deadline:
                raise error
            self._sleep(min(getattr(error, "retry_after", None) or 1.0, 5.0))

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        return ask(self._http, self.url, method, path, within_s=self._timeout_s, **request)

    def _take(self, answer: dict[str, Any], layers: list[int] | None) -> Capture:
        """Join the slices of an answer with one item, and release them whatever comes of it."""
        try:
            item = answer["data"][0]
            tag, start_id = str(item["tag"]), start_id_of(str(answer["start_id"]))
            if not is_tag(tag):
                raise CaptureFailed(f"the engine named a capture {tag!r:.80}, which is no tag")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CaptureFailed(f"the engine's answer lacks what it must have: {error!r}") from error
        directory = self.slice_dir / f"start-{start_id}"
        try:
            return _read(answer, item, directory, layers)
        except FileNotFoundError as error:
            if directory.is_dir():
                raise CaptureFailed("the slices went away before they were read") from error
            raise EngineUnavailable(
                f"{directory} is not there: slice_dir must be the tap's slice directory, on a shared mount"
            ) from error
        except PermissionError as error:
            raise EngineUnavailable(
                f"can't read {directory}: run workers as the engine's user ({error.strerror})"
            ) from error
        except (SliceError, KeyError, TypeError, ValueError, OverflowError, OSError) as error:
            raise CaptureFailed(f"its slices can't be used: {error}") from error
        finally:
            _release(directory, tag)


def _read(answer: dict[str, Any], item: dict[str, Any], directory: Path, layers: list[int] | None) -> Capture:
    if item.get("error"):
        raise CaptureFailed(f"the engine could not capture it: {item['error']}")
    if item.get("finish_reason") == "abort":
        raise EngineUnavailable("the engine aborted the row: it is stopping")
    paths = [directory / f"{item['tag']}.t{int(part['tp_rank'])}.slice" for part in item["slices"]]
    rows = int(item["rows"])
    tapped = check_slices(paths)[0]
    token_ids = np.asarray(item["token_ids"], np.int32)
    if not 0 < rows <= len(token_ids):
        raise CaptureFailed(f"the engine says {rows} rows of {len(token_ids)} tokens")
    finish_reason = item.get("finish_reason")
    if not isinstance(finish_reason, str | None):
        raise CaptureFailed(f"the engine says finish_reason {finish_reason!r:.40}, which is no text")
    mask, fingerprint = item.get("loss_mask"), _fingerprint(answer["fingerprint"])
    capture = Capture(
        token_ids=token_ids,
        prompt_len=int(item["prompt_len"]),
        rows=rows,
        finish_reason=finish_reason,
        loss_mask=None if mask is None else np.asarray(mask, np.uint8),
        states=join_slices(paths, token_ids[:rows], layers),
        layers=tapped.layers if layers is None else tuple(layers),
        num_layers=int(answer["num_layers"]),
        dtype=tapped.dtype,
        fingerprint=fingerprint,
        fingerprint_id=fingerprint_id(fingerprint),
        witness=_witness(item.get("witness")),
    )
    try:
        meta_of(capture)
    except ValidationError as error:
        raise CaptureFailed(f"the engine says what can't be: {describe(error)}") from error
    return capture


def meta_of(capture: Capture, *, job_id: str | None = None, batch: int | None = None) -> ShardMeta:
    """What all samples of a shard share, from the first of them; raises pydantic's `ValidationError`."""
    return ShardMeta(
        layers=capture.layers,
        num_layers=capture.num_layers,
        hidden_size=capture.hidden_size,
        dtype=capture.dtype,
        fingerprint=capture.fingerprint,
        job_id=job_id,
        batch=batch,
    )


def _fingerprint(found: Any) -> dict[str, Any]:
    """What identifies the engine's weights; raises `CaptureFailed` for what identifies nothing."""
    if not isinstance(found, dict) or not found:
        raise CaptureFailed(f"the engine says fingerprint {found!r:.40}, which identifies nothing")
    try:
        json.dumps(found, allow_nan=False)
    except ValueError as error:
        raise CaptureFailed("the engine's fingerprint holds NaN or infinity") from error
    return found


def _witness(found: Any) -> Witness | None:
    """What the engine said for a proof; raises `CaptureFailed` for what is no witness."""
    if found is None:
        return None
    try:
        tokens = tuple(tuple(int(token) for token in row) for row in found["top_tokens"])
        logprobs = tuple(tuple(float(value) for value in row) for row in found["top_logprobs"])
        return Witness(int(found["first_row"]), tokens, logprobs)
    except (KeyError, TypeError, ValueError) as error:
        raise CaptureFailed(f"the engine's witness lacks what it must have: {error!r}") from error
    except InvalidSample as error:
        raise CaptureFailed(f"the engine's witness can't be: {error.detail}") from error


def _release(directory: Path, tag: str) -> None:
    try:
        release(directory, tag)
    except OSError:
        return  # the tap sweeps what nobody released


def in_order(
    work: Callable[[T], R],
    items: Iterable[T],
    concurrency: int,
    room: Callable[[int], bool] = lambda _: True,
) -> Iterator[R]:
    """Map `work` over `items` with at most `concurrency` begun and not yet taken, in the order of `items`.

    `room(n)` says whether one more may begin beside `n` of those; where it may not beside none, the rest of
    `items` is left out. A call's exception is raised where its result would be. Leaving early waits for no
    call that runs.
    """
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="row")
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            while pending and (len(pending) >= concurrency or not room(len(pending))):
                yield pending.popleft().result()
            if not pending and not room(0):
                return
            pending.append(pool.submit(work, item))
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
