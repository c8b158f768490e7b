"""What extraction may use of the engine now: one small file in the start's directory.

An API server writes it (``PUT /v1/hidden_states/quota``), every engine core reads it a few times a second.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from taphouse.slices import read_text, write_atomically

FILE = "quota.json"
NOTE_LENGTH = 200


@dataclass(frozen=True)
class Quota:
    """Bounds on extraction. Without a scheduler of ours in the engine only `stopped` has an effect.

    `busy_ms`: milliseconds that extraction may add to a step while production runs or waits.
    `quiet_ms`: milliseconds that a step may take while no production is there.
    `slots`: extraction requests that run at once. `kv_share`: share of the KV cache that they may reserve.
    `stopped`: nothing of extraction runs. `note` says to people who set it, and why.
    `expires_at`: Unix seconds after which the defaults are in force again; None for never.
    """

    busy_ms: float
    quiet_ms: float
    slots: int
    kv_share: float
    stopped: bool = False
    note: str = ""
    expires_at: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The quota as status, record and file have it."""
        return asdict(self)


def changed(default: Quota, fields: Mapping[str, Any], expires_at: float | None) -> Quota:
    """`default` with `fields` in their places.

    Raises: `ValueError` that names the field, for one that is not there, of another type, or out of bounds.
    """
    if unknown := sorted(set(fields) - set(_CHECKS)):
        raise ValueError(f"{unknown[0]}: no such field; there are {', '.join(_CHECKS)}")
    for name, value in fields.items():
        ok, expected = _CHECKS[name]
        if not ok(value):
            raise ValueError(f"{name}: {value!r:.80} is not {expected}")
    return replace(default, **fields, expires_at=expires_at)


def write_quota(start_dir: Path, quota: Quota) -> None:
    """Put `quota` in force in every engine core of the start."""
    write_atomically(start_dir / FILE, json.dumps(quota.as_dict()))


def read_quota(start_dir: Path, default: Quota, now: float) -> Quota:
    """The quota in force at `now` (Unix seconds): `default` where none was written, or it has expired.

    Raises: `ValueError` for a file that is none of ours.
    """
    try:
        fields = json.loads(read_text(start_dir / FILE))
    except FileNotFoundError:
        return default
    if not isinstance(fields, dict):
        raise ValueError(f"{FILE} holds no JSON object")
    expires_at = fields.pop("expires_at", None)
    if expires_at is not None and not _number(0, math.inf)(expires_at):
        raise ValueError(f"expires_at: {expires_at!r:.80} is no time")
    if expires_at is not None and expires_at <= now:
        return default
    return changed(default, fields, expires_at)


def _number(low: float, high: float) -> Any:
    return lambda value: (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
    )


_CHECKS: dict[str, tuple[Any, str]] = {
    "busy_ms": (_number(0, 1e6), "a number of milliseconds from 0 to 1,000,000"),
    "quiet_ms": (_number(0, 1e6), "a number of milliseconds from 0 to 1,000,000"),
    "slots": (
        lambda value: type(value) is int and 0 <= value <= 1 << 20,
        "a whole number of requests from 0 to 1,048,576",
    ),
    "kv_share": (_number(0, 1), "a number from 0 to 1"),
    "stopped": (lambda value: isinstance(value, bool), "true or false"),
    "note": (
        lambda value: isinstance(value, str) and len(value) <= NOTE_LENGTH,
        f"a text of at most {NOTE_LENGTH} characters",
    ),
}
