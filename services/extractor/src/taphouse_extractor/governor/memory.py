"""What Redis keeps of the governor. It may be lost at any time: then it learns anew.

<prefix>:governor-leader     the one that governs; short-lived, renewed at each tick
<prefix>:governor-state      the law's state and what is shown of it, of the last tick
<prefix>:governor-baseline   production's latency without extraction

State and baseline are written only by who leads at that moment, checked by Redis itself.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from pydantic import TypeAdapter

from taphouse.wire import Governor as View
from taphouse_extractor.governor.baseline import Baseline
from taphouse_extractor.governor.state import Order, State
from taphouse_extractor.leases import DROP_IF_MINE, KEEP_IF_MINE, Client

__all__ = ["Memory"]

log = logging.getLogger(__name__)
BASELINE_EVERY_S = 5.0
STALE_S = 10.0
MAX_AWAY_S = 7 * 86400.0
SET_IF_LEADER = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 2, #KEYS do redis.call('set', KEYS[i], ARGV[i]) end
return 1
"""
_STATE = TypeAdapter(State)
_BASELINE = TypeAdapter(Baseline)
_LEFT_OUT = {"baseline", "window", "recent", "verdicts"}


class Memory:
    """Reads and writes the keys above; raises `redis.RedisError`s. `now` is seconds since the epoch."""

    def __init__(
        self, client: Client, *, prefix: str, ttl_s: float, now: Callable[[], float] = time.time
    ) -> None:
        self._redis, self._ttl_ms, self._now = client, int(ttl_s * 1000), now
        self._leader = f"{prefix}:governor-leader"
        self._state, self._baseline = f"{prefix}:governor-state", f"{prefix}:governor-baseline"
        self._baseline_at: float | None = None

    def lead(self, name: str) -> bool:
        """Become or stay the one that governs."""
        return bool(self._redis.eval(KEEP_IF_MINE, 1, self._leader, name, self._ttl_ms))

    def take_over(self, name: str) -> None:
        """Become the one that governs, whoever did."""
        self._redis.set(self._leader, name, px=self._ttl_ms)

    def resign(self, name: str) -> None:
        """Let another lead at once."""
        self._redis.eval(DROP_IF_MINE, 1, self._leader, name)

    def leader(self) -> str | None:
        """Who leads now."""
        name = self._redis.get(self._leader)
        return None if name is None else str(name)

    def load(self, half_life_s: float) -> State | None:
        """The last leader's state, as old as it is by now; None without one. A window is not kept."""
        kept, learnt = self._redis.mget(self._state, self._baseline)
        self._baseline_at = None
        if kept is None:
            return None
        try:
            document = json.loads(kept)
            state = _STATE.validate_python(document["state"])
            away = min(MAX_AWAY_S, max(0.0, self._now() - float(document["at"])))
            baseline = _BASELINE.validate_json(learnt) if learnt is not None else Baseline()
        except (ValueError, KeyError, TypeError):
            log.warning("the governor's kept state can't be read: it starts anew")
            return None
        aged = baseline.aged(away, half_life_s)
        return replace(state, baseline=aged, clock_s=state.clock_s + away, extracted=True)

    def save(self, name: str, state: State, view: View) -> bool:
        """Keep a tick's state; False, and nothing is kept, when `name` does not lead any more."""
        at = self._now()
        document = {
            "at": at,
            "state": _STATE.dump_python(state, mode="json", exclude=_LEFT_OUT),
            "view": view.model_dump(mode="json"),
        }
        keys, values = [self._leader, self._state], [name, json.dumps(document)]
        learn = self._baseline_at is None or not 0 <= at - self._baseline_at < BASELINE_EVERY_S
        if learn:
            keys.append(self._baseline)
            values.append(_BASELINE.dump_json(state.baseline).decode())
        kept = bool(self._redis.eval(SET_IF_LEADER, len(keys), *keys, *values))
        if kept and learn:
            self._baseline_at = at
        return kept

    def view(self, order: Order | None = None) -> View | None:
        """What the last tick showed; an old one says so, None without any. `order`: what is wanted now."""
        kept = self._redis.get(self._state)
        if kept is None:
            return None
        try:
            view = View.model_validate(json.loads(kept)["view"])
        except (ValueError, KeyError, TypeError):
            return None
        mode = view.mode if order is None else order.mode
        age = self._now() - (view.updated_at or 0.0)
        if age > STALE_S:
            why = f"no governor has led for {age:.0f} s: the engine's own defaults are in force"
            return view.model_copy(update={"mode": mode, "reason": why})
        if mode is not view.mode:
            view = view.model_copy(update={"mode": mode, "reason": "ordered, in force in a moment"})
        return view
