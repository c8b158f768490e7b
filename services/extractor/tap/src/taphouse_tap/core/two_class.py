"""Keeps extraction's requests behind production's, around each `schedule()` of vLLM's own scheduler.

Before a step extraction's waiting requests are taken aside and only those that the plan admits are put back;
those that run are held to their tokens. After the step everything is as vLLM left it, so nothing of vLLM's
bookkeeping ever misses a request, and when an error of ours turns this off, vLLM goes on with all of them.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from taphouse_tap.core.plan import Plan, Production, Running, View, Waiting, plan
from taphouse_tap.core.step_cost import StepCost
from taphouse_tap.quota import Quota

QUIET_AFTER_S = 1.0
"""Seconds without any production request after which a step may be as long as `quiet_ms` allows."""

_STEPS_IN_FLIGHT = 64

logger = logging.getLogger("vllm.taphouse")


class Scheduler(Protocol):
    """vLLM's scheduler as this module uses it; `compat_scheduler.VllmScheduler` is it."""

    def requests(self) -> int:
        """Requests it has, of both classes."""
        ...

    def production(self, extraction: dict[str, Any]) -> Production:
        """What production's requests need, all but `extraction`."""
        ...

    def running(self, request: Any) -> Running | None:
        """An extraction request that runs, or None."""
        ...

    def waiting(self, request: Any) -> Waiting | None:
        """An extraction request that waits, or None."""
        ...

    def is_gone(self, request: Any) -> bool:
        """Whether it ended."""
        ...

    whole_prompts: bool
    """Whether prompts are computed in one step or not at all."""

    def sizes(self) -> tuple[int, int, int, int, int]:
        """Tokens of a step, slots, blocks, free blocks, tokens of a block."""
        ...

    def order(self, extraction: dict[str, Any]) -> None:
        """Put production before extraction among those that run."""
        ...

    def preempt(self, request: Any) -> None:
        """Send a running request back to the waiting ones."""
        ...

    def take_aside(self, requests: list[Any]) -> None:
        """Remove requests from the waiting ones."""
        ...

    def put_back(self, requests: list[Any]) -> None:
        """Add them behind those that wait."""
        ...

    def allow(self, request: Any, tokens: int | None) -> None:
        """Bound what a running request may compute in the next step; None: no bound."""
        ...

    def bound_step(self, tokens: int | None) -> None:
        """Bound a whole step; None: as vLLM has it."""
        ...


class TwoClasses:
    """The policy of one engine core. No method raises; an error turns it off, and `reason` says why."""

    def __init__(self, scheduler: Scheduler, quota: Callable[[], Quota]) -> None:
        self.reason: str | None = None
        self.extraction: dict[str, Any] = {}
        self.counts: Counter[str] = Counter(
            steps=0, extraction_steps=0, production_tokens=0, extraction_tokens=0, preempted=0, admitted=0
        )
        self.cost = StepCost()
        self._scheduler, self._quota = scheduler, quota
        self._aside: list[Any] = []
        self._allowed: list[Any] = []
        self._production_at = -math.inf
        self._in_flight: dict[int, tuple[int, int, float]] = {}
        self._done_at = 0.0

    @property
    def quiet(self) -> bool:
        """Whether no production request was there for a while."""
        return time.monotonic() - self._production_at >= QUIET_AFTER_S

    def arrived(self, request_id: str, request: Any) -> None:
        """A request of extraction's joins."""
        self.extraction[request_id] = request

    def before(self) -> None:
        """Shape the step that is about to be scheduled."""
        if self.reason is not None or not self.extraction:
            return
        try:
            self._before()
        except Exception as error:
            self.turn_off("before a step", error)

    def after(self) -> None:
        """The step is scheduled: put everything back."""
        try:
            self._restore()
        except Exception as error:
            self.turn_off("after a step", error)

    def scheduled(self, step: int, tokens: dict[str, int]) -> None:
        """`tokens` by request of the step that was just scheduled; `step` identifies it until it is done."""
        try:
            extraction = sum(tokens.get(request_id, 0) for request_id in self.extraction)
            production = sum(tokens.values()) - extraction
            if len(self._in_flight) >= _STEPS_IN_FLIGHT:
                self._in_flight.clear()
            now = time.monotonic()
            self._in_flight[step] = (production, extraction, now)
            if self._scheduler.requests() > len(self.extraction):
                self._production_at = now
        except Exception as error:
            self.turn_off("after scheduling", error)

    def done(self, step: int) -> None:
        """The results of a step are there."""
        try:
            now = time.monotonic()
            production, extraction, began = self._in_flight.pop(step, (0, 0, now))
            if production or extraction:
                self.cost.observe(production, extraction, now - max(began, self._done_at))
                self.counts.update(
                    steps=1,
                    extraction_steps=int(extraction > 0),
                    production_tokens=production,
                    extraction_tokens=extraction,
                )
            self._done_at = now
        except Exception as error:
            self.turn_off("after a step", error)

    def turn_off(self, where: str, error: Exception) -> None:
        """vLLM's own behaviour from here on."""
        if self.reason is None:
            self.reason = f"{where}: {type(error).__name__}: {error}"
            logger.exception("Taphouse's scheduler is off, vLLM's own goes on (%s)", where)
        for restore in (self._give_back, self._unbound, lambda: self._scheduler.bound_step(None)):
            try:
                restore()
            except Exception:
                logger.exception("Taphouse could not restore vLLM's scheduler")
        self.extraction.clear()

    def _before(self) -> None:
        for request_id in [key for key, value in self.extraction.items() if self._scheduler.is_gone(value)]:
            del self.extraction[request_id]
        if not self.extraction:
            return
        self._scheduler.order(self.extraction)
        view, quota = self._view(), self._quota()
        quiet = self.quiet and not (view.production.running or view.production.waiting)
        budget = quota.quiet_ms if quiet else quota.busy_ms
        tokens = self.cost.tokens_within(budget / 1000, view.tokens, quiet=quiet, least=view.least)
        tries_whole = bool(
            view.whole
            and view.waiting
            and view.production.running
            and view.waiting[0].tokens > tokens
            and self.cost.tries_whole(budget / 1000, view.waiting[0].tokens)
        )
        self._apply(view, plan(view, quota, tokens, tries_whole=tries_whole))

    def _view(self) -> View:
        scheduler, known = self._scheduler, self.extraction.values()
        tokens, slots, blocks, free_blocks, block_size = scheduler.sizes()
        return View(
            production=scheduler.production(self.extraction),
            running=[ours for request in known if (ours := scheduler.running(request)) is not None],
            waiting=sorted(
                (found for request in known if (found := scheduler.waiting(request)) is not None),
                key=lambda found: found.priority,
            ),
            tokens=tokens,
            slots=slots,
            blocks=blocks,
            free_blocks=free_blocks,
            block_size=block_size,
            whole=scheduler.whole_prompts,
        )

    def _apply(self, view: View, step: Plan) -> None:
        for request_id in step.preempt:
            self._scheduler.preempt(self.extraction[request_id])
        admitted = [self.extraction[request_id] for request_id in step.admit]
        waiting = {found.id for found in view.waiting}.union(step.preempt)
        self._aside = [request for request_id, request in self.extraction.items() if request_id in waiting]
        self._scheduler.take_aside(self._aside)
        if admitted:
            self._aside = [request for request in self._aside if request not in admitted]
            self._scheduler.put_back(admitted)
        for request_id, tokens in step.allowed.items():
            request = self.extraction[request_id]
            self._allowed.append(request)
            self._scheduler.allow(request, tokens)
        if step.tokens is not None:
            self._scheduler.bound_step(step.tokens)
        self.counts.update(preempted=len(step.preempt), admitted=len(step.admit))

    def _restore(self) -> None:
        self._give_back()
        self._unbound()
        self._scheduler.bound_step(None)

    def _give_back(self) -> None:
        aside, self._aside = self._aside, []
        if aside:
            self._scheduler.put_back(aside)

    def _unbound(self) -> None:
        allowed, self._allowed = self._allowed, []
        for request in allowed:
            self._scheduler.allow(request, None)
