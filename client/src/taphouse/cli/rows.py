"""One row of a dataset, checked as the service would: what is wrong with it is said for people."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from taphouse.cli.words import told
from taphouse.wire import Row

__all__ = ["FIELDS", "kind_of", "parse_row"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
FIELDS = {
    "id": "text of at most 256 characters, or a whole number",
    "user": "text of at most 256 characters, or a whole number",
    "messages": "a list of objects",
    "tools": "a list of objects",
    "prompt": "text, or a list of token ids",
    "text": "text",
}
"""What each field of a row is."""


def parse_row(line: bytes, generate: bool = False) -> Row:
    """One line as a row; with `generate`, a trailing assistant turn will be dropped.

    Raises:
        ValueError: with a reason for people, as the service would refuse it.
    """
    try:
        value = json.loads(line.decode())  # of bytes it would guess the encoding
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # as "Invalid control character at"
        raise ValueError(f"not JSON: {what} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a row is a JSON object, this is {_json_kind(value)}")
    if b"\\u" in line:
        _check_text(value)
    row = _as_the_service_reads(line)
    if b"NaN" in line or b"Infinity" in line:
        _check_numbers(row)
    kind = kind_of(row)
    if kind is None:
        raise ValueError("it has none of messages, prompt and text")
    if kind == "messages":
        _check_messages(row.messages or [], generate)
    elif not getattr(row, kind):
        raise ValueError(f"its {kind} is empty")
    return row


def _as_the_service_reads(line: bytes) -> Row:
    """pydantic's reader takes less nesting than Python's."""
    try:
        return Row.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        if first["type"] == "json_invalid" and "recursion limit" in first["msg"]:
            raise ValueError("nested too deeply") from None
        field = str(first["loc"][0]) if first["loc"] else ""
        raise ValueError(f"{field}: it must be {FIELDS[field]}" if field in FIELDS else told(first)) from None


def _check_text(value: dict[str, Any]) -> None:
    """Python reads more than JSON may hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is no text") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _check_numbers(row: Row) -> None:
    """So does pydantic."""
    try:
        json.dumps(row.model_dump(), allow_nan=False)
    except ValueError:
        raise ValueError("it holds NaN or Infinity, which JSON doesn't have") from None


def _check_messages(messages: list[dict[str, Any]], generate: bool) -> None:
    for at, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise ValueError(f"messages.{at}.role: {message.get('role')!r:.40} is none of {', '.join(ROLES)}")
    kept = messages[:-1] if generate and messages and messages[-1]["role"] == "assistant" else messages
    if not kept:
        raise ValueError("messages: nothing is left to prompt with")


def kind_of(row: Row) -> str | None:
    """The field that is taken: `messages`, then `prompt`, then `text`; None when all are absent."""
    return next((kind for kind in ("messages", "prompt", "text") if getattr(row, kind) is not None), None)


def _json_kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
