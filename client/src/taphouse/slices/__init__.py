"""The slice contract between the tap inside vLLM and whoever consumes captures (numpy and stdlib only).

::

    <slice_dir>/                     0700, ours alone
      start-<id>/                    0700, one an engine start
        lock                         shared lock of every process of the start; unheld = dead, may be swept
        secret                       0600, signs opt-ins
        admission.lock               held while space is reserved
        d<dp>-t<tp>.json             a rank's record
        latency-<pid>.json           an API server's latency by class
        scheduler-d<dp>.json         an engine core's scheduler
        quota.json                   what extraction may use now
        <tag>.claim                  space reserved for one capture
        <tag>.t<tp>.part -> .slice   a rank's columns of it, sealed by rename
        spare/                       released slices whose pages the next captures use

Who consumed a capture removes it with `release`. Start reading at `start.py` (directory), `files.py` (one
slice), `join.py` (all ranks), `opt_in.py` (who may be captured), `stream.py` (the streamed answer).
"""

from .errors import (
    BadOptIn,
    BadSlice,
    BadStream,
    CaptureFailed,
    ChecksumMismatch,
    DirectoryFull,
    MissingRows,
    NoRoom,
    SliceError,
    SlicesDisagree,
    TooManyInFlight,
    TruncatedSlice,
    UnsafeDirectory,
    UnsupportedSlice,
    WrongTokens,
)
from .files import (
    RAW_DTYPES,
    TOKEN_BYTES,
    SliceWriter,
    Trailer,
    cut,
    read_slice,
    read_token_ids,
    read_trailer,
    seal_error,
)
from .join import check_slices, check_token_ids, join_rows, join_slices
from .opt_in import (
    EXTRA_ARGS_KEY,
    OptIn,
    canonical_json,
    fingerprint_id,
    is_tag,
    new_tag,
    verify_opt_in,
)
from .private import check_private, read_text, write_atomically
from .start import (
    Claim,
    Start,
    open_start,
    read_records,
    release,
    start_id_of,
    sweep_dead_starts,
)
from .stream import Stream, encode_stream, parse_stream, stream_parts

__all__ = [
    "EXTRA_ARGS_KEY",
    "RAW_DTYPES",
    "TOKEN_BYTES",
    "BadOptIn",
    "BadSlice",
    "BadStream",
    "CaptureFailed",
    "ChecksumMismatch",
    "Claim",
    "DirectoryFull",
    "MissingRows",
    "NoRoom",
    "OptIn",
    "SliceError",
    "SliceWriter",
    "SlicesDisagree",
    "Start",
    "Stream",
    "TooManyInFlight",
    "Trailer",
    "TruncatedSlice",
    "UnsafeDirectory",
    "UnsupportedSlice",
    "WrongTokens",
    "canonical_json",
    "check_private",
    "check_slices",
    "check_token_ids",
    "cut",
    "encode_stream",
    "fingerprint_id",
    "is_tag",
    "join_rows",
    "join_slices",
    "new_tag",
    "open_start",
    "parse_stream",
    "read_records",
    "read_slice",
    "read_text",
    "read_token_ids",
    "read_trailer",
    "release",
    "seal_error",
    "start_id_of",
    "stream_parts",
    "sweep_dead_starts",
    "verify_opt_in",
    "write_atomically",
]
