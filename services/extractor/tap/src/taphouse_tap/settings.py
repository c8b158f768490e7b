"""The tap's settings: environment variables `TAPHOUSE_TAP_*`, the same for API servers and worker ranks.

Layers and the tap's version are not here: they stand in vLLM's `--additional-config`, which is part of its
compile-cache key (`python -m taphouse_tap launch-args` prints the flags).
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from taphouse_tap.quota import Quota

_PREFIX = "TAPHOUSE_TAP_"
_GIB = 1 << 30


class TapSettings(BaseSettings):
    """What can be set of the tap; every limit is an upper bound that answers 413, 422 or 429 when reached."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, extra="forbid")

    slice_dir: Path = Field(
        default=Path("/dev/shm/taphouse"), description="Where slices lie; 0700, ours alone."
    )
    slice_dir_limit_bytes: PositiveInt = Field(
        default=8 * _GIB, description="Bytes reserved at most, all ranks."
    )
    slice_ttl_s: float = Field(
        default=600.0, gt=0, description="Seconds after which an untouched capture is removed."
    )
    pinned_limit_bytes: PositiveInt = Field(
        default=_GIB, description="Host memory for rows on their way, a rank."
    )
    api_key: SecretStr | None = Field(
        default=None, description="Key of the endpoint; without it, the server's."
    )
    api_key_file: Path | None = Field(default=None, description="File that holds the endpoint's key.")
    max_in_flight: PositiveInt = Field(default=256, description="Captures at a time; more answer 429.")
    max_body_bytes: PositiveInt = Field(default=16 << 20, description="Largest request body.")
    max_prompts: PositiveInt = Field(default=64, description="Most prompts in one request.")
    stream_limit_bytes: PositiveInt = Field(default=_GIB, description="Largest streamed answer.")
    max_bytes_per_s: NonNegativeInt = Field(
        default=0, description="Bytes of states captured a second, all ranks, each API server; 0: no bound."
    )
    proof_interval_s: float = Field(
        default=60.0, ge=0, description="Seconds between captures proven to be the engine's; 0 proves none."
    )
    busy_ms: float = Field(
        default=2.0,
        ge=0,
        description="Milliseconds extraction may add to a step beside production.",
    )
    quiet_ms: float = Field(
        default=100.0, ge=0, description="Milliseconds a step may take while there is no production."
    )
    slots: PositiveInt = Field(default=16, description="Extraction requests that run at once.")
    kv_share: float = Field(
        default=0.25, gt=0, le=1, description="Share of the KV cache that extraction may reserve."
    )
    allow_unknown_version: bool = Field(
        default=False, description="Capture on engine versions that never ran here."
    )

    def quota(self) -> Quota:
        """What extraction may use while nobody sets a quota."""
        return Quota(
            busy_ms=self.busy_ms,
            quiet_ms=self.quiet_ms,
            slots=self.slots,
            kv_share=self.kv_share,
            note="the engine's settings",
        )

    def key(self) -> str | None:
        """Return the endpoint's own key, from `api_key` or `api_key_file`; None if neither is set.

        Raises `ValueError` for an empty file, which would leave the endpoint open, and `OSError`.
        """
        if self.api_key is not None:
            return self.api_key.get_secret_value() or None
        if self.api_key_file is None:
            return None
        key = self.api_key_file.read_text(encoding="utf-8").strip()
        if not key:
            raise ValueError(f"{self.api_key_file} is empty: put the endpoint's key into it")
        return key


def load_settings() -> TapSettings:
    """Read the settings; raise `ValueError` for a value that doesn't fit or a variable that doesn't exist."""
    known = {f"{_PREFIX}{name}".upper() for name in TapSettings.model_fields}
    unknown = sorted(
        name for name in os.environ if name.upper().startswith(_PREFIX) and name.upper() not in known
    )
    if unknown:
        raise ValueError(f"unknown settings {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return TapSettings()
