"""Errors of the tap's worker side.

::

    TapError
    ├── Refusal             what the endpoint answers instead of a capture (`refusals.py`)
    ├── CaptureRefused      this engine, mode or model can't be captured right; the reason is for people
    ├── BadRows             the rows of one capture are not what they should be
    └── WriterFailed        the writer process could not start, met an error, or is gone
"""

from __future__ import annotations


class TapError(Exception):
    """Root of the worker side's own errors."""


class CaptureRefused(TapError):
    """Capture stays off on this engine; the message says why. Serving goes on."""


class BadRows(TapError):
    """One capture's rows are missing, unwritten or out of order: it fails, others go on."""


class WriterFailed(TapError):
    """The writer process could not start, met an error of ours, or is gone: capture is off."""
