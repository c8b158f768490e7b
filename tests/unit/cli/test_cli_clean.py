"""Nothing that a server sent reaches the terminal as a control code; JSON keeps every character."""

from __future__ import annotations

import io
import json

import pytest
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from taphouse.cli.clean import clean
from taphouse.cli.terminal import SafeConsole, items_bar
from taphouse.wire import Check, RowFailure

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31mred\x00\x7f\u202e\u2066after"
LEFT = "]0;owned[2J31mredafter"
DANGER = set(EVIL) - set(LEFT)


def test_control_characters_go_and_text_stays() -> None:
    assert clean(EVIL) == LEFT
    assert clean("a\tb\nc – é 日本 \U0001f600") == "a\tb\nc – é 日本 \U0001f600"


@pytest.mark.parametrize(
    "command",
    [
        ("jobs", "job-a"),
        ("jobs",),
        ("queue",),
        ("watch", "--once"),
        ("shards",),
        ("doctor",),
        ("enqueue", "-", "--wait"),
    ],
)
def test_no_command_prints_what_a_terminal_would_obey(cli, api, make, no_sleep, command):
    failures = [RowFailure(row=1, id=EVIL, reason=EVIL)]
    evil = make("job", name=EVIL, reason=EVIL, failures=failures)
    api.jobs = [evil]
    api.later = [evil, make("job", state="done", name=EVIL, failures=failures)] if "--wait" in command else []
    status = make("status", paused=EVIL)
    engine = status.engines[0].model_copy(update={"url": EVIL, "detail": EVIL, "capture": "off"})
    consumer = status.consumers[0].model_copy(update={"name": EVIL, "ended": EVIL})
    worker = status.workers[0].model_copy(update={"name": EVIL, "state": EVIL, "batch": EVIL})
    api.status = status.model_copy(update={"engines": [engine], "consumers": [consumer], "workers": [worker]})
    api.entries = [make("entry", 1).model_copy(update={"shard": EVIL, "dtype": EVIL})]
    api.checks = [Check(check=EVIL, ok=False, detail=EVIL, advice=EVIL)]
    result = cli(*command, stdin='{"prompt": "x"}\n')
    assert LEFT in result.output.replace("\n", ""), result.output
    assert not DANGER & set(result.output)


def test_errors_are_cleaned_and_json_is_not(cli, api, make):
    api.refuse["/v1/queue"] = (422, EVIL)
    for debug in ([], ["--debug"]):
        result = cli("queue", *debug)
        assert LEFT in result.stderr and not DANGER & set(result.stderr)
    api.jobs = [make("job", name=EVIL)]
    assert json.loads(cli("jobs", "-o", "json").stdout)["jobs"][0]["name"] == EVIL


def test_a_live_view_sends_its_own_codes_only() -> None:
    written = io.StringIO()
    written.isatty = lambda: True  # type: ignore[method-assign]
    console = SafeConsole(written, 60)
    table = Table("a", "b")
    table.add_row(Text(EVIL), Text(EVIL, "red"))
    with Live(Panel(table, title=Text(EVIL)), console=console, auto_refresh=False) as live:
        live.refresh()
    with items_bar(console, EVIL, 3) as step:
        step(1)
    out = written.getvalue()
    assert "\x1b]0" not in out and not (DANGER - {"\x1b"}) & set(out) and "\x1b[2J" not in out
    assert "\x1b[31m" in out
