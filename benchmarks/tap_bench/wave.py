"""One wave: engines that are up together, and the steps taken on them within the budget."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .process import CommandFailed, Engine, EngineFailed
from .sections import Calibration, Step
from .shapes import Shape

Emit = Callable[..., None]
_START_S = 330.0


@dataclass
class Wave:
    """Takes steps and keeps their answers: `values[figure][engine][round]` and `answers` in order."""

    label: dict[str, Any]
    shape: Shape
    args: argparse.Namespace
    emit: Emit
    deadline: float
    launch: Callable[[str, dict[str, Any]], Engine]
    calibration: Calibration = field(default_factory=Calibration)
    values: dict[str, dict[str, dict[int, list[float]]]] = field(default_factory=dict)
    answers: list[tuple[Step, Any]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    longest_start: float = 0.0
    _seconds: float = 0.0
    _took: dict[tuple[str, str, str], float] = field(default_factory=dict)
    _engines: dict[str, Engine] = field(default_factory=dict)

    def start(self, kinds: Sequence[str]) -> list[str]:
        """Start engines of these kinds at once; return the names of those that came up."""
        began = time.monotonic()
        for kind in kinds:
            self._engines[kind] = self.launch(kind, self.label)
            time.sleep(2.0)  # engines look for free ports of their own
        up = [kind for kind in kinds if self._up(kind)]
        self.longest_start = max(self.longest_start, time.monotonic() - began)
        return up

    def close(self) -> None:
        """End all engines of the wave."""
        for engine in self._engines.values():
            engine.quit()
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def together(self, steps: Sequence[Step]) -> None:
        """Take the steps in their order, on engines that are all up."""
        self._seconds = self.deadline - time.monotonic()
        for number, step in enumerate(steps):
            engine = self._engines.get(step.engine)
            if engine is not None and engine.alive:
                self._take(engine, step, steps[number + 1 :])

    def one_by_one(self, steps: Sequence[Step]) -> None:
        """Take the steps engine by engine, each alone on its cards; the first is untapped, to calibrate."""
        kinds = dict.fromkeys(step.engine for step in steps)
        for kind in sorted(kinds, key=lambda kind: kind != "untapped"):
            mine = [step for step in steps if step.engine == kind]
            if time.monotonic() + self.longest_start > self.deadline:
                self.left_out.update(f"{step.section} ({kind})" for step in mine)
            elif kind in self.start([kind]):
                self.together(mine)
            self.close()

    def ask(self, kind: str, command: dict[str, Any]) -> Any:
        """Send one command beside the steps; return None when it failed, and say so."""
        try:
            return self._engines[kind].ask(command)
        except (CommandFailed, EngineFailed) as error:
            self._failed(self._engines[kind], command["do"], error)
            return None

    def _up(self, kind: str) -> bool:
        engine = self._engines[kind]
        try:
            self.emit("start", **self.label, engine=kind, **engine.started(_START_S))
        except EngineFailed as error:
            self._failed(engine, "start", error)
            engine.close()
            return False
        return True

    def _take(self, engine: Engine, step: Step, rest: Sequence[Step]) -> None:
        command = step.command(self.calibration)
        kept = 0.0
        if step.section in ("rounds", "peer"):  # leave room for what comes after the rounds
            kept = sum(self._guess(other) for other in rest if other.section != step.section)
            kept = min(kept, 0.6 * self._seconds)
        if time.monotonic() + self._guess(step) + kept > self.deadline:
            self.left_out[f"{step.section} ({step.engine})"] += 1
            return
        began = time.monotonic()
        try:
            answer = engine.ask(command)
        except (CommandFailed, EngineFailed) as error:
            self._failed(engine, step.figure, error)
            return
        key = (step.section, step.engine, step.figure)
        self._took[key] = max(self._took.get(key, 0.0), time.monotonic() - began)
        self._keep(step, answer)

    def _guess(self, step: Step) -> float:
        return self._took.get((step.section, step.engine, step.figure), step.guess_s)

    def _keep(self, step: Step, answer: Any) -> None:
        if step.section == "warm-up":
            self._calibrate(step, answer)
        elif isinstance(answer, dict) and "value" in answer:
            rounds = self.values.setdefault(step.figure, {}).setdefault(step.engine, {})
            rounds.setdefault(step.round, []).append(answer["value"])
        self.answers.append((step, answer))
        if step.section in ("bitwise", "mixed"):
            return
        shown = answer
        if isinstance(answer, dict):
            shown = {k: v for k, v in answer.items() if not isinstance(v, list)}
        named = {"section": step.section, "engine": step.engine, "figure": step.figure, "round": step.round}
        self.emit("sample", **self.label, **named, answer=shown)

    def _calibrate(self, step: Step, answer: Any) -> None:
        if step.engine != "untapped":
            return
        if step.figure == "prefill":
            prompts = self.args.prefill_s * answer["value"] / self.shape.prompt_length
            multiple = max(1, self.shape.max_num_batched_tokens // self.shape.prompt_length)
            self.calibration.prefill_prompts = multiple * max(1, round(prompts / multiple))
        else:
            tokens = round(1e3 * self.args.decode_s / max(answer["value"], 1e-3))
            self.calibration.decode_tokens[int(step.figure.split()[1])] = min(400, max(30, tokens))

    def _failed(self, engine: Engine, what: str, error: Exception) -> None:
        self.emit("failed", **self.label, engine=engine.name, what=what, error=str(error)[:600])
        print(engine.log_tail(), flush=True)


def emitter(began: float, kept: list[dict[str, Any]]) -> Emit:
    """Return a function that prints each result as a JSON line at once, and keeps it."""

    def emit(result: str, **values: Any) -> None:
        line = {"result": result, "at_s": round(time.monotonic() - began, 1), **values}
        kept.append(line)
        print(json.dumps(line), flush=True)

    return emit
