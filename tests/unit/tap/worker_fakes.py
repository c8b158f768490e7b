"""What the worker side is given in unit tests: a start on disk, a scheduler output, a worker, a stack."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from taphouse.slices import Claim, OptIn, Start, Trailer, new_tag, open_start
from taphouse_tap.rank.area import Area, Layout
from taphouse_tap.rank.capture import Capture
from taphouse_tap.rank.staging import Staging
from taphouse_tap.rank.weights import Weights

WIDTH, LAYERS, TOKENS = 4, 2, 16


def template(start: Start) -> Trailer:
    return Trailer(
        tag="",
        start_id=start.start_id,
        tap_version="0",
        tp_rank=0,
        tp_size=1,
        dp_rank=0,
        layers=(0, 3),
        dtype="float32",
        hidden_size=WIDTH,
        column_offset=0,
        width=WIDTH,
        rows=0,
        prompt_len=0,
        weights_epoch=0,
        crc32=0,
        token_crc32=0,
    )


def opened(tmp_path: Path) -> Start:
    return open_start(tmp_path / "slices", "unit")


def admitted(start: Start, prompt_len: int, max_rows: int) -> OptIn:
    opt_in = OptIn(new_tag(), prompt_len, max_rows)
    start.reserve(Claim(opt_in.tag, 1000, time.time(), prompt_len, max_rows), 1 << 20)
    return opt_in


def capture_of(start: Start, prompt_len: int, max_rows: int) -> Capture:
    opt_in = admitted(start, prompt_len, max_rows)
    base = template(start)
    trailer = Trailer(**{**vars(base), "tag": opt_in.tag, "prompt_len": prompt_len})
    return Capture(trailer, start.directory, max_rows, tokens_at(range(prompt_len)))


def weights_of(model: nn.Module) -> Weights:
    """The weights of a model that has no norm."""
    return Weights(model, model, {"config": "c"}, "float32")


def staging(host_rows: int = 64) -> Staging:
    held = LAYERS * WIDTH * 4 + 16
    return Staging((TOKENS, LAYERS, WIDTH), torch.float32, torch.device("cpu"), host_rows * held, 256)


def area(rows: int = 64, prompt_tokens: int = 256) -> Area:
    return Area.create(Layout(rows, LAYERS * WIDTH * 4, prompt_tokens))


def rows_at(positions: Sequence[int]) -> np.ndarray:
    """The rows that belong at `positions`: every element tells position, layer and column."""
    p = np.asarray(positions, np.float32)[:, None, None] * 100
    return p + np.arange(LAYERS, dtype=np.float32)[:, None] * 10 + np.arange(WIDTH, dtype=np.float32)


def tokens_at(positions: Sequence[int]) -> np.ndarray:
    """The token ids of the sequence that all unit tests run: position p holds token 7 + p."""
    return np.asarray(positions, np.int32) + 7


def marks_at(positions: Sequence[int]) -> np.ndarray:
    """Marks [n, 2] as the graph records them."""
    return np.stack([np.asarray(positions, np.int64), tokens_at(positions).astype(np.int64)], axis=1)


def raw(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)


def forward(staging: Staging, batch: Sequence[tuple[int, int]]) -> None:
    """Stand in for the graph: write rows and marks of `batch` [(first position, count)]."""
    row = 0
    for first, count in batch:
        positions = range(first, first + count)
        staging.rows[row : row + count] = torch.from_numpy(rows_at(positions))
        staging.marks[row : row + count] = torch.from_numpy(marks_at(positions))
        row += count


@dataclass
class Output:
    """A scheduler's output, as far as the tap looks at it."""

    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    scheduled_new_reqs: Sequence[Any] = ()
    finished_req_ids: Sequence[str] = ()
    preempted_req_ids: Sequence[str] | None = None
    computed: Mapping[str, int] = field(default_factory=dict)

    @property
    def scheduled_cached_reqs(self) -> Any:
        return SimpleNamespace(req_ids=list(self.computed), num_computed_tokens=list(self.computed.values()))

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


def new_request(request_id: str, prompt_len: int, extra_args: Any) -> Any:
    return SimpleNamespace(
        req_id=request_id,
        num_computed_tokens=0,
        prompt_token_ids=tokens_at(range(prompt_len)).tolist(),
        sampling_params=SimpleNamespace(extra_args=extra_args),
    )


def worker_running(*request_ids: str, v2: bool = False) -> Any:
    batch = SimpleNamespace(input_batch=SimpleNamespace(req_ids=list(request_ids)))
    runner = SimpleNamespace(execute_model_state=batch) if v2 else batch
    config = SimpleNamespace(num_speculative_tokens=0)
    return SimpleNamespace(model_runner=runner, use_v2_model_runner=v2, vllm_config=config)


class Norm(nn.Module):
    """Takes and hands on as vLLM's RMSNorm does, and normalises nothing."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return x if residual is None else (x + residual, x + residual)


class Layer(nn.Module):
    """A decoder layer by its signature; hands on the stream plus one."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = Norm()

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            normed = self.input_layernorm(hidden_states)
        else:
            normed, residual = self.input_layernorm(hidden_states, residual)
        return torch.ones_like(normed), residual


class Embedding(nn.Module):
    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(input_), 1)


class Decoder(nn.Module):
    """An embedding of zeros, `count` layers and a norm: the stream entering layer i is `hidden` plus i."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.norm = Norm()

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.embed_tokens(token_ids)
        residual = None
        for number, layer in enumerate(self.layers):
            if number % 2:
                hidden, residual = layer(positions, hidden, residual)
            else:
                hidden, residual = layer(positions=positions, hidden_states=hidden, residual=residual)
        return self.norm(hidden, residual)[0]
