"""What the trainer says of itself: a record in the store, a line a step in the output directory, metrics.

The record ``consumers/<name>.json`` is what ``taphouse watch`` and the extractor's queue status show. The
log ``metrics.jsonl`` names every step's samples; a resumed run cuts it back to its checkpoint first, so
that the log always tells what the weights have seen.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taphouse.errors import TaphouseError
from taphouse.ledger import Ledger
from taphouse.store import Store, put_json
from taphouse_trainer.errors import CheckpointError
from taphouse_trainer.health import Metrics
from taphouse_trainer.shard_gate import Refused
from taphouse_trainer.shard_stream import Position

log = logging.getLogger(__name__)

_RECORD_EVERY_S = 3.0
_LOG_EVERY_S = 15.0
_REFUSED_SHOWN = 20
_SMOOTHING = 0.9


class StepLog:
    """A JSON line a step (``kind`` "step") and an evaluation ("held_out")."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def cut_back(self, step: int) -> None:
        """Drop what came after ``step``, and a last line that a kill cut short.

        Raises:
            CheckpointError: the file is no such log.
        """
        if not self._path.exists():
            return
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as e:
            raise CheckpointError(
                f"{self._path} is not UTF-8 ({e}), so no log of a trainer: move it away"
            ) from e
        kept = []
        for line in lines:
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                break
        staged = self._path.with_suffix(".tmp")
        staged.write_text("".join(f"{line}\n" for line in kept))
        staged.replace(self._path)

    def write(self, entry: dict[str, Any]) -> None:
        """Append one entry."""
        with self._path.open("a") as f:
            f.write(json.dumps(entry) + "\n")


class Progress:
    """Keeps record, log and metrics up to date. Nothing here stops training: a record that can't be written
    is logged.
    """

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        *,
        name: str,
        steps: StepLog,
        metrics: Metrics,
        refused: Sequence[Refused],
    ) -> None:
        """``refused`` is the gate's list, which grows."""
        self._store = store
        self._ledger = ledger
        self._name = name
        self._steps = steps
        self._metrics = metrics
        self._refused = refused
        self._counted_refusals = 0
        self._written_at = self._logged_at = -_LOG_EVERY_S
        self._last_step_at = time.monotonic()
        self._record: dict[str, Any] = {
            "name": name, "phase": "starting", "pid": os.getpid(), "cursor": 0, "acknowledged": 0,
            "epoch": 0, "step": 0, "samples": 0, "tokens": 0, "loss": None, "accuracy": None,
            "held_out_loss": None, "ended": None,
        }  # fmt: skip

    def health(self) -> dict[str, Any]:
        """The record, for ``/health``; answered from another thread."""
        return {"status": "ok", **self._record}

    def phase(self, phase: str) -> None:
        """What the trainer is doing now, in a word or two."""
        if phase != self._record["phase"]:
            log.info("%s", phase)
            self._record["phase"] = phase
            self._publish(now=True)

    def waiting(self) -> None:
        """A turn of waiting for shards."""
        self._publish()

    def resumed(self, step: int, samples: int, tokens: int, position: Position, acknowledged: int) -> None:
        """Training goes on from a checkpoint; the log is cut back to it."""
        self._steps.cut_back(step)
        self._record.update(
            step=step,
            samples=samples,
            tokens=tokens,
            cursor=position.cursor,
            acknowledged=acknowledged,
            epoch=position.epoch,
            checkpoint=step,
        )
        self._metrics.step.set(step)

    def trained(
        self, entry: dict[str, Any], position: Position, totals: tuple[int, int], *, finite: bool
    ) -> None:
        """A step was done. ``entry`` is its line in the log; ``totals``: samples and rows over all runs."""
        loss = _finite(entry["loss"])
        self._steps.write({"kind": "step", "finite": finite, **entry, "loss": loss})
        now = time.monotonic()
        rate, self._last_step_at = entry["tokens"] / max(1e-9, now - self._last_step_at), now
        before = self._record.get("tokens_per_s")
        rate = rate if before is None else _SMOOTHING * before + (1 - _SMOOTHING) * rate
        self._record.update(
            step=entry["step"], epoch=position.epoch, cursor=position.cursor,
            samples=totals[0], tokens=totals[1],
            loss=loss, accuracy=entry["accuracy"][0], accuracies=entry["accuracy"],
            acceptance_length=1 + sum(entry["accuracy"]), tokens_per_s=rate, lr=entry["lr"],
        )  # fmt: skip
        metrics = self._metrics
        metrics.step.set(entry["step"])
        metrics.epoch.set(position.epoch)
        metrics.cursor.set(position.cursor)
        metrics.loss.set(entry["loss"])
        metrics.learning_rate.set(entry["lr"])
        metrics.tokens.inc(entry["tokens"])
        metrics.samples.inc(len(entry["ids"]))
        metrics.tokens_per_second.set(rate)
        if not finite:
            metrics.skipped_steps.inc()
            log.warning(
                "step %d: gradients are not finite; weights left alone",
                entry["step"],
                extra={"step": entry["step"]},
            )
        self._accuracies("training", entry["accuracy"])
        self._publish()

    def evaluated(self, step: int, loss: float, accuracy: Sequence[float], samples: int) -> None:
        """Held-out loss was measured."""
        entry = {
            "kind": "held_out",
            "step": step,
            "loss": _finite(loss),
            "accuracy": list(accuracy),
            "samples": samples,
        }
        self._steps.write(entry)
        length = 1 + sum(accuracy)
        if self._record.get("first_held_out_loss") is None:
            self._record["first_held_out_loss"] = _finite(loss)
        self._record.update(
            held_out_loss=_finite(loss), held_out_acceptance_length=length, held_out_samples=samples
        )
        self._metrics.held_out_loss.set(loss)
        self._accuracies("held_out", accuracy)
        log.info(
            "step %d: held-out loss %.3f, acceptance length %.2f (%d samples)",
            step,
            loss,
            length,
            samples,
            extra={"step": step},
        )
        self._last_step_at = time.monotonic()

    def saved(self, step: int, path: Path, acknowledged: int) -> None:
        """A checkpoint was written: who resumes from it needs none of the first ``acknowledged`` entries."""
        self._record.update(checkpoint=step, checkpoint_path=str(path), acknowledged=acknowledged)
        self._metrics.checkpoint_step.set(step)
        log.info("step %d: saved %s", step, path, extra={"step": step})
        self._last_step_at = time.monotonic()

    def close(self, ending: str) -> None:
        """The last word: why training ended, as it was meant to."""
        self._record["phase"] = self._record["ended"] = ending
        self._publish(now=True)

    def _accuracies(self, kind: str, accuracy: Sequence[float]) -> None:
        for k, value in enumerate(accuracy):
            self._metrics.accuracy.labels(kind, str(k + 1)).set(value)
        self._metrics.acceptance_length.labels(kind).set(1 + sum(accuracy))

    def _publish(self, *, now: bool = False) -> None:
        clock = time.monotonic()
        if not now and clock - self._written_at < _RECORD_EVERY_S:
            return
        self._written_at = clock
        for refused in self._refused[self._counted_refusals :]:
            self._metrics.refused.labels(refused.reason).inc()
            self._counted_refusals += 1
        try:
            head = self._ledger.head()
            lag = max(0, head - self._record["cursor"])
            self._metrics.lag.set(lag)
            shown = [{"shard": r.shard, "reason": r.reason} for r in self._refused[-_REFUSED_SHOWN:]]
            self._record.update(head=head, lag=lag, refused=len(self._refused), refused_shards=shown)
            self._record["updated_at"] = time.time()
            put_json(self._store, f"consumers/{self._name}.json", self._record, durable=False)
        except (TaphouseError, OSError) as e:
            log.warning("can't write consumers/%s.json: %s", self._name, e)
        if clock - self._logged_at >= _LOG_EVERY_S and self._record["loss"] is not None:
            self._logged_at = clock
            log.info(
                "step %d epoch %d: loss %.3f, accuracy %.3f, %.0f tokens/s, cursor %d of %d",
                *(
                    self._record[k]
                    for k in ("step", "epoch", "loss", "accuracy", "tokens_per_s", "cursor", "head")
                ),
                extra={k: self._record[k] for k in ("step", "loss", "accuracy", "cursor")},
            )


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else None
