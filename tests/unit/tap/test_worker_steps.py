"""Around each engine step: who is admitted, whose rows are taken, and that nothing of it raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.tap.worker_fakes import (
    TOKENS,
    Output,
    admitted,
    forward,
    new_request,
    opened,
    staging,
    weights_of,
    worker_running,
)

from taphouse.slices import OptIn
from taphouse_tap import compat
from taphouse_tap.rank.breaker import Breaker
from taphouse_tap.rank.messages import Fail, FailAll, Finish, Step
from taphouse_tap.rank.record import Counters
from taphouse_tap.rank.rings import Ring
from taphouse_tap.rank.steps import Steps


class Queue:
    """Stands in for the link to the writer: keeps what it is given."""

    def __init__(self, rows: int) -> None:
        self.items: list[Any] = []
        self.tags: list[str] = []
        self.unsent = 0
        self.epochs: list[int] = []
        self.full = False
        self._ring = Ring(rows)

    def admit(self, opt_in: OptIn, epoch: int, prompt: Any) -> int | None:
        if opt_in.tag in self.tags:
            return None
        self.tags.append(opt_in.tag)
        self.epochs.append(epoch)
        return len(self.tags) - 1

    def take_rows(self, count: int) -> int | None:
        return self._ring.take(count)

    def step(self, step: Step) -> bool:
        self.items += [] if self.full else [step]
        return not self.full

    def put(self, item: Any) -> None:
        self.items.append(item)
        self.unsent += 1

    def flush(self) -> None:
        self.unsent = 0

    def fail_all(self, reason: str) -> None:
        self.items.append(FailAll(reason))

    def of(self, kind: type) -> list[Any]:
        return [item for item in self.items if isinstance(item, kind)]


class Bench:
    def __init__(self, tmp_path: Path, host_rows: int = 64) -> None:
        self.start = opened(tmp_path)
        self.staging = staging(host_rows)
        self.worker = worker_running()
        self.queue = Queue(host_rows)
        self.breaker, self.counters = Breaker(), Counters()
        self.weights = weights_of(torch.nn.Linear(3, 3))
        self.steps = Steps(
            self.worker,
            self.start.secret,
            staging=self.staging,
            weights=self.weights,
            link=self.queue,  # type: ignore[arg-type]
            breaker=self.breaker,
            counters=self.counters,
            changed=lambda: None,
        )

    def admit(self, prompt_len: int = 4) -> tuple[OptIn, dict[str, Any]]:
        opt_in = admitted(self.start, prompt_len, prompt_len + 4)
        return opt_in, {"taphouse": opt_in.signed(self.start.secret)}

    def step(self, counts: dict[str, int], new: tuple[Any, ...] = (), **more: Any) -> None:
        """A step of the engine whose batch holds `counts` in this order."""
        output = Output(counts, new, **more)
        self.worker.model_runner.input_batch.req_ids = list(counts)
        self.steps.before(output)
        forward(self.staging, [(0, count) for count in counts.values()])
        assert self.queue.unsent == 0
        self.steps.after(output)
        assert self.queue.unsent == 0


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_rows_of_those_who_opted_in_are_taken(bench: Bench) -> None:
    (one, extra_one), (two, extra_two) = bench.admit(), bench.admit(3)
    new = (new_request("a", 4, extra_one), new_request("b", 5, None), new_request("c", 3, extra_two))
    bench.step({"a": 4, "b": 5, "c": 3}, new)
    (step,) = bench.queue.of(Step)
    assert bench.queue.tags == [one.tag, two.tag]
    assert (step.at, step.parts, step.arrival) == (0, [(0, 4, 0), (1, 3, 0)], 1)
    assert bench.staging.area.marks[:7, 0].tolist() == [0, 1, 2, 3, 0, 1, 2]
    bench.step({"b": 1, "c": 1}, finished_req_ids=["a"], computed={"c": 3, "b": 5})
    assert [item.number for item in bench.queue.of(Finish)] == [0]
    assert bench.queue.of(Step)[1].parts == [(1, 1, 3)]


def test_the_schedulers_positions_are_not_asked_beside_drafts(bench: Bench) -> None:
    """It counts drafts as computed before it knows whether they were accepted."""
    bench.worker.vllm_config.num_speculative_tokens = 3
    _, extra = bench.admit()
    bench.step({"a": 4}, (new_request("a", 4, extra),))
    bench.step({"a": 3}, computed={"a": 4})
    assert [step.parts for step in bench.queue.of(Step)] == [[(0, 4, None)], [(0, 3, None)]]


def test_a_step_without_captures_takes_nothing(bench: Bench) -> None:
    bench.step({"a": 4}, (new_request("a", 4, {"other": 1}),), finished_req_ids=["zzz"])
    assert bench.queue.items == [] and bench.counters.forged == 0
    assert bench.counters.steps == 1


def test_rows_are_poisoned_before_the_forward(bench: Bench) -> None:
    _, extra = bench.admit()
    forward(bench.staging, [(0, TOKENS)])
    bench.steps.before(Output({"a": 4}, (new_request("a", 4, extra),)))
    assert bench.staging.rows[:4].isnan().all() and bench.staging.marks[:4].tolist() == [[-1, -1]] * 4


def test_nothing_is_poisoned_where_no_capture_has_rows(bench: Bench) -> None:
    _, extra = bench.admit()
    bench.step({"a": 4}, (new_request("a", 4, extra),))
    forward(bench.staging, [(0, TOKENS)])
    bench.steps.before(Output({"b": 4}))
    assert not bench.staging.rows.isnan().any()
    bench.steps.before(Output({"b": 4, "a": 1}))
    assert bench.staging.rows[:5].isnan().all() and not bench.staging.rows[5:].isnan().any()


@pytest.mark.parametrize("value", ["x", 7, None, [], {"tag": "0" * 32}, {}])
def test_what_is_not_signed_captures_nothing(bench: Bench, value: Any) -> None:
    bench.step({"a": 4}, (new_request("a", 4, {"taphouse": value}),))
    assert bench.queue.items == [] and bench.counters.forged == 1
    assert not bench.breaker.tripped


def test_another_signature_captures_nothing(bench: Bench) -> None:
    opt_in, _ = bench.admit()
    bench.step({"a": 4}, (new_request("a", 4, {"taphouse": opt_in.signed(b"not the secret")}),))
    assert bench.queue.items == [] and bench.counters.forged == 1


def test_a_replayed_tag_captures_nothing(bench: Bench) -> None:
    _, extra = bench.admit()
    bench.step({"a": 4, "b": 4}, (new_request("a", 4, extra), new_request("b", 4, extra)))
    assert [len(step.parts) for step in bench.queue.of(Step)] == [1]
    assert bench.counters.forged == 1


def test_a_prompt_of_another_length_fails(bench: Bench) -> None:
    _, extra = bench.admit(4)
    bench.step({"a": 5}, (new_request("a", 5, extra),))
    (fail,) = bench.queue.of(Fail)
    assert "5 tokens, the opt-in says 4" in fail.reason
    assert bench.queue.of(Step) == []


def test_a_preempted_request_goes_on(bench: Bench) -> None:
    """The V2 runner is sent the request again as if it were new."""
    _, extra = bench.admit()
    bench.step({"a": 4}, (new_request("a", 4, extra),))
    bench.step({"b": 1}, preempted_req_ids=["a"])
    bench.step({"a": 4}, (new_request("a", 4, extra),))
    assert [step.parts for step in bench.queue.of(Step)] == [[(0, 4, 0)]] * 2
    assert (bench.counters.preempted, bench.counters.forged) == (1, 0)


def test_full_host_memory_drops_the_captures_and_not_the_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path, host_rows=TOKENS)
    _, extra = bench.admit(10)
    bench.step({"a": 10}, (new_request("a", 10, extra),))
    _, extra = bench.admit(10)
    bench.step({"b": 10}, (new_request("b", 10, extra),))
    (fail,) = bench.queue.of(Fail)
    assert "the host memory for rows on their way is full" in fail.reason and fail.retry
    bench.step({"b": 1})
    assert len(bench.queue.of(Step)) == 1 and not bench.breaker.tripped


def test_a_step_that_cannot_be_told_drops_the_captures_and_not_the_step(bench: Bench) -> None:
    _, extra = bench.admit()
    bench.queue.full = True
    bench.step({"a": 4}, (new_request("a", 4, extra),))
    (fail,) = bench.queue.of(Fail)
    assert (fail.number, fail.retry) == (0, True) and not bench.breaker.tripped
    bench.queue.full = False
    bench.step({"a": 1})
    assert bench.queue.of(Step) == []


@pytest.mark.parametrize(
    "function", ["row_count", "scheduled", "new_requests", "finished", "preempted", "batch_rows"]
)
def test_an_error_trips_the_breaker_and_does_not_reach_the_engine(
    bench: Bench, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    _, extra = bench.admit()
    bench.step({"a": 4}, (new_request("a", 4, extra),))
    monkeypatch.setattr(compat, function, broken)
    bench.step({"a": 1})
    assert bench.breaker.tripped
    steps = len(bench.queue.of(Step))
    bench.step({"a": 1})
    assert len(bench.queue.of(Step)) == steps


def test_what_was_admitted_while_the_breaker_tripped_is_failed(bench: Bench) -> None:
    _, extra = bench.admit()
    admit = bench.queue.admit

    def tripping(*given: Any) -> int | None:
        bench.breaker.refuse("from another thread")
        return admit(*given)

    bench.queue.admit = tripping  # type: ignore[method-assign]
    bench.step({"a": 4}, (new_request("a", 4, extra),))
    assert len(bench.queue.tags) == 1 and len(bench.queue.of(FailAll)) == 1


@pytest.mark.parametrize("v2", [False, True])
def test_the_batch_tells_where_rows_lie(v2: bool) -> None:
    worker = worker_running("b", "idle", "a", v2=v2)
    assert list(compat.batch_rows(worker, Output({"a": 3, "b": 2}))) == [("b", 0, 2), ("a", 2, 3)]


def test_a_batch_that_does_not_add_up_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the scheduler says 5"):
        list(compat.batch_rows(worker_running("b"), Output({"a": 3, "b": 2})))


def test_captures_carry_the_epoch_of_the_weights(bench: Bench) -> None:
    bench.weights.renew()
    _, extra = bench.admit()
    bench.step({"a": 4}, (new_request("a", 4, extra),))
    assert bench.queue.epochs == [1]


def test_what_is_in_flight_when_the_weights_change_fails(bench: Bench) -> None:
    _, extra = bench.admit()
    bench.step({"a": 4}, (new_request("a", 4, extra),))
    bench.steps.fail_all("the weights changed")
    assert [item.reason for item in bench.queue.of(FailAll)] == ["the weights changed"]
    bench.step({"a": 1})
    assert len(bench.queue.of(Step)) == 1


def test_nothing_is_captured_while_the_weights_are_away(bench: Bench) -> None:
    bench.weights.put_away("asleep")
    _, extra = bench.admit()
    bench.step({"a": 4}, (new_request("a", 4, extra),))
    assert [item.reason for item in bench.queue.of(Fail)] == ["asleep"]
    assert bench.queue.of(Step) == []
