"""Requests are timed by class, and nothing of that reaches vLLM: fake output processor, fake clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.tap.latency_fakes import (
    Client,
    Clock,
    Output,
    Params,
    Processor,
    Reason,
    Request,
    over_loads,
    quantile,
    samples,
)

from taphouse import slices
from taphouse_tap import compat_timing
from taphouse_tap.api.latency import BOUNDS, BUCKET_RATIO, Histogram, LatencyByClass

SECRET = b"of this start"
TAG = "0" * 32


class Bench:
    """A processor with our hooks, and the clock they read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, log_stats: bool = False) -> None:
        self.clock = Clock()
        monkeypatch.setattr(compat_timing, "monotonic", self.clock)
        self.processor = Processor(log_stats=log_stats)
        self.latency = LatencyByClass()
        self.latency.secret = SECRET
        compat_timing.time_requests(Client(self.processor), self.latency)

    def add(self, request_id: str, extra_args: dict[str, Any] | None = None, **more: Any) -> None:
        self.processor.add_request(Request(request_id, Params(extra_args), **more), "prompt")

    def add_capture(self, request_id: str) -> None:
        self.add(request_id, {slices.EXTRA_ARGS_KEY: slices.OptIn(TAG, 3, 4).signed(SECRET)})

    def step(self, seconds: float, *outputs: Output) -> None:
        self.clock.now += seconds
        self.processor.process_outputs(outputs)

    def of(self, name: str) -> Any:
        return self.latency.report()[name]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def near(histogram: dict[str, dict[str, int]], *expected: float) -> None:
    """The samples are ``expected``, each within its bucket."""
    found = sorted(
        BOUNDS[int(bucket)] for bucket, count in over_loads(histogram).items() for _ in range(count)
    )
    assert len(found) == len(expected)
    for bound, value in zip(found, sorted(expected), strict=True):
        assert bound / BUCKET_RATIO * (1 - 1e-9) <= value <= bound * (1 + 1e-9)


def test_one_request_from_arrival_to_end(bench: Bench) -> None:
    bench.add("cmpl-1")
    assert bench.of("production")["running"] == 1
    bench.step(0.5, Output("cmpl-1", [7]))
    bench.step(0.02, Output("cmpl-1", [8]))
    bench.step(0.03, Output("cmpl-1", [9], Reason.LENGTH))
    found = bench.of("production")
    near(found["ttft"], 0.5)
    near(found["itl"], 0.02, 0.03)
    near(found["e2e"], 0.55)
    assert (found["finished"], found["failed"], found["aborted"], found["running"]) == (1, 0, 0, 0)
    assert bench.of("extraction")["ttft"] == {}


def test_classes_are_apart(bench: Bench) -> None:
    bench.add("cmpl-1")
    bench.add_capture("taphouse-1")
    bench.step(0.1, Output("cmpl-1", [7]), Output("taphouse-1", [7], Reason.LENGTH))
    bench.step(0.2, Output("cmpl-1", [7], Reason.STOP))
    production, extraction = bench.of("production"), bench.of("extraction")
    near(production["ttft"], 0.1)
    near(production["itl"], 0.2)
    near(extraction["ttft"], 0.1)
    assert extraction["itl"] == {}
    assert (production["finished"], extraction["finished"]) == (1, 1)


@pytest.mark.parametrize(
    "extra_args",
    [
        None,
        {"kv_transfer_params": {}},
        {"taphouse": "yes"},
        {"taphouse": {"tag": TAG, "prompt_len": 3, "max_rows": 4, "sig": "guessed"}},
        {"taphouse": {"tag": TAG, "prompt_len": 10**5000, "max_rows": 10**5000, "sig": ""}},
        {"taphouse": slices.OptIn(TAG, 3, 4).signed(b"of another start")},
        ["taphouse"],
    ],
)
def test_only_our_own_opt_in_makes_extraction(bench: Bench, extra_args: Any) -> None:
    bench.add("taphouse-forged", extra_args)
    assert (bench.of("production")["running"], bench.of("extraction")["running"]) == (1, 0)
    assert bench.latency.problem is None


def test_before_the_start_is_known_all_is_production(bench: Bench) -> None:
    bench.latency.secret = None
    bench.add_capture("taphouse-1")
    assert bench.of("production")["running"] == 1


def test_tokens_that_come_together_share_their_time(bench: Bench) -> None:
    """As with speculative decoding."""
    bench.add("a")
    bench.step(0.1, Output("a", [1]))
    bench.step(0.06, Output("a", [2, 3, 4]))
    bench.step(0.02, Output("a", [5], Reason.LENGTH))
    near(bench.of("production")["itl"], 0.02, 0.02, 0.02, 0.02)


def test_outputs_without_tokens_are_no_samples(bench: Bench) -> None:
    bench.add("a")
    bench.step(0.1, Output("a", []))
    bench.step(0.1, Output("a", [1]))
    bench.step(0.1, Output("a", []))
    bench.step(0.1, Output("a", [2], Reason.STOP))
    near(bench.of("production")["ttft"], 0.2)
    near(bench.of("production")["itl"], 0.2)


def test_a_pooling_request_has_an_end_alone(bench: Bench) -> None:
    bench.processor.add_request(Request("pool-1", None), None)
    bench.step(0.1, Output("pool-1", [], Reason.STOP))
    found = bench.of("production")
    assert (found["ttft"], found["itl"], found["finished"], samples(found["e2e"])) == ({}, {}, 1, 1)


def test_waiting_in_the_queue_is_what_the_engine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, log_stats=True)
    bench.add("a")
    bench.add("b")
    bench.step(1.0, Output("a", [1], queued_ts=5.0, scheduled_ts=5.25), Output("b", [1]))
    bench.step(1.0, Output("a", [1], Reason.STOP), Output("b", [1], Reason.STOP))
    near(bench.of("production")["queue"], 0.25)


def test_a_client_that_leaves_is_no_failure(bench: Bench) -> None:
    bench.add("a")
    bench.step(0.1, Output("a", [1]))
    assert bench.processor.abort_requests(["a", "unknown"], internal=True) == ["a"]
    bench.step(0.1, Output("a", [2], Reason.ABORT))
    found = bench.of("production")
    assert (found["finished"], found["failed"], found["aborted"], found["running"]) == (0, 0, 1, 0)
    assert found["e2e"] == {}


@pytest.mark.parametrize("reason", [Reason.ERROR, Reason.ABORT])
def test_what_the_engine_ends_is_a_failure(bench: Bench, reason: Reason) -> None:
    bench.add("a")
    bench.step(0.1, Output("a", [], reason))
    found = bench.of("production")
    assert (found["finished"], found["failed"], found["running"], found["e2e"]) == (0, 1, 0, {})


def test_an_engine_that_dies_fails_all_of_them_once(bench: Bench) -> None:
    bench.add("a")
    bench.add_capture("b")
    bench.processor.propagate_error(RuntimeError("dead"))
    bench.processor.abort_requests(["a", "b"], internal=True)
    for name in ("production", "extraction"):
        found = bench.of(name)
        assert (found["failed"], found["aborted"], found["running"]) == (1, 0, 0)


def test_each_sequence_of_a_parallel_request_counts(bench: Bench) -> None:
    bench.add("0_cmpl-1")
    bench.add("1_cmpl-1")
    bench.step(0.1, Output("0_cmpl-1", [1], Reason.STOP), Output("1_cmpl-1", [1], Reason.STOP))
    found = bench.of("production")
    assert (samples(found["ttft"]), found["finished"]) == (2, 2)


def test_waiting_for_a_clients_next_input_is_no_latency(bench: Bench) -> None:
    bench.add("rt-1", resumable=True)
    bench.step(0.1, Output("rt-1", [1], Reason.LENGTH))
    bench.step(60.0)
    bench.add("rt-1", resumable=True)
    bench.step(0.2, Output("rt-1", [2]))
    bench.step(0.3, Output("rt-1", [3], Reason.LENGTH))
    bench.add("rt-1")
    found = bench.of("production")
    near(found["ttft"], 0.1)
    near(found["itl"], 0.3)
    assert (found["finished"], found["running"], found["e2e"]) == (1, 0, {})


def test_the_load_is_the_production_in_flight_here_and_elsewhere(bench: Bench) -> None:
    bench.add_capture("capture")
    bench.step(0.1, Output("capture", [1]))
    assert list(bench.of("extraction")["ttft"]) == ["0"]
    for name in ("a", "b", "c"):
        bench.add(name)
    bench.step(0.1, Output("a", [1]))
    bench.latency.elsewhere = 5
    bench.step(0.1, Output("a", [1]), Output("capture", [1]))
    assert list(bench.of("production")["ttft"]) == ["1"]
    assert list(bench.of("production")["itl"]) == ["3"]
    assert list(bench.of("extraction")["itl"]) == ["3"]


@pytest.mark.parametrize(
    "method", ["add_request", "_update_stats_from_output", "_update_stats_from_finished", "abort_requests"]
)
def test_what_vllm_raises_passes_through_and_timing_goes_on(bench: Bench, method: str) -> None:
    bench.add("a")
    bench.processor.raises = method
    before = bench.processor.calls.count(method)
    with pytest.raises(RuntimeError, match=f"vLLM's own: {method}"):
        bench.add("b")
        bench.step(0.1, Output("a", [1], Reason.STOP))
        bench.processor.abort_requests(["a"], internal=True)
    assert bench.processor.calls.count(method) == before + 1
    assert bench.latency.problem is None


@pytest.mark.parametrize(("method", "first_tokens"), [("arrived", 1), ("tokens", 1), ("ended", 2)])
def test_an_error_of_ours_turns_timing_off_and_leaves_vllm_alone(
    bench: Bench, method: str, first_tokens: int
) -> None:
    bench.add("a")
    bench.step(0.1, Output("a", [1]))

    def broken(*_args: Any) -> None:
        raise KeyError("ours")

    setattr(bench.latency, method, broken)
    bench.add("b")
    bench.step(0.1, Output("a", [2]), Output("b", [1], Reason.STOP))
    assert bench.processor.abort_requests(["a"], internal=True) == ["a"]
    assert bench.processor.calls.count("_update_stats_from_output") == 3
    assert bench.processor.calls.count("add_request") == 2
    assert bench.latency.problem is not None and "KeyError: 'ours'" in bench.latency.problem
    found = bench.of("production")
    assert (found["running"], samples(found["ttft"])) == (0, first_tokens)
    assert bench.latency.report()["problem"] == bench.latency.problem


def test_a_client_without_an_output_processor_is_left_as_it_is() -> None:
    latency = LatencyByClass()
    compat_timing.time_requests("engine", latency)
    assert latency.problem is not None and "can't be timed" in latency.problem

    class Other:
        request_states: dict[str, Any] = {}  # noqa: RUF012

        def add_request(self) -> str:
            return "its own"

    other, latency = Other(), LatencyByClass()
    compat_timing.time_requests(Client(other), latency)
    assert latency.problem is not None and "_update_stats_from_output" in latency.problem
    assert other.add_request() == "its own" and "add_request" not in vars(other)


@given(
    st.lists(st.floats(min_value=BOUNDS[0], max_value=BOUNDS[-1]), min_size=1, max_size=200),
    st.sampled_from([0.01, 0.5, 0.9, 0.95, 0.99, 1.0]),
)
def test_a_quantile_is_within_one_bucket_of_the_true_one(seconds: list[float], share: float) -> None:
    histogram = Histogram()
    for index, value in enumerate(seconds):
        histogram.add(index % 3, value)
    true = float(np.quantile(seconds, share, method="inverted_cdf"))
    found = quantile(over_loads(histogram.to_dict()), share)
    assert true * (1 - 1e-9) <= found <= true * BUCKET_RATIO * (1 + 1e-9)
    assert histogram.seconds == pytest.approx(sum(seconds))


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (0.00025, 0), (0.0003, 5), (1e6, len(BOUNDS))])
def test_the_first_and_the_last_bucket_are_open(seconds: float, bucket: int) -> None:
    histogram = Histogram()
    histogram.add(0, seconds, 3)
    assert histogram.to_dict() == {"0": {str(bucket): 3}}
