"""What the tap does around each engine step, on the engine's own thread: as little as it can."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from taphouse.slices import EXTRA_ARGS_KEY, BadOptIn, verify_opt_in
from taphouse_tap import compat

from .breaker import Breaker
from .link import Link
from .messages import Fail, Finish, Step
from .record import Counters
from .staging import Staging
from .weights import Weights


class Steps:
    """`before` and `after` an engine step. Neither raises: an error of ours trips the breaker."""

    def __init__(
        self,
        worker: Any,
        secret: bytes,
        *,
        staging: Staging,
        weights: Weights,
        link: Link,
        breaker: Breaker,
        counters: Counters,
        changed: Callable[[], None],
    ) -> None:
        self._worker, self._secret = worker, secret
        self._staging, self._weights, self._link = staging, weights, link
        self._breaker, self._counters, self._changed = breaker, counters, changed
        self._active: dict[str, int] = {}  # the number of each request's capture

    def before(self, scheduler_output: Any) -> None:
        """Look at what the scheduler sends: seal the finished, admit the new, poison the rows to come.

        While capture is on no file is touched here: whether one is still wanted is the writer's business.
        """
        if self._breaker.tripped:
            return
        began = time.perf_counter()
        try:
            self._counters.steps += 1
            if self._active:
                for request_id in compat.preempted(scheduler_output):
                    self._counters.preempted += request_id in self._active
                for request_id in compat.finished(scheduler_output):
                    self._finish(request_id)
            for new in compat.new_requests(scheduler_output):
                if EXTRA_ARGS_KEY in new.extra_args and new.request_id not in self._active:
                    self._admit(new)
            self._link.flush()
            if not self._active.keys().isdisjoint(compat.scheduled(scheduler_output)):
                self._staging.poison(compat.row_count(scheduler_output))
            if self._active:
                self._counters.held(time.perf_counter() - began)
        except Exception as error:
            self._breaker.trip("execute_model (before)", error)
        self._fail_if_off()

    def after(self, scheduler_output: Any) -> None:
        """Send the captured requests' rows on their way, once the forward was launched."""
        if self._breaker.tripped or not self._active:
            return
        began = time.perf_counter()
        try:
            if compat.row_count(scheduler_output):
                self._take(scheduler_output)
            self._counters.held(time.perf_counter() - began)
        except Exception as error:
            self._breaker.trip("execute_model (after)", error)

    def fail_all(self, reason: str) -> None:
        """Fail what is in flight. Called on the engine's thread, between steps."""
        self._active = {}
        self._link.fail_all(reason)

    def _fail_if_off(self) -> None:
        """Fail what was admitted while another thread tripped the breaker."""
        if self._breaker.tripped:
            self._link.fail_all(f"capture is off: {self._breaker.reason}")

    def _take(self, scheduler_output: Any) -> None:
        parts: list[tuple[int, int, int | None]] = []
        runs: list[tuple[int, int]] = []
        positions: dict[str, int] | None = None
        for request_id, first, count in compat.batch_rows(self._worker, scheduler_output):
            number = self._active.get(request_id)
            if number is None:
                continue
            if positions is None:
                positions = compat.first_positions(self._worker, scheduler_output)
            parts.append((number, count, positions.get(request_id)))
            if runs and sum(runs[-1]) == first:
                runs[-1] = (runs[-1][0], runs[-1][1] + count)
            else:
                runs.append((first, count))
        if not parts:
            return
        at = self._link.take_rows(sum(count for _, count, _ in parts))
        if at is None:
            why = "the host memory for rows on their way is full"
        elif self._link.step(Step(at, self._staging.move(runs, at), parts)):
            return
        else:
            why = "the writer takes no more messages"
        for number, _, _ in parts:
            self._drop(number, why, retry=True)
        self._link.flush()

    def _admit(self, new: compat.NewRequest) -> None:
        try:
            opt_in = verify_opt_in(self._secret, new.extra_args[EXTRA_ARGS_KEY])
        except BadOptIn:
            self._counters.forged += 1
            return
        number = self._link.admit(opt_in, self._weights.epoch, new.token_ids)
        if number is None:
            self._counters.forged += 1
            return
        self._active[new.request_id] = number
        if self._weights.now.away is not None:
            self._drop(number, self._weights.now.away)
        elif len(new.token_ids) != opt_in.prompt_len:
            self._drop(
                number, f"the prompt has {len(new.token_ids)} tokens, the opt-in says {opt_in.prompt_len}"
            )
        self._changed()

    def _finish(self, request_id: str) -> None:
        number = self._active.pop(request_id, None)
        if number is not None:
            self._link.put(Finish(number))
            self._changed()

    def _drop(self, number: int, reason: str, *, retry: bool = False) -> None:
        self._active = {k: v for k, v in self._active.items() if v != number}
        self._link.put(Fail(number, reason, retry))
