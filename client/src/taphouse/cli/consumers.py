"""`taphouse consumers`: who reads the ledger, what waits for whom, and forget one that will not go on."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from taphouse.cli.boundary import DefaultCommand
from taphouse.cli.session import Session, with_session

__all__ = ["app"]

app = typer.Typer(
    cls=DefaultCommand, help="List consumers of the ledger (`consumers`), or forget one (`consumers forget`)."
)


@app.command("list")
@with_session()
def list_consumers(session: Session) -> None:
    """List who is registered, how far each is, and what it holds back. Runs without a command."""
    from rich.console import Group

    from taphouse.cli import render, render_consumers

    with session.client() as client:
        status = client.queue()
    facts = [
        *([("unconsumed", render_consumers.unconsumed_text(status.unconsumed))] if status.unconsumed else []),
        *([("retention", render_consumers.retention_text(status.retention))] if status.retention else []),
    ]
    document = status.model_dump(mode="json", include={"consumers", "unconsumed", "retention", "ledger_head"})
    session.show(
        document,
        lambda: Group(
            render_consumers.consumers_table(status, time.time()),
            "",
            render.facts_grid([(name, render.plain(text)) for name, text in facts]),
        ),
    )


@app.command("forget")
@with_session()
def forget(
    session: Session,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Consumers.", show_default=False)],
) -> None:
    """Forget consumers that will not go on, so that nothing waits for them. An admin's.

    One that runs is refused; one that comes back later is registered again, where it stood.
    """
    from taphouse.cli.render import plain
    from taphouse.cli.several import Tried
    from taphouse.cli.units import count
    from taphouse.client.bodies import segment

    for name in names:
        segment(name)
    tried = Tried()
    with session.client() as client:
        gone = tried.each(names, client.forget_consumer)
    told = "\n".join(f"forgot {one.name}, which was at ledger entry {count(one.cursor or 0)}" for one in gone)
    document = {"forgotten": [one.model_dump(mode="json") for one in gone]}
    if gone:
        session.show(document, lambda: plain(told))
    tried.end()
