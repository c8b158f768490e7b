"""A tap without an engine: speaks the endpoint's contract and seals real slices through `taphouse.slices`.

Tokens are bytes. The state of a token depends on its id, position, layer and column only, so a test can tell
what it must get (`states_of`). Words in a prompt ask for trouble: REFUSE (422, while `refusing`), BROKEN
(500, always), NAN, ABORT.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from taphouse.slices import (
    Claim,
    DirectoryFull,
    SliceWriter,
    Trailer,
    fingerprint_id,
    new_tag,
    open_start,
)

Answer = tuple[int, dict[str, str], dict[str, Any]]


def states_of(token_ids: list[int], layers: tuple[int, ...], hidden: int) -> NDArray[np.float32]:
    """[T, L, H] float32, never zero."""
    tokens = np.asarray(token_ids, np.float32)[:, None, None]
    places = np.arange(len(token_ids), dtype=np.float32)[:, None, None]
    ids = np.asarray(layers, np.float32)[None, :, None]
    columns = np.arange(hidden, dtype=np.float32)[None, None, :]
    return tokens + places / 16 + ids * 3 + columns / 64 + 0.5


def two_classes() -> dict[str, Any]:
    """The status's section of an engine with the two-class scheduler, at rest."""
    return {
        "scheduler": "on",
        "reason": None,
        "steps": {"steps": 0, "extraction_tokens": 0},
        "running": 0,
        "held": 0,
        "quiet": True,
    }


@dataclass
class FakeTap:
    """One engine start. `off` is why capture is off (503), `full` answers 429 that many times.

    `failing` is a status that every capture is answered with, `hanging` keeps captures without an answer.
    `canary` is how one that is run now ends, `canaries` how many were.
    `isolation` and `latency` are those sections of the status, None for a tap without; `quotas` what was set.
    """

    slice_dir: Path
    weights: str = "first"
    layers: tuple[int, ...] = (1, 2, 4)
    num_layers: int = 4
    max_model_len: int = 8192
    seeds: bool = True
    refusing: bool = True
    hidden: int = 8
    tp_size: int = 2
    key: str | None = None
    delay_s: float = 0.0
    off: str | None = None
    full: int = 0
    failing: int = 0
    hanging: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    isolation: dict[str, Any] | None = field(default_factory=two_classes)
    latency: dict[str, Any] | None = None
    quotas: list[dict[str, Any]] = field(default_factory=list)
    canary: dict[str, Any] = field(default_factory=lambda: {"state": "passed", "reason": None})
    canaries: int = 0

    def __post_init__(self) -> None:
        self.start = open_start(self.slice_dir, f"fake-{secrets.token_hex(4)}")
        self._lock, self._running = threading.Lock(), 0

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {"weights": self.weights, "config": "tiny", "tokenizer": "bytes"}

    def handle(self, method: str, path: str, authorization: str | None, body: dict[str, Any]) -> Answer:
        if self.key is not None and authorization != f"Bearer {self.key}":
            return refuse(401, "wrong key")
        if (method, path) == ("GET", "/v1/hidden_states/status"):
            return 200, {}, self.status()
        if (method, path) == ("POST", "/v1/hidden_states"):
            return self.capture(body)
        if (method, path) == ("POST", "/v1/hidden_states/canary"):
            self.canaries += 1
            return (200 if self.canary.get("state") == "passed" else 503), {}, self.canary
        if (method, path) == ("PUT", "/v1/hidden_states/quota") and self.isolation is not None:
            ttl_s = body["ttl_s"]
            self.quotas.append({**body, "expires_at": None if ttl_s is None else time.time() + ttl_s})
            return 200, {}, self.quota()
        return refuse(404, "no such route")

    def quota(self) -> dict[str, Any]:
        """The quota in force."""
        default = {"busy_ms": 2.0, "stopped": False, "note": "the engine's settings", "expires_at": None}
        last = self.quotas[-1] if self.quotas else default
        ended = last["expires_at"] is not None and last["expires_at"] <= time.time()
        return default if ended else {**default, **last}

    def status(self) -> dict[str, Any]:
        sections: dict[str, Any] = {}
        if self.isolation is not None:
            sections["isolation"] = {**self.isolation, "quota": self.quota()}
        if self.latency is not None:
            sections["latency"] = self.latency
        return {
            **sections,
            "capture": "off" if self.off else "on",
            "reason": self.off,
            "layers": list(self.layers),
            "num_layers": self.num_layers,
            "start_id": self.start.start_id,
            "fingerprint_id": fingerprint_id(self.fingerprint),
            "versions": {"vllm": "fake", "tap": "fake"},
            "canary": {"state": "passed"},  # the one of the start
            "dtype": "float32",
            "max_model_len": self.max_model_len,
            "seeds": self.seeds,
            "in_flight": {"here": self._running, "claims": self._running + len(self.start.claims())},
        }

    def capture(self, body: dict[str, Any]) -> Answer:
        text, mask = _render(body)
        no = self._refusal(body, text)
        if no is not None:
            return no
        layers = tuple(body.get("layers") or self.layers)
        if not set(layers) <= set(self.layers):
            return refuse(422, f"layers: {layers} are not all tapped")
        self._wait()
        try:
            return 200, {}, self._answer(text, mask, body, layers)
        except DirectoryFull as error:  # as the endpoint does
            return refuse(429, f"{error}; ask again later", **{"Retry-After": "2"})

    def _refusal(self, body: dict[str, Any], text: str) -> Answer | None:
        """What a request is told instead of a capture, whatever it holds."""
        with self._lock:
            self.requests.append(body)
            stopped = self.isolation is not None and self.quota()["stopped"]
            if stopped or self.full > 0:
                self.full -= not stopped
                why = "extraction is stopped" if stopped else "slice directory full"
                return refuse(429, why, **{"Retry-After": "1"})
        while self.hanging:
            time.sleep(0.02)
        if self.failing or self.off:
            off = f"capture is off: {self.off}"
            return refuse(self.failing or 503, off if self.off else "the engine is told to fail")
        if self.refusing and "REFUSE" in text:
            return refuse(422, "prompt: too long, at most 7 tokens", prompt_tokens=len(text.encode()))
        return refuse(500, "the capture failed: row 3 is missing") if "BROKEN" in text else None

    def _answer(
        self, text: str, mask: list[int], body: dict[str, Any], layers: tuple[int, ...]
    ) -> dict[str, Any]:
        prompt = list(text.encode())
        generated = [97 + i % 26 for i in range(body["max_tokens"])]
        token_ids = prompt + generated
        item: dict[str, Any] = {
            "index": 0,
            "token_ids": token_ids,
            "prompt_len": len(prompt),
            "rows": len(token_ids) - 1,
            "shape": [len(token_ids) - 1, len(layers), self.hidden],
            "finish_reason": "abort" if "ABORT" in text else "length",
            "error": None,
            **self._seal(token_ids, len(prompt), broken="NAN" in text),
        }
        if body.get("return_loss_mask"):
            item["loss_mask"] = mask + [0] * len(generated)
        return {
            "start_id": self.start.start_id,
            "fingerprint": self.fingerprint,
            "fingerprint_id": fingerprint_id(self.fingerprint),
            "layers": list(layers),
            "num_layers": self.num_layers,
            "dtype": "float32",
            "data": [item],
        }

    def _wait(self) -> None:
        with self._lock:
            self._running += 1
        time.sleep(self.delay_s)
        with self._lock:
            self._running -= 1

    def _seal(self, token_ids: list[int], prompt_len: int, *, broken: bool) -> dict[str, Any]:
        tag, rows = new_tag(), len(token_ids) - 1
        states = states_of(token_ids, self.layers, self.hidden)
        if broken:
            states[1, 0, 0] = np.nan
        claim = Claim(
            tag=tag, nbytes=states.nbytes, created_at=time.time(), prompt_len=prompt_len, max_rows=rows
        )
        self.start.reserve(claim, 1 << 30)
        width, parts = self.hidden // self.tp_size, []
        for rank in range(self.tp_size):
            trailer = Trailer(
                tag=tag,
                start_id=self.start.start_id,
                tap_version="fake",
                tp_rank=rank,
                tp_size=self.tp_size,
                dp_rank=0,
                layers=self.layers,
                dtype="float32",
                hidden_size=self.hidden,
                column_offset=rank * width,
                width=width,
                rows=0,
                prompt_len=prompt_len,
                weights_epoch=0,
                crc32=0,
                token_crc32=0,
            )
            writer = SliceWriter(self.start.directory, trailer, len(token_ids))
            columns = np.ascontiguousarray(states[:, :, rank * width : (rank + 1) * width])
            writer.write(0, columns)  # one row more than the client gets: surplus is cut by the reader
            sealed = writer.seal(np.array(token_ids))
            assert sealed is not None
            parts.append({"path": f"/elsewhere/{tag}.t{rank}.slice", "tp_rank": rank, "crc32": sealed.crc32})
        return {"tag": tag, "slices": parts}

    def slices_left(self) -> list[str]:
        """Names of slice files that nobody released."""
        return [path.name for path in self.start.directory.iterdir() if path.suffix in (".slice", ".claim")]


def _render(body: dict[str, Any]) -> tuple[str, list[int]]:
    if "prompt" in body:
        prompt = body["prompt"]
        text = prompt if isinstance(prompt, str) else bytes(token % 128 for token in prompt).decode()
        return text, [1] * len(text.encode())
    text, mask = "", list[int]()
    for message in body["messages"]:
        head, turn = f"<{message['role']}>", f"{message['content']}\n"
        trained = message["role"] == "assistant"
        mask += [0] * len(head.encode()) + [int(trained)] * len(turn.encode())
        text += head + turn
    return text, mask


def refuse(status: int, message: str, prompt_tokens: int | None = None, **headers: str) -> Answer:
    kinds = {401: "authentication_error", 422: "invalid_request_error", 429: "busy", 503: "capture_off"}
    kind = kinds.get(status, "capture_failed")
    error: dict[str, Any] = {"message": message, "type": kind, "param": None, "code": status}
    if prompt_tokens is not None:
        error["prompt_tokens"] = prompt_tokens
    return status, headers, {"error": error}
