"""The one place where an error becomes a line on stderr and an exit code."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from taphouse.cli.clean import clean
from taphouse.cli.exits import CliError, ExitCode
from taphouse.cli.streams import discard, flush_last, open_closed

__all__ = ["Boundary", "DefaultCommand", "describe", "say"]

_ClickException: type[Exception] = typer.BadParameter.__mro__[2]
"""Base of all usage errors, wherever the installed typer keeps click."""


ORDER = (
    "extract",
    "enqueue",
    "jobs",
    "queue",
    "shards",
    "samples",
    "consumers",
    "watch",
    "governor",
    "doctor",
)


DEBUG = "run it again with --debug and report it"


class Boundary(TyperGroup):
    """The root command: runs the rest, and answers for whatever comes out of it."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run with `args` (default: the process's) and exit the process."""
        given = sys.argv[1:] if args is None else list(args)
        open_closed()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a locale without some sign shows another, and goes on
                stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
        main = super().main

        def run() -> int:
            code = main(given, prog_name, complete_var, False, windows_expand_args, **extra)
            sys.stdout.flush()
            return code if isinstance(code, int) else ExitCode.OK

        try:
            code = _guarded(run, debug="--debug" in given)
        finally:
            flush_last()
        if not standalone_mode:
            return code
        sys.exit(code)

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order people meet them."""
        return sorted(
            super().list_commands(ctx), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)
        )


_NO_TEXT = {chr(0xDC00 + byte) for byte in range(0x80, 0x100)}
"""How Python hands over bytes of an argument that are no UTF-8 (PEP 383)."""


class DefaultCommand(TyperGroup):
    """A group whose `list` runs when the first word names no command: `jobs`, `jobs ID`, `jobs -o json`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `list` in front of arguments that don't start with a command's name."""
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def _guarded(run: Callable[[], int], debug: bool) -> int:
    try:
        return run()
    except BrokenPipeError:  # of stdout: what is written to stderr survives that
        discard(sys.stdout)
        return ExitCode.OK
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich and typer exit with 1 then
            discard(sys.stdout)
            return ExitCode.OK
        raise
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except Exception as error:
        if debug:
            _tell(traceback.format_exc())
        message, advice, code = describe(error)
        _say(message, "report it" if debug and advice == DEBUG else advice)
        return code


def describe(error: Exception) -> tuple[str, str | None, ExitCode]:
    """Message, advice and exit code of an error of any kind."""
    if isinstance(error, CliError):
        return error.message, error.advice, error.exit_code
    if isinstance(error, _ClickException):
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "taphouse"
        return error.format_message(), f"see `{command} --help`", ExitCode.USAGE  # type: ignore[attr-defined]
    from taphouse import errors

    if isinstance(error, errors.TaphouseError):
        message = getattr(error, "message", None) or str(error)
        return message, error.advice or _advice(error), _code(error)
    if isinstance(error, OSError):
        return str(error), None, ExitCode.UNEXPECTED
    if isinstance(error, UnicodeEncodeError) and error.object[error.start] in _NO_TEXT:
        return "an argument holds bytes that are no UTF-8", "write it in UTF-8", ExitCode.USAGE
    return (
        f"unexpected {type(error).__name__}: {error}",
        DEBUG,
        ExitCode.UNEXPECTED,
    )


def _code(error: Exception) -> ExitCode:
    """The table from the client's errors to exit codes."""
    from taphouse import errors

    if isinstance(error, errors.ApiError) and not error.status:  # refused here: nothing was sent
        return ExitCode.USAGE
    table: tuple[tuple[type[Exception] | tuple[type[Exception], ...], ExitCode], ...] = (
        ((errors.Unreachable, errors.TooBusy, errors.Unavailable), ExitCode.UNAVAILABLE),
        (errors.ApiError, ExitCode.REFUSED),
        (errors.ShardError, ExitCode.CHECK_FAILED),
        (errors.PartialFailure, ExitCode.PARTIAL),
    )
    return next((code for kind, code in table if isinstance(error, kind)), ExitCode.UNEXPECTED)


def _advice(error: Exception) -> str | None:
    """What to do about an error of the service that brings no advice itself."""
    from taphouse import errors

    if getattr(error, "status", None) == 403:
        return _FORBIDDEN
    param = (getattr(error, "param", None) or "").partition(".")[0].partition(" ")[0]
    table: tuple[tuple[type[Exception], dict[str, str], str], ...] = (
        (errors.Unauthorized, {}, "give the service's token with --token-file or TAPHOUSE_TOKEN"),
        (errors.NotFound, _WHERE, "check --api-url, and that this command is of the service's version"),
        (errors.BodyTimeout, {}, "send it from a file, if what makes it pauses"),
        (errors.Conflict, _CONFLICT, "look at where it stands with `taphouse jobs`"),
        (errors.TooLarge, _TOO_LARGE, "send less at once"),
        (errors.BadRequest, _WRONG, "correct it: see `--help`"),
        (errors.TooBusy, {}, "try again a little later"),
        (errors.Unavailable, {}, "run `taphouse doctor`"),
        (errors.TruncatedShard, {}, "try again"),
        (errors.ChecksumMismatch, {}, "try again"),
    )
    return next((by.get(param, advice) for kind, by, advice in table if isinstance(error, kind)), None)


_FORBIDDEN = (
    "give a token that may: with the role read it looks and fetches, with submit it also enqueues, extracts "
    "and acts on jobs, with admin it may do all; one tenant's never sees what tells of all tenants"
)
_WHERE = {
    "consumer": "see who there is with `taphouse consumers`",
    "job_id": "see what there is with `taphouse jobs`",
    "name": "see what there is with `taphouse shards`",
}
_CONFLICT = {
    "again": "add --again for another job of them",
    "consumer": "see how far it is with `taphouse consumers`",
    "Idempotency-Key": "send it again when that has ended",
    "mode": "set TAPHOUSE_EXTRACTOR_GOVERNOR=true where the API starts",
}
_TOO_LARGE = {
    "rows": "queue them with `taphouse enqueue`",
    "line": "shorten that row, or leave it out",
    "body": "queue it in parts",
}
_WRONG = {
    "rows": "correct that row",
    "line": "correct that row",
    "Idempotency-Key": "give another --key",
    "path": "name a file below the service's dataset roots, or upload it: leave --server-path out",
}
"""By the first word of `param`, which names what of a request is wrong."""


def say(error: Exception) -> None:
    """Tell an error that doesn't end the command: one line on stderr."""
    _say(*describe(error)[:2])


def _say(message: str, advice: str | None) -> None:
    line = " ".join(message.split())
    if advice:
        line = f"{line} · do this: {' '.join(advice.split())}"
    _tell(f"error: {line}")


def _tell(text: str) -> None:
    """Write to stderr, if anybody reads it."""
    try:
        print(clean(text), file=sys.stderr, flush=True)
    except BrokenPipeError:
        discard(sys.stderr)
