"""Inside vLLM's workers, for benchmarks only: the tap, with step times around it."""

from __future__ import annotations

import time
from typing import Any

from taphouse_tap.worker import HiddenStatesExtension

from .worker import StepTimes  # after the tap: its times include the tap's work


class TappedStepTimes(HiddenStatesExtension, StepTimes):
    """The worker extension of a tapped engine."""

    def bench_d2h(self, repeats: int = 10) -> dict[str, Any]:
        """Time the tap's own way of one full step's rows to host memory, on an idle engine: bytes/s."""
        try:
            staging = self._taphouse_tap._staging  # type: ignore[attr-defined]
            rows, rates = staging.rows.shape[0], []
            for _ in range(repeats):
                began = time.perf_counter()
                staged = staging.take([(0, rows)])
                staged.wait()
                rates.append(staged.raw.nbytes / (time.perf_counter() - began))
                staging.give_back()
            return {
                "bytes": rows * staging.row_bytes,
                "best": max(rates),
                "median": sorted(rates)[repeats // 2],
            }
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
