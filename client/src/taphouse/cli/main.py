"""Entry point of the `taphouse` command: where a missing `[cli]` extra becomes one readable line.

Only the standard library is imported here, so that the line can be printed at all.
"""

from __future__ import annotations

import sys

__all__ = ["main"]

_EXTRA = ("typer", "rich", "pydantic_settings")


def main() -> None:
    """Run the command and exit with one of `taphouse.cli.exits.ExitCode`."""
    try:
        from taphouse.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        print(
            f"error: the command needs {error.name}, which is not installed"
            ' · do this: pip install "taphouse[cli]"',
            file=sys.stderr,
        )
        sys.exit(1)
    app(prog_name="taphouse")
