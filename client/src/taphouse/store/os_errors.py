"""The operating system's errors as the store's."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from taphouse.errors import NotInStore, StoreDenied, StoreError, StoreFull

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def os_errors(path: str) -> Iterator[None]:
    """Turn an `OSError` into the `StoreError` that fits it, naming `path`."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotInStore(f"{path} is not there", path=path) from error
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise StoreFull(
                f"{path} can't be written: {reason}", path=path, advice="Free some space and run it again"
            ) from error
        if error.errno in _DENIED:
            raise StoreDenied(
                f"{path} can't be used: {reason}",
                path=path,
                advice="Check owner, mode and mount of the store",
            ) from error
        raise StoreError(f"{path}: {reason}", path=path) from error
