"""Inside vLLM's workers, for benchmarks only: the tap, with step times around it."""

from __future__ import annotations

import time
from typing import Any

from taphouse_tap.rank.area import Word
from taphouse_tap.rank.messages import Step
from taphouse_tap.worker import HiddenStatesExtension

from .worker import StepTimes  # after the tap: its times include the tap's work


class TappedStepTimes(HiddenStatesExtension, StepTimes):
    """The worker extension of a tapped engine."""

    def bench_d2h(self, repeats: int = 10) -> dict[str, Any]:
        """Time the tap's own way of one full step's rows to host memory, on an idle engine: bytes/s."""
        try:
            tap = self._taphouse_tap  # type: ignore[attr-defined]
            staging, link = tap._staging, tap._link
            rows, rates = staging.rows.shape[0], []
            for _ in range(repeats):
                began = time.perf_counter()
                at = link.take_rows(rows)
                arrival = staging.move([(0, rows)], at)
                while staging.area.words[Word.ARRIVED] < arrival:
                    time.sleep(0)
                rates.append(rows * staging.row_bytes / (time.perf_counter() - began))
                link.step(Step(at, arrival, []))  # gives the memory back
                while link.rows_used:
                    time.sleep(0)
            return {
                "bytes": rows * staging.row_bytes,
                "best": max(rates),
                "median": sorted(rates)[repeats // 2],
            }
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
