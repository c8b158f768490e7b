"""Production's clients: replays a trace open-loop over HTTP and times every streamed piece.

A request is sent at its time whatever became of the earlier ones. Times in a `Served` are seconds since the
pass began. An inter-token latency is the gap between two pieces of one stream, which is what a person sees;
with an engine under load a piece may hold more than one token.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from .trace import Trace

TIMEOUT_S = 120.0


@dataclass
class Served:
    """What became of one request of the trace.

    `wanted` tokens were asked for; `pieces` are the arrival times of the stream's pieces. `error` is None for
    a request that was answered in full; `refused` says that the server answered with an error at once.
    """

    index: int
    burst: int
    wanted: int
    sent: float
    late: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    refused: bool = False

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first piece; None when there was none."""
        return self.pieces[0] - self.sent if self.pieces else None


@dataclass(frozen=True)
class Target:
    """Where production's requests go: base URL, model name, the span of token ids, and a server's key."""

    url: str
    model: str
    vocabulary: tuple[int, int]
    key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


async def replay(trace: Trace, target: Target, salt: str) -> tuple[float, list[Served]]:
    """Send the trace's requests and wait for all; returns when it began (`time.monotonic`) too."""
    bodies = [_body(trace, index, target, salt) for index in range(len(trace.requests))]
    # Every request a connection of its own, as from different people.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with _client(target, limits) as client:
        asking, began = [], time.monotonic()
        for index, request in enumerate(trace.requests):
            await asyncio.sleep(max(0.0, began + request.at_s - time.monotonic()))
            sent = time.monotonic() - began
            served = Served(index, request.burst, request.output_tokens, sent, sent - request.at_s)
            asking.append(asyncio.create_task(_ask(client, target.url, bodies[index], served, began)))
        return began, list(await asyncio.gather(*asking))


def _client(target: Target, limits: httpx.Limits) -> httpx.AsyncClient:
    # Certificates, which nobody needs here, take 0.1 s to load.
    return httpx.AsyncClient(
        timeout=TIMEOUT_S, limits=limits, trust_env=False, verify=False, headers=target.headers
    )


def _body(trace: Trace, index: int, target: Target, salt: str) -> bytes:
    body = {
        "model": target.model,
        "prompt": trace.prompt(index, salt, target.vocabulary),
        "max_tokens": trace.requests[index].output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


async def _ask(client: httpx.AsyncClient, url: str, body: bytes, served: Served, began: float) -> Served:
    kind = {"Content-Type": "application/json"}
    usage: dict[str, Any] = {}
    done = False
    try:
        async with client.stream("POST", f"{url}/v1/completions", content=body, headers=kind) as answer:
            if answer.status_code != 200:
                served.refused = True
                served.error = f"HTTP {answer.status_code}: {(await answer.aread())[:200]!r}"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    usage = _piece(line[6:], served, time.monotonic() - began) or usage
    except httpx.HTTPError as error:
        served.error = f"{type(error).__name__}: {error}"
    served.ended = time.monotonic() - began
    _account(served, usage, done)
    return served


def _piece(data: str, served: Served, now: float) -> dict[str, Any] | None:
    """Note a piece's arrival, or return the usage that ends a stream."""
    if '"choices":[]' not in data:
        served.pieces.append(now)
        return None
    usage = json.loads(data).get("usage")
    return usage if isinstance(usage, dict) else None


def _account(served: Served, usage: dict[str, Any], done: bool) -> None:
    served.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    served.output_tokens = int(usage.get("completion_tokens") or 0)
    served.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    if served.error is None and not done:
        served.error = "the stream broke off"
    if served.error is None and served.output_tokens != served.wanted:
        served.error = f"{served.output_tokens} tokens of {served.wanted}"


async def warm(trace: Trace, target: Target) -> None:
    """Have every assistant's system prompt computed once, as it is when a service has run for a while."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, headers=target.headers) as client:
        for assistant in range(trace.plan.assistants):
            prompt = trace.system_prompt(assistant, target.vocabulary)
            body = {"model": target.model, "prompt": [*prompt, target.vocabulary[0]], "max_tokens": 1}
            answer = await client.post(f"{target.url}/v1/completions", json=body | {"temperature": 0})
            answer.raise_for_status()
