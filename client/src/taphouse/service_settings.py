"""What every service's settings have: nothing misspelt is passed over, and problems name the variable."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource

__all__ = ["ServiceSettings", "settings_problems"]


class ServiceSettings(BaseSettings):
    """Settings of a class with an `env_prefix` and `extra="forbid"`, which holds for the environment too."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The usual ones; the environment's says unknown names, as the file's does."""
        return init_settings, _Environment(settings_cls), dotenv_settings


class _Environment(EnvSettingsSource):
    def __call__(self) -> dict[str, Any]:
        prefix = self.env_prefix.lower()
        known = {prefix + name for name in self.settings_cls.model_fields}
        ours = {name: value for name, value in self.env_vars.items() if name.startswith(prefix)}
        return {**super().__call__(), **{name: ours[name] for name in ours.keys() - known}}


def settings_problems(error: ValidationError, settings: type[BaseSettings]) -> list[str]:
    """A line for each problem: `<PREFIX><NAME> (--name): what is wrong`. Values are never quoted."""
    prefix = str(settings.model_config["env_prefix"])
    lines = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
            lines.append(_unknown(path.upper(), [prefix + name.upper() for name in settings.model_fields]))
            continue
        name = path.lower().removeprefix(prefix.lower())
        where = f"{prefix}{name.upper()} (--{name.replace('_', '-')})" if name else "settings"
        lines.append(f"{where}: {problem['msg']}")
    return lines


def _unknown(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"{name}: there is no such setting" + (f"; did you mean {near[0]}?" if near else "")
