"""A step whose numbers are not finite is recorded, and stops nothing."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from taphouse.ledger import Ledger
from taphouse.store import LocalStore, read_json
from taphouse_trainer import main as main_module
from taphouse_trainer.health import Metrics
from taphouse_trainer.progress import Progress, StepLog
from taphouse_trainer.shard_stream import Position


def test_a_loss_that_is_not_finite_is_recorded_as_none(tmp_path: Path) -> None:
    store, log = LocalStore(tmp_path / "store"), tmp_path / "metrics.jsonl"
    progress = Progress(store, Ledger(store), name="t", steps=StepLog(log), metrics=Metrics(), refused=[])
    entry = {"step": 1, "loss": float("nan"), "accuracy": [0.0], "lr": 1.0, "tokens": 4, "ids": ["a"]}
    progress.trained(entry, Position(), (1, 4), finite=False)
    assert read_json(store, "consumers/t.json")["ended"] is None
    progress.evaluated(1, float("inf"), [0.0], 1)
    progress.close("stopped")
    record = read_json(store, "consumers/t.json")
    assert record["ended"] == "stopped"
    assert (record["step"], record["loss"], record["held_out_loss"]) == (1, None, None)
    assert [json.loads(line)["loss"] for line in log.read_text().splitlines()] == [None, None]
    json.dumps(progress.health(), allow_nan=False)


def test_a_port_that_is_taken_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def taken(*_: object) -> str:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(main_module, "run", taken)
    monkeypatch.setattr(main_module.signal, "signal", lambda *_: None)
    places = [f"--{name}={tmp_path}" for name in ("store", "target", "output")]
    assert main_module.main(places) == 1
    assert [record.getMessage() for record in caplog.records] == ["[Errno 98] Address already in use"]
