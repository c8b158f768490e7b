"""`taphouse samples`: rows of a person or a tenant, by id: find them, delete them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from taphouse.cli.exits import PartialFailure, UsageProblem
from taphouse.cli.session import Session, with_session

if TYPE_CHECKING:
    from taphouse.wire import SampleQuery

__all__ = ["app"]

app = typer.Typer(help="Find (`samples find`) or delete (`samples delete`) the rows of a person or a tenant.")

SHOWN = 20
"""Problems."""

Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID...", help="Ids of rows or samples.", show_default=False),
]
User = Annotated[
    str | None, typer.Option("--user", help="All rows whose field `user` is this.", show_default=False)
]
Tenant = Annotated[
    str | None, typer.Option("--tenant", help="All rows of this tenant's jobs.", show_default=False)
]


@app.command("find")
@with_session()
def find(session: Session, ids: Ids = None, user: User = None, tenant: Tenant = None) -> None:
    """Find rows by id, user or tenant, and the shards that hold their samples. Needs an admin's token."""
    from taphouse.cli import render_samples

    query = _query(ids, user, tenant)
    with session.client() as client:
        found = client.find_samples(query)
    session.show(found, lambda: render_samples.found_table(found))
    _check(found.problems, "searched")


@app.command("delete")
@with_session()
def delete(
    session: Session,
    ids: Ids = None,
    user: User = None,
    tenant: Tenant = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; there is no way back.")] = False,
) -> None:
    """Delete rows, and their samples from shards, for good. Without --yes: only say how many there are."""
    from taphouse.cli import render_samples

    query = _query(ids, user, tenant)
    with session.client() as client:
        if not yes:
            found = client.find_samples(query)
            _check(found.problems, "searched")
            rows = found.rows
            raise UsageProblem(f"{rows} rows would be deleted for good", "give --yes to delete them")
        deleted = client.delete_samples(query)
    session.show(deleted, lambda: render_samples.deleted_view(deleted))
    _check(deleted.problems, "deleted from")


def _check(problems: list[str], what: str) -> None:
    if problems:
        more = f"\nand {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise PartialFailure(
            f"not all could be {what}:\n" + "\n".join(problems[:SHOWN]) + more, "mend these, and ask again"
        )


def _query(ids: list[str] | None, user: str | None, tenant: str | None) -> SampleQuery:
    from pydantic import ValidationError

    from taphouse.wire import SampleQuery

    named = [
        what for what, value in (("ids", ids), ("--user", user), ("--tenant", tenant)) if value is not None
    ]
    if len(named) > 1:
        raise UsageProblem(f"{' and '.join(named)} were given", "give only one of them")
    try:
        return SampleQuery(ids=ids or None, user=user, tenant=tenant)
    except ValidationError as error:
        raise UsageProblem(
            "this names no rows", "give ids, or --user, or --tenant: one of the three, none of them empty"
        ) from error
