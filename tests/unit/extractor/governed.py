"""An engine whose production is modelled, as the governor's thread meets it."""

from __future__ import annotations

from typing import Any

from tests.queue.fake_tap import FakeTap
from tests.unit.extractor.conftest import engine_of
from tests.unit.extractor.governing import SCALE, Production

from taphouse_extractor.errors import EngineUnavailable
from taphouse_extractor.governor.histograms import loads_added


class Clock:
    """Both clocks."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class ModelledEngine:
    """A tap's status that grows as a modelled production works under the quota it is given."""

    url = "http://modelled"

    def __init__(self, production: Production, tap: FakeTap) -> None:
        self.production, self.tap = production, tap
        self.away: str | None = None
        self._engine = engine_of(tap)
        self._itl: Any = {}
        self._ttft: Any = {}
        self._failed = 0

    def work(self) -> None:
        """One interval."""
        quota = self.tap.quota()
        seen = self.production.interval(quota["stopped"], quota["busy_ms"])
        self._itl, self._ttft = loads_added(self._itl, seen.itl), loads_added(self._ttft, seen.ttft)
        self._failed += seen.failed
        if self.tap.isolation is not None:
            self.tap.isolation["steps"]["extraction_tokens"] += 100 * seen.extracted
            self.tap.isolation["running"] = int(self.production.wanted and not quota["stopped"])
            self.tap.isolation["quiet"] = self.production.streams == 0
        self.tap.latency = {
            "bucket_ratio": SCALE.ratio,
            "first_bound_s": SCALE.first_s,
            "production": {
                "itl": {str(load): {str(k): n for k, n in c.items()} for load, c in self._itl.items()},
                "ttft": {str(load): {str(k): n for k, n in c.items()} for load, c in self._ttft.items()},
                "failed": self._failed,
                "running": self.production.streams,
            },
            "extraction": {"running": int(seen.extracted)},
        }

    def status(self, *, timeout_s: float = 5.0) -> dict[str, Any]:
        if self.away:
            raise EngineUnavailable(self.away)
        self.work()
        return self._engine.status()

    def set_quota(self, quota: dict[str, Any]) -> None:
        if self.away:
            raise EngineUnavailable(self.away)
        self._engine.set_quota(quota)
