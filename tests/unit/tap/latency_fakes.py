"""A written fake of vLLM's output processor (`v1/engine/output_processor.py`), a clock, and readers."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from taphouse_tap.api.latency import BUCKET_RATIO, FIRST_BOUND_S


class Reason(enum.IntEnum):
    """vLLM's `FinishReason`."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass
class Params:
    extra_args: dict[str, Any] | None = None


@dataclass
class Request:
    """What arrives; pooling requests have no sampling parameters."""

    request_id: str
    sampling_params: Params | None = field(default_factory=Params)
    resumable: bool = False


@dataclass
class Output:
    """One request's part of one step."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: Reason | None = None
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0


@dataclass
class Stats:
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0


@dataclass
class State:
    request_id: str
    stats: Stats | None
    streaming_input: bool = False


class Processor:
    """`log_stats` as vLLM has it; `raises` names a method that fails; `calls` counts vLLM's own work."""

    def __init__(self, *, log_stats: bool = False) -> None:
        self.request_states: dict[str, State] = {}
        self.calls: list[str] = []
        self.raises: str | None = None
        self._log_stats = log_stats

    def add_request(
        self, request: Request, prompt: str | None, parent: Any = None, index: int = 0, queue: Any = None
    ) -> None:
        self._call("add_request")
        state = self.request_states.get(request.request_id)
        if state is None:
            stats = Stats() if self._log_stats else None
            self.request_states[request.request_id] = State(request.request_id, stats, request.resumable)
        elif not request.resumable:
            del self.request_states[request.request_id]

    def process_outputs(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                continue
            self._update_stats_from_output(state, output, 1.0, None)
            if output.finish_reason is not None and not state.streaming_input:
                self.request_states.pop(output.request_id)
                self._update_stats_from_finished(state, output.finish_reason, None)

    def _update_stats_from_output(
        self, req_state: State, engine_core_output: Output, timestamp: float | None, iteration_stats: Any
    ) -> None:
        self._call("_update_stats_from_output")
        if req_state.stats is not None and engine_core_output.scheduled_ts:
            req_state.stats.queued_ts = engine_core_output.queued_ts
            req_state.stats.scheduled_ts = engine_core_output.scheduled_ts

    def _update_stats_from_finished(
        self, req_state: State, finish_reason: Reason | None, iteration_stats: Any
    ) -> None:
        self._call("_update_stats_from_finished")

    def abort_requests(self, request_ids: Sequence[str], internal: bool) -> list[str]:
        self._call("abort_requests")
        return [name for name in request_ids if self.request_states.pop(name, None) is not None]

    def propagate_error(self, e: Exception) -> None:
        self._call("propagate_error")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.raises == name:
            raise RuntimeError(f"vLLM's own: {name}")


@dataclass
class Client:
    """vLLM's engine client, as far as requests are timed by it."""

    output_processor: Any


@dataclass
class Clock:
    """A clock that only moves when it is told to."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def quantile(counts: Mapping[str, int], share: float) -> float:
    """The upper bound in seconds of the bucket that holds the sample at ``share`` of a status's histogram."""
    left = math.ceil(share * sum(counts.values()))
    for bucket in sorted(counts, key=int):
        left -= counts[bucket]
        if left <= 0:
            return FIRST_BOUND_S * float(BUCKET_RATIO) ** int(bucket)
    raise ValueError("no samples")


def over_loads(histogram: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """A status's histogram whatever the load."""
    total: dict[str, int] = {}
    for counts in histogram.values():
        for bucket, count in counts.items():
            total[bucket] = total.get(bucket, 0) + count
    return total


def samples(histogram: Mapping[str, Mapping[str, int]]) -> int:
    """How many samples a status's histogram holds."""
    return sum(over_loads(histogram).values())
