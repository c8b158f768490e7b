"""Looks at the engine every few seconds, so that answers about it cost it nothing and wait for nothing."""

from __future__ import annotations

import threading
import time
from typing import Any

from pydantic import ValidationError

from taphouse.wire import Engine as EngineView
from taphouse.wire import Latency
from taphouse_extractor.engine import Engine
from taphouse_extractor.errors import EngineError
from taphouse_extractor.governor.report import read_report
from taphouse_extractor.latency import LatencyWindow, ProductionWindow
from taphouse_extractor.rows import describe

__all__ = ["EngineMonitor"]


class EngineMonitor:
    """The last look at one engine. `view` is None until the first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._window, self._production = LatencyWindow(), ProductionWindow()
        self.view: EngineView | None = None
        self.looked_at = 0.0

    def run(self, stop: threading.Event, every_s: float) -> None:
        """Look until `stop` is set."""
        while not stop.is_set():
            self.look()
            stop.wait(every_s)

    def look(self) -> EngineView:
        """Ask the engine for its status now, and for vLLM's metrics if need be. Never raises."""
        try:
            status = self._engine.status()
        except EngineError as error:
            view = EngineView(url=self._engine.url, capture="unreachable", detail=str(error))
        else:
            view = _view(self._engine.url, status, self._latency(status))
        self.view, self.looked_at = view, time.time()
        return view

    def problem(self) -> str | None:
        """Why nothing can be extracted now; None when it can, or before the first look."""
        view = self.view
        if view is None or view.capture == "on":
            return None
        return f"engine {view.url} ({view.capture}): {view.detail}"

    def _latency(self, status: dict[str, Any]) -> Latency | None:
        report = read_report(status)
        if report.latency is not None:
            return self._production.add(report.latency, report.start_id)
        try:
            return self._window.add(self._engine.metrics())
        except (EngineError, ValueError):
            return None


def _view(url: str, status: dict[str, Any], latency: Latency | None) -> EngineView:
    in_flight = status.get("in_flight")
    try:
        return EngineView(
            url=url,
            capture="on" if status.get("capture") == "on" else "off",
            detail=status.get("reason"),
            layers=status.get("layers"),
            fingerprint_id=status.get("fingerprint_id"),
            in_flight=in_flight.get("claims") if isinstance(in_flight, dict) else None,
            latency=latency,
        )
    except ValidationError as error:
        detail = f"its status is none of this version ({describe(error)})"
        return EngineView(url=url, capture="off", detail=detail, latency=latency)
