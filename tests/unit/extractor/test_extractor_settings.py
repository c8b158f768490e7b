from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from taphouse_extractor import main as main_module
from taphouse_extractor.settings import Settings


def test_the_command_line_beats_the_environment_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(main_module, "work", seen.append)
    file = tmp_path / "settings.env"
    file.write_text(
        "TAPHOUSE_EXTRACTOR_STORE=/from/file\nTAPHOUSE_EXTRACTOR_PORT=1\nTAPHOUSE_EXTRACTOR_MAX_QUEUED=1\n"
    )
    monkeypatch.setenv("TAPHOUSE_EXTRACTOR_PORT", "2")
    monkeypatch.setenv("TAPHOUSE_EXTRACTOR_MAX_QUEUED", "2")
    main_module.main(["worker", "--env-file", str(file), "--max-queued", "3"])
    settings = seen[0]
    assert (str(settings.store), settings.port, settings.max_queued) == ("/from/file", 2, 3)


@pytest.mark.parametrize("arguments", [["--nonsense", "1"], ["--port", "x"], []])
def test_bad_settings_end_with_2_and_a_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TAPHOUSE_EXTRACTOR_STORE", raising=False)
    with pytest.raises(SystemExit) as ended:
        main_module.main(["worker", *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_an_unknown_setting_in_the_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.env"
    file.write_text("TAPHOUSE_EXTRACTOR_STORE=/x\nTAPHOUSE_EXTRACTOR_TYPO=1\n")
    with pytest.raises(SystemExit) as ended:
        main_module.main(["worker", "--env-file", str(file)])
    assert ended.value.code == 2
    assert "typo" in capsys.readouterr().err


def test_no_open_door_by_accident(tmp_path: Path) -> None:
    assert Settings(store=tmp_path, host="127.0.0.1").bearer() is None
    with pytest.raises(ValidationError, match="open to other machines"):
        Settings(store=tmp_path, host="0.0.0.0")
    assert Settings(store=tmp_path, host="0.0.0.0", allow_anonymous=True).bearer() is None
    secret = tmp_path / "token"
    secret.write_text("from-file\n")
    settings = Settings(store=tmp_path, host="0.0.0.0", token_file=secret)
    assert settings.bearer() == "from-file"
    assert "hidden" not in repr(Settings(store=tmp_path, token="hidden", engine_key="hidden"))


def test_settings_do_not_change(tmp_path: Path) -> None:
    settings = Settings(store=tmp_path)
    with pytest.raises(ValidationError):
        settings.port = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", ["engine_key", "token"])
@pytest.mark.parametrize("secret", ["one\ntwo", "clé"])
def test_a_secret_that_http_can_not_carry_is_refused_unquoted(
    tmp_path: Path, name: str, secret: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "secret"
    file.write_text(secret, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main_module.main(["worker", "--store", str(tmp_path), f"--{name.replace('_', '-')}-file", str(file)])
    said = capsys.readouterr().err
    assert (ended.value.code, "on one line" in said, secret in said) == (2, True, False)


def test_an_environment_that_can_not_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad.env"
    bad.write_bytes(b"TAPHOUSE_EXTRACTOR_STORE=\xff\n")
    arguments = [["--env-file", str(bad)], ["--env-file", str(tmp_path / "none.env")], ["--store", "/x"]]
    for given, why in zip(arguments, ("not UTF-8", "No such file", "dataset_roots"), strict=True):
        if why == "dataset_roots":
            monkeypatch.setenv("TAPHOUSE_EXTRACTOR_DATASET_ROOTS", "[")
        with pytest.raises(SystemExit) as ended:
            main_module.main(["worker", *given])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and why in said and said.count("\n") == 1
