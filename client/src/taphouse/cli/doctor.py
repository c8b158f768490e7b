"""`taphouse doctor`: every link, and what to do about the ones that fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from taphouse.cli.boundary import describe
from taphouse.cli.exits import CheckFailed, CliError, ExitCode
from taphouse.cli.session import Session, with_session

if TYPE_CHECKING:
    from taphouse.client import Taphouse
    from taphouse.wire import Check

__all__ = ["doctor"]


class Unreached(CliError):
    """The API itself gave no answer."""

    exit_code = ExitCode.UNAVAILABLE


@with_session()
def doctor(
    session: Session,
    canary: Annotated[
        bool,
        typer.Option(
            "--canary", help="Have every engine run its canary now: a few tokens, captured and compared."
        ),
    ] = False,
) -> None:
    """Check every link: the API, and from there engine, slice mount, Redis, store, workers, trainer.

    Exits with 0 when all is well, 3 when the API can't be reached, 6 when a check failed.
    """
    from taphouse.cli import render
    from taphouse.cli.terminal import items_bar

    with session.client() as client, items_bar(session.err, "checking every link", None):
        reached, checks = _checks(str(session.settings.url), client, canary=canary)
    failed = [check for check in checks if not check.ok]
    document = {"ok": not failed, "checks": [check.model_dump(mode="json") for check in checks]}
    session.show(document, lambda: render.checks_table(checks))
    if not reached:
        raise Unreached(failed[0].detail, failed[0].advice)
    if failed:
        names = ", ".join(check.check for check in failed)
        raise CheckFailed(
            f"{len(failed)} of {len(checks)} checks failed: {names}", "see the advice beside them"
        )


def _checks(url: str, client: Taphouse, *, canary: bool) -> tuple[bool, list[Check]]:
    """Whether the API answers, and all checks in the order of the links."""
    from taphouse import __version__
    from taphouse.errors import TaphouseError
    from taphouse.wire import Check

    try:
        health = client.health()
    except TaphouseError as error:
        return False, [_failed("api", error)]
    checks = [Check(check="api", ok=True, detail=f"answers at {url}, version {health.version}")]
    if health.version != __version__:
        checks.append(
            Check(
                check="version",
                ok=False,
                detail=f"the service is {health.version}, this command is {__version__}",
                advice=f'pip install "taphouse[cli]=={health.version}"',
            )
        )
    try:
        checks += client.doctor(canary=canary)
    except TaphouseError as error:
        checks.append(_failed("api's own checks", error))
    return True, checks


def _failed(name: str, error: Exception) -> Check:
    from taphouse.errors import Unavailable
    from taphouse.wire import Check

    message, advice, _ = describe(error)
    if isinstance(error, Unavailable) and not error.advice:  # whose advice would be to run this
        advice = "see the log of the service, and of what stands before it"
    return Check(check=name, ok=False, detail=message, advice=advice)
