"""What the engine tells its writer process: small messages, several to a packet, handled in order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass

MAX_BYTES = 1 << 17
"""The largest packet: a step of a thousand captures takes a seventh of it."""


@dataclass(frozen=True)
class Admit:
    """A capture begins, under a number of its own; its prompt lies at `prompt_at` of the area's prompts."""

    number: int
    tag: str
    prompt_len: int
    max_rows: int
    epoch: int
    prompt_at: int
    prompt_count: int


@dataclass(frozen=True)
class Step:
    """Rows of an engine step, from row `at` of the area on, whole once `arrival` steps have arrived.

    `parts` are (number of the capture, rows, position of the first row by the scheduler or None where that is
    not exact) and lie one after the other.
    """

    at: int
    arrival: int
    parts: Sequence[tuple[int, int, int | None]]


@dataclass(frozen=True)
class Finish:
    """The request ended: seal what there is."""

    number: int


@dataclass(frozen=True)
class Fail:
    """The capture can't be completed; `retry`: for want of room."""

    number: int
    reason: str
    retry: bool = False


@dataclass(frozen=True)
class FailAll:
    """Nothing in flight can be completed."""

    reason: str


Message = Admit | Step | Finish | Fail | FailAll

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Admit, Step, Finish, Fail, FailAll)}


def encode(message: Message) -> bytes:
    """Return a message as one line of a packet, with its end."""
    return json.dumps([type(message).__name__, *astuple(message)]).encode() + b"\n"


def decode(packet: bytes) -> list[Message]:
    """Return the messages of a packet; raises `ValueError`, `KeyError` or `TypeError` when it has others."""
    return [_KINDS[kind](*values) for kind, *values in map(json.loads, packet.splitlines())]
