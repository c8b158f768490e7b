"""Moves captured rows from the tap's buffer to host memory without holding up the engine.

On a GPU: rows are copied aside on the engine's stream before its next forward, then to pinned memory on a
side stream, where a counter in the same memory tells the writer process that they are there. On a CPU the
rows go straight to host memory. All memory is taken before vLLM sizes its KV cache; nothing is allocated on
the device later.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from taphouse_tap.errors import CaptureRefused

from .area import MARK_BYTES, Area, Layout, Word
from .rings import Ring

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of this process."""


class Staging:
    """Rows [max_tokens, L, W] (`shape`) and marks [max_tokens, 2] of the tap, and the way out of them.

    `prompt_tokens` is how many tokens of new prompts the area has room for.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        host_limit_bytes: int,
        prompt_tokens: int,
    ) -> None:
        max_tokens, layers, width = shape
        self.rows = torch.full((max_tokens, layers, width), float("nan"), dtype=dtype, device=device)
        self.marks = torch.full((max_tokens, 2), -1, dtype=torch.int64, device=device)
        self.row_bytes = layers * width * self.rows.element_size()
        self.held_bytes = self.row_bytes + MARK_BYTES
        host_rows = host_limit_bytes // self.held_bytes
        if host_rows < max_tokens:
            raise CaptureRefused(
                f"the pinned limit of {host_limit_bytes} bytes holds {host_rows} rows, fewer than the "
                f"{max_tokens} of one step; raise TAPHOUSE_TAP_PINNED_LIMIT_BYTES to at least "
                f"{max_tokens * self.held_bytes}"
            )
        self._cuda = device.type == "cuda"
        self.area = Area.create(Layout(host_rows, self.row_bytes, prompt_tokens))
        layout = self.area.layout
        self._host_rows = self._view(dtype, host_rows * layers * width, layout.rows_at)
        self._host_rows = self._host_rows.view(host_rows, layers, width)
        self._host_marks = self._view(torch.int64, 2 * host_rows, layout.marks_at).view(host_rows, 2)
        self._steps = 0
        self.aside_bytes = 0
        if self._cuda:
            self._pin()
            aside = max_tokens + max_tokens // 8
            self._aside_rows = torch.empty((aside, layers, width), dtype=dtype, device=device)
            self._aside_marks = torch.empty((aside, 2), dtype=torch.int64, device=device)
            self._aside = Ring(aside)
            self._aside_events: deque[Any] = deque()
            self._arrived = torch.zeros(1, dtype=torch.int64, device=device)
            self._side = torch.cuda.Stream(device=device)
            self.aside_bytes = aside * self.held_bytes

    @property
    def memory(self) -> dict[str, int]:
        """Bytes taken: the tap's buffer and the staging on the device, and the host memory for rows."""
        return {
            "buffer_bytes": self.rows.shape[0] * self.held_bytes,
            "staging_bytes": self.aside_bytes,
            "pinned_limit": self.area.layout.rows * self.held_bytes,
        }

    def poison(self, rows: int) -> None:
        """Make the first `rows` rows unwritten (NaN, marks -1) before a forward that must write them."""
        self.rows[:rows].fill_(float("nan"))
        self.marks[:rows].fill_(-1)

    def move(self, runs: list[tuple[int, int]], at: int) -> int:
        """Start moving the rows of `runs` [(first, count)] to row `at` of the area, one run after the other.

        Called on the engine's thread right after a forward was launched; never blocks it. They are there once
        the area's count of arrivals has reached what is returned.
        """
        if self._cuda:
            self._out_of_device(runs, at)
        else:
            self._out_of_host(runs, at)
        return self._steps

    def close(self) -> None:
        """Let go of the area: nothing moves any more."""
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.area.address)
        self.area.close()

    def _view(self, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        return torch.frombuffer(self.area.map, dtype=dtype, count=count, offset=offset)

    def _pin(self) -> None:
        """Pin the area's pages for this device: copies to them don't hold up their stream."""
        error = torch.cuda.cudart().cudaHostRegister(self.area.address, self.area.layout.nbytes, _PORTABLE)
        if int(error) or not self._host_rows.is_pinned():
            raise CaptureRefused(
                f"{self.area.layout.nbytes} bytes of host memory can't be pinned (CUDA error {int(error)})"
            )
        self._word = self._view(torch.int64, 1, 8 * Word.ARRIVED)

    def _out_of_host(self, runs: list[tuple[int, int]], at: int) -> None:
        for first, n in runs:
            self._host_rows[at : at + n].copy_(self.rows[first : first + n])
            self._host_marks[at : at + n].copy_(self.marks[first : first + n])
            at += n
        self._steps += 1
        self.area.words[Word.ARRIVED] = self._steps

    def _out_of_device(self, runs: list[tuple[int, int]], to: int) -> None:
        engine = torch.cuda.current_stream()
        count = sum(n for _, n in runs)
        while (at := self._aside.take(count)) is None:
            engine.wait_event(self._aside_events.popleft())
            self._aside.give_back()
        source, target = slice(at, at + count), slice(to, to + count)
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
            self._arrived.add_(1)
            self._steps += 1
            self._word.copy_(self._arrived, non_blocking=True)
            away = torch.cuda.Event()
            away.record(self._side)
        self._aside_events.append(away)
