"""What every service's settings have: nothing misspelt is passed over, and problems name the variable."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
)
from pydantic_settings.sources import DotenvType

__all__ = ["ServiceSettings", "settings_problems"]


class ServiceSettings(BaseSettings):
    """Settings of a class with an `env_prefix` and `extra="forbid"`, for environment and file too."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The usual ones, which say unknown names too: without a value, and the file's without the prefix."""
        file = dotenv_settings.env_file if isinstance(dotenv_settings, DotEnvSettingsSource) else None
        return init_settings, _Environment(settings_cls), _File(settings_cls, file)


class _Environment(EnvSettingsSource):
    def __call__(self) -> dict[str, Any]:
        return {**super().__call__(), **_unknown(self, self.env_prefix.lower())}


class _File(DotEnvSettingsSource):
    """All of its lines are this service's."""

    def __init__(self, settings_cls: type[BaseSettings], file: DotenvType | None) -> None:
        super().__init__(settings_cls, file, dotenv_filtering="only_existing")

    def __call__(self) -> dict[str, Any]:
        return {**super().__call__(), **_unknown(self, "")}


def _unknown(source: EnvSettingsSource, start: str) -> dict[str, str | None]:
    """Names that begin with `start` and are no setting's: in capitals, so that none is taken for a field."""
    known = {source.env_prefix.lower() + name for name in source.settings_cls.model_fields}
    names = (name for name in source.env_vars if name.startswith(start) and name not in known)
    return {name.upper(): source.env_vars[name] for name in names}


def settings_problems(error: ValidationError, settings: type[BaseSettings]) -> list[str]:
    """A line for each problem: `<PREFIX><NAME> (--name): what is wrong`. Values are never quoted."""
    prefix = str(settings.model_config["env_prefix"])
    lines = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
            lines.append(_no_such(path.upper(), prefix.upper(), settings))
            continue
        name = path.lower().removeprefix(prefix.lower())
        where = f"{prefix}{name.upper()} (--{name.replace('_', '-')})" if name else "settings"
        lines.append(f"{where}: {problem['msg']}")
    return lines


def _no_such(name: str, prefix: str, settings: type[BaseSettings]) -> str:
    known = [field.upper() for field in settings.model_fields]
    near = get_close_matches(name.removeprefix(prefix), known, n=1)
    return f"{name}: there is no such setting" + (f"; did you mean {prefix}{near[0]}?" if near else "")
