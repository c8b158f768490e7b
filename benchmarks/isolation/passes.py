"""One pass: a mode, an engine, the trace once. Its result is JSON-able, with times in seconds since t = 0."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from .client import replay, warm
from .extraction import Extraction, Load
from .modes import CLASSES, Mode
from .server import Server, Watch
from .trace import Trace

QUOTA_TTL_S = 120.0
FIRST_CAPTURE_S, LAST_CAPTURE_S = 15.0, 2.0
SETTLE_S = 1.0


class Governing(Protocol):
    """A governor that can be let go and held."""

    def resume(self) -> None:
        """Let it set quotas."""
        ...

    def pause(self) -> None:
        """Have it set none; what it learned stays."""
        ...

    def state(self) -> dict[str, Any]:
        """What it says of itself."""
        ...


@dataclass(frozen=True)
class Size:
    """Extraction's load beside the trace: captures in flight, their length in tokens, processes that read."""

    in_flight: int
    prompt_tokens: int
    processes: int = 1


def run_pass(
    mode: Mode,
    *,
    number: int,
    trace: Trace,
    size: Size,
    server: Server,
    start_dir: Path,
    governor: Governing | None,
) -> dict[str, Any]:
    """Run `mode` over the trace, in round `number`."""
    salt = f"{number}/{mode.name}"
    server.await_idle()
    with _protection(mode, server, governor):
        asyncio.run(warm(trace, server.target))
        before = server.counters()
        extraction = _extraction(mode, number, size, server)
        watch = Watch(start_dir)
        try:
            if extraction is not None:
                extraction.await_first(FIRST_CAPTURE_S)
            began, served = asyncio.run(replay(trace, server.target, salt))
            _sleep_until(began + trace.length_s)
            if extraction is not None:  # what was under way at the end is known once it is there
                extraction.await_first(LAST_CAPTURE_S, since=time.monotonic())
        finally:
            events = extraction.stop() if extraction is not None else []
            seen = watch.stop()
        after = server.counters()
        said = governor.state() if mode.governed and governor is not None else None
    return {
        "mode": mode.name,
        "engine": mode.engine,
        "base": mode.base,
        "round": number,
        "length_s": trace.length_s,
        "bursts": trace.bursts,
        "served": [_rounded(asdict(one)) for one in served],
        "extraction": [_shifted(event, began) for event in events],
        "watch": [_shifted(event, began) for event in seen],
        "counters": {name: after[name] - before[name] for name in before},
        "governor": said,
    }


@contextlib.contextmanager
def _protection(mode: Mode, server: Server, governor: Governing | None) -> Iterator[None]:
    """Put the mode's quota in force. The governor learns in every pass of its engine without a fixed one."""
    if mode.busy_ms is not None:
        note = f"benchmark: {mode.name}"
        server.put_quota({"busy_ms": mode.busy_ms, "note": note}, QUOTA_TTL_S)
    learns = mode.engine == CLASSES and mode.busy_ms is None
    if learns and governor is not None:
        governor.resume()
    time.sleep(SETTLE_S)
    try:
        yield
    finally:
        if learns and governor is not None:
            governor.pause()


def _extraction(mode: Mode, number: int, size: Size, server: Server) -> Extraction | None:
    if not mode.extraction:
        return None
    load = Load(
        url=server.target.url,
        in_flight=size.in_flight,
        prompt_tokens=size.prompt_tokens,
        vocabulary=server.target.vocabulary,
        seed=number,
        priority=mode.priority,
        key=server.key,
    )
    return Extraction(load, size.processes)


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


def _shifted(event: dict[str, Any], began: float) -> dict[str, Any]:
    times: dict[str, Any] = {name: round(event[name] - began, 4) for name in ("at", "sent") if name in event}
    return {**event, **times}


def _rounded(served: dict[str, Any]) -> dict[str, Any]:
    whole = {name: round(served[name], 5) for name in ("sent", "late", "ended")}
    return {**served, **whole, "pieces": [round(at, 5) for at in served["pieces"]]}
