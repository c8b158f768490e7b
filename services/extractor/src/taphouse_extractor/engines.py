"""The engines of the settings, and which of them serves a batch: one that fits, the least loaded first."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import TracebackType

from taphouse.wire import Engine as EngineView
from taphouse_extractor.aside import Aside
from taphouse_extractor.engine import Engine
from taphouse_extractor.errors import EngineError, EngineFailing, EngineTimeout, EngineUnavailable, NoEngine
from taphouse_extractor.fitting import Needs, load_of, misfit, none_fits, view_of

__all__ = ["Engines"]

LOOK_S = 2.0
"""The longest wait for an engine's status."""

STRAGGLER_S = 0.25
"""How long the others are waited for once an engine that fits has answered."""

Look = tuple[Engine, EngineView]


class Engines:
    """Every engine, asked anew for each choice: a sick one is left out, and is back as soon as it is well.

    Safe to share between threads.
    """

    def __init__(self, engines: Sequence[Engine], aside: Aside) -> None:
        self.each, self.aside = tuple(engines), aside

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for engine in self.each:
            engine.close()

    @contextmanager
    def using(self, needs: Needs) -> Iterator[Engine]:
        """The engine to use now. One that fails inside is set aside: others are preferred for a while.

        Raises `NoEngine` when none can serve `needs`, with what each of them lacks.
        """
        engine, view = self._choose(needs)
        try:
            yield engine
        except (EngineUnavailable, EngineTimeout, EngineFailing) as error:
            if len(self.each) > 1:
                self.aside.put(engine.url, view.start_id, str(error))
            raise

    def _choose(self, needs: Needs) -> Look:
        looks = self._look_at_all(needs)
        fitting = [(engine, view) for engine, view in looks if misfit(view, needs) is None]
        if not fitting:
            raise NoEngine(none_fits([view for _, view in looks], needs) or "there is no engine")
        if len(fitting) == 1:
            return fitting[0]

        def order(look: Look) -> tuple[bool, int, float]:
            engine, view = look
            set_aside = self.aside.why(engine.url, view.start_id) is not None
            return set_aside, load_of(view), random.random()

        return min(fitting, key=order)

    def _look_at_all(self, needs: Needs) -> list[Look]:
        """Every engine that answers; one that hangs is not waited for where another fits."""
        if len(self.each) == 1:
            return [_look(self.each[0])]
        pool = ThreadPoolExecutor(len(self.each), thread_name_prefix="look")
        asked: set[Future[Look]] = {pool.submit(_look, engine) for engine in self.each}
        looks: list[Look] = []
        until: float | None = None
        while asked and (until is None or time.monotonic() < until):
            left = None if until is None else max(0.0, until - time.monotonic())
            done, asked = wait(asked, timeout=left, return_when=FIRST_COMPLETED)
            looks += [future.result() for future in done]
            if until is None and any(misfit(view, needs) is None for _, view in looks):
                until = time.monotonic() + STRAGGLER_S
        pool.shutdown(wait=False)
        return sorted(looks, key=lambda look: self.each.index(look[0]))


def _look(engine: Engine) -> Look:
    """An engine and what it says; one that can't be asked is unreachable."""
    try:
        return engine, view_of(engine.url, engine.status(timeout_s=LOOK_S))
    except EngineError as error:
        return engine, EngineView(url=engine.url, capture="unreachable", detail=str(error))
