"""The policy around a scheduler: what it leaves behind, and what happens when it fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from taphouse_tap.core.plan import Production, Running, Waiting
from taphouse_tap.core.two_class import TwoClasses
from taphouse_tap.quota import Quota

QUOTA = Quota(busy_ms=2.0, quiet_ms=100.0, slots=4, kv_share=0.5)


@dataclass(eq=False)
class Request:
    id: str
    state: str = "waiting"
    allowed: int | None = None


@dataclass
class FakeScheduler:
    """Lists for queues, as vLLM's scheduler has them. `fails` names a method that raises."""

    queue: list[Request] = field(default_factory=list)
    active: list[Request] = field(default_factory=list)
    known: dict[str, Request] = field(default_factory=dict)
    tokens: int | None = None
    fails: str | None = None
    preempted: list[str] = field(default_factory=list)
    whole_prompts: bool = False
    drafts: int = 0

    def _called(self, name: str) -> None:
        if name == self.fails:
            raise RuntimeError("broken on purpose")

    def add(self, request: Request) -> Request:
        self.known[request.id] = request
        (self.active if request.state == "running" else self.queue).append(request)
        return request

    def requests(self) -> int:
        return len(self.known)

    def production(self, extraction: dict[str, Any]) -> Production:
        self._called("production")
        ours = [request for request in self.active if request.id not in extraction]
        waiting = [request for request in self.queue if request.id not in extraction]
        return Production(len(ours), len(ours), len(ours), len(waiting), 3 * len(waiting))

    def running(self, request: Request) -> Running | None:
        if request.state != "running":
            return None
        return Running(request.id, 1 + self.drafts if self.drafts else 50, 4, 8, bool(self.drafts))

    def waiting(self, request: Request) -> Waiting | None:
        return Waiting(request.id, 50, 8) if request.state == "waiting" else None

    def is_gone(self, request: Request) -> bool:
        return request.id not in self.known

    def sizes(self) -> tuple[int, int, int, int, int]:
        self._called("sizes")
        return 512, 4, 100, 90, 16

    def order(self, extraction: dict[str, Any]) -> None:
        self.active.sort(key=lambda request: request.id in extraction)

    def preempt(self, request: Request) -> None:
        self.active.remove(request)
        request.state = "waiting"
        self.queue.insert(0, request)
        self.preempted.append(request.id)

    def take_aside(self, requests: list[Request]) -> None:
        self._called("take_aside")
        self.queue = [request for request in self.queue if request not in requests]

    def put_back(self, requests: list[Request]) -> None:
        self.queue += requests

    def allow(self, request: Request, tokens: int | None) -> None:
        if tokens is not None:
            self._called("allow")
        request.allowed = tokens

    def bound_step(self, tokens: int | None) -> None:
        self.tokens = tokens


def policy_of(scheduler: FakeScheduler, *extraction: Request) -> TwoClasses:
    policy = TwoClasses(scheduler, lambda: QUOTA)
    for request in extraction:
        policy.arrived(request.id, scheduler.add(request))
    return policy


def test_nothing_of_ours_nothing_done() -> None:
    scheduler = FakeScheduler(fails="production")
    scheduler.add(Request("p"))
    policy = policy_of(scheduler)
    policy.before()
    policy.after()
    assert policy.reason is None and scheduler.tokens is None


def test_waiting_extraction_is_aside_during_the_step_and_back_after_it() -> None:
    scheduler = FakeScheduler()
    scheduler.add(Request("p"))
    policy = policy_of(scheduler, Request("a"), Request("b", "running"))
    policy.before()
    assert [request.id for request in scheduler.queue] == ["p"]
    assert scheduler.active[0].allowed == 16
    policy.after()
    assert [request.id for request in scheduler.queue] == ["p", "a"]
    assert scheduler.active[0].allowed is None and scheduler.tokens is None


def test_admitted_ones_wait_behind_production_during_the_step() -> None:
    scheduler = FakeScheduler()
    policy = policy_of(scheduler, Request("a"), Request("b"))
    policy.before()
    assert [request.id for request in scheduler.queue] == ["a"]  # nothing is known yet: sixteen tokens
    assert scheduler.tokens == 16
    policy.after()
    assert {request.id for request in scheduler.queue} == {"a", "b"}


def test_extraction_gives_way_to_production_that_waits_for_a_slot() -> None:
    scheduler = FakeScheduler()
    for name in "pqr":
        scheduler.add(Request(name, "running"))
    policy = policy_of(scheduler, Request("a", "running"))
    scheduler.add(Request("s"))
    policy.before()
    assert scheduler.preempted == ["a"]
    assert [request.id for request in scheduler.queue] == ["s"]
    policy.after()
    assert [request.id for request in scheduler.queue] == ["s", "a"]


@pytest.mark.parametrize("fails", ["production", "sizes", "take_aside", "allow"])
def test_an_error_leaves_vllms_scheduler_with_every_request_and_without_bounds(fails: str) -> None:
    scheduler = FakeScheduler(fails=fails)
    scheduler.add(Request("p", "running"))
    policy = policy_of(scheduler, Request("a"), Request("b", "running"))
    policy.before()
    policy.after()
    assert policy.reason is not None and "broken on purpose" in policy.reason
    assert {request.id for request in scheduler.queue + scheduler.active} == {"p", "a", "b"}
    assert scheduler.tokens is None
    assert all(request.allowed is None for request in scheduler.active)
    scheduler.fails = None
    policy.before()
    assert scheduler.tokens is None, "once off, it stays off"


def test_requests_that_ended_are_forgotten() -> None:
    scheduler = FakeScheduler()
    policy = policy_of(scheduler, Request("a"))
    del scheduler.known["a"]
    scheduler.queue.clear()
    policy.before()
    assert policy.extraction == {} and scheduler.tokens is None


def test_steps_are_counted_by_class_and_quiet_ends_with_production() -> None:
    scheduler = FakeScheduler()
    policy = policy_of(scheduler, Request("a", "running"))
    assert policy.quiet
    policy.before()
    policy.after()
    policy.scheduled(1, {"a": 16})
    policy.done(1)
    assert policy.quiet
    scheduler.add(Request("p", "running"))
    policy.before()
    policy.after()
    policy.scheduled(2, {"a": 1, "p": 3})
    policy.done(2)
    policy.done(3)  # of a step that was never scheduled
    assert not policy.quiet
    assert dict(policy.counts) == {
        "steps": 2,
        "extraction_steps": 2,
        "production_tokens": 3,
        "extraction_tokens": 17,
        "preempted": 0,
        "admitted": 0,
    }


def test_a_whole_prompt_that_does_not_fit_is_tried_beside_production_once_in_a_while() -> None:
    scheduler = FakeScheduler(whole_prompts=True)
    policy = policy_of(scheduler, Request("a"))
    scheduler.add(Request("p", "running"))
    for _ in range(127):
        policy.before()
        policy.after()
    assert policy.counts["admitted"] == 0
    policy.before()
    assert policy.counts["admitted"] == 1


def test_where_nothing_fits_one_with_drafts_is_tried_with_all_of_them_once_in_a_while() -> None:
    scheduler = FakeScheduler(drafts=3)
    scheduler.add(Request("p", "running"))
    ours = Request("a", "running")
    policy = policy_of(scheduler, ours)
    policy.cost.observe(1, 0, 0.01)
    policy.cost.observe(1, 1, 10.0)
    seen = []
    for _ in range(128):
        policy.before()
        seen.append(ours.allowed)
        policy.after()
    assert (seen.count(0), seen[-1]) == (127, 4)
