"""A store in a directory: temporary file, flush, link or rename, flush of the directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from taphouse.errors import NotInStore, StoreBusy, StoreError
from taphouse.store.os_errors import os_errors
from taphouse.store.paths import TEMPORARY_PREFIX, is_name, safe_path

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class LocalStore:
    """A store in a directory of a local or shared POSIX file system (it needs hard links and flock)."""

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self.root = Path(root).absolute()
        self._prefix = f"{self.root}{os.sep}"
        if create:
            with os_errors(str(self.root)):
                _make_directory(self.root)
        elif not self.root.is_dir():
            raise NotInStore(f"there is no store at {self.root}", path=str(self.root))

    def read(self, path: str) -> bytes:
        """See `Store.read`."""
        with os_errors(path):
            return self.local_path(path).read_bytes()

    def open(self, path: str) -> BinaryIO:
        """See `Store.open`."""
        with os_errors(path):
            return self.local_path(path).open("rb")

    def put(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """See `Store.put`."""
        target = self._writable(path)
        with os_errors(path), _temporary(target, data, durable=durable) as temporary:
            temporary.rename(target)
            if durable:
                _sync_directory(target.parent)

    def put_new(self, path: str, data: bytes) -> bool:
        """See `Store.put_new`."""
        target = self._writable(path)
        with os_errors(path):
            if target.exists():
                _sync_directory(target.parent)
                return False
            with _temporary(target, data) as temporary:
                return _link(temporary, target)

    def create(self, path: str) -> LocalStagedFile:
        """See `Store.create`."""
        return LocalStagedFile(self._writable(path), path)

    def link(self, source: str, target: str) -> bool:
        """See `Store.link`."""
        old, new = self.local_path(source), self._writable(target)
        with os_errors(target):
            _make_directory(new.parent)
            return _link(old, new)

    def flush(self, directory: str) -> None:
        """See `Store.flush`."""
        with os_errors(directory):
            _sync_directory(self.local_path(directory))

    def exists(self, path: str) -> bool:
        """See `Store.exists`."""
        return self._stat(path) is not None

    def size(self, path: str) -> int:
        """See `Store.size`."""
        with os_errors(path):
            return self.local_path(path).stat().st_size

    def modified(self, path: str) -> float:
        """See `Store.modified`."""
        with os_errors(path):
            return self.local_path(path).stat().st_mtime

    def stamp(self, directory: str) -> tuple[int, int] | None:
        """See `Store.stamp`."""
        found = self._stat(directory)
        return None if found is None else (found.st_mtime_ns, found.st_ino)

    def scan(self, directory: str) -> Iterator[str]:
        """See `Store.scan`."""
        with os_errors(directory):
            try:
                entries = os.scandir(self.local_path(directory))
            except FileNotFoundError:
                return
            with entries:
                for entry in entries:
                    if is_name(entry.name):
                        yield entry.name

    def list(self, directory: str) -> list[str]:
        """See `Store.list`."""
        return sorted(self.scan(directory))

    def delete(self, path: str) -> bool:
        """See `Store.delete`."""
        with os_errors(path):
            try:
                self.local_path(path).unlink()
            except FileNotFoundError:
                return False
        return True

    def drop(self, directory: str) -> bool:
        """See `Store.drop`."""
        place = self.local_path(directory)
        with os_errors(directory):
            try:
                left = list(place.iterdir())
                if not all(path.name.startswith(TEMPORARY_PREFIX) for path in left):
                    return False
                for path in left:
                    path.unlink(missing_ok=True)
                place.rmdir()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                    return False
                raise
        return True

    @contextlib.contextmanager
    def lock(self, path: str, *, wait: bool = True) -> Iterator[None]:
        """See `Store.lock`. Threads of one process exclude each other too."""
        target = self._writable(path)
        with os_errors(path):
            _make_directory(target.parent)
            descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with os_errors(path):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise StoreBusy(f"{path} is held by somebody else", path=path) from error
            yield
        finally:
            os.close(descriptor)

    def local_path(self, path: str) -> Path:
        """The file of an object. Raises `UnsafePath`; whether there is a file is not looked at."""
        return self.root / safe_path(path)

    def free_bytes(self) -> int:
        """See `Store.free_bytes`."""
        with os_errors(str(self.root)):
            return shutil.disk_usage(self.root).free

    def _stat(self, path: str) -> os.stat_result | None:
        """None where there is nothing. Without `pathlib`: it is asked thousands of times a second."""
        try:
            return os.stat(f"{self._prefix}{safe_path(path)}")  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            with os_errors(path):
                raise

    def _writable(self, path: str) -> Path:
        """The file of an object about to be written: a root that went away is not made again."""
        target = self.local_path(path)
        if not self.root.is_dir():
            raise NotInStore(
                f"the store's directory {self.root} is gone",
                path=path,
                advice="Was it removed or unmounted? Bring it back and run it again",
            )
        return target

    def sweep_temporaries(self, older_than_s: float = 3600.0) -> int:
        """See `Store.sweep_temporaries`."""
        limit = time.time() - older_than_s
        removed = 0
        with os_errors(str(self.root)):
            directories = [str(self.root)]
            while directories:
                with contextlib.suppress(FileNotFoundError), os.scandir(directories.pop()) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            directories.append(entry.path)
                        elif entry.name.startswith(TEMPORARY_PREFIX):
                            removed += _remove_older(entry, limit)
        return removed


class LocalStagedFile:
    """`StagedFile` on a POSIX file system. `target` is the file it becomes, `path` how others call it.

    The temporary file is made by the first `write`, so that one that is long in the making doesn't look as if
    its writer had died.
    """

    def __init__(self, target: Path, path: str | None = None) -> None:
        self.path = str(target) if path is None else path
        self._target = target
        self._temporary: Path | None = None
        self._file: FileIO | None = None
        self._done = False

    def write(self, data: bytes | memoryview) -> None:
        """See `StagedFile.write`."""
        file = self._opened()
        with os_errors(self.path):
            view = memoryview(data).cast("B")
            while view:
                view = view[file.write(view) :]

    def scratch(self) -> BinaryIO:
        """See `StagedFile.scratch`."""
        with os_errors(self.path):
            _make_directory(self._target.parent)
            return tempfile.TemporaryFile(dir=self._target.parent, prefix=TEMPORARY_PREFIX)

    def seal(self) -> bool:
        """See `StagedFile.seal`."""
        file = self._opened()
        assert self._temporary is not None
        with os_errors(self.path):
            os.fsync(file.fileno())
            file.close()
            linked = _link(self._temporary, self._target)
        self.abort()
        return linked

    def local_path(self) -> Path:
        """See `StagedFile.local_path`."""
        return self._target

    def abort(self) -> None:
        """See `StagedFile.abort`. Does nothing after `seal`."""
        self._done = True
        if self._file is not None and self._temporary is not None:
            self._file.close()
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> LocalStagedFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()

    def _opened(self) -> FileIO:
        if self._done:
            raise StoreError(f"{self.path} was sealed or dropped before", path=self.path)
        if self._file is None:
            with os_errors(self.path):
                self._temporary = _temporary_name(self._target)
                self._file = self._temporary.open("xb", buffering=0)
        return self._file


def _remove_older(entry: os.DirEntry[str], limit: float) -> bool:
    """Remove a file that was not written since `limit`; whether that was done here."""
    try:
        if entry.stat().st_mtime >= limit:
            return False
        Path(entry.path).unlink()
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _temporary(target: Path, data: bytes, *, durable: bool = True) -> Iterator[Path]:
    """A temporary file of `data` beside `target`, gone afterwards unless it was renamed."""
    path = _temporary_name(target)
    try:
        with path.open("xb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            if durable:
                os.fsync(file.fileno())
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _temporary_name(target: Path) -> Path:
    _make_directory(target.parent)
    return target.parent / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


def _link(source: Path, target: Path) -> bool:
    """Link exclusively and flush the directory, even when the name was taken (its writer may have died)."""
    try:
        target.hardlink_to(source)
        linked = True
    except FileExistsError:
        linked = False
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise StoreError(
                f"{target} can't be made: its file system has no hard links ({error.strerror})",
                path=str(target),
                advice="Put the store on a file system that has them, such as ext4, xfs, tmpfs or NFS",
            ) from error
        raise
    _sync_directory(target.parent)
    return linked


def _make_directory(path: Path) -> None:
    """Make a directory and its parents, each durable in the one above."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
