"""Objects made of settings alone, for both processes."""

from __future__ import annotations

from collections.abc import Callable

from taphouse.store import Store
from taphouse_extractor.aside import Aside
from taphouse_extractor.engine import Engine
from taphouse_extractor.engines import Engines
from taphouse_extractor.errors import ExtractionStopped
from taphouse_extractor.governor.memory import Memory
from taphouse_extractor.governor.orders import Orders
from taphouse_extractor.governor.verdicts import Bounds
from taphouse_extractor.home import Home
from taphouse_extractor.leases import Leases, connect
from taphouse_extractor.settings import Settings

__all__ = ["aside_of", "bounds_of", "check_of", "engines_of", "home_of", "leases_of", "memory_of"]

GOVERNOR_LEASE_S = 5.0


def engines_of(settings: Settings) -> Engines:
    """The engines of the settings, and what Redis says of those that failed."""
    engines = [
        Engine(
            engine.url,
            slice_dir=engine.slice_dir,
            key=engine.bearer(),
            timeout_s=settings.engine_timeout_s,
            patience_s=settings.engine_patience_s,
        )
        for engine in settings.each_engine()
    ]
    return Engines(engines, aside_of(settings))


def aside_of(settings: Settings) -> Aside:
    """Engines that are set aside, in the settings' Redis."""
    return Aside(connect(settings.redis()), prefix=f"taphouse:{settings.queue_name}")


def leases_of(settings: Settings) -> Leases:
    """Leases in the settings' Redis."""
    client = connect(settings.redis())
    return Leases(client, prefix=f"taphouse:{settings.queue_name}", ttl_s=settings.lease_ttl_s)


def home_of(settings: Settings, store: Store) -> Home:
    """What the settings' Redis says of the store."""
    return Home(store, connect(settings.redis()), prefix=f"taphouse:{settings.queue_name}")


def check_of(settings: Settings, store: Store, home: Home) -> Callable[[], None]:
    """What a worker asks before each batch: it raises while none may run."""

    def check() -> None:
        home.check()
        stopped = Orders(store).stopped() if settings.governor else None
        if stopped is not None:
            raise ExtractionStopped(stopped)

    return check


def memory_of(settings: Settings) -> Memory:
    """The governor's memory in it."""
    client = connect(settings.redis())
    ttl_s = max(GOVERNOR_LEASE_S, 4 * settings.governor_tick_s)
    return Memory(client, prefix=f"taphouse:{settings.queue_name}", ttl_s=ttl_s)


def bounds_of(settings: Settings) -> Bounds:
    """What the governor holds to."""
    itl, ttft = settings.governor_itl_slo_ms, settings.governor_ttft_slo_ms
    return Bounds(
        tolerance=settings.governor_tolerance,
        itl_slo_s=None if itl is None else itl / 1000,
        ttft_slo_s=None if ttft is None else ttft / 1000,
        start_ms=min(settings.governor_start_ms, settings.governor_max_ms),
        step_ms=settings.governor_step_ms,
        floor_ms=settings.governor_floor_ms,
        max_ms=settings.governor_max_ms,
        trip_factor=settings.governor_trip_factor,
        hold_s=settings.governor_hold_s,
        half_life_s=settings.governor_half_life_s,
        window_s=settings.governor_window_s,
        min_samples=settings.governor_min_samples,
    )
