"""The canary: a small capture whose last-layer states must reproduce the tokens the engine itself chose.

The endpoint captures a few greedy tokens like any request. The ranks then apply the final norm and the head
to the captured rows, in one RPC, and compare. Until it passes the endpoint captures for nobody. It asks for
top tokens like a proof, since vLLM compiles what ranks them when that is first asked for: production stands
still meanwhile (1.4 s on a CPU), at the engine's start and not in the middle of its work.

The result lies in the start's directory, so that all API servers of an engine go by the last canary, whoever
ran it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from taphouse import slices
from taphouse.slices import write_atomically
from taphouse_tap.api.admission import Admission
from taphouse_tap.api.collect import Capture, Collector
from taphouse_tap.api.refusals import Busy, Refusal
from taphouse_tap.api.rendering import Tokenizer
from taphouse_tap.api.requests import CaptureRequest, ModelFacts, Prompt
from taphouse_tap.verdict import combine

TEXT = "Count up from one: one, two, three, four, five, six,"
GENERATED = 4
TIMEOUT_S = 300.0
RESULT_FILE = "canary.json"
RETRIES = 30
"""How often the canary of the start waits for room, `Busy.retry_after` seconds each."""

Check = Callable[[str, list[int], int], Awaitable[list[Any]]]
"""``(tag, token_ids, rows)`` to every rank; `combine` says what their answers come to."""


@dataclass(frozen=True)
class Result:
    """How the last canary ended. ``state``: pending, running, passed or failed; ``at`` in Unix seconds.

    One that was given up is pending again, with a reason: it says nothing of captures. None says anything of
    other weights than those of ``weights_epoch``.
    """

    state: str = "pending"
    reason: str | None = None
    at: float | None = None
    took_s: float | None = None
    checked: int = 0
    weights_epoch: int = 0

    @property
    def ended(self) -> bool:
        """Whether the canary passed, failed, or was given up."""
        return self.at is not None

    def as_dict(self) -> dict[str, Any]:
        """For the status answer."""
        return asdict(self)


class Canary:
    """Runs canaries one at a time and remembers the last result."""

    def __init__(
        self,
        *,
        start: slices.Start,
        admission: Admission,
        collector: Collector,
        tokenizer: Tokenizer,
        model: ModelFacts,
        check: Check,
        dp_size: int,
        weights_epoch: int,
        top: int = 0,
    ) -> None:
        """`top`: how many tokens a row proofs ask the engine for."""
        self._file = start.directory / RESULT_FILE
        self._admission = admission
        self._collector = collector
        self._tokenizer = tokenizer
        self._model = model
        self._check = check
        self._dp_size = dp_size
        self._top = top
        self._one_at_a_time = asyncio.Lock()
        self._epoch = weights_epoch
        self._own = Result(weights_epoch=weights_epoch)

    @property
    def result(self) -> Result:
        """The last canary of these weights, of this API server or another. Reads a file."""
        shared = Result()
        with contextlib.suppress(OSError, ValueError, TypeError):
            shared = Result(**json.loads(self._file.read_text(encoding="utf-8")))
        if shared.weights_epoch != self._epoch:
            return self._own
        if shared.ended and (not self._own.ended or (shared.at or 0.0) >= (self._own.at or 0.0)):
            return shared
        return self._own

    async def run(self, *, retries: int = 0) -> Result:
        """Run one canary on every data-parallel engine. Never raises but `Busy` (no room for it now)."""
        async with self._one_at_a_time:
            before, began = self._own, time.monotonic()
            if before.state != "passed":
                self._own = self._result("running")
            try:
                checked = await asyncio.wait_for(self._with_retries(retries), TIMEOUT_S)
            except (Busy, asyncio.CancelledError):
                self._own = before
                raise
            except TimeoutError:
                reason = f"the engine did not answer within {TIMEOUT_S:g} s; it is run again"
                self._own = self._result("pending", reason, began)
            except (Refusal, _Mismatch) as error:
                self._own = self._result("failed", str(error), began)
            except Exception as error:
                self._own = self._result("failed", f"{type(error).__name__}: {error}", began)
            else:
                self._own = self._result("passed", None, began, checked)
            with contextlib.suppress(OSError):
                await asyncio.to_thread(write_atomically, self._file, json.dumps(self._own.as_dict()))
            return self._own

    def _result(
        self, state: str, reason: str | None = None, began: float | None = None, checked: int = 0
    ) -> Result:
        if began is None:
            return Result(state, reason, weights_epoch=self._epoch)
        return Result(state, reason, time.time(), time.monotonic() - began, checked, self._epoch)

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
        claims = await self._admission.admit([prompt], request.max_tokens, self._collector, paced=False)
        try:
            capture = await self._collector.capture(
                request, prompt, claims[0], dp_rank if self._dp_size > 1 else None, self._top
            )
            if capture.weights_epoch != self._epoch:
                raise _Mismatch("the engine's weights changed while it ran")
            return self._verdict(await self._ask(capture))
        finally:
            self._collector.release(claims, unfinished=True)

    async def _ask(self, capture: Capture) -> list[Any]:
        return await self._check(capture.tag, capture.token_ids, capture.rows)

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
