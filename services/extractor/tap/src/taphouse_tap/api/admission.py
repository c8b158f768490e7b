"""Room for captures: claimed before anything is generated, given back with the slices.

A capture claims ``(P + max_tokens) * (L * H * itemsize + 4 * ranks)`` bytes summed over all ranks. The claims
are files in the start's directory and are made under its lock, so several API servers of one engine share one
limit.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from taphouse import slices
from taphouse_tap.api.collect import Collector
from taphouse_tap.api.refusals import RETRY_AFTER_S, Busy, TooLarge
from taphouse_tap.api.requests import ModelFacts, Prompt

TRAILER_BYTES = 64 * 1024
"""Allowance for the trailers and file-system blocks of one capture."""


@dataclass(frozen=True)
class Limits:
    """Bounds: bytes claimed in the slice directory, captures running, bytes of streams, bytes a second.

    The first two are shared by all API servers of an engine, the others are each server's own. No rate: 0.
    """

    slice_dir_bytes: int
    in_flight: int
    stream_bytes: int
    bytes_per_s: int = 0


class Admission:
    """Hands out claims on one start's directory."""

    def __init__(
        self,
        start: slices.Start,
        model: ModelFacts,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pace = Pace(limits.bytes_per_s, clock)
        self._start = start
        self._model = model
        self._streaming = 0
        self.limits = limits

    def reserve(
        self, prompts: Sequence[Prompt], max_tokens: int, *, paced: bool = True
    ) -> list[slices.Claim]:
        """Claim room for all of ``prompts`` or none. Blocks for the lock: call it off the event loop.

        What is not ``paced`` waits for no bound of bytes a second, but counts.

        Raises: `TooLarge` when the request could never fit, `Busy` when it does not fit now.
        """
        now = time.time()
        claims = [
            slices.Claim(
                tag=slices.new_tag(),
                nbytes=(len(prompt.token_ids) + max_tokens) * self._model.slice_row_bytes + TRAILER_BYTES,
                created_at=now,
                prompt_len=len(prompt.token_ids),
                max_rows=len(prompt.token_ids) + max_tokens - 1,
            )
            for prompt in prompts
        ]
        self._refuse_what_never_fits(claims)
        needed = sum(claim.nbytes for claim in claims)
        self._pace.spend(needed, wait=paced)
        try:
            self._start.reserve_all(claims, self.limits.slice_dir_bytes, self.limits.in_flight)
        except BaseException as error:
            self._pace.give_back(needed)
            if isinstance(error, (slices.DirectoryFull, slices.TooManyInFlight)):
                raise Busy(f"{error}; ask again later", retry_after=RETRY_AFTER_S) from error
            raise
        return claims

    async def admit(
        self, prompts: Sequence[Prompt], max_tokens: int, collector: Collector, *, paced: bool = True
    ) -> list[slices.Claim]:
        """`reserve` off the event loop; a caller that leaves meanwhile leaves no claim behind."""
        reserving = asyncio.ensure_future(asyncio.to_thread(self.reserve, prompts, max_tokens, paced=paced))
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:
            reserving.add_done_callback(lambda done: _give_back(done, collector))
            raise

    def admit_stream(self, prompts: Sequence[Prompt], max_tokens: int, layers: int) -> StreamRoom:
        """Take room in memory for the largest stream that may come out, before anything is generated.

        All streams of this API server share one limit. Raises: `TooLarge`, `Busy`.
        """
        row = layers * self._model.hidden_size * self._model.itemsize
        worst = sum(len(prompt.token_ids) + max_tokens - 1 for prompt in prompts) * row
        limit = self.limits.stream_bytes
        if worst > limit:
            raise TooLarge(
                f"delivery: a stream of up to {worst} bytes, the limit is {limit}; "
                "ask for fewer prompts, tokens or layers, or use delivery=slices",
                param="delivery",
            )
        if self._streaming + worst > limit:
            raise Busy(
                f"streams of up to {self._streaming} bytes are on their way, {worst} more would pass "
                f"the limit of {limit}; ask again later",
                retry_after=RETRY_AFTER_S,
            )
        self._streaming += worst
        return StreamRoom(self, worst)

    def give_back_stream(self, nbytes: int) -> None:
        """Room that a `StreamRoom` held."""
        self._streaming -= nbytes

    def _refuse_what_never_fits(self, claims: Sequence[slices.Claim]) -> None:
        needed = sum(claim.nbytes for claim in claims)
        if needed > self.limits.slice_dir_bytes:
            raise TooLarge(
                f"max_tokens: the capture needs up to {needed} bytes, the slice directory holds "
                f"{self.limits.slice_dir_bytes}; ask for fewer prompts or tokens",
                param="max_tokens",
            )
        if len(claims) > self.limits.in_flight:
            raise TooLarge(
                f"prompt: {len(claims)} prompts, at most {self.limits.in_flight} captures run at once",
                param="prompt",
            )


class Pace:
    """Bounds the states captured to `bytes_per_s` on average, summed over the ranks; 0 is no bound.

    What was admitted is paid for by waiting afterwards: a large capture is never refused for its size alone.
    """

    def __init__(self, bytes_per_s: int, clock: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._paid_at = 0.0
        self._lock = threading.Lock()

    def spend(self, nbytes: int, *, wait: bool = True) -> None:
        """Count `nbytes` of a capture that is being admitted.

        Raises: `Busy` while earlier captures are not paid for, unless it does not `wait` for them.
        """
        if not self._bytes_per_s:
            return
        with self._lock:
            now = self._clock()
            if wait and self._paid_at > now:
                raise Busy(
                    f"the bound of {self._bytes_per_s} bytes of states a second is used up; ask again later",
                    retry_after=math.ceil(self._paid_at - now),
                )
            self._paid_at = max(self._paid_at, now) + nbytes / self._bytes_per_s

    def give_back(self, nbytes: int) -> None:
        """It was not admitted after all."""
        if self._bytes_per_s:
            with self._lock:
                self._paid_at -= nbytes / self._bytes_per_s


class StreamRoom:
    """Memory held for one stream until it was sent, or until it turned out that there will be none."""

    def __init__(self, admission: Admission, nbytes: int) -> None:
        self._admission = admission
        self._nbytes = nbytes

    def give_back(self) -> None:
        """Let go of it. Idempotent."""
        self._admission.give_back_stream(self._nbytes)
        self._nbytes = 0


def _give_back(done: asyncio.Future[list[slices.Claim]], collector: Collector) -> None:
    if not done.cancelled() and done.exception() is None:
        collector.release(done.result(), unfinished=False)
