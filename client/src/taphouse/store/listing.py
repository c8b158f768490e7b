"""A directory's names, listed again only when they may have changed."""

from __future__ import annotations

import time

from taphouse.store.protocol import Store

__all__ = ["Listing"]

SETTLED_S = 2.0
"""Changes so long after a stamp was first seen have another: far over any file system's clock tick."""


class Listing:
    """The names of one directory as far as they are news. One thread at a time."""

    __slots__ = ("_directory", "_settled", "_since", "_store", "stamp")

    def __init__(self, store: Store, directory: str) -> None:
        self._store, self._directory = store, directory
        self.stamp: tuple[int, int] | None = None
        """Of the last look. Once `news` gives None, any change from then on gives another."""
        self._since, self._settled = 0.0, False

    def quiet(self) -> bool:
        """Whether `news` would give None; whatever else it would give is still news. Raises `StoreError`s."""
        return self._settled and self._store.stamp(self._directory) == self.stamp

    def news(self) -> list[str] | None:
        """All names, sorted; None when they are surely those of the last time. Raises `StoreError`s.

        A stamp is not believed at once: two changes within a tick of the file system's clock leave the same.
        """
        stamp, now = self._store.stamp(self._directory), time.monotonic()
        if stamp is not None and stamp == self.stamp:
            if self._settled:
                return None
        else:
            self.stamp, self._since = stamp, now
        self._settled = now - self._since >= SETTLED_S
        return self._store.list(self._directory) if stamp is not None else []
