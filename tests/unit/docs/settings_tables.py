"""Writes docs/configuration.md from the settings classes: `python -m tests.unit.docs.settings_tables`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from taphouse.cli.settings import Settings as CommandSettings
from taphouse_extractor.settings import Settings as ExtractorSettings
from taphouse_tap.settings import TapSettings
from taphouse_trainer.settings import Settings as TrainerSettings

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"

HEAD = """# Configuration

Made from the settings classes; a test holds this page against them. Every process reads its settings once,
at its start. Order of force: command line, environment, file, default. A file of such lines is named by
`--env-file` (extractor) or `--settings-file` (trainer); it is that service's alone. An unknown name is
refused at the start, with a value or without: an option, any line of a file, and a variable that begins
with `TAPHOUSE_TAP_`, `TAPHOUSE_EXTRACTOR_` or `TAPHOUSE_TRAINER_`. On Kubernetes every Service whose name
begins with `taphouse-tap`, `taphouse-extractor` or `taphouse-trainer` (also `taphouse-extractor-api`) makes
such variables in the pods of its namespace: set `enableServiceLinks: false`.
"""

PROCESSES: list[tuple[str, str, type[BaseSettings]]] = [
    (
        "Tap (inside vLLM)",
        "Environment only. Layers and the tap's version stand in vLLM's `--additional-config` instead, which "
        "is part of its compile-cache key: `python -m taphouse_tap launch-args` prints the flags.",
        TapSettings,
    ),
    (
        "Extractor (`taphouse-extractor api`, `taphouse-extractor worker`)",
        "Options of the same names with dashes. `ENGINES` is a JSON list that stands in place of "
        "`ENGINE_URL`, `ENGINE_KEY`, `ENGINE_KEY_FILE` and `SLICE_DIR`: see [engines.md](engines.md).",
        ExtractorSettings,
    ),
    ("Trainer (`taphouse-trainer`)", "Options of the same names with dashes.", TrainerSettings),
    ("Command (`taphouse`)", "See [cli.md](cli.md) for its options.", CommandSettings),
]


def kind(annotation: Any) -> str:
    """A type as a reader would say it."""
    if get_origin(annotation) is not None and type(None) in get_args(annotation):
        return " or ".join(kind(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is not None:
        inner = ", ".join(
            repr(part) if isinstance(part, str) else kind(part)
            for part in get_args(annotation)
            if part is not Ellipsis
        )
        name = getattr(get_origin(annotation), "__name__", str(get_origin(annotation)))
        return inner.replace("'", "`") if name == "Literal" else f"{name} of {inner}"
    names = {"Path": "path", "SecretStr": "secret", "AnyHttpUrl": "URL", "EngineSettings": "engine (JSON)"}
    return names.get(annotation.__name__, str(annotation.__name__))


def default(field: FieldInfo) -> str:
    """The default as it would be typed."""
    if field.is_required():
        return "**required**"
    value = field.default
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"`{value}` ({value >> 20} MiB)"
    return f"`{value}`"


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, text, settings in PROCESSES:
        prefix = settings.model_config["env_prefix"]
        parts += [f"## {title}\n\n{text}\n", "| variable | type | default | |\n| --- | --- | --- | --- |"]
        for name, field in settings.model_fields.items():
            what = (field.description or "").replace("|", "\\|")
            parts.append(
                f"| `{prefix}{name.upper()}` | {kind(field.annotation)} | {default(field)} | {what} |"
            )
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
