"""Engines that failed a batch, kept in Redis for every worker: for a while the others are preferred.

<prefix>:aside:<url>     why, and the engine's start that it is about; ends by itself

An engine may answer for its status and fail every capture all the same: least loaded, it would be given one
batch after the other. One that was started anew since is as good as any.
"""

from __future__ import annotations

import logging

import redis
from pydantic import BaseModel, ConfigDict, ValidationError

from taphouse_extractor.leases import Client

__all__ = ["Aside", "SetAside"]

log = logging.getLogger(__name__)
REASON_LENGTH = 300


class SetAside(BaseModel):
    """Why an engine is set aside, and which of its starts."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    reason: str
    start_id: str | None = None


class Aside:
    """Reads and writes the keys above; without Redis, none is set aside. `for_s` is the while."""

    def __init__(self, client: Client, *, prefix: str, for_s: float = 30.0) -> None:
        self._redis, self._prefix, self._for_ms = client, prefix, int(for_s * 1000)

    def put(self, url: str, start_id: str | None, reason: str) -> None:
        """Set an engine aside. Never raises."""
        said = SetAside(reason=reason[:REASON_LENGTH], start_id=start_id)
        log.warning("engine %s is set aside for %g s: %s", url, self._for_ms / 1000, said.reason)
        try:
            self._redis.set(self._key(url), said.model_dump_json(), px=self._for_ms)
        except redis.RedisError as error:
            log.warning("Redis can't be told so: %s", error)

    def why(self, url: str, start_id: str | None) -> str | None:
        """Why this start of an engine is set aside, or None. Never raises."""
        try:
            found = self._redis.get(self._key(url))
            if found is not None and self._redis.pttl(self._key(url)) > self._for_ms:
                return None  # Redis' clock was set back since: the while is over
            said = SetAside.model_validate_json(found) if found is not None else None
        except (redis.RedisError, ValidationError):
            return None
        return said.reason if said is not None and said.start_id in (None, start_id) else None

    def _key(self, url: str) -> str:
        return f"{self._prefix}:aside:{url}"
