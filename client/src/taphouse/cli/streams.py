"""The process's own streams, whose other ends may be closed or go away."""

from __future__ import annotations

import os
import sys
from typing import IO

__all__ = ["discard", "flush_last", "open_closed"]


def discard(stream: IO[str]) -> None:
    """What is or will be written goes nowhere, instead of failing."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # it has no descriptor: nothing to flush into
        return


def flush_last() -> None:
    """Write out what waits in them: the interpreter's own flush would change the exit code if it failed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard(stream)


def open_closed() -> None:
    """Streams that were closed at the start are nowhere; what is opened later doesn't get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
