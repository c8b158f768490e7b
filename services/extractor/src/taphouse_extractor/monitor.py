"""Looks at the engines every few seconds: answers about them cost them nothing, and wait for nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from taphouse.wire import Engine as EngineView
from taphouse.wire import JobOptions, Latency
from taphouse_extractor.engine import Engine
from taphouse_extractor.engines import Engines
from taphouse_extractor.errors import EngineError
from taphouse_extractor.fitting import (
    Needs,
    Refusal,
    longest_prompt,
    none_fits,
    refused_by_all,
    trouble,
    view_of,
)
from taphouse_extractor.governor.report import read_report
from taphouse_extractor.latency import LatencyWindow, ProductionWindow
from taphouse_extractor.trouble import Trouble

__all__ = ["EngineMonitor", "Monitors"]

log = logging.getLogger(__name__)
WhyAside = Callable[["str", "str | None"], "str | None"]


class EngineMonitor:
    """The last look at one engine. `view` is None until the first. `aside` says why it is set aside."""

    def __init__(self, engine: Engine, aside: WhyAside = lambda _url, _start_id: None) -> None:
        self._engine, self._aside = engine, aside
        self._window, self._production = LatencyWindow(), ProductionWindow()
        self.view: EngineView | None = None

    def run(self, stop: threading.Event, every_s: float) -> None:
        """Look until `stop` is set."""
        trouble = Trouble(log, f"engine {self._engine.url}")
        while not stop.is_set():
            try:
                self.look()
                trouble.over()
            except Exception as error:  # an engine may say anything; the next look may be better
                trouble.unexpected(error)
            stop.wait(every_s)

    def look(self) -> EngineView:
        """Ask the engine for its status now, and for vLLM's metrics if need be. Never raises."""
        try:
            status = self._engine.status()
        except EngineError as error:
            view = EngineView(url=self._engine.url, capture="unreachable", detail=str(error))
        else:
            view = view_of(self._engine.url, status, self._latency(status))
        if view.capture == "on":
            view = view.model_copy(update={"set_aside": self._aside(view.url, view.start_id)})
        self.view = view
        return view

    def _latency(self, status: dict[str, Any]) -> Latency | None:
        report = read_report(status)
        if report.latency is not None:
            return self._production.add(report.latency, report.start_id)
        try:
            return self._window.add(self._engine.metrics())
        except (EngineError, ValueError):
            return None


class Monitors:
    """A monitor for each engine."""

    def __init__(self, engines: Engines) -> None:
        self.each = [EngineMonitor(engine, engines.aside.why) for engine in engines.each]

    def look(self) -> list[EngineView]:
        """Look at every engine now. Never raises."""
        return [monitor.look() for monitor in self.each]

    @property
    def views(self) -> list[EngineView]:
        """The last look at each engine that was looked at."""
        return [monitor.view for monitor in self.each if monitor.view is not None]

    def problem(self) -> str | None:
        """Why nothing can be extracted now; None when it can, or while an engine was not looked at yet."""
        views = self.views
        reasons = [trouble(view) for view in views]
        return None if len(views) < len(self.each) or None in reasons else "; ".join(filter(None, reasons))

    def unfit(self, needs: Needs) -> str | None:
        """Why no engine can serve an extraction now; None when one can, or one was not looked at yet."""
        views = self.views
        return None if len(views) < len(self.each) else none_fits(views, needs)

    def refusal(self, options: JobOptions) -> Refusal | None:
        """Why every engine would refuse every row of a job; None while one isn't known to."""
        views = self.views
        return refused_by_all(views, options) if len(views) == len(self.each) else None

    def longest_prompt(self, options: JobOptions) -> int | None:
        """Tokens that a row's prompt may have; None while that isn't known."""
        views = self.views
        return longest_prompt(views, options) if len(views) == len(self.each) else None
