"""`taphouse governor`: what extraction may use while production is there, and an operator's word on it."""

from __future__ import annotations

from typing import Annotated

import typer

from taphouse.cli.exits import UsageProblem
from taphouse.cli.session import Session, with_session

__all__ = ["governor"]

ACTIONS = ("auto", "pin", "stop")
HIGHEST_MS = 60_000.0


@with_session()
def governor(
    session: Session,
    action: Annotated[
        str | None,
        typer.Argument(
            metavar="ACTION",
            help="auto: by production's latency; pin: keep a limit; stop: no extraction. None: show it.",
            show_default=False,
        ),
    ] = None,
    limit_ms: Annotated[
        float | None,
        typer.Argument(
            metavar="MS",
            help="With pin: ms that extraction may add to a step while production is there; 0 is nothing.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show the governor, or tell it what to do: auto, pin MS, stop. An order is kept through restarts."""
    from taphouse.cli import render_governor
    from taphouse.wire import GovernorMode

    _check(action, limit_ms)
    with session.client() as client:
        if action is None:
            state = client.governor()
        else:
            modes = (GovernorMode.AUTO, GovernorMode.PINNED, GovernorMode.STOPPED)
            state = client.govern(modes[ACTIONS.index(action)], limit_ms)
    session.show(state, lambda: render_governor.governor_view(state))


def _check(action: str | None, limit_ms: float | None) -> None:
    """Raise `UsageProblem` for what makes no sense."""
    if action is not None and action.startswith("-"):
        raise UsageProblem(f"No such option: {action}", "see `taphouse governor --help`")
    if action is not None and action not in ACTIONS:
        raise UsageProblem(f"there is no action {action!r}", "give auto, pin or stop")
    if action != "pin" and limit_ms is not None:
        raise UsageProblem(f"{action} takes no limit", "give one with pin: `taphouse governor pin 5`")
    if action == "pin" and limit_ms is None:
        raise UsageProblem("pin needs a limit", "give it in milliseconds: `taphouse governor pin 5`")
    if limit_ms is not None and not 0 <= limit_ms <= HIGHEST_MS:
        raise UsageProblem(f"{limit_ms:g} ms is no limit", f"give 0 to {HIGHEST_MS:g}")
