"""Runs of the trainer in this process, and what they leave behind."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tests.trainer.tiny import step_lines

from taphouse_trainer.main import run
from taphouse_trainer.settings import Settings

QUICK: dict[str, Any] = {
    "port": 0, "draft_vocab_size": 96, "vocabulary_min_tokens": 1000, "batch_size": 4, "warmup_steps": 5,
    "lr": 3e-3, "poll_s": 0.01, "threads": 1, "replay_after_s": 0, "stop_when_idle_s": 0,
    "held_out_fraction": 0.1, "evaluate_every_steps": 10,
}  # fmt: skip


def settings(tmp_path: Path, store: Path, target: Path, **changes: Any) -> Settings:
    """Settings that end as soon as the data does."""
    return Settings(**{"store": store, "target": target, "output": tmp_path / "out", **QUICK, **changes})


def train(tmp_path: Path, store: Path, target: Path, **changes: Any) -> str:
    """Run the trainer to its end; returns why it ended."""
    return run(settings(tmp_path, store, target, **changes), threading.Event())


def losses(output: Path) -> list[float]:
    """Training loss by step."""
    return [line["loss"] for line in step_lines(output)]


def seen(output: Path) -> list[tuple[int, str]]:
    """(epoch, sample id) of everything trained on, in order."""
    return [(line["epoch"], sample) for line in step_lines(output) for sample in line["ids"]]
