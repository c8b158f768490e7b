"""Settings of the extractor: command line > environment (`TAPHOUSE_EXTRACTOR_*`) > env file > default."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from taphouse.logs import LogFormat
from taphouse.service_settings import ServiceSettings
from taphouse_extractor.tokens import Tokens

__all__ = ["EngineSettings", "Settings", "is_loopback"]

MIB, GIB = 1 << 20, 1 << 30
SLICE_DIR = Path("/dev/shm/taphouse")
ONE_ENGINE = ("engine_url", "engine_key", "engine_key_file", "slice_dir")


class EngineSettings(BaseModel):
    """One live vLLM server: where it is, the key of its tap, and its slice directory as we see it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    key: SecretStr | None = None
    key_file: Path | None = None
    slice_dir: Path = SLICE_DIR

    @field_validator("url")
    @classmethod
    def _can_be_shown(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError("an engine's URL is http(s)://host:port, and its key stands apart from it")
        return url.rstrip("/")

    def bearer(self) -> str | None:
        """The key of its tap, None when it has none."""
        return _secret("engine_key", self.key, self.key_file)


class Settings(ServiceSettings):
    """One class for `api` and `worker`: both must agree on store, Redis, queue and engines."""

    model_config = SettingsConfigDict(
        env_prefix="TAPHOUSE_EXTRACTOR_",
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    store: Path = Field(description="Root directory of the store.")
    redis_url: SecretStr = Field(
        default=SecretStr("redis://127.0.0.1:6379/0"),
        description="With user and password where Redis wants them; rediss:// for TLS.",
    )
    redis_url_file: Path | None = Field(default=None, description="File that holds it.")
    log_format: LogFormat = Field(default="text", description="Log lines as text, or as JSON objects.")
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="Collector for OpenTelemetry spans of batches (OTLP over HTTP); needs the extra otel.",
    )
    audit_log: Path | None = Field(
        default=None, description="File for the API's audit lines (JSON); without one they are in its log."
    )
    queue_name: str = Field(
        default="taphouse",
        pattern=r"^[a-z0-9_-]{1,64}$",
        description="Queue and prefix of our keys in Redis.",
    )

    engine_url: str = Field(default="http://127.0.0.1:8000", description="The live vLLM server.")
    engine_key: SecretStr | None = Field(default=None, description="Key of the tap's endpoint.")
    engine_key_file: Path | None = Field(default=None, description="File that holds it.")
    slice_dir: Path = Field(
        default=SLICE_DIR, description="The tap's slice directory, as this process sees it."
    )
    engines: tuple[EngineSettings, ...] = Field(
        default=(), description="Several engines, in place of the four settings above."
    )
    engine_concurrency: int = Field(default=8, ge=1, le=256, description="Rows of a batch in flight at once.")
    engine_timeout_s: float = Field(default=600.0, gt=0, description="Longest wait for one row.")
    engine_patience_s: float = Field(
        default=60.0, ge=0, description="Longest wait of a row while it is full."
    )
    engine_poll_s: float = Field(default=3.0, gt=0, description="How often the API asks for its status.")

    host: str = Field(default="127.0.0.1", description="Address the API listens on.")
    port: int = Field(default=8900, ge=0, le=65535, description="Port of the API; 0 takes a free one.")
    token: SecretStr | None = Field(default=None, description="An admin's bearer token.")
    token_file: Path | None = Field(default=None, description="File that holds it.")
    tokens_file: Path | None = Field(
        default=None, description="JSON file of tokens' digests with their roles; docs/access.md."
    )
    requests_per_minute: int = Field(
        default=6000, ge=0, description="Requests a minute of one token; 0: any number."
    )
    max_jobs_per_token: int = Field(
        default=1000, ge=0, description="Unfinished jobs of one token; 0: any number."
    )
    allow_anonymous: bool = Field(default=False, description="Serve other machines without a token.")
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="Names of its proxies; an API without tokens refuses others than its own."
    )
    open_metrics: bool = Field(default=True, description="/metrics needs no token.")
    dataset_roots: tuple[Path, ...] = Field(
        default=(), description="Directories whose files a job may name by path."
    )
    max_upload_bytes: int = Field(default=16 * GIB, ge=1, description="Bytes of one uploaded dataset.")
    max_rows: int = Field(default=10_000_000, ge=1, description="Rows of one dataset.")
    max_row_bytes: int = Field(default=4 * MIB, ge=2, description="Bytes of one row of a dataset.")
    extract_max_rows: int = Field(default=16, ge=1, description="Rows of one direct extraction.")
    extract_max_tokens: int = Field(default=2048, ge=1, description="max_tokens of a direct extraction.")
    extract_max_bytes: int = Field(default=512 * MIB, ge=1, description="Raw bytes of one direct extraction.")
    extract_concurrency: int = Field(default=4, ge=1, description="Direct extractions at once.")
    max_request_bytes: int = Field(default=8 * MIB, ge=1, description="Body of a JSON request.")
    max_header_bytes: int = Field(
        default=64 << 10,
        ge=4096,
        description="Request line and headers of a request that is still coming in.",
    )
    body_timeout_s: float = Field(
        default=60.0, gt=0, description="A request whose body stands still for so long is refused (408)."
    )
    send_timeout_s: float = Field(
        default=60.0, gt=0, description="A client that takes nothing of its answer for so long is cut off."
    )
    shutdown_s: int = Field(
        default=10, ge=0, description="Longest wait for open requests when the API is told to end."
    )
    max_streams: int = Field(default=64, ge=1, description="Streams of events at once.")
    max_streams_per_token: int = Field(default=16, ge=1, description="Those of one token.")
    stream_s: float = Field(default=300.0, gt=0, description="Longest life of a stream of events.")

    max_queued: int = Field(default=64, ge=1, description="Batches queued in Redis at once, over all jobs.")
    feeder_interval_s: float = Field(default=1.0, gt=0, description="How often the feeder looks.")
    batch_timeout_s: int = Field(default=1800, ge=1, description="Longest run of one batch.")
    lease_ttl_s: float = Field(
        default=15.0, ge=1, description="A worker silent for so long has lost its batch."
    )
    start_grace_s: float = Field(
        default=5.0, gt=0, description="From taking a batch to its first sign of life."
    )
    max_attempts: int = Field(
        default=8, ge=1, description="Runs of a batch that end in a crash or time-out before its rows fail."
    )
    backoff_base_s: float = Field(
        default=1.0, gt=0, description="First wait before a batch is run again; doubles each time."
    )
    backoff_cap_s: float = Field(default=15.0, gt=0, description="Longest such wait.")
    min_free_bytes: int = Field(
        default=GIB, ge=0, description="Extraction pauses when the store has less free."
    )
    max_unconsumed_bytes: int = Field(
        default=0,
        ge=0,
        description="Extraction pauses at so many bytes of shards no consumer's cursor has passed; 0: never.",
    )
    retention: Literal["keep", "consumed", "age"] = Field(
        default="keep", description="Shards are kept, or deleted once consumed, or at an age."
    )
    retention_age_s: float = Field(default=7 * 86400.0, gt=0, description="That age.")

    governor: bool = Field(
        default=True, description="Govern what extraction may use by production's latency."
    )
    governor_tick_s: float = Field(default=0.5, gt=0, le=2.0, description="How often it looks and decides.")
    governor_tolerance: float = Field(
        default=0.05,
        gt=0,
        description="How much slower production's p95 may be than without extraction (0.05: 5%).",
    )
    governor_itl_slo_ms: float | None = Field(
        default=None,
        gt=0,
        description="Production's p95 inter-token latency is held to this instead of its baseline.",
    )
    governor_ttft_slo_ms: float | None = Field(
        default=None,
        gt=0,
        description="Production's p95 time to first token is held to this instead of its baseline.",
    )
    governor_start_ms: float = Field(
        default=1.0,
        gt=0,
        description="Cautious first limit: ms that extraction may add to a step while production is there.",
    )
    governor_step_ms: float = Field(default=0.1, gt=0, description="What a tick may raise the limit by.")
    governor_floor_ms: float = Field(default=0.25, gt=0, description="A limit below this is 0.")
    governor_max_ms: float = Field(default=20.0, gt=0, description="The highest limit.")
    governor_trip_factor: float = Field(
        default=2.0, gt=1, description="Extraction stops at once when production's p95 is so many times over."
    )
    governor_hold_s: float = Field(
        default=30.0, gt=0, description="How long it is stopped then, and when production's requests failed."
    )
    governor_half_life_s: float = Field(
        default=600.0, gt=0, description="Half-life of the latency learned without extraction."
    )
    governor_window_s: float = Field(
        default=3.0,
        gt=0,
        description="Tokens of the last so many seconds are judged; first tokens of 5 times that.",
    )
    governor_min_samples: int = Field(
        default=40, ge=1, description="Tokens to judge by, at least; first tokens: a fourth of that."
    )
    governor_ttl_s: float = Field(
        default=10.0,
        ge=2,
        description="A quota not renewed for so long ends, but a stop: the engine's defaults hold.",
    )

    @model_validator(mode="after")
    def _no_open_door(self) -> Settings:
        engines = self.each_engine()
        for engine in engines:
            engine.bearer()  # a key that can't be sent is said at the start
        if len({engine.url for engine in engines}) < len(engines):
            raise ValueError("engines names one URL twice")
        if urlsplit(self.redis()).scheme not in ("redis", "rediss", "unix"):
            raise ValueError("redis_url begins with none of redis://, rediss:// and unix://")
        if self.tokens().open and not self.allow_anonymous and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is open to other machines: set a token, tokens_file or allow_anonymous"
            )
        return self

    def tokens(self) -> Tokens:
        """Who may come in; raises ValueError where what says so can't be used."""
        return Tokens(self.bearer(), self.tokens_file)

    def bearer(self) -> str | None:
        """The one token of an API without a tokens file: an admin's."""
        return _secret("token", self.token, self.token_file)

    def redis(self) -> str:
        """Where Redis is, with what it asks for."""
        return _secret("redis_url", None, self.redis_url_file) or self.redis_url.get_secret_value()

    def each_engine(self) -> tuple[EngineSettings, ...]:
        """Every engine, whichever way it was named; raises ValueError where both ways were used."""
        if not self.engines:
            key, file, slices = self.engine_key, self.engine_key_file, self.slice_dir
            return (EngineSettings(url=self.engine_url, key=key, key_file=file, slice_dir=slices),)
        both = [name for name in ONE_ENGINE if name in self.model_fields_set]
        if both:
            raise ValueError(f"engines names every engine with its key and slice_dir: take {both[0]} away")
        return self.engines

    def secrets(self) -> list[str]:
        """What may stand in no log."""
        password = urlsplit(self.redis()).password
        keys = [engine.bearer() for engine in self.each_engine()]
        found = (self.bearer(), *keys, password, unquote(password or ""))
        return [secret for secret in found if secret]


def _secret(name: str, value: SecretStr | None, file: Path | None) -> str | None:
    """The secret of a setting or of its file; raises ValueError naming it, without what it holds."""
    try:
        text = value.get_secret_value() if value else file.read_text(encoding="utf-8").strip() if file else ""
    except OSError as error:
        raise ValueError(f"{name}_file: {file} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}_file: {file} is not UTF-8: put one {name} on one line") from error
    if not (text.isascii() and (text.isprintable())):  # HTTP would refuse it, and quote it in its error
        raise ValueError(f"{name} holds line ends or characters beyond ASCII: put one on one line")
    return text or None


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
