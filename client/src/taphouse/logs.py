"""How Taphouse's processes log: lines of text for people, or one JSON object a line for programs.

A JSON line has `time` (UTC), `level`, `logger`, `event`, the fields in force where it was written (`job`,
`batch`, `sample`, …) and, for an exception, `error`. It is the standard library's logging, so what libraries
log comes out the same way.

Prompts are never logged: rows are named by job, row number and sample id. Secrets are taken out of every
line, whoever put them there.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Literal, TextIO
from urllib.parse import quote

__all__ = ["JsonFormatter", "LogFormat", "TextFormatter", "fields", "formatter", "set_up"]

LogFormat = Literal["text", "json"]
HIDDEN = "***"
SHORTEST_SECRET = 4
_in_force: ContextVar[Mapping[str, object]] = ContextVar("taphouse_log_fields", default=MappingProxyType({}))
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}


@contextmanager
def fields(**named: object) -> Iterator[None]:
    """Give every line that this thread (or task) logs inside these fields too."""
    token = _in_force.set({**_in_force.get(), **named})
    try:
        yield
    finally:
        _in_force.reset(token)


class _Formatter(logging.Formatter):
    def __init__(self, secrets: Collection[str] = ()) -> None:
        super().__init__()
        forms = {form for secret in secrets if len(secret) >= SHORTEST_SECRET for form in _forms(secret)}
        self._secrets = sorted(forms, key=len, reverse=True)

    def _hide(self, text: str) -> str:
        """A text before it is put into a line, which may escape what is in it."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def _hidden(self, value: object) -> object:
        """A value as a line may have it, without secrets at any depth."""
        if isinstance(value, str):
            return self._hide(value)
        if isinstance(value, Mapping):
            return {self._hide(str(name)): self._hidden(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple | Set):
            return [self._hidden(inner) for inner in value]
        text = str(value)
        hidden = self._hide(text)
        plain = value is None or isinstance(value, bool | int | float)
        return value if plain and hidden == text else hidden

    def _fields(self, record: logging.LogRecord) -> dict[str, object]:
        """Those in force, and those of the line itself (`extra=`)."""
        own = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
        return {name: self._hidden(value) for name, value in {**_in_force.get(), **own}.items()}

    def _event(self, record: logging.LogRecord) -> str:
        return self._hide(record.getMessage())

    def _error(self, record: logging.LogRecord) -> str | None:
        text = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        return self._hide(text) if text else None


class JsonFormatter(_Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": self._event(record),
            **self._fields(record),
        }
        error = self._error(record)
        if error:
            line["error"] = error
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(_Formatter):
    """Time, level, logger and event, with the fields behind it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record; an exception's traceback follows on lines of its own."""
        fields = " ".join(f"{name}={_shown(value)}" for name, value in self._fields(record).items())
        event = _shown(" ".join(self._event(record).splitlines()))
        line = f"{_utc(record.created)} {record.levelname} {record.name}: {event}"
        error = self._error(record)
        return line + (f" [{fields}]" if fields else "") + (f"\n{error}" if error else "")


def formatter(style: LogFormat, secrets: Collection[str] = ()) -> logging.Formatter:
    """The formatter of a style; `secrets` come out as `***`."""
    return JsonFormatter(secrets) if style == "json" else TextFormatter(secrets)


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what is stderr at the time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """Where lines go."""
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None: ...


def set_up(style: LogFormat, *, secrets: Collection[str] = ()) -> None:
    """Log to stderr from now on; what an earlier call set up ends."""
    root = logging.getLogger()
    for earlier in [handler for handler in root.handlers if isinstance(handler, _ToStderr)]:
        root.removeHandler(earlier)
    handler = _ToStderr()
    handler.setFormatter(formatter(style, secrets))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def _forms(secret: str) -> set[str]:
    """A secret as it may stand in a text: as it is, in JSON, as Python shows it, in a URL."""
    in_json = {json.dumps(secret, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)}
    return {secret, repr(secret)[1:-1], quote(secret, safe="", errors="replace"), *in_json}


def _shown(value: object) -> str:
    """Text for a line: what would end it, or what a terminal obeys, is escaped."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _utc(seconds: float) -> str:
    milliseconds = int(seconds % 1 * 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03d}Z"
