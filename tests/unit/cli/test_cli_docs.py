"""`docs/cli.md` names what exists, and all of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from taphouse.cli.app import app
from taphouse.cli.exits import ExitCode
from taphouse.cli.settings import Settings
from taphouse.wire import JobOptions, JobState
from taphouse_extractor.settings import Settings as ServiceSettings
from taphouse_tap.api.requests import CaptureRequest

DOCS = Path(__file__).parents[3] / "docs" / "cli.md"
COMPLETION = {"--install-completion", "--show-completion"}


@pytest.fixture(scope="module")
def text() -> str:
    return DOCS.read_text(encoding="utf-8")


def commands(group: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        found |= (
            commands(command, f"{prefix}{name} ")
            if hasattr(command, "commands")
            else {prefix + name: command}
        )
    return found


def options(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


def test_every_command_is_in_the_table_and_every_row_is_a_command(text):
    known = commands(get_command(app))
    named = re.findall(r"^\| `taphouse ([a-z ]+?)(?: [A-Z]\S*)?` \|", text, flags=re.M)
    assert sorted(named) == sorted(known)


def test_every_option_named_in_a_row_is_one_of_that_command(text):
    known = commands(get_command(app))
    for name, row in re.findall(r"^\| `taphouse ([a-z ]+?)(?: [A-Z]\S*)?` \|(.*)$", text, flags=re.M):
        assert set(re.findall(r"`(--[a-z-]+)", row)) <= options(known[name]), name


def test_every_option_that_exists_is_named_and_no_other(text):
    root = get_command(app)
    exist = set().union(*(options(command) for command in [root, *commands(root).values()]))
    named = set(re.findall(r"`(--[a-z-]+)[` ]", text))
    assert named - {"--help"} == exist - COMPLETION - {"--help", "--version"}


def test_what_to_capture_and_its_defaults(text):
    known = commands(get_command(app))
    section = text[text.index("What to capture") : text.index("What every row")]
    rows = re.findall(r"^\| (\+ )?(`--[^|]+`) \| ?([^|`]*?) ?\|", section, flags=re.M)
    both, more = (
        {
            option
            for plus, names, _ in rows
            if bool(plus) is only
            for option in re.findall(r"--[a-z-]+", names)
        }
        for only in (False, True)
    )
    capturing = set(JobOptions.model_fields) - {"stop_token_ids"}
    assert {OPTIONS.get(option, option[2:].replace("-", "_")) for option in both | more} == capturing
    assert both <= options(known["extract"]) & options(known["enqueue"])
    assert more <= options(known["enqueue"]) - options(known["extract"])
    for _, names, shown in rows:
        for option in re.findall(r"--[a-z-]+", names):
            assert shown == default_of(OPTIONS.get(option, option[2:].replace("-", "_"))), option


OPTIONS = {"--stop-on-error": "on_error"}


def default_of(option: str) -> str:
    """The job's, else the engine's or the service's; empty where nothing is done without the option."""
    engines = CaptureRequest.model_fields[option].default if option in ("temperature", "priority") else None
    service = ServiceSettings.model_fields[option].default if option == "max_attempts" else None
    value = next(
        (v for v in (JobOptions.model_fields[option].default, engines, service) if v is not None), ""
    )
    said = {"skip": "off", "": "all tapped" if option == "layers" else ""}
    return "off" if value is False else said[value] if isinstance(value, str) else f"{value:g}"


def test_every_state_of_a_job(text):
    table = text[text.index("| state | when |") :]
    table = table[: table.index("\n\n")]
    named = re.findall(r"^\| `(\w+)` \|", table, flags=re.M)
    assert sorted(named) == sorted(JobState)
    assert [state for state in named if JobState(state).final] == named[-3:]


def test_settings_and_their_defaults(text):
    rows = re.findall(r"^\| `--[a-z-]+` \| `(TAPHOUSE_\w+)` \| (?:`(\w+)`)? ?\| (.*?) \|$", text, flags=re.M)
    assert {variable for variable, _, _ in rows} == {
        f"TAPHOUSE_{name.upper()}" for name in Settings.model_fields
    }
    for variable, name, default in rows:
        field = Settings.model_fields[variable.removeprefix("TAPHOUSE_").lower()]
        if name and field.default is not None:
            assert default == f"`{field.default}`"


def test_exit_codes(text):
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, flags=re.M)
    assert rows == [(str(code.value), code.meaning) for code in ExitCode]
