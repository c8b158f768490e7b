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


@pytest.mark.parametrize("where", ["file", "environment"])
@pytest.mark.parametrize("command", ["api", "worker"])
def test_a_misspelt_setting_is_refused_and_the_right_name_said(
    command: str,
    where: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Settings] = []
    monkeypatch.setattr(main_module, "work", started.append)
    monkeypatch.setattr(main_module, "run_api", started.append)
    file = tmp_path / "settings.env"
    file.write_text("TAPHOUSE_EXTRACTOR_REDIS_URI=a-secret\n" if where == "file" else "")
    if where == "environment":
        monkeypatch.setenv("TAPHOUSE_EXTRACTOR_REDIS_URI", "a-secret")
    with pytest.raises(SystemExit) as ended:
        main_module.main([command, "--store", str(tmp_path), "--env-file", str(file)])
    assert (ended.value.code, started) == (2, [])
    assert capsys.readouterr().err == (
        "taphouse-extractor: TAPHOUSE_EXTRACTOR_REDIS_URI: there is no such setting; "
        "did you mean TAPHOUSE_EXTRACTOR_REDIS_URL?\n"
    )


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


TWO = """[{"url": "http://a:1/", "key": "one-key"},
          {"url": "https://b", "key_file": "%s", "slice_dir": "/mnt/b"}]"""


def test_engines_are_one_by_its_settings_or_several_by_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [one] = Settings(
        store=tmp_path, engine_url="http://x:1", engine_key="k", slice_dir="/mnt/x"
    ).each_engine()
    assert (one.url, one.bearer(), str(one.slice_dir)) == ("http://x:1", "k", "/mnt/x")
    file = tmp_path / "key"
    file.write_text("other-key\n")
    seen: list[Settings] = []
    monkeypatch.setattr(main_module, "work", seen.append)
    monkeypatch.setenv("TAPHOUSE_EXTRACTOR_ENGINES", TWO % file)
    main_module.main(["worker", "--store", str(tmp_path)])
    monkeypatch.delenv("TAPHOUSE_EXTRACTOR_ENGINES")
    main_module.main(["worker", "--store", str(tmp_path), "--engines", TWO % file])
    for settings in seen:
        assert [(e.url, e.bearer(), str(e.slice_dir)) for e in settings.each_engine()] == [
            ("http://a:1", "one-key", "/dev/shm/taphouse"),
            ("https://b", "other-key", "/mnt/b"),
        ]
        assert {"one-key", "other-key"} <= set(settings.secrets())
        assert "one-key" not in repr(settings)


@pytest.mark.parametrize(
    ("engines", "why"),
    [
        (TWO % "/none", "engine_key_file: /none can't be read"),
        ('[{"url": "http://a"}, {"url": "http://a/"}]', "names one URL twice"),
        ('[{"url": "http://user:one-key@a"}]', "http(s)://host:port"),
        ('[{"url": "a:8000", "key": "one-key"}]', "http(s)://host:port"),
        ('[{"url": "http://a", "keys": "one-key"}]', "Extra inputs"),
        ('[{"url": "http://a", "key": "one-key"', "ENGINES"),
    ],
)
def test_engines_that_can_not_be_used_are_said_at_the_start(
    tmp_path: Path,
    engines: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TAPHOUSE_EXTRACTOR_ENGINES", engines)
    with pytest.raises(SystemExit) as ended:
        main_module.main(["worker", "--store", str(tmp_path)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and why.lower() in said.lower() and "one-key" not in said


def test_an_engine_is_named_one_way_only(tmp_path: Path) -> None:
    several = ({"url": "http://a"}, {"url": "http://b"})
    for name, value in {"engine_url": "http://a", "engine_key": "k", "slice_dir": "/mnt/x"}.items():
        with pytest.raises(ValidationError, match=f"take {name} away"):
            Settings(store=tmp_path, engines=several, **{name: value})
