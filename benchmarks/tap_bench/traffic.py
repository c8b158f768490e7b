"""Production's chats and extraction beside them for a longer time: what fails, what changes?"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import RequestOutputKind

from .captures import Consumer
from .load import Load
from .shapes import Shape
from .stats import percentile

_SYSTEM_PROMPTS = 4
_AT_ONCE = 4
"""Captures in flight."""


@dataclass
class _Chat:
    """One of production's requests: when it is due (s), and what came of it."""

    due: float
    prompt: list[int]
    tokens: int
    got: list[int] = field(default_factory=list)
    last: float = 0.0
    done: bool = False


@dataclass
class Traffic:
    """Replays one seeded trace open-loop: chats whose prompts begin with one of a few shared ones."""

    load: Load
    shape: Shape
    captures: Any

    def run(self, seconds: float, rate: float, capture: bool, seed: int) -> dict[str, Any]:
        """Send `rate` chats a second for `seconds`; with `capture`, keep captures in flight meanwhile.

        Returns what was sent and answered, each chat's greedy token ids, gaps between tokens (ms), and what
        a process beside it verified of the captures: every rank's slices joined, checksums, token ids.
        """
        chats = self._chats(seconds, rate, seed)
        consumer = Consumer(self.captures, verify=True) if capture else None
        by_id: dict[str, _Chat] = {}
        mine: set[str] = set()
        gaps: list[float] = []
        sent, began = 0, time.perf_counter()
        try:
            while not all(chat.done for chat in chats) or mine:
                now = time.perf_counter() - began
                for chat in chats[len(by_id) :]:
                    if chat.due > now:
                        break
                    kind = RequestOutputKind.DELTA
                    by_id[self.load.add(chat.prompt, chat.tokens, output_kind=kind)] = chat
                while consumer and len(mine) < _AT_ONCE and now < seconds:
                    mine.add(self._extract(consumer, seed + sent))
                    sent += 1
                for output in self.load.step():
                    if output.request_id in mine:
                        mine.discard(output.request_id)
                    elif chat := by_id.get(output.request_id):
                        self._heard(chat, output, gaps)
            if consumer:
                consumer.wait(sent)
        finally:
            if consumer:
                consumer.close()
        answered = [chat for chat in chats if len(chat.got) == chat.tokens]
        result = {"seconds": time.perf_counter() - began, "chats": len(chats), "answered": len(answered)}
        result |= {"itl_p50_ms": percentile(gaps, 0.5), "itl_p95_ms": percentile(gaps, 0.95)}
        if consumer:
            result |= {"captures": sent} | {f"taken_{k}": v for k, v in consumer.taken.items()}
            result["bytes_expected"] = sent * self.shape.mixed_length * self.shape.row_bytes
        return result | {"token_ids": [chat.got for chat in chats]}

    def _chats(self, seconds: float, rate: float, seed: int) -> list[_Chat]:
        rng = random.Random(seed)
        most = self.shape.mixed_length
        shared = self.load.prompts([most // 2] * _SYSTEM_PROMPTS, seed)
        made, due = [], rng.expovariate(rate)
        while due < seconds:
            (turn,) = self.load.prompts([rng.randint(max(2, most // 32), most // 4)], rng.randrange(1 << 30))
            tokens = rng.randint(max(2, most // 64), max(4, most // 16))
            made.append(_Chat(due, [*rng.choice(shared), *turn], tokens))
            due += rng.expovariate(rate)
        return made

    def _extract(self, consumer: Consumer, seed: int) -> str:
        (prompt,) = self.load.prompts([self.shape.mixed_length], seed)
        ((tag, opt_in),) = self.captures.claim([len(prompt)], 1)
        consumer.expect(tag, prompt)
        return self.load.add(prompt, 1, opt_in)

    @staticmethod
    def _heard(chat: _Chat, output: Any, gaps: list[float]) -> None:
        now = time.perf_counter()
        if chat.last:
            gaps.append(1e3 * (now - chat.last))
        chat.last = now
        chat.got.extend(output.outputs[0].token_ids)
        chat.done = output.finished
