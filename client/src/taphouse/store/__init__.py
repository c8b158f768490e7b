"""Where datasets, shards and the ledger lie: a small object store, and its implementation on a directory.

Paths inside a store are relative, with `/` between parts; each part begins with a letter or digit and goes
on with letters, digits, `.`, `_` and `-`. Anything else is `UnsafePath`, so a name from outside can't leave
the store, and names that begin with a dot are free for temporary files.

What is put is durable before the call returns: written to a temporary file, flushed to disk, given its name
by `link` (exclusive) or `rename` (replacing), and the directory flushed. A reader sees all of an object or
none.
"""

from taphouse.store.documents import put_json, put_json_new, read_json, to_json
from taphouse.store.listing import Listing
from taphouse.store.local import LocalStagedFile, LocalStore
from taphouse.store.numbering import last_number
from taphouse.store.os_errors import os_errors
from taphouse.store.paths import safe_path
from taphouse.store.protocol import StagedFile, Store

__all__ = [
    "Listing",
    "LocalStagedFile",
    "LocalStore",
    "StagedFile",
    "Store",
    "last_number",
    "os_errors",
    "put_json",
    "put_json_new",
    "read_json",
    "safe_path",
    "to_json",
]
