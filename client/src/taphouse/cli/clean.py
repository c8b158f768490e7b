"""Text of other people, made safe to print: a terminal obeys what it is sent."""

from __future__ import annotations

__all__ = ["clean"]

_KEPT = "\n\t"
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_LINE_ENDS = (0x2028, 0x2029)
_DROPPED = dict.fromkeys(code for code in (*_CONTROLS, *_DIRECTIONS, *_LINE_ENDS) if chr(code) not in _KEPT)


def clean(text: str) -> str:
    """The text without control characters (line ends and tabs stay) and without what turns its direction.

    They have no width, so a layout that was measured with them stays right.
    """
    return text.translate(_DROPPED)
