"""Where settings come from, and what outranks what."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The default configuration file, with a URL and a token in it."""
    path = tmp_path / "config" / "taphouse" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text('url = "http://from-file:1"\ntoken = "s3cret"\ntimeout_s = 5\n')
    return path


def test_option_then_environment_then_file_then_default(cli, config):
    assert cli("queue", token=False).exit_code == 0
    assert str(cli.settings[-1].url) == "http://from-file:1/" and cli.settings[-1].timeout_s == 5
    cli.env = {"TAPHOUSE_URL": "http://from-env:2"}
    assert cli("queue", token=False).exit_code == 0
    assert str(cli.settings[-1].url) == "http://from-env:2/" and cli.settings[-1].timeout_s == 5
    cli("queue", "--api-url", "http://from-option:3", "--timeout", "7", token=False)
    assert str(cli.settings[-1].url) == "http://from-option:3/" and cli.settings[-1].timeout_s == 7
    config.unlink()
    cli.env = {}
    cli("queue", token=False)
    assert str(cli.settings[-1].url) == "http://127.0.0.1:8900/"


def test_options_may_stand_before_the_command_and_behind_it_they_win(cli):
    assert cli("--api-url", "http://before:1", "-o", "json", "queue").stdout.startswith("{")
    assert str(cli.settings[-1].url) == "http://before:1/"
    cli("--api-url", "http://before:1", "queue", "--api-url", "http://behind:2")
    assert str(cli.settings[-1].url) == "http://behind:2/"


def test_a_token_file_outranks_a_token_from_a_lower_place(cli, tmp_path):
    file = tmp_path / "token"
    file.write_text("from-token-file\n")
    cli("queue", "--token-file", str(file))
    assert cli.settings[-1].bearer() == "from-token-file"
    cli.env = {"TAPHOUSE_TOKEN_FILE": str(file)}
    cli("queue", "--token", "from-option", token=False)
    assert cli.settings[-1].bearer() == "from-option"
    cli("--token", "before", "queue", "--token-file", str(file), token=False)
    assert cli.settings[-1].bearer() == "from-token-file"


def test_a_token_never_shows(cli, api):
    api.refuse["/v1/queue"] = (401, "wrong token")
    result = cli("queue", "--token", "hunter2", "--debug")
    assert "hunter2" not in result.output and "hunter2" not in repr(cli.settings[-1])


@pytest.mark.parametrize("token", ["two\nlines", "clé"])
def test_a_token_that_http_can_not_carry_is_refused_unquoted(cli, api, token):
    result = cli("queue", "--token", token)
    assert result.exit_code == 2 and "on one line" in result.stderr
    assert token not in result.output and api.requests == []


def test_a_timeout_has_an_end(cli):
    assert cli("queue", "--timeout", "1e400").exit_code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("url = 'not a url'", "url"),
        ("ulr = 'http://x'", "ulr"),
        ("url = ", "TOML"),
        ("token = 'a'\ntoken_file = 'b'", "both"),
    ],
)
def test_a_wrong_configuration_file_is_named(cli, api, config, text, message):
    config.write_text(text)
    result = cli("queue", token=False)
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
    assert api.requests == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config", "missing.toml"], "missing.toml"),
        (["--token-file", "missing"], "missing"),
        (["--token-file", "empty"], "empty"),
        (["--timeout", "-1"], "timeout_s"),
        (["--timeout", "0"], "timeout_s"),
        (["--token", " "], "the token is empty"),
        (["--token", "a", "--token-file", "empty"], "both"),
    ],
)
def test_wrong_options_are_named(cli, api, args, message):
    Path("empty").write_text("\n")
    result = cli("queue", *args, token=False)
    assert result.exit_code == 2 and message in result.stderr and api.requests == []


def test_a_named_configuration_file_replaces_the_default_one(cli, config):
    Path("other.toml").write_text('url = "http://other:9"\n')
    cli("queue", "--config", "other.toml", token=False)
    assert str(cli.settings[-1].url) == "http://other:9/" and cli.settings[-1].bearer() is None
