"""Log lines: JSON that stands on one line whatever is logged, with fields, without secrets."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taphouse.logs import JsonFormatter, TextFormatter, fields, set_up

UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def record(event: str = "it %s", *arguments: Any, **extra: Any) -> logging.LogRecord:
    return logging.getLogger("taphouse.x").makeRecord(
        "taphouse.x", logging.WARNING, __file__, 1, event, arguments or ("works",), None, extra=extra
    )


def test_a_json_line_has_its_fields() -> None:
    with fields(job="j1", batch=3), fields(batch=4):
        line = json.loads(JsonFormatter().format(record(sample="s1")))
    assert UTC.fullmatch(line.pop("time"))
    assert line == {
        "level": "warning",
        "logger": "taphouse.x",
        "event": "it works",
        "job": "j1",
        "batch": 4,
        "sample": "s1",
    }
    assert "job" not in json.loads(JsonFormatter().format(record()))


def test_fields_are_a_threads_own() -> None:
    seen: list[str] = []
    with fields(job="mine"):
        thread = threading.Thread(target=lambda: seen.append(JsonFormatter().format(record())))
        thread.start()
        thread.join()
    assert "job" not in json.loads(seen[0])


@given(st.text(), st.dictionaries(st.sampled_from(["job", "sample", "why"]), st.text() | st.binary()))
def test_whatever_is_logged_is_one_line(text: str, extra: dict[str, Any]) -> None:
    line = JsonFormatter().format(record("%s", text, **extra))
    assert "\n" not in line and json.loads(line)["event"] == text
    shown = TextFormatter().format(record("%s", text, **extra))
    assert shown.isprintable() and len(shown.splitlines()) == 1


def test_an_exception_is_told_in_the_line() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        made = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    line = JsonFormatter().format(made)
    assert "\n" not in line and json.loads(line)["error"].endswith("ValueError: why")
    assert TextFormatter().format(made).endswith("ValueError: why")


@pytest.mark.parametrize("style", [JsonFormatter, TextFormatter])
def test_secrets_are_taken_out_wherever_they_stand(style: type[JsonFormatter] | type[TextFormatter]) -> None:
    hiding = style(["hunter22", "hunter2234", "abc"])
    url = "redis://:hunter22@x"
    try:
        raise ValueError(url)
    except ValueError:
        made = logging.LogRecord("x", 40, __file__, 1, "got %s abc", ("hunter2234",), sys.exc_info())
    made.url = "hunter22"
    line = hiding.format(made)
    assert "hunter" not in line
    assert "got *** abc" in line and line.count("***") == 3


SECRETS = st.text(min_size=4).filter(lambda secret: "*" not in secret)


@given(SECRETS, st.text(), st.text())
def test_json_without_a_secret_is_json_whatever_the_secret(secret: str, before: str, after: str) -> None:
    text = before + secret + after
    made = record("%s", text, deep=[{"at": text, secret: 1}], other=text.encode("utf-8", "replace"))
    line = json.loads(JsonFormatter([secret]).format(made))
    assert "***" in line["event"] and secret not in line["event"]
    [deep] = line["deep"]
    assert secret not in deep["at"] and secret not in "".join(deep)


ODD = 'pa"ss\\wo/rd\tü'


@pytest.mark.parametrize("style", [JsonFormatter, TextFormatter])
@pytest.mark.parametrize(
    "text",
    [
        ODD,
        json.dumps({"key": ODD}),
        json.dumps({"key": ODD}, ensure_ascii=False),
        repr({"key": ODD}),
        quote(ODD, safe=""),
    ],
)
def test_a_secret_is_known_as_others_write_it(
    style: type[JsonFormatter] | type[TextFormatter], text: str
) -> None:
    line = style([ODD]).format(record("%s", text, also=[text]))
    assert line.count("***") == 2 and "ss" not in line


def test_a_number_that_is_a_secret_is_none() -> None:
    made = record(port=12345678, count=12, none=None, yes=True)
    line = json.loads(JsonFormatter(["12345678"]).format(made))
    assert (line["port"], line["count"], line["none"], line["yes"]) == ("***", 12, None, True)


def test_set_up_again_replaces_what_it_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        set_up("text")
        set_up("json", secrets=["hunter22"])
        logging.getLogger("x").info("once hunter22")
        said = capsys.readouterr().err
        assert json.loads(said)["event"] == "once ***"
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
