"""What pydantic found wrong with a value, in the command's words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["told"]

_WORDS = {
    "Value error, ": "",
    "Input should be": "it must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


def told(found: ErrorDetails) -> str:
    """One finding of a `ValidationError`, without its place."""
    text = found["msg"]
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    return text
