"""Written fakes around the endpoint: a tokenizer, an engine whose ranks seal slices, a server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from taphouse import slices
from taphouse_tap.api.auth import KeyRing
from taphouse_tap.api.collect import Generated
from taphouse_tap.api.endpoint import Endpoint
from taphouse_tap.api.latency import LatencyByClass
from taphouse_tap.api.latency_reports import LatencyReports
from taphouse_tap.api.metrics import LatencyMetrics, Metrics
from taphouse_tap.api.refusals import CaptureOff, InvalidField
from taphouse_tap.api.requests import CaptureRequest, ModelFacts
from taphouse_tap.api.service import Service
from taphouse_tap.settings import TapSettings

START, END, NEWLINE = 0, 1, 2
ROLES = {"system": 3, "user": 4, "assistant": 5, "tool": 6}
VOCABULARY = 512
LAYERS = (0, 2, 4)
PASSED: dict[str, Any] = {
    "ok": True,
    "reason": None,
    "checked": 4,
    "best": [9.0, 9.0, 9.0, 9.0],
    "chosen": [9.0, 9.0, 9.0, 9.0],
    "tolerance": 0.1,
}
"""What a rank answers to a canary whose tokens it reproduced."""


class FakeTokenizer:
    """ChatML with one token a word: ``<start> role words... <end> \\n``. It may misbehave on request."""

    def __init__(self, *, opening: Sequence[int] = (), rewrites: bool = False) -> None:
        """``opening``: tokens a generation prompt adds after the header. ``rewrites``: drops the first word
        of assistant turns that are not the last message."""
        self.opening = list(opening)
        self.rewrites = rewrites

    async def text(self, text: str) -> list[int]:
        return [self.word(word) for word in text.split()]

    async def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None,
        chat_template_kwargs: dict[str, Any] | None,
    ) -> list[int]:
        ids: list[int] = []
        if tools:
            ids += [
                START,
                ROLES["system"],
                *(self.word(tool["function"]["name"]) for tool in tools),
                END,
                NEWLINE,
            ]
        for index, message in enumerate(messages):
            if message["role"] not in ROLES:
                raise InvalidField(f"messages: no role {message['role']}", param="messages")
            words = str(message["content"]).split()
            if self.rewrites and message["role"] == "assistant" and index < len(messages) - 1:
                words = words[1:]
            ids += [START, ROLES[message["role"]], *map(self.word, words), END, NEWLINE]
        if add_generation_prompt:
            ids += [START, ROLES["assistant"], *self.opening]
        if chat_template_kwargs and chat_template_kwargs.get("thinking"):
            ids += [self.word("thinking")]
        return ids

    def special_ids(self) -> frozenset[int]:
        return frozenset({START, END})

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join("\n" if token_id == NEWLINE else f"w{token_id}" for token_id in token_ids)

    @staticmethod
    def word(word: str) -> int:
        """A token id above the special ones; the same word always the same id."""
        return 10 + sum(map(ord, word)) % (VOCABULARY - 10)


@dataclass
class FakeEngine:
    """Answers with ``generated`` and has a thread a rank seal slices. The faults are switches."""

    start: slices.Start
    model: ModelFacts
    generated: list[int] = field(default_factory=lambda: [100, 101, 102, 103, 104, 105])
    finish_reason: str = "length"
    delay_s: float = 0.0
    delay_after_s: float = 0.0
    hangs: bool = False
    silent_rank: int | None = None
    error_rank: int | None = None
    retry: bool = False
    short: bool = False
    most_top: int = 5
    fed: list[int] | None = None
    surplus: int = 0
    wrong: dict[str, Any] = field(default_factory=dict)
    hang_from: int = 10**9
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    seen: list[tuple[list[int], CaptureRequest, int | None]] = field(default_factory=list)
    ranked: list[int] = field(default_factory=list)

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
        wanted = slices.verify_opt_in(self.start.secret, opt_in)
        assert (self.start.directory / f"{wanted.tag}.claim").exists()
        self.seen.append((token_ids, request, dp_rank))
        self.ranked.append(top)
        self.running.add(request_id)
        try:
            if self.hangs or len(self.seen) > self.hang_from:
                await asyncio.Event().wait()
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        finally:
            self.running.discard(request_id)
        generated = self.generated[: request.max_tokens]
        fed = [*token_ids, *generated][:-1] if self.fed is None else self.fed
        for rank in range(self.model.tp_size):
            if rank != self.silent_rank:
                threading.Thread(target=self._seal, args=(rank, wanted, fed), daemon=True).start()
        await asyncio.sleep(self.delay_after_s)
        ranked = (
            [[(token, -0.5), (token + 1, -1.5)][: min(top, self.most_top)] for token in generated]
            if top
            else []
        )
        return Generated(list(generated), self.finish_reason, ranked)

    def _seal(self, rank: int, wanted: slices.OptIn, fed: list[int]) -> None:
        width = self.model.hidden_size // self.model.tp_size
        facts: dict[str, Any] = {
            "tag": wanted.tag,
            "start_id": self.start.start_id,
            "tap_version": "0",
            "tp_rank": rank,
            "tp_size": self.model.tp_size,
            "dp_rank": 0,
            "layers": self.model.layers,
            "dtype": self.model.dtype,
            "hidden_size": self.model.hidden_size,
            "column_offset": rank * width,
            "width": width,
            "rows": 0,
            "prompt_len": wanted.prompt_len,
            "weights_epoch": 0,
            "crc32": 0,
            "token_crc32": 0,
        }
        trailer = slices.Trailer(**{**facts, **self.wrong})
        if rank == self.error_rank:
            slices.seal_error(self.start.directory, trailer, "row 3 was never written", retry=self.retry)
            return
        fed = fed[:-1] if self.short else fed + [9] * self.surplus
        rows = len(fed)
        writer = slices.SliceWriter(self.start.directory, trailer, rows)
        states = expected_states(rows, self.model)[:, :, rank * width : (rank + 1) * width]
        writer.write(0, np.ascontiguousarray(states.astype(slices.RAW_DTYPES[trailer.dtype])))
        writer.seal(np.array(fed))


def expected_states(rows: int, model: ModelFacts) -> Any:
    """What the fake ranks capture: ``[rows, L, H]``, every element different."""
    shape = (rows, len(model.layers), model.hidden_size)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def make_model(tp_size: int = 2, **changed: Any) -> ModelFacts:
    facts: dict[str, Any] = {
        "layers": LAYERS,
        "num_layers": 4,
        "hidden_size": 8,
        "dtype": "float32",
        "itemsize": 4,
        "vocab_size": VOCABULARY,
        "max_model_len": 64,
        "tp_size": tp_size,
    }
    return ModelFacts(**{**facts, **changed})


class FakeServer:
    """A server around a `FakeEngine`; its ranks publish their records when told to."""

    def __init__(
        self, start: slices.Start, model: ModelFacts, tokenizer: FakeTokenizer, dp_size: int = 1
    ) -> None:
        self.fake = FakeEngine(start, model)
        self.engine = self.fake
        self.tokenizer = tokenizer
        self.dp_size = dp_size
        self.dp_here = 1
        self.canary_answer: dict[str, Any] = PASSED
        self.proof_answer: dict[str, Any] = PASSED
        self.proven: list[tuple[int, list[int]]] = []
        self.carries_tap = True
        self._model = model
        self._start = start

    async def start_id(self) -> str:
        if not self.carries_tap:
            raise CaptureOff("the engine's ranks do not carry the tap")
        return self._start.start_id

    async def check(
        self,
        tag: str,
        token_ids: list[int],
        rows: int,
        first: int | None = None,
        highest: list[int] | None = None,
    ) -> list[Any]:
        assert len(self._start.slice_paths(tag)) == self._model.tp_size
        if first is not None and highest is not None:
            self.proven.append((first, highest))
            assert rows == len(token_ids) and first + len(highest) <= rows
            return [self.proof_answer] * self._model.tp_size
        assert rows == len(token_ids) - 1
        return [self.canary_answer] * self._model.tp_size

    def model(self, record: dict[str, Any]) -> ModelFacts:
        return self._model

    async def tokenizer_fingerprint(self) -> dict[str, str | None]:
        return {"tokenizer": "t0", "chat_template": "c0"}

    def plugins(self) -> dict[str, list[str]]:
        return {"allowed": ["taphouse"], "left_out": ["other"]}

    def publish(self, tp_rank: int, *, dp_rank: int = 0, age_s: float = 0.0, **changed: Any) -> None:
        """Write a rank's record."""
        record = {
            "dp_rank": dp_rank,
            "tp_rank": tp_rank,
            "tp_size": self._model.tp_size,
            "updated_at": time.time() - age_s,
            "capture": "on",
            "reason": None,
            "breaker": None,
            "layers": list(self._model.layers),
            "versions": {"vllm": "0"},
            "counters": {"rows": 5, "sealed": 1},
            "model_fingerprint": {"config": "m0"},
            "weights_epoch": 0,
        }
        self._start.write_record({**record, **changed})


@dataclass
class Bench:
    """The endpoint on a fake server, and what a test looks at."""

    endpoint: Endpoint
    service: Service
    server: FakeServer
    start: slices.Start
    model: ModelFacts

    @property
    def engine(self) -> FakeEngine:
        return self.server.fake

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(app=self.endpoint)
        return httpx.AsyncClient(transport=transport, base_url="http://tap", headers=headers)

    async def ready(self) -> None:
        """Start the service and wait until capture is on."""
        for rank in range(self.model.tp_size):
            self.server.publish(rank)
        self.service.begin()
        while self.service.why_off() is not None:
            await asyncio.sleep(0.005)
        self.engine.seen.clear()

    def leftovers(self) -> list[str]:
        """Files of captures in the start's directory."""
        return sorted(
            path.name for path in self.start.directory.iterdir() if slices.is_tag(path.name.split(".")[0])
        )


def make_bench(
    directory: Path,
    *,
    model: ModelFacts | None = None,
    tokenizer: FakeTokenizer | None = None,
    own_key: str = "",
    server_keys: Sequence[str] = (),
    **settings: Any,
) -> Bench:
    model = model or make_model()
    settings.setdefault("proof_interval_s", 0)
    start = slices.open_start(directory / "slices", "abc12")
    server = FakeServer(start, model, tokenizer or FakeTokenizer())
    latency = LatencyReports(LatencyByClass(), LatencyMetrics(publish=False))
    wanted = TapSettings(slice_dir=directory / "slices", **settings)
    service = Service(wanted, server, Metrics(publish=False), latency)
    endpoint = Endpoint()
    endpoint.service, endpoint.keys = service, KeyRing([own_key], server_keys)
    return Bench(endpoint, service, server, start, model)
