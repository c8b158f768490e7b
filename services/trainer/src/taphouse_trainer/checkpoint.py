"""Checkpoints: whole or not there at all.

``<output>/checkpoint-<step>/`` is what vLLM serves (``config.json``, ``model.safetensors``); its
``training_state/`` holds what an exact resume needs: trained weights in full precision, AdamW's moments,
the random state, the vocabulary, and ``state.json`` with the position in the ledger. A checkpoint is
written beside its place, flushed to disk and renamed, so a kill at any moment leaves the one before.
``<output>/latest`` points to the newest.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from taphouse_trainer.draft import Draft
from taphouse_trainer.errors import AlreadyRunning, CheckpointError
from taphouse_trainer.optimizer import Optimizer
from taphouse_trainer.shard_stream import Position
from taphouse_trainer.vocabulary import Vocabulary

_NAME = re.compile(r"checkpoint-(\d+)")
_VERSION = 1


@dataclass
class TrainingState:
    """Where training stands.

    ``held_out``: references (ledger entry, index) to the samples that held-out loss is measured on.
    ``pinned``: settings that a resumed run must share. ``position``: where in the ledger the next batch
    begins. ``reached_at``: when the last ledger entry that was read from was made, which tells that entry
    from another store's of the same number, or from one that came after the store was restored; ``None``
    before the first, or in an older checkpoint.
    """

    layers: tuple[int, ...]
    pinned: dict[str, Any]
    target: str
    step: int = 0
    samples: int = 0
    tokens: int = 0
    position: Position = field(default_factory=Position)
    held_out: list[tuple[int, int]] = field(default_factory=list)
    reached_at: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"version": _VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainingState:
        """From JSON.

        Raises:
            CheckpointError: another version.
        """
        data = dict(data)
        if data.pop("version", None) != _VERSION:
            raise CheckpointError("the checkpoint was written by another version of the trainer")
        data["position"] = Position(**data["position"])
        data["layers"] = tuple(data["layers"])
        data["held_out"] = [(seq, index) for seq, index in data["held_out"]]
        return cls(**data)


@dataclass(frozen=True)
class Stored:
    """A checkpoint that was found: state and vocabulary; ``Checkpoints.restore`` loads its weights."""

    path: Path
    state: TrainingState
    vocabulary: Vocabulary


class Checkpoints:
    """The checkpoints of one output directory, which one trainer at a time owns."""

    def __init__(self, output: Path, keep: int, servable_dtype: torch.dtype) -> None:
        self._output = output
        self._keep = keep
        self._dtype = servable_dtype
        output.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Own the directory, and clear away what a killed run left half-written.

        Raises:
            AlreadyRunning: another trainer is at work here.
        """
        with (self._output / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                raise AlreadyRunning(
                    f"another trainer is writing to {self._output}; give this one its own"
                ) from e
            for leftover in self._output.glob(".checkpoint-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            yield

    def latest(self) -> Stored | None:
        """The newest checkpoint, ``None`` when there is none.

        Raises:
            CheckpointError: it can't be read.
        """
        steps = self._steps()
        if not steps:
            return None
        path = self._path(steps[-1])
        inner = path / "training_state"
        try:
            state = TrainingState.from_json(json.loads((inner / "state.json").read_bytes()))
            with np.load(inner / "vocabulary.npz") as arrays:
                vocabulary = Vocabulary(arrays["d2t"], arrays["t2d"])
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as e:
            raise CheckpointError(
                f"{path} can't be read ({e}); move it away to resume from the one before"
            ) from e
        return Stored(path, state, vocabulary)

    def restore(self, stored: Stored, draft: Draft, optimizer: Optimizer) -> None:
        """Load weights, moments and random state.

        Raises:
            CheckpointError: the files are damaged or of another draft.
        """
        inner = stored.path / "training_state"
        try:
            draft.load_exact(inner / "weights.safetensors")
            kept = torch.load(inner / "optimizer.pt", map_location=draft.device, weights_only=True)
            optimizer.load(kept["optimizer"])
            _set_random_state(kept["random"])
        except CheckpointError:
            raise
        except Exception as e:
            raise CheckpointError(f"{stored.path} can't be loaded: {e}") from e

    def save(self, state: TrainingState, draft: Draft, optimizer: Optimizer) -> Path:
        """Write a checkpoint for ``state.step``; returns its directory.

        Raises:
            CheckpointError: it can't be written (a full disk, for one); nothing half-written stays.
        """
        final = self._path(state.step)
        staged = self._output / f".{final.name}.{os.getpid()}"
        try:
            inner = staged / "training_state"
            inner.mkdir(parents=True)
            draft.save_servable(staged, self._dtype)
            draft.save_exact(inner / "weights.safetensors")
            torch.save({"optimizer": optimizer.state(), "random": _random_state()}, inner / "optimizer.pt")
            vocabulary = draft.vocabulary
            np.savez(inner / "vocabulary.npz", d2t=vocabulary.draft_to_target, t2d=vocabulary.target_to_draft)
            (inner / "state.json").write_text(json.dumps(state.to_json(), indent=1) + "\n")
            _flush_tree(staged)
            if final.exists():  # the same step again, from a run that resumed before it
                shutil.rmtree(final)
            staged.rename(final)
            self._point_latest(final.name)
            _flush(self._output)
        except OSError as e:
            shutil.rmtree(staged, ignore_errors=True)
            raise CheckpointError(f"can't write {final}: {e}") from e
        self._prune()
        return final

    def _path(self, step: int) -> Path:
        return self._output / f"checkpoint-{step}"

    def _steps(self) -> list[int]:
        found = (_NAME.fullmatch(p.name) for p in self._output.iterdir() if p.is_dir() and not p.is_symlink())
        return sorted(int(m.group(1)) for m in found if m)

    def _point_latest(self, name: str) -> None:
        link = self._output / ".checkpoint-latest"
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        link.replace(self._output / "latest")

    def _prune(self) -> None:
        """Keep the newest ones, and checkpoint-0: the untrained draft that others are compared with."""
        for step in [s for s in self._steps() if s > 0][: -self._keep]:
            doomed = self._path(step)
            # Out of sight first: a kill in the middle must not leave a part under a checkpoint's name.
            hidden = self._output / f".{doomed.name}.pruned"
            doomed.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


class Interval:
    """Due every so many steps or seconds, whichever comes first; ``step`` is where it was last done, -1 for
    never.
    """

    def __init__(self, steps: int, seconds: float) -> None:
        self._every_steps = steps
        self._every_s = seconds
        self.mark(-1)

    def mark(self, step: int) -> None:
        """It was done at ``step``."""
        self._step, self._at = step, time.monotonic()

    def done_at(self, step: int) -> bool:
        """Whether ``step`` is where it was last done."""
        return step == self._step

    def due(self, step: int) -> bool:
        """Whether it should be done now."""
        return step - self._step >= self._every_steps or time.monotonic() - self._at >= self._every_s


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])


def _flush_tree(root: Path) -> None:
    for path in [*root.rglob("*"), root]:
        _flush(path)


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
