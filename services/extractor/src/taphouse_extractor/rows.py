"""Rows of a dataset: bytes → `Row` → `Prompt`, what the engine is asked and how its answer is masked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import ValidationError

from taphouse.wire import JobOptions, Row
from taphouse_extractor.errors import BadRow

__all__ = ["Mask", "Numbered", "Prompt", "number_rows", "parse_row", "plain_id", "to_prompt", "too_long"]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
SAMPLING = ("temperature", "top_p", "seed", "stop", "stop_token_ids", "priority")


class Mask(Enum):
    """Which tokens of a sample are trained on."""

    ALL = "all"
    ASSISTANT = "assistant"
    GENERATED = "generated"


@dataclass(frozen=True)
class Numbered:
    """A row as it stands in a batch's file: its number in the job, its sample id, and its bytes."""

    row: int
    id: str
    line: bytes


@dataclass(frozen=True)
class Prompt:
    """One row, ready for the engine: `body` is the JSON of `POST /v1/hidden_states`."""

    row: int
    id: str
    body: dict[str, Any]
    mask: Mask

    @property
    def tokens(self) -> int:
        """Number of its tokens; 0 while only the engine can tell."""
        given = self.body.get("prompt")
        return len(given) if isinstance(given, list) else 0


def parse_row(line: bytes) -> Row:
    """Parse one line of a dataset; raise `BadRow` with what is wrong with it."""
    try:
        return Row.model_validate_json(line)
    except ValidationError as error:
        raise BadRow(describe(error)) from error


def describe(error: ValidationError) -> str:
    """A validation error in one line that names the field, and never quotes the row's text."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])


def number_rows(
    lines: Iterable[bytes], *, first_row: int, job_id: str, kept: Mapping[int, str] | None = None
) -> Iterator[Numbered]:
    """Give each line its row number and sample id, the same at every run.

    The id is the row's own, or `<job id>/<row>`; one that an earlier row of the batch has gets `#<row>`
    added. `kept`: ids of rows that follow from earlier ones which were blanked.
    """
    taken: set[str] = set()
    for row, line in enumerate(lines, start=first_row):
        name = kept[row] if kept and row in kept else plain_id(line, row, job_id)
        while name in taken:
            name = f"{name}#{row}"
        taken.add(name)
        yield Numbered(row, name, line)


def plain_id(line: bytes, row: int, job_id: str) -> str:
    """The sample id of a row that no earlier one of its batch has."""
    return _own_id(line) or f"{job_id}/{row}"


def _own_id(line: bytes) -> str | None:
    try:
        value = json.loads(line).get("id")
    except (ValueError, AttributeError, RecursionError):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    usable = isinstance(value, str) and 0 < len(value) <= 240 and value.isprintable()
    return value if usable else None


def to_prompt(numbered: Numbered, row: Row, options: JobOptions) -> Prompt:
    """Make the engine's request of a row; raise `BadRow` when it has nothing to run or can't be masked."""
    generate = options.max_tokens > 1
    if row.messages is not None:
        body, mask = _conversation(row, options, generate)
    elif row.prompt is not None or row.text is not None:
        given = row.prompt if row.prompt is not None else row.text
        if not given:
            raise BadRow("the prompt is empty")
        body, mask = {"prompt": given}, Mask.GENERATED if generate else Mask.ALL
    else:
        raise BadRow("the row has none of messages, prompt and text")
    body |= {"max_tokens": options.max_tokens, "delivery": "slices", "request_id": numbered.id}
    body |= {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.layers is not None:
        body["layers"] = options.layers
    return Prompt(numbered.row, numbered.id, body, mask)


def too_long(tokens: int, options: JobOptions) -> str | None:
    """Why a prompt of so many tokens is left out, or None."""
    if options.max_length is None or tokens <= options.max_length:
        return None
    return f"{tokens} tokens are more than max_length {options.max_length}"


def _conversation(row: Row, options: JobOptions, generate: bool) -> tuple[dict[str, Any], Mask]:
    messages = list(row.messages or ())
    for at, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise BadRow(f"messages.{at}.role: {role!r:.40} is none of {', '.join(sorted(ROLES))}")
    if generate and messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise BadRow("messages: nothing is left to prompt with")
    open_end = messages[-1]["role"] != "assistant"
    body: dict[str, Any] = {"messages": messages, "add_generation_prompt": open_end}
    if row.tools:
        body["tools"] = row.tools
    if options.chat_template_kwargs:
        body["chat_template_kwargs"] = options.chat_template_kwargs
    if generate:
        return body, Mask.GENERATED
    if any(message["role"] == "assistant" for message in messages):
        return body | {"return_loss_mask": True}, Mask.ASSISTANT
    return body, Mask.ALL
