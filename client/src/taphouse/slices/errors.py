"""Errors of the slice contract.

::

    SliceError
    ├── UnsafeDirectory     a directory or file is not ours, too open, or a symbolic link
    ├── DirectoryFull       no room: the directory's limit or the file system's
    ├── TooManyInFlight     as many captures run as the limit allows
    ├── BadOptIn            an opt-in is malformed or its signature is wrong
    ├── BadSlice            a slice file can't be trusted
    │   ├── TruncatedSlice      shorter than it says, or not a slice at all
    │   ├── ChecksumMismatch    its payload is not what was written
    │   └── UnsupportedSlice    a version, dtype or checksum this reader does not know
    ├── CaptureFailed       the rank sealed an error in place of rows
    │   └── NoRoom              for want of room: the same request may work later
    ├── MissingRows         fewer rows than the request needs
    ├── SlicesDisagree      the ranks' slices are not parts of one capture
    ├── WrongTokens         rows of other tokens than the request's
    └── BadStream           a streamed body is cut or damaged
"""

from __future__ import annotations


class SliceError(Exception):
    """Root of this package's errors."""


class UnsafeDirectory(SliceError):
    """A directory or file is not owned by this user, is open to others, or is a symbolic link."""


class DirectoryFull(SliceError):
    """The slice directory (or its file system) has no room for this capture; try again later."""


class TooManyInFlight(SliceError):
    """As many captures are running as the limit allows; try again later."""


class BadOptIn(SliceError):
    """A request's opt-in is malformed, or its signature was not made with this start's secret."""


class BadSlice(SliceError):
    """A slice file can't be trusted."""


class TruncatedSlice(BadSlice):
    """The file ends too early or lacks the slice trailer."""


class ChecksumMismatch(BadSlice):
    """The payload differs from what was written."""


class UnsupportedSlice(BadSlice):
    """The slice uses a version, dtype or checksum that this reader does not know."""


class CaptureFailed(SliceError):
    """The rank that owned this capture sealed an error instead of rows."""


class NoRoom(CaptureFailed):
    """A rank had no room for the capture's rows; the same request may work later."""


class MissingRows(SliceError):
    """A capture holds fewer rows than its request needs."""


class SlicesDisagree(SliceError):
    """Slices that should be columns of one capture differ in request, layers, dtype or ranks."""


class WrongTokens(SliceError):
    """The model was fed other tokens at a capture's rows than its request says: the rows are not its own."""


class BadStream(SliceError):
    """A streamed answer is cut short or damaged."""
