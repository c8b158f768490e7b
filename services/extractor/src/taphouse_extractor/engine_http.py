"""One request to an engine and its answer, which is foreign input: bounded in bytes, time and depth."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import httpx

from taphouse_extractor.errors import (
    BadRow,
    CaptureFailed,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    RowRefused,
)

__all__ = ["MAX_ANSWER_BYTES", "ask", "encode_body", "error_of", "explain", "json_of"]

MAX_ANSWER_BYTES = 64 << 20
"""Far more than the token ids of the longest prompt."""

RETRY_AFTER_CAP_S = 60.0
"""The longest wait that an engine's Retry-After is believed."""

REFUSED, FAILED = (400, 413, 422), 500
"""What such answers say is of a row and may quote it: jobs have it, logs don't."""

OWN_TYPES = {401: "authentication_error", 429: "busy", 503: "capture_off"}
"""What other answers say is logged, and whoever stands before an engine may echo a row in it: nothing is told
of one that isn't in the form of the tap's own refusals.
"""

WORDS = 300
"""Characters that are told of an answer."""


def ask(
    http: httpx.Client, url: str, method: str, path: str, *, within_s: float, **request: Any
) -> httpx.Response:
    """Send a request and read its whole answer: one that trickles or has no end is given up.

    `within_s` is the time for it where `request` has no `timeout`, in seconds. Raises `EngineTimeout` and
    `EngineUnavailable`.
    """
    deadline, body = time.monotonic() + request.get("timeout", within_s), bytearray()
    try:
        with http.stream(method, path, **request) as answer:
            for chunk in answer.iter_bytes():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise EngineUnavailable(f"the engine at {url} answers with over {MAX_ANSWER_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise EngineTimeout(f"the engine at {url} did not answer in time")
    except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
        raise EngineTimeout(f"the engine at {url} did not answer in time") from error
    except httpx.RemoteProtocolError as error:  # its text may quote the answer
        raise EngineUnavailable(f"the engine at {url} broke off, or answered what is no HTTP") from error
    except httpx.RequestError as error:
        raise EngineUnavailable(f"can't reach the engine at {url}: {error}") from error
    plain = {name: value for name, value in answer.headers.items() if name != "content-encoding"}
    return httpx.Response(answer.status_code, headers=plain, content=bytes(body))


def encode_body(body: dict[str, Any]) -> bytes:
    """Make the JSON of a request; raises `BadRow`: Python reads NaN and lone surrogates."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise BadRow(f"the row can't be sent to the engine: {error}") from error


def error_of(answer: httpx.Response) -> EngineError:
    """What an answer other than 200 means for a row."""
    status, reason = answer.status_code, explain(answer)
    if status in REFUSED:
        return RowRefused(reason, prompt_tokens=_prompt_tokens(answer))
    if status == FAILED:
        return CaptureFailed(reason)
    try:
        wait = float(answer.headers.get("Retry-After", ""))
    except ValueError:
        wait = math.nan
    sane = math.isfinite(wait) and wait >= 0
    return EngineUnavailable(reason, retry_after=min(wait, RETRY_AFTER_CAP_S) if sane else None)


def explain(answer: httpx.Response) -> str:
    """Say in one sentence why an answer is no 200."""
    status = answer.status_code
    hint = {401: " (check engine_key)", 403: " (check engine_key)", 404: " (is the tap's endpoint loaded?)"}
    return f"engine answered {status}: {_words(answer) or 'no explanation'}{hint.get(status, '')}"


def _words(answer: httpx.Response) -> str | None:
    """What an answer says for itself, cut; None where that may not be told."""
    status = answer.status_code
    try:
        error = answer.json()["error"]
        message = str(error["message"])
        own = status in OWN_TYPES and (error["type"], error["code"]) == (OWN_TYPES[status], status)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return message[:WORDS] if own or status in (*REFUSED, FAILED) else None


def _prompt_tokens(answer: httpx.Response) -> int | None:
    """How long a prompt is that was refused for its length; None where that isn't why."""
    try:
        tokens = answer.json()["error"]["prompt_tokens"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return tokens if type(tokens) is int and tokens > 0 else None


def json_of(answer: httpx.Response) -> dict[str, Any]:
    """Read an answer's object; raises `CaptureFailed`."""
    try:
        body = answer.json()
    except (ValueError, RecursionError) as error:
        raise CaptureFailed("the engine's answer is not JSON") from error
    if not isinstance(body, dict):
        raise CaptureFailed("the engine's answer is not a JSON object")
    return body
