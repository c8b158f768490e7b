"""A step whose numbers are not finite is recorded, and stops nothing."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from taphouse.ledger import Ledger
from taphouse.store import LocalStore, read_json
from taphouse_trainer import main as main_module
from taphouse_trainer.errors import AlreadyRunning, CheckpointError, SettingsConflict
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


def test_a_log_that_is_no_text_is_named_and_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b'{"step": 1}\n\xff\xfe\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is not UTF-8"):
        StepLog(log).cut_back(1)
    assert log.read_bytes() == b'{"step": 1}\n\xff\xfe\n'


@pytest.mark.parametrize(
    ("error", "code"),
    [(SettingsConflict("no"), 2), (AlreadyRunning("no"), 1), (CheckpointError("no"), 1)],
)
def test_what_is_wrong_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def refused(*_: object) -> str:
        raise error

    monkeypatch.setattr(main_module, "run", refused)
    monkeypatch.setattr(main_module.signal, "signal", lambda *_: None)
    assert main_module.main([f"--{name}={tmp_path}" for name in ("store", "target", "output")]) == code


@pytest.mark.parametrize("loss", ["bogus", "[]", "{}", '{"bogus": 1}', '{"kl_div": "x"}', '{"kl_div": NaN}'])
def test_a_loss_that_is_none_ends_it_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, loss: str
) -> None:
    monkeypatch.setattr(main_module.signal, "signal", lambda *_: None)
    places = [f"--{name}={tmp_path / name}" for name in ("store", "target", "output")]
    assert main_module.main([*places, f"--loss={loss}"]) == 2
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("loss: ") and list(tmp_path.iterdir()) == []


def test_a_settings_file_that_can_not_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.env"
    bad.write_bytes(b"TAPHOUSE_TRAINER_NAME=\xff\n")
    places = [f"--{name}={tmp_path}" for name in ("store", "target", "output")]
    for file, why in ((bad, "not UTF-8"), (tmp_path / "none.env", "No such file")):
        assert main_module.main([*places, f"--settings-file={file}"]) == 2
        said = capsys.readouterr().err
        assert why in said and str(file) in said and said.count("\n") == 1
