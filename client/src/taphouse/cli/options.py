"""The options every command has. They may stand before the command's name too; behind it they win."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "CONNECTION",
    "OUTPUT",
    "ApiUrl",
    "Config",
    "Debug",
    "Output",
    "OutputForm",
    "Timeout",
    "Token",
    "TokenFile",
]

PANEL = "Output and connection"


class OutputForm(str, Enum):
    """How an answer is written to stdout."""

    TABLE = "table"
    JSON = "json"


def _option(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=PANEL, show_default=False)


Output = Annotated[
    OutputForm | None,
    _option("--output", "-o", help="table (default) or json: one document, nothing else on stdout."),
]
Debug = Annotated[bool, _option("--debug", help="Show tracebacks.")]
ApiUrl = Annotated[
    str | None, _option("--api-url", metavar="URL", help="The extractor's API. Also TAPHOUSE_URL.")
]
Token = Annotated[str | None, _option("--token", metavar="TOKEN", help="Bearer token. Also TAPHOUSE_TOKEN.")]
TokenFile = Annotated[
    Path | None,
    _option("--token-file", metavar="FILE", help="File that holds the token. Also TAPHOUSE_TOKEN_FILE."),
]
Timeout = Annotated[
    float | None,
    _option("--timeout", metavar="SECONDS", help="Seconds to wait for an answer. Also TAPHOUSE_TIMEOUT_S."),
]
Config = Annotated[
    Path | None,
    _option(
        "--config",
        metavar="FILE",
        help="Configuration file (TOML). Also TAPHOUSE_CONFIG; default ~/.config/taphouse/config.toml.",
    ),
]

OUTPUT: dict[str, Any] = {"output": Output, "debug": Debug}
CONNECTION: dict[str, Any] = {
    "api_url": ApiUrl,
    "token": Token,
    "token_file": TokenFile,
    "timeout_s": Timeout,
    "config": Config,
}
