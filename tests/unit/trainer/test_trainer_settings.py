"""Command line > environment > file > default, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from taphouse_trainer.main import main
from taphouse_trainer.settings import load_settings

NEEDED = ["--store", "s", "--target", "t", "--output", "o"]


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trainer.env"
    file.write_text("TAPHOUSE_TRAINER_LR=0.1\nTAPHOUSE_TRAINER_SEED=1\nTAPHOUSE_TRAINER_BATCH_SIZE=11\n")
    monkeypatch.setenv("TAPHOUSE_TRAINER_SEED", "2")
    monkeypatch.setenv("TAPHOUSE_TRAINER_BATCH_SIZE", "22")
    made = load_settings([*NEEDED, "--batch-size", "33", "--settings-file", str(file)])
    assert (made.lr, made.seed, made.batch_size, made.ttt_steps) == (0.1, 2, 33, 3)


def test_lists_and_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = load_settings([*NEEDED, "--layers", "2,15,27", "--epochs", "null"])
    assert (made.layers, made.epochs) == ((2, 15, 27), None)
    monkeypatch.setenv("TAPHOUSE_TRAINER_LAYERS", "[2, 15]")
    assert load_settings(NEEDED).layers == (2, 15)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--store", "s", "--target", "t"], "output"),
        ([*NEEDED, "--lr", "-1"], "lr"),
        ([*NEEDED, "--name", "../other"], "name"),
        ([*NEEDED, "--epochs", "null", "--stop-when-idle-s", "5"], "last pass"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        load_settings(arguments)


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings([*NEEDED, "--no-such-thing", "1"])
    assert caught.value.code == 2
    file = tmp_path / "trainer.env"
    file.write_text("TAPHOUSE_TRAINER_LERNING_RATE=0.1\n")
    with pytest.raises(ValidationError, match=r"(?i)lerning_rate"):
        load_settings([*NEEDED, "--settings-file", str(file)])


def test_a_misspelt_variable_is_refused_and_the_right_name_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TAPHOUSE_TRAINER_BATCHSIZE", "")
    monkeypatch.setenv("TAPHOUSE_EXTRACTOR_BATCHSIZE", "another service's")
    assert main(NEEDED) == 2
    assert capsys.readouterr().err == (
        "taphouse-trainer: TAPHOUSE_TRAINER_BATCHSIZE: there is no such setting; "
        "did you mean TAPHOUSE_TRAINER_BATCH_SIZE?\n"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("LR=0.1", "LR: there is no such setting; did you mean TAPHOUSE_TRAINER_LR?"),
        ("batchsize=1", "BATCHSIZE: there is no such setting; did you mean TAPHOUSE_TRAINER_BATCH_SIZE?"),
        (
            "TAPHOUSE_TRAINER_BATCHSIZE=",
            "TAPHOUSE_TRAINER_BATCHSIZE: there is no such setting; did you mean TAPHOUSE_TRAINER_BATCH_SIZE?",
        ),
        ("TAPHOUSE_TRAINER_LERNING_RATE", "TAPHOUSE_TRAINER_LERNING_RATE: there is no such setting"),
        ("TAPHOUSE_TRAINER_SERVICE_HOST=x", "TAPHOUSE_TRAINER_SERVICE_HOST: there is no such setting"),
        ("TAPHOUSE_EXTRACTOR_STORE=", "TAPHOUSE_EXTRACTOR_STORE: there is no such setting"),
        ("FOO=1", "FOO: there is no such setting"),
    ],
)
def test_no_line_of_a_file_is_passed_over(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trainer.env"
    file.write_text(f"# ours\nTAPHOUSE_TRAINER_SEED=1\n{line}\n")
    assert main([*NEEDED, "--settings-file", str(file)]) == 2
    assert capsys.readouterr().err == f"taphouse-trainer: {said}\n"


@pytest.mark.parametrize("name", ["SERVICE_HOST", "PORT_8910_TCP_ADDR", "FOO"])
def test_a_variable_that_is_like_no_setting_is_told_none(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LR", "another program's")
    monkeypatch.setenv(f"TAPHOUSE_TRAINER_{name}", "x")
    assert main(NEEDED) == 2
    assert capsys.readouterr().err == f"taphouse-trainer: TAPHOUSE_TRAINER_{name}: there is no such setting\n"


def test_settings_are_frozen() -> None:
    made = load_settings(NEEDED)
    with pytest.raises(ValidationError):
        made.lr = 1.0  # type: ignore[misc]
