"""The command's settings: options > environment (`TAPHOUSE_*`) > configuration file > defaults.

The configuration file is TOML with the field names below at its top level, found at `--config`,
`TAPHOUSE_CONFIG` or `$XDG_CONFIG_HOME/taphouse/config.toml` (`~/.config/taphouse/config.toml`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import AnyHttpUrl, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from taphouse.cli.exits import UsageProblem
from taphouse.cli.words import told

__all__ = ["Settings", "load_settings"]


class Settings(BaseSettings):
    """Where the service is and how to talk to it."""

    model_config = SettingsConfigDict(
        env_prefix="TAPHOUSE_", frozen=True, extra="forbid", env_ignore_empty=True
    )

    url: AnyHttpUrl = Field(default=AnyHttpUrl("http://127.0.0.1:8900"), description="The extractor's API.")
    token: SecretStr | None = Field(default=None, description="Bearer token.")
    token_file: Path | None = Field(default=None, description="File whose content is the bearer token.")
    timeout_s: float = Field(default=30.0, gt=0, le=1e6, description="Seconds to wait for an answer.")
    config: Path | None = Field(default=None, description="Configuration file.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """One merged source, so that a token from a higher place also outranks a token file from a lower."""
        options, environment = init_settings(), env_settings()
        named = options.get("config") or environment.get("config")
        file = TomlConfigSettingsSource(settings_cls, _config_path(named))()
        merged: dict[str, Any] = {}
        for layer in (options, environment, file):
            has_token = "token" in merged or "token_file" in merged
            merged.update(
                {
                    k: v
                    for k, v in layer.items()
                    if k not in merged and not (has_token and k.startswith("token"))
                }
            )
        return (InitSettingsSource(settings_cls, init_kwargs=merged),)

    def bearer(self) -> str | None:
        """The token to send, or None.

        Raises:
            UsageProblem: the token file can't be read or is empty, or the token is none that HTTP can carry.
        """
        token = self._token()
        if token is not None and not (token.isascii() and token.isprintable()):
            raise UsageProblem(
                "the token holds line ends or characters beyond ASCII",
                "give the service's token, on one line",
            )
        return token

    def _token(self) -> str | None:
        if self.token is not None:
            token = self.token.get_secret_value().strip()
            if not token:
                raise UsageProblem("the token is empty", "give the service's token, or none")
            return token
        if self.token_file is None:
            return None
        try:
            token = self.token_file.expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageProblem(
                f"the token file {self.token_file} can't be read: {error}",
                "give a readable file with --token-file",
            ) from error
        if not token:
            raise UsageProblem(f"the token file {self.token_file} is empty", "write the token into it")
        return token


def _config_path(named: object) -> Path | None:
    if named:
        path = Path(str(named)).expanduser()
        if not path.is_file():
            raise UsageProblem(
                f"there is no configuration file {path}", "correct --config or TAPHOUSE_CONFIG"
            )
        return path
    home = _ConfigHome().xdg_config_home or Path.home() / ".config"
    default = home / "taphouse" / "config.toml"
    return default if default.is_file() else None


class _ConfigHome(BaseSettings):
    """Where this user keeps configuration files."""

    xdg_config_home: Path | None = None


def load_settings(options: dict[str, Any]) -> Settings:
    """Settings from the options that were given (None counts as not given), environment and file.

    Raises:
        UsageProblem: a value is wrong, unknown, or the configuration file can't be read.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        settings = Settings(**given)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        raise UsageProblem(
            f"setting {name}: {told(first)}",
            f"correct {_OPTIONS.get(name, 'it')}, TAPHOUSE_{name.upper()} or the configuration file",
        ) from error
    except ValueError as error:  # a TOML file that doesn't parse
        raise UsageProblem(
            f"the configuration file can't be read: {error}", "correct it; it is TOML"
        ) from error
    if settings.token is not None and settings.token_file is not None:
        raise UsageProblem("both a token and a token file are given", "give one of them")
    return settings


_OPTIONS = {"url": "--api-url", "token_file": "--token-file", "timeout_s": "--timeout", "config": "--config"}
