"""Extraction's quota as this API server sees and sets it, and what the engine cores' schedulers say."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from taphouse.slices import read_text
from taphouse_tap.api.refusals import Busy, InvalidField, MalformedBody
from taphouse_tap.quota import Quota, changed, read_quota, write_quota

FLAG = "taphouse_tap.scheduler.two_class_scheduler"
"""What vLLM's `--scheduler-cls` is to be."""

TTL_S = 30.0
"""How long a quota is in force when its writer does not say."""

STOPPED_RETRY_AFTER_S = 5
_READ_S = 0.1
_STALE_S = 15.0


class Isolation:
    """The quota file and the schedulers' records of one start."""

    def __init__(self, start_dir: Path, default: Quota, engines: int = 1) -> None:
        """`default` is in force while nothing was set; `engines` data-parallel engines run on this host."""
        self._start_dir, self._default, self._engines = start_dir, default, engines
        self._read: tuple[float, Quota] = (0.0, default)

    def quota(self) -> Quota:
        """The quota in force, read at most ten times a second."""
        read_at, quota = self._read
        if time.monotonic() - read_at > _READ_S:
            try:
                quota = read_quota(self._start_dir, self._default, time.time())
            except (OSError, ValueError):
                quota = self._default
            self._read = (time.monotonic(), quota)
        return quota

    def set(self, body: bytes) -> Quota:
        """Put a quota in force from the JSON of ``PUT /v1/hidden_states/quota``.

        Raises: `MalformedBody`, `InvalidField`.
        """
        try:
            fields = json.loads(body or b"{}")
        except ValueError as error:
            raise MalformedBody(f"the body is no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise MalformedBody("the body is not a JSON object")
        ttl_s = fields.pop("ttl_s", TTL_S)
        if ttl_s is not None and not (type(ttl_s) in (int, float) and 0 < ttl_s <= 1e9):
            raise InvalidField("ttl_s: a number of seconds above 0, or null for ever", param="ttl_s")
        try:
            quota = changed(self._default, fields, None if ttl_s is None else time.time() + ttl_s)
        except ValueError as error:
            raise InvalidField(str(error), param=str(error).split(":", 1)[0]) from error
        write_quota(self._start_dir, quota)
        self._read = (time.monotonic(), quota)
        return quota

    def check(self) -> None:
        """Raise `Busy` while extraction is stopped."""
        quota = self.quota()
        if quota.stopped:
            raise Busy(
                f"extraction is stopped ({quota.note or 'no reason given'}); ask again later",
                retry_after=STOPPED_RETRY_AFTER_S,
            )

    def status(self) -> dict[str, Any]:
        """The section `isolation` of the status: scheduler, quota, and its steps summed over the engines."""
        records = self._records()
        steps: Counter[str] = Counter()
        for record in records:
            steps.update({name: int(count) for name, count in (record.get("steps") or {}).items()})
        scheduler, reason = self._scheduler(records)
        return {
            "scheduler": scheduler,
            "reason": reason,
            "quota": self.quota().as_dict(),
            "steps": dict(steps),
            "running": sum(int(record.get("running") or 0) for record in records),
            "held": sum(int(record.get("held") or 0) for record in records),
            "quiet": all(bool(record.get("quiet")) for record in records),
            "engines": records,
        }

    def _scheduler(self, records: list[dict[str, Any]]) -> tuple[str, str | None]:
        if not records:
            return "absent", "the engine runs vLLM's own scheduler: launch it with --scheduler-cls " + FLAG
        for record in records:
            if record.get("scheduler") != "on":
                return "off", str(record.get("reason"))
            if time.time() - float(record.get("updated_at") or 0.0) > _STALE_S:
                return "off", f"the scheduler of engine {record.get('dp_rank')} has not reported lately"
        if len(records) < self._engines:
            return (
                "off",
                f"{self._engines - len(records)} of {self._engines} engines have no scheduler of ours",
            )
        return "on", None

    def _records(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self._start_dir.glob("scheduler-d*.json")):
            try:
                record = json.loads(read_text(path))
            except (OSError, ValueError):
                continue
            if isinstance(record, dict):
                found.append(record)
        return found
