"""The training loop: batch → loss → step → checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from taphouse_trainer.batches import Batch, Packing
from taphouse_trainer.checkpoint import Checkpoints, Interval, TrainingState
from taphouse_trainer.draft import Draft
from taphouse_trainer.optimizer import Optimizer
from taphouse_trainer.progress import Progress
from taphouse_trainer.shard_stream import Drawn, HeldOut, ShardStream


@dataclass(frozen=True)
class Limits:
    """When to evaluate, and when to end; ``None``: no such end."""

    evaluate_every_steps: int
    stop_after_steps: int | None = None
    stop_after_samples: int | None = None

    def reached(self, state: TrainingState) -> bool:
        """Whether training has come to its end."""
        steps, samples = self.stop_after_steps, self.stop_after_samples
        return (steps is not None and state.step >= steps) or (
            samples is not None and state.samples >= samples
        )


@dataclass(frozen=True)
class Trainer:
    """Everything the loop works with."""

    stream: ShardStream
    held_out: HeldOut
    packing: Packing
    draft: Draft
    optimizer: Optimizer
    checkpoints: Checkpoints
    progress: Progress
    limits: Limits
    interval: Interval
    stopping: Callable[[], bool]

    def run(self, state: TrainingState) -> str:
        """Train from ``state`` until a limit, the end of the data or a request to stop; says which."""
        if state.step == 0:
            self.evaluate(state)
        ending = self._ending(state)
        for batch in [] if ending else self.stream.batches(state.position):
            self.step(state, batch)
            if state.step % self.limits.evaluate_every_steps == 0:
                self.evaluate(state)
            if self.interval.due(state.step):
                self.save(state)
            ending = self._ending(state)
            if ending:
                break
        ending = ending or self._ending(state) or "data ended"
        if ending != "stopped" and state.step % self.limits.evaluate_every_steps:
            self.evaluate(state)
        self.save(state)
        return ending

    def _ending(self, state: TrainingState) -> str:
        """Why to end now; empty for going on."""
        if self.stopping():
            return "stopped"
        return "limit reached" if self.limits.reached(state) else ""

    def step(self, state: TrainingState, drawn: list[Drawn]) -> None:
        """One batch: loss, update, and a line in the log."""
        self.progress.phase("training")
        batch = self._pack(drawn)
        outcome = self.draft.loss(batch)
        lr = self.optimizer.lr
        finite = self.optimizer.step(outcome.loss)
        state.step += 1
        state.samples += len(drawn)
        state.tokens += batch.tokens
        state.position = drawn[-1].position
        entry = {
            "step": state.step,
            "epoch": state.position.epoch,
            "loss": float(outcome.loss.detach()),
            "accuracy": list(outcome.accuracy),
            "lr": lr,
            "tokens": batch.tokens,
            "trained_tokens": batch.trained_tokens,
            "ids": [d.sample.id for d in drawn],
        }
        self.progress.trained(entry, state.position, (state.samples, state.tokens), finite=finite)

    def evaluate(self, state: TrainingState) -> None:
        """Mean loss and accuracy over the trained rows of the held-out samples, if there are any."""
        samples = rows = 0
        loss, accuracy = 0.0, [0.0] * self.packing.ttt_steps
        for drawn in self.stream.held_out_samples():
            batch = self._pack([drawn])
            outcome = self.draft.evaluate(batch)
            samples, rows = samples + 1, rows + batch.trained_tokens
            loss += float(outcome.loss) * batch.trained_tokens
            accuracy = [a + b * batch.trained_tokens for a, b in zip(accuracy, outcome.accuracy, strict=True)]
        if rows:
            self.progress.evaluated(state.step, loss / rows, [a / rows for a in accuracy], samples)

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint, unless this step already has one."""
        state.held_out = list(self.held_out.references)
        state.reached_at = self.stream.reached_at(state.position)
        if not self.interval.done_at(state.step):
            path = self.checkpoints.save(state, self.draft, self.optimizer)
            self.progress.saved(state.step, path, self.stream.acknowledged(state.position))
        self.interval.mark(state.step)

    def _pack(self, drawn: list[Drawn]) -> Batch:
        samples, columns = [d.sample for d in drawn], [d.columns for d in drawn]
        return self.packing.pack(samples, columns, self.draft.device, torch.float32)
