"""Which paths there can be inside a store."""

from __future__ import annotations

import re

from taphouse.errors import UnsafePath

TEMPORARY_PREFIX = ".tmp-"
_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
_PART, _PATH = re.compile(_NAME), re.compile(f"{_NAME}(?:/{_NAME})*")


def safe_path(path: str) -> str:
    """The path itself when it is a safe relative one. Raises `UnsafePath`."""
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise UnsafePath(
            f"{path!r} is no path inside a store",
            path=str(path),
            advice="Between slashes use letters, digits, '.', '_' and '-', a letter or digit first",
        )
    return path


def is_name(name: str) -> bool:
    """Whether a name in a directory is an object's or directory's of the store, and no temporary file's."""
    return _PART.fullmatch(name) is not None
