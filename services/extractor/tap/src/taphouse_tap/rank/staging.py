"""Moves captured rows from the tap's buffer to host memory without holding up the engine.

On a GPU: rows are copied aside on the engine's stream before its next forward, then to pinned memory on a
side stream; an event tells the writer when they are there. On a CPU the rows go straight to host memory. All
memory is taken before vLLM sizes its KV cache; nothing is allocated on the device later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from taphouse_tap.errors import CaptureRefused

from .rings import Ring

_MARK_BYTES = 16
"""A mark is two int64: the position and the token id of a row."""


@dataclass(frozen=True)
class StagedRows:
    """Rows of one engine step on their way to the writer.

    `raw` [n, row bytes] uint8, `edges` [n, L, 2] (first and last column of each row, to find poison) and
    `marks` [n, 2] int64 (position and token id of each row) are views of host memory; they hold data once
    `wait` returned.
    """

    raw: NDArray[Any]
    edges: torch.Tensor
    marks: NDArray[Any]
    event: Any | None

    def wait(self) -> None:
        """Block the calling (writer's) thread until the rows have arrived."""
        if self.event is not None:
            self.event.synchronize()


class Staging:
    """Rows [max_tokens, L, W] (`shape`) and marks [max_tokens, 2] of the tap, and the way out of them."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        host_limit_bytes: int,
    ) -> None:
        max_tokens, layers, width = shape
        self.rows = torch.full((max_tokens, layers, width), float("nan"), dtype=dtype, device=device)
        self.marks = torch.full((max_tokens, 2), -1, dtype=torch.int64, device=device)
        self.row_bytes = layers * width * self.rows.element_size()
        self._held_bytes = self.row_bytes + _MARK_BYTES
        host_rows = host_limit_bytes // self._held_bytes
        if host_rows < max_tokens:
            raise CaptureRefused(
                f"the pinned limit of {host_limit_bytes} bytes holds {host_rows} rows, fewer than the "
                f"{max_tokens} of one step; raise TAPHOUSE_TAP_PINNED_LIMIT_BYTES to at least "
                f"{max_tokens * self._held_bytes}"
            )
        self._cuda = device.type == "cuda"
        self.host = Ring(host_rows)
        self._host_rows = torch.empty((host_rows, layers, width), dtype=dtype, pin_memory=self._cuda)
        self._host_marks = torch.empty((host_rows, 2), dtype=torch.int64, pin_memory=self._cuda)
        self._raw = self._host_rows.view(torch.uint8).numpy().reshape(host_rows, self.row_bytes)
        self._raw_marks = self._host_marks.numpy()
        self.aside_bytes = 0
        if self._cuda:
            aside = max_tokens + max_tokens // 8
            self._aside_rows = torch.empty((aside, layers, width), dtype=dtype, device=device)
            self._aside_marks = torch.empty((aside, 2), dtype=torch.int64, device=device)
            self._aside = Ring(aside)
            self._aside_events: deque[Any] = deque()
            self._side = torch.cuda.Stream(device=device)
            self.aside_bytes = aside * self._held_bytes

    @property
    def memory(self) -> dict[str, int]:
        """Bytes taken: the tap's buffer and the staging on the device, the host memory and its limit."""
        buffer = self.rows.shape[0] * self._held_bytes
        host = self.host.capacity * self._held_bytes
        return {
            "buffer_bytes": buffer,
            "staging_bytes": self.aside_bytes,
            "pinned_bytes": self.host.used * self._held_bytes,
            "pinned_limit": host,
        }

    def poison(self, rows: int) -> None:
        """Make the first `rows` rows unwritten (NaN, marks -1) before a forward that must write them."""
        self.rows[:rows].fill_(float("nan"))
        self.marks[:rows].fill_(-1)

    def take(self, runs: list[tuple[int, int]]) -> StagedRows | None:
        """Start moving the rows of `runs` [(first, count)] out; None when host memory is full.

        Called on the engine's thread right after a forward was launched; never blocks it. The rows come out
        one run after the other. Give the memory back with `give_back` in the order of the calls.
        """
        count = sum(n for _, n in runs)
        at = self.host.take(count)
        if at is None:
            return None
        target = slice(at, at + count)
        event = self._out_of_device(runs, count, target) if self._cuda else None
        if not self._cuda:
            self._out_of_host(runs, at)
        return StagedRows(
            raw=self._raw[target],
            edges=self._host_rows[target, :, :: max(1, self._host_rows.shape[2] - 1)],
            marks=self._raw_marks[target],
            event=event,
        )

    def give_back(self) -> None:
        """Return the host memory of the oldest `StagedRows`."""
        self.host.give_back()

    def _out_of_host(self, runs: list[tuple[int, int]], at: int) -> None:
        for first, n in runs:
            self._host_rows[at : at + n].copy_(self.rows[first : first + n])
            self._host_marks[at : at + n].copy_(self.marks[first : first + n])
            at += n

    def _out_of_device(self, runs: list[tuple[int, int]], count: int, target: slice) -> Any:
        engine = torch.cuda.current_stream()
        while (at := self._aside.take(count)) is None:
            engine.wait_event(self._aside_events.popleft())
            self._aside.give_back()
        source = slice(at, at + count)
        for first, n in runs:
            self._aside_rows[at : at + n].copy_(self.rows[first : first + n])
            self._aside_marks[at : at + n].copy_(self.marks[first : first + n])
            at += n
        copied = torch.cuda.Event()
        copied.record(engine)
        self._side.wait_event(copied)
        with torch.cuda.stream(self._side):
            self._host_rows[target].copy_(self._aside_rows[source], non_blocking=True)
            self._host_marks[target].copy_(self._aside_marks[source], non_blocking=True)
            arrived = torch.cuda.Event(blocking=True)  # the writer sleeps, it doesn't spin
            arrived.record(self._side)
        self._aside_events.append(arrived)
        return arrived
