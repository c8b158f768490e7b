"""Runs prompts on the engine and collects what the ranks sealed.

No RPC: the opt-in travels in the request, and every rank answers by sealing a slice in the start's directory.
Waiting is polling for those files. Whatever goes wrong (the caller leaves, a rank reports an error, time runs
out) ends in one place, `Collector.release`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from taphouse import slices
from taphouse_tap.api.refusals import RETRY_AFTER_S, Busy, CaptureFailed, Refusal
from taphouse_tap.api.requests import CaptureRequest, ModelFacts, Prompt

POLL_FIRST_S = 0.002
POLL_LAST_S = 0.05
WATCH_S = 0.5
"""How often a running request's capture is looked at: a rank may have failed it already."""

T = TypeVar("T")


Ranked = list[tuple[int, float]]
"""What the engine ranked highest at one row: ``(token id, logprob)``, best first."""


@dataclass(frozen=True)
class Generated:
    """What the engine answered to one prompt: token ids ``[G]`` and why it stopped.

    ``top`` has what it ranked highest for each of them, where that was asked for.
    """

    token_ids: list[int]
    finish_reason: str | None
    top: Sequence[Ranked] = ()


class Engine(Protocol):
    """The engine as the endpoint uses it."""

    async def generate(
        self,
        token_ids: list[int],
        request: CaptureRequest,
        opt_in: dict[str, Any],
        request_id: str,
        *,
        dp_rank: int | None = None,
        top: int = 0,
    ) -> Generated:
        """Run one prompt to its end, on one data-parallel engine if told; ``top`` tokens are ranked a row.

        Cancelling the caller aborts the request in the engine.

        Raises: `InvalidField` for what the engine refuses, `CaptureFailed` for everything else.
        """
        ...


@dataclass(frozen=True)
class Capture:
    """One prompt's capture: whole, checked against what the engine answered, not yet released.

    ``rows`` is ``P + G - 1``: the last sampled token never ran through the model. ``paths`` and ``trailers``
    are by TP rank; a slice may hold more rows than ``rows``. ``witness`` is there once it was proven.
    """

    tag: str
    prompt: Prompt
    generated: Generated
    rows: int
    paths: tuple[Path, ...]
    trailers: tuple[slices.Trailer, ...]
    witness: dict[str, Any] | None = None

    @property
    def weights_epoch(self) -> int:
        """Which of the engine's weights made it."""
        return self.trailers[0].weights_epoch

    @property
    def token_ids(self) -> list[int]:
        """Prompt and generated tokens, ``[P + G]``."""
        return [*self.prompt.token_ids, *self.generated.token_ids]

    @property
    def fed_token_ids(self) -> list[int]:
        """The tokens that the model was fed, one a row."""
        return self.token_ids[: self.rows]


class Collector:
    """Captures prompts that were admitted."""

    def __init__(
        self,
        engine: Engine,
        start: slices.Start,
        model: ModelFacts,
        *,
        seal_timeout_s: float,
        why_off: Callable[[], str | None],
        check_running: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_running` raises the refusal that ends a running capture."""
        self._engine = engine
        self._start = start
        self._model = model
        self._seal_timeout_s = seal_timeout_s
        self._why_off = why_off
        self._check_running = check_running
        self.in_flight: set[str] = set()
        self._left: dict[str, float] = {}

    async def capture_all(
        self,
        request: CaptureRequest,
        prompts: Sequence[Prompt],
        claims: Sequence[slices.Claim],
        top: int = 0,
    ) -> list[Capture]:
        """Capture every prompt at once; the answers are in the order of the prompts.

        If one fails the others are aborted, and the failure is raised. The caller releases the claims.
        """
        return await gather_all(
            [
                self.capture(request, prompt, claim, top=top)
                for prompt, claim in zip(prompts, claims, strict=True)
            ]
        )

    async def capture(
        self,
        request: CaptureRequest,
        prompt: Prompt,
        claim: slices.Claim,
        dp_rank: int | None = None,
        top: int = 0,
    ) -> Capture:
        """Run one prompt and wait for its slices.

        Raises: `InvalidField`, `CaptureFailed`.
        """
        self.in_flight.add(claim.tag)
        try:
            opt_in = slices.OptIn(claim.tag, claim.prompt_len, claim.max_rows).signed(self._start.secret)
            generated = await self._unless_failed(
                claim.tag,
                self._engine.generate(
                    prompt.token_ids, request, opt_in, f"taphouse-{claim.tag}", dp_rank=dp_rank, top=top
                ),
            )
            if not generated.token_ids:
                raise CaptureFailed(
                    f"the engine ended the request ({generated.finish_reason}) without a token"
                )
            return await self._sealed(prompt, generated, claim)
        finally:
            self.in_flight.discard(claim.tag)

    async def _unless_failed(self, tag: str, generating: Coroutine[Any, Any, Generated]) -> Generated:
        """Await the engine's answer, but end it once a rank sealed an error or extraction is stopped."""

        def look() -> None:
            self._raise_sealed_error(tag)
            self._check_running()

        return await watched(generating, look, WATCH_S)

    def _raise_sealed_error(self, tag: str) -> None:
        for path in self._start.slice_paths(tag):
            try:
                trailer = slices.read_trailer(path)
            except (slices.SliceError, OSError) as error:
                raise _failed(error) from error
            if trailer.error is not None:
                kind = slices.NoRoom if trailer.retry else slices.CaptureFailed
                raise _failed(kind(trailer.error))

    async def _sealed(self, prompt: Prompt, generated: Generated, claim: slices.Claim) -> Capture:
        paths = await self._wait_for_slices(claim.tag)
        rows = len(prompt.token_ids) + len(generated.token_ids) - 1
        try:
            trailers = slices.check_slices(paths)
            self._check(trailers, claim, rows)
            capture = Capture(claim.tag, prompt, generated, rows, tuple(paths), tuple(trailers))
            slices.check_token_ids(paths, capture.fed_token_ids)
        except (slices.SliceError, OSError) as error:
            raise _failed(error) from error
        return capture

    async def _wait_for_slices(self, tag: str) -> list[Path]:
        paths = [self._start.directory / f"{tag}.t{rank}.slice" for rank in range(self._model.tp_size)]
        deadline = time.monotonic() + self._seal_timeout_s
        pause = POLL_FIRST_S
        next_look = time.monotonic() + 1.0
        while True:
            missing = [rank for rank, path in enumerate(paths) if not path.exists()]
            if not missing:
                return paths
            now = time.monotonic()
            if now >= next_look:
                next_look = now + 1.0
                if reason := self._why_off():
                    raise CaptureFailed(f"rank {_ranks(missing)} sealed nothing: {reason}")
            if now >= deadline:
                raise CaptureFailed(
                    f"rank {_ranks(missing)} sealed nothing within {self._seal_timeout_s:g} s "
                    "of the last token"
                )
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, POLL_LAST_S)

    def _check(self, trailers: Sequence[slices.Trailer], claim: slices.Claim, rows: int) -> None:
        """Check trailers against the request; that they agree with each other is already known."""
        expected = {
            "tag": claim.tag,
            "start_id": self._start.start_id,
            "prompt_len": claim.prompt_len,
            "layers": self._model.layers,
            "hidden_size": self._model.hidden_size,
            "dtype": self._model.dtype,
        }
        for trailer in trailers:
            for name, value in expected.items():
                if getattr(trailer, name) != value:
                    found = getattr(trailer, name)
                    raise CaptureFailed(f"rank {trailer.tp_rank}: {name} is {found!r}, expected {value!r}")
            if trailer.rows < rows:
                raise CaptureFailed(f"rank {trailer.tp_rank}: row {trailer.rows} of {rows} is missing")

    def release(self, claims: Sequence[slices.Claim], *, unfinished: bool) -> None:
        """Remove slices and claims. A rank may still write an ``unfinished`` one: it is removed again."""
        for claim in claims:
            self._start.release(claim.tag, keep=not unfinished)  # a check may still read an unfinished one
            if unfinished:
                self._left[claim.tag] = time.monotonic()

    def tidy(self, ttl_s: float) -> list[str]:
        """What the janitor does every few seconds; returns the tags that expired.

        Running captures are kept young, unfinished ones are removed again, and what nobody consumed expires.
        """
        for tag in list(self.in_flight):
            self._start.touch(tag)
        for tag, since in list(self._left.items()):
            self._start.release(tag, keep=False)
            if time.monotonic() - since > self._seal_timeout_s:
                del self._left[tag]
        return self._start.expire(ttl_s)


def _failed(error: Exception) -> Refusal:
    """What a capture that is not whole means to the caller."""
    if isinstance(error, slices.NoRoom):
        return Busy(f"the capture failed: {error}; ask again later", retry_after=RETRY_AFTER_S)
    return CaptureFailed(f"the capture failed: {error}")


async def watched(work: Awaitable[T], look: Callable[[], None], every_s: float) -> T:
    """Await `work`, with a `look` every `every_s` seconds; what a look raises cancels it, and is raised."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=every_s))[0]:
            look()
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def gather_all(work: Sequence[Awaitable[T]]) -> list[T]:
    """Await all; on the first failure (or when cancelled) cancel the rest, wait for them, and raise it."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
