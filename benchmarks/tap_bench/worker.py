"""Inside vLLM's workers, for benchmarks only: the time of every engine step.

Importing this module, as vLLM does with the module of `worker_extension_cls`, wraps `Worker.execute_model`.
A step's time is from the end of the step before it to its own end: on a GPU between events on the engine's
stream, so idle moments of the card count too, and on a CPU by the clock.
"""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

_LOG = "_bench_steps"
_HOLD = "_bench_hold_s"


def _mark(worker: Any) -> Any:
    if worker.device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(worker: Any, first: Any, second: Any) -> float:
    if worker.device.type != "cuda":
        return 1e3 * (second - first)
    return float(first.elapsed_time(second))


def _wrap() -> None:
    original = Worker.execute_model

    @functools.wraps(original)
    def execute(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        hold = self.__dict__.pop(_HOLD, 0.0)
        if hold:
            time.sleep(hold)
        entered = time.perf_counter()
        result = original(self, scheduler_output, *args, **kwargs)
        log = self.__dict__.get(_LOG)
        if log is not None and scheduler_output.total_num_scheduled_tokens:
            left = time.perf_counter()
            log.append((_mark(self), scheduler_output.total_num_scheduled_tokens, entered, left))
        return result

    Worker.execute_model = execute


_wrap()


class StepTimes:
    """What an engine without a tap gets as its worker extension."""

    def bench_log_steps(self, on: bool) -> list[tuple[float, int, float, float]]:
        """Start or end the log; return what is known of each step logged so far but the first.

        (ms, tokens, host ms before it since the worker was done with the step before, host ms in the worker).
        """
        log = self.__dict__.get(_LOG) or []
        if log and self.device.type == "cuda":  # type: ignore[attr-defined]
            torch.cuda.synchronize()
        times = [
            (_between(self, a, b), tokens, 1e3 * (entered - before), 1e3 * (left - entered))
            for (a, _, _, before), (b, tokens, entered, left) in itertools.pairwise(log)
        ]
        self.__dict__[_LOG] = [] if on else None
        return times

    def bench_hold(self, seconds: float) -> None:
        """Make the next step wait, so that requests sent meanwhile come into one batch."""
        self.__dict__[_HOLD] = seconds
