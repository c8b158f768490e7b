"""Exit codes of the command and the errors that lead to them.

CliError
├── UsageProblem        2   an option, a setting or an input file is wrong
├── PartialFailure      5   the work ended, and some rows made no sample
├── CheckFailed         6   `shards verify` or `doctor` found something
└── JobStopped          7   a job that was waited for failed or was cancelled
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["CheckFailed", "CliError", "ExitCode", "JobStopped", "PartialFailure", "UsageProblem"]


class ExitCode(IntEnum):
    """What the command's exit status means; `meaning` is what `--help` says."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    UNAVAILABLE = 3
    REFUSED = 4
    PARTIAL = 5
    CHECK_FAILED = 6
    JOB_STOPPED = 7
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """One line for people."""
        return _MEANING[self]


_MEANING = {
    ExitCode.OK: "it worked",
    ExitCode.UNEXPECTED: "an error nobody expected (try again with --debug)",
    ExitCode.USAGE: "wrong arguments, settings or input file; nothing was sent",
    ExitCode.UNAVAILABLE: "the service can't be reached, is busy or not ready: try again later",
    ExitCode.REFUSED: "the service refused: token, unknown id, or a value it doesn't accept",
    ExitCode.PARTIAL: "rows failed, and --fail-on-error was given; or samples were left out",
    ExitCode.CHECK_FAILED: "`shards verify`, `doctor` or a checksum found something wrong",
    ExitCode.JOB_STOPPED: "the job that was waited for failed or was cancelled",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
}


class CliError(Exception):
    """An error that is told in one line: what was wrong, and what to do about it."""

    exit_code = ExitCode.UNEXPECTED

    def __init__(self, message: str, advice: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice


class UsageProblem(CliError):
    """Arguments, settings or an input file are wrong; nothing was sent."""

    exit_code = ExitCode.USAGE


class PartialFailure(CliError):
    """The work ended and some rows made no sample."""

    exit_code = ExitCode.PARTIAL


class CheckFailed(CliError):
    """A verification or a link failed."""

    exit_code = ExitCode.CHECK_FAILED


class JobStopped(CliError):
    """A job that was waited for failed or was cancelled."""

    exit_code = ExitCode.JOB_STOPPED
