"""The canary: a small capture whose last-layer states must reproduce the tokens the engine itself chose.

The endpoint captures a few greedy tokens like any request. The ranks then apply the final norm and the head
to the captured rows, in one RPC, and compare. Until it passes the endpoint captures for nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from taphouse_tap.admission import Admission
from taphouse_tap.collect import Capture, Collector
from taphouse_tap.refusals import Busy, Refusal
from taphouse_tap.rendering import Tokenizer
from taphouse_tap.requests import CaptureRequest, ModelFacts, Prompt
from taphouse_tap.verdict import combine

TEXT = "Count up from one: one, two, three, four, five, six,"
GENERATED = 4
TIMEOUT_S = 300.0
RETRIES = 30
"""How often the canary of the start waits for room, `Busy.retry_after` seconds each."""

Check = Callable[[str, list[int], int], Awaitable[list[Any]]]
"""``(tag, token_ids, rows)`` to every rank; `combine` says what their answers come to."""


@dataclass(frozen=True)
class Result:
    """How the last canary ended. ``state``: pending, running, passed or failed; ``at`` in Unix seconds."""

    state: str = "pending"
    reason: str | None = None
    at: float | None = None
    took_s: float | None = None
    checked: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For the status answer."""
        return asdict(self)


class Canary:
    """Runs canaries one at a time and remembers the last result."""

    def __init__(
        self,
        *,
        admission: Admission,
        collector: Collector,
        tokenizer: Tokenizer,
        model: ModelFacts,
        check: Check,
        dp_size: int,
    ) -> None:
        self._admission = admission
        self._collector = collector
        self._tokenizer = tokenizer
        self._model = model
        self._check = check
        self._dp_size = dp_size
        self._one_at_a_time = asyncio.Lock()
        self.result = Result()

    async def run(self, *, retries: int = 0) -> Result:
        """Run one canary on every data-parallel engine. Never raises but `Busy` (no room for it now)."""
        async with self._one_at_a_time:
            before, began = self.result, time.monotonic()
            if before.state != "passed":
                self.result = Result("running")
            try:
                checked = await asyncio.wait_for(self._with_retries(retries), TIMEOUT_S)
            except Busy:
                self.result = before
                raise
            except asyncio.CancelledError:
                self.result = before
                raise
            except (Refusal, _Mismatch) as error:
                self.result = Result("failed", str(error), time.time(), time.monotonic() - began)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                self.result = Result("failed", reason, time.time(), time.monotonic() - began)
            else:
                self.result = Result("passed", None, time.time(), time.monotonic() - began, checked)
            return self.result

    async def _with_retries(self, retries: int) -> int:
        for attempt in range(retries + 1):
            try:
                return sum([await self._capture_and_check(rank) for rank in range(self._dp_size)])
            except Busy as error:
                if attempt == retries:
                    raise
                await asyncio.sleep(error.retry_after or 1)
        raise AssertionError("unreachable")

    async def _capture_and_check(self, dp_rank: int) -> int:
        """Returns how many tokens were reproduced."""
        prompt = Prompt(await self._token_ids())
        request = CaptureRequest(prompt=prompt.token_ids, max_tokens=GENERATED, ignore_eos=True)
        claims = await self._admission.admit([prompt], request.max_tokens, self._collector)
        try:
            capture = await self._collector.capture(
                request, prompt, claims[0], dp_rank if self._dp_size > 1 else None
            )
            return self._verdict(await self._ask(capture))
        finally:
            self._collector.release(claims, unfinished=True)

    async def _ask(self, capture: Capture) -> list[Any]:
        token_ids = [*capture.prompt.token_ids, *capture.generated.token_ids]
        return await self._check(capture.tag, token_ids, capture.rows)

    def _verdict(self, answers: list[Any]) -> int:
        joined = combine(answers)
        if not joined["ok"]:
            raise _Mismatch(str(joined["reason"]))
        if not joined["checked"]:
            raise _Mismatch("no rank checked a token")
        return int(joined["checked"])

    async def _token_ids(self) -> list[int]:
        room = self._model.max_model_len - GENERATED
        try:
            token_ids = await self._tokenizer.text(TEXT)
        except Refusal:
            token_ids = []
        return (token_ids or [at % self._model.vocab_size for at in range(1, 17)])[:room]


class _Mismatch(Exception):
    """The captured states are not those of the tokens the engine chose."""
