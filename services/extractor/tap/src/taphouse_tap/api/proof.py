"""Proofs: now and then a capture is checked against what the engine itself ranked highest.

The canary proves captures once; proofs go on while production runs. For a proof the engine is asked for its
top tokens at the rows it samples from, and the ranks compare them with `head(norm(h))` of a few sealed rows,
in one RPC. An RPC runs between two steps of the engine, so proofs are rare: one in about `interval_s` seconds
at most. What the engine said goes to the caller as the capture's *witness*.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from taphouse_tap.api.collect import Capture, Ranked, watched
from taphouse_tap.api.metrics import Metrics
from taphouse_tap.api.refusals import CaptureFailed, Disproved
from taphouse_tap.verdict import combine

TOP = 5
"""Tokens that the engine is asked for, a row."""

ROWS = 4
"""Rows proven of one capture."""

LOOK_S = 1.0
"""How often whoever waits for the ranks looks whether they are still there."""

Check = Callable[[str, list[int], int, int, list[int]], Awaitable[list[Any]]]
"""``(tag, fed token ids, rows, first row, highest tokens)`` to every rank."""


class Proofs:
    """Decides which captures are proven, and proves them."""

    def __init__(
        self,
        check: Check,
        interval_s: float,
        metrics: Metrics,
        *,
        why_off: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``interval_s`` 0 proves nothing; ``why_off`` says why no answer of the ranks is to be expected."""
        self._check = check
        self._why_off = why_off
        self._metrics = metrics
        self._interval_s = interval_s
        self._clock = clock
        self._next = 0.0

    def due(self) -> bool:
        """Whether the next capture is to be proven; the one after it will not be."""
        now = self._clock()
        if not self._interval_s or now < self._next:
            return False
        self._next = now + self._interval_s * random.uniform(0.5, 1.5)
        return True

    async def prove(self, capture: Capture) -> dict[str, Any] | None:
        """Prove a few rows of a capture; return the witness, None if the engine named no two tokens a row.

        Raises: `Disproved` when the captured states are not those that the engine computed, and
        `CaptureFailed` when a rank could not compare them (the weights changed meanwhile).
        """
        top = capture.generated.top
        if not top:
            return None
        count = min(ROWS, len(top))
        at = random.randint(0, len(top) - count)
        first, chosen = len(capture.prompt.token_ids) - 1 + at, top[at : at + count]
        highest = [row[0][0] for row in chosen]
        answers = await self._answers(capture, first, highest)
        joined = combine(answers)
        if not all(isinstance(answer, dict) and "best" in answer for answer in answers):
            raise CaptureFailed(f"the captured states could not be proven: {joined['reason']}")
        if not joined["ok"]:
            self._metrics.add("disproved")
            raise Disproved(f"the captured states are not those of the engine: {joined['reason']}")
        self._metrics.add("proven")
        # Who checks a witness compares differences between tokens: one alone says nothing.
        return witness_of(first, chosen) if min(map(len, chosen)) > 1 else None

    async def _answers(self, capture: Capture, first: int, highest: list[int]) -> list[Any]:
        """What the ranks say. An engine that ends meanwhile never answers an RPC."""

        def look() -> None:
            if reason := self._why_off():
                raise CaptureFailed(f"the captured states could not be proven: {reason}")

        asking = self._check(capture.tag, capture.fed_token_ids, capture.rows, first, highest)
        return await watched(asking, look, LOOK_S)


def witness_of(first_row: int, top: Sequence[Ranked]) -> dict[str, Any]:
    """The witness as the answer carries it: what the engine ranked highest at rows ``first_row`` on."""
    return {
        "first_row": first_row,
        "top_tokens": [[token for token, _ in row] for row in top],
        "top_logprobs": [[logprob for _, logprob in row] for row in top],
    }
