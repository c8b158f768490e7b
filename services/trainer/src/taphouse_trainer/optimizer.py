"""One update of the draft's weights: clipped gradients, AdamW, a warm-up and an optional cosine decay."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

_FLOOR = 0.1


@dataclass(frozen=True)
class Schedule:
    """Learning rate ``lr`` after ``warmup_steps``; with ``decay_steps`` it falls to a tenth there."""

    lr: float
    warmup_steps: int = 0
    decay_steps: int | None = None

    def factor(self, step: int) -> float:
        """What ``lr`` is multiplied with at ``step`` (0 is the first)."""
        rise = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        if self.decay_steps is None:
            return rise
        done = min(1.0, step / self.decay_steps)
        return rise * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


class Optimizer:
    """AdamW over the given parameters. A step whose gradients are not finite changes nothing.

    The learning rate is a function of the number of steps, so a resumed run may change the schedule.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        schedule: Schedule,
        *,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        self._parameters = list(parameters)
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._adamw = torch.optim.AdamW(self._parameters, lr=schedule.lr, weight_decay=weight_decay)
        self._steps = 0

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._schedule.lr * self._schedule.factor(self._steps)

    def step(self, loss: torch.Tensor) -> bool:
        """Backward and update. Returns False, and leaves weights alone, when a gradient isn't finite."""
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        finite = bool(torch.isfinite(norm))
        if finite:
            self._adamw.step()
        self._steps += 1
        return finite

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: AdamW's moments and the number of steps."""
        return {"moments": self._adamw.state_dict()["state"], "steps": self._steps}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what ``state`` returned; rates and decay are this run's."""
        groups = self._adamw.state_dict()["param_groups"]
        self._adamw.load_state_dict({"state": state["moments"], "param_groups": groups})
        self._steps = int(state["steps"])
