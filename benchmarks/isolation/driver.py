"""The rounds: passes until the time is spent, results as they come, tables and picture at the end."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .figures import Pass, of_pass, summary
from .modes import CLASSES, GOVERNED, NONE, PRIORITY, UNPROTECTED, Mode, order, warm_up
from .passes import Governing, Size, run_pass
from .picture import picture
from .report import machine, markdown, write_json
from .server import Server
from .trace import Plan, Trace, make_trace


@dataclass
class Bench:
    """One run. `sweep` are the fixed quotas (ms); `budget_s` is what all passes may take together.

    `only` keeps the modes whose names begin so; `left_out` says what was not measured, and why.
    """

    trace: Trace
    size: Size
    sweep: Sequence[float]
    rounds: int
    budget_s: float
    servers: Mapping[str, Server]
    governor: Governing | None
    left_out: list[str] = field(default_factory=list)
    only: tuple[str, ...] = ()
    _two_classes: bool = True

    def run(self) -> list[Pass]:
        """Run all rounds; a pass that fails is named and left out."""
        starts = {name: Path(server.await_capture()["start_dir"]) for name, server in self.servers.items()}
        self._look_at_scheduler()
        passes: list[Pass] = []
        began, longest = time.monotonic(), 0.0
        for name in self.servers:  # what an engine does for the first time takes longer
            self._pass(warm_up(name), 0, make_trace(_short_plan(self.trace.plan)), starts)
        for number in range(self.rounds):
            for mode in self._modes(number):
                passed = time.monotonic()
                if passed - began + longest > self.budget_s:
                    self.left_out.append(f"round {number} from {mode.name} on (the time was spent)")
                    return passes
                try:
                    one = self._pass(mode, number, self.trace, starts)
                except Exception as error:
                    self.left_out.append(f"{mode.name} in round {number}: {type(error).__name__}: {error}")
                    emit("failed", mode=mode.name, round=number, why=f"{type(error).__name__}: {error}")
                    continue
                passes.append(one)
                longest = max(longest, time.monotonic() - passed)
                emit(
                    "pass", **of_pass(one), governor=one["governor"], at_s=round(time.monotonic() - began, 1)
                )
        return passes

    def _pass(self, mode: Mode, number: int, trace: Trace, starts: Mapping[str, Path]) -> Pass:
        return run_pass(
            mode,
            number=number,
            trace=trace,
            size=self.size,
            server=self.servers[mode.engine],
            start_dir=starts[mode.engine],
            governor=self.governor,
        )

    def _modes(self, number: int) -> list[Mode]:
        modes = order(number, self.sweep, governed=self.governor is not None)
        kept = [mode for mode in modes if not self.only or mode.name.startswith(self.only)]
        up = [mode for mode in kept if mode.engine in self.servers]
        return [mode for mode in up if self._two_classes or mode.engine != CLASSES]

    def _look_at_scheduler(self) -> None:
        """An engine whose two-class scheduler is off would be measured as if it were on."""
        found = self.servers[CLASSES].status().get("isolation") or {}
        if found.get("scheduler") != "on":
            self._two_classes = False
            why = f"the two-class scheduler is {found.get('scheduler')}: {found.get('reason')}"
            self.left_out.append(why)
            emit("left_out", why=why)


def emit(what: str, **values: Any) -> None:
    """Print a result as a line of JSON."""
    print(json.dumps({"result": what, **_short(values)}), flush=True)


def finish(
    passes: Sequence[Pass], bench: Bench, *, engine: str, command: str, out: Path, svg: Path, device: str = ""
) -> int:
    """Write the JSON file and the picture, print the tables; returns the exit code."""
    trace = bench.trace
    about: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": device or machine(),
        "engine": engine,
        "command": command,
        "what": describe(trace, bench.size),
        "trace": trace.as_json(),
        "picture": svg.name,
        "left_out": bench.left_out,
    }
    write_json(out, about, passes)
    svg.parent.mkdir(parents=True, exist_ok=True)
    svg.write_text(picture(shown(passes), summary(passes), f"{engine}, {about['date']}"))
    print(f"\n{markdown(about, passes)}\n\n{out}\n{svg}", flush=True)
    return int(not passes)


def shown(passes: Sequence[Pass]) -> list[Pass]:
    """The passes for the picture: the first round's, one a mode, with one quota."""
    first = {one["mode"]: one for one in reversed(passes)}
    quotas = [mode for mode in first if mode.startswith("quota")]
    kept = [mode for mode in quotas if sum(one["mode"] == mode for one in passes) > 1] or quotas
    names = [NONE.name, UNPROTECTED.name, PRIORITY.name, *kept[:1], GOVERNED.name]
    return [first[name] for name in names if name in first]


def describe(trace: Trace, size: Size) -> str:
    """The load in words."""
    plan = trace.plan
    return (
        f"{len(trace.requests)} chats in {plan.bursts} bursts of {plan.burst_s:g} s ({plan.rate:g} a second, "
        f"{plan.assistants} system prompts of {plan.system_tokens} tokens, turns of {plan.user_tokens[0]} "
        f"to {plan.user_tokens[1]}, answers of {plan.output_tokens[0]} to {plan.output_tokens[1]}), gaps of "
        f"about {plan.quiet_s:g} s, {size.in_flight} captures of {size.prompt_tokens} tokens in flight; "
        "medians over rounds, quotients within a round"
    )


def _short_plan(plan: Plan) -> Plan:
    return replace(plan, lead_s=0.2, bursts=1, burst_s=min(2.0, plan.burst_s), quiet_s=0.2)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {name: _short(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_short(item) for item in value]
    return value
