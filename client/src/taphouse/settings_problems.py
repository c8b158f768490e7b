"""What is wrong with a process's settings, in lines that name the variable."""

from __future__ import annotations

from pydantic import ValidationError

__all__ = ["settings_problems"]


def settings_problems(error: ValidationError, prefix: str) -> list[str]:
    """A line for each problem: `<PREFIX><NAME> (--name): what is wrong`. Values are never quoted."""
    lines = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        name = ".".join(str(part) for part in problem["loc"]).lower().removeprefix(prefix.lower())
        where = f"{prefix}{name.upper()} (--{name.replace('_', '-')})" if name else "settings"
        lines.append(f"{where}: {problem['msg']}")
    return lines
