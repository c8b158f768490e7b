"""Who may capture: the tap's own key, or without one the server's, or everybody where the server has none.

A key of the tap's own means that the customers' key opens nothing here. Keys are compared by digest, in
constant time, and all of them are compared whatever the first result.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from taphouse_tap.api.refusals import WrongKey


class KeyRing:
    """The keys that open the tap's routes; an empty ring is an open door."""

    def __init__(self, own: Iterable[str], server: Iterable[str]) -> None:
        own = [key for key in own if key]
        keys = own or [key for key in server if key]
        self.source = "own key" if own else "server's key" if keys else "open"
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, authorization: str | None) -> None:
        """Check an ``Authorization`` header.

        Raises: `WrongKey`.
        """
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise WrongKey(f"`Authorization: Bearer <key>` is needed ({self.source})")
