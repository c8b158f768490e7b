"""`taphouse shards`: list the ledger, fetch shards, verify files, look inside one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from taphouse.cli.boundary import DefaultCommand
from taphouse.cli.exits import CheckFailed, UsageProblem
from taphouse.cli.session import Session, with_session

if TYPE_CHECKING:
    from taphouse.client import Taphouse
    from taphouse.shards import Report
    from taphouse.wire import ShardInfo

__all__ = ["app"]

PAGE = 100
SUFFIX = ".safetensors"

app = typer.Typer(
    cls=DefaultCommand,
    help="List shards (`shards`), fetch (`get`), delete (`prune`), check (`verify`) or show (`show`) them.",
)


@app.command("list")
@with_session()
def list_shards(
    session: Session,
    after: Annotated[
        int | None,
        typer.Option(
            min=0, help="Entries after this sequence number. Default: the newest.", show_default=False
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
) -> None:
    """List ledger entries in order, the newest last. Runs when `shards` is given no command."""
    from taphouse.cli import render
    from taphouse.wire import ShardList

    with session.client() as client:
        if after is None:
            after = max(0, client.shards(after=0, limit=1).head - limit)
        shards, head = _entries(client, after, limit)
    document = ShardList(shards=shards, next_after=shards[-1].seq if shards else after, head=head)
    session.show(document, lambda: render.shards_table(shards, head))


def _entries(client: Taphouse, after: int, limit: int) -> tuple[list[ShardInfo], int]:
    shards: list[ShardInfo] = []
    while True:
        page = client.shards(after=after, limit=min(PAGE, limit - len(shards)))
        shards += page.shards
        if not page.shards or len(shards) >= limit or page.next_after >= page.head:
            return shards[:limit], page.head
        after = page.next_after


@app.command("get")
@with_session()
def get(
    session: Session,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Shards to fetch.", show_default=False)
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="PATH", help="Directory, made if need be; or a file name ending in .safetensors for one."
        ),
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Fetch shards; each is checked against its checksum before it gets its name.

    NAME is a shard's name with or without .safetensors.
    """
    from taphouse.cli.several import Tried

    targets = _targets(names, out)
    taken = [str(path) for path in targets.values() if path.exists() and not force]
    if taken:
        raise UsageProblem(f"{', '.join(taken)} exists already", "give another --out, or --force")
    _make_directory(next(iter(targets.values())).parent)
    tried = Tried()
    with session.client() as client:
        files = tried.each(targets, lambda name: _fetched(session, client, name, targets[name]))
    if session.json and (files or not tried.errors):
        session.write_json({"files": files})
    tried.end()


def _fetched(session: Session, client: Taphouse, name: str, target: Path) -> dict[str, str | int]:
    from taphouse.cli.terminal import bytes_bar

    with bytes_bar(session.err, name, None) as step:
        path = client.download(name, target, progress=step)
    if not session.json:
        session.out.print(str(path), markup=False, soft_wrap=True)
    return {"shard": name, "path": str(path), "bytes": path.stat().st_size}


def _targets(names: list[str], out: Path) -> dict[str, Path]:
    """Where each shard goes, by its whole name; raises `BadRequest` for what names none."""
    from taphouse.client.bodies import segment

    shards = [name if name.endswith(SUFFIX) else name + SUFFIX for name in names]
    for shard in shards:
        segment(shard)
    if out.is_dir() or (out.suffix != SUFFIX and not out.exists()):
        return {shard: out / shard for shard in shards}
    if len(set(shards)) > 1:
        raise UsageProblem(f"{out} is no directory", "give a directory, to fetch several shards into it")
    return {shards[0]: out}


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageProblem(
            f"the directory {path} can't be made: {error.strerror}", "give another place with --out"
        ) from error


@app.command("prune")
@with_session()
def prune(
    session: Session,
    older_than: Annotated[
        float | None,
        typer.Option(
            min=0, max=1e9, metavar="HOURS", help="Only those sealed so long ago.", show_default=False
        ),
    ] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Also what consumers still need.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; there is no way back.")] = False,
) -> None:
    """Delete shards that every consumer has acknowledged. Without --yes: only say how many. An admin's."""
    from taphouse.cli import render_shard
    from taphouse.wire import PruneRequest

    seconds = None if older_than is None else older_than * 3600
    with session.client() as client:
        pruned = client.prune_shards(PruneRequest(older_than_s=seconds, force=force, dry_run=not yes))
    session.show(pruned, lambda: render_shard.pruned_view(pruned))


@app.command("verify")
@with_session(local=True)
def verify(
    session: Session,
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Shard files, or directories of them.", show_default=False),
    ],
) -> None:
    """Read every byte of shard files and check it: structure, checksums, NaN, zero rows."""
    from taphouse.cli import render_shard
    from taphouse.cli.terminal import items_bar

    files = shard_files(paths)
    reports = []
    with items_bar(session.err, "verifying", len(files)) as step:
        for done, file in enumerate(files, start=1):
            reports.append(_verified(file))
            step(done)
    failed = sum(not report.ok for report in reports)
    document = {
        "ok": not failed,
        "files": len(reports),
        "failed": failed,
        "reports": [render_shard.report_document(report) for report in reports],
    }
    session.show(document, lambda: render_shard.reports_table(reports))
    if failed:
        raise CheckFailed(
            f"{failed} of {len(reports)} files failed verification",
            "fetch them again, or extract their batches again",
        )


def _verified(file: Path) -> Report:
    """The report on one file; one that can't be read doesn't keep the others from being checked."""
    from taphouse.errors import StoreError
    from taphouse.shards import Report, verify_shard

    try:
        return verify_shard(file)
    except StoreError as error:
        return Report(str(file), problem=error.message, kind=type(error).__name__)


@app.command("show")
@with_session(local=True)
def show(
    session: Session,
    path: Annotated[Path, typer.Argument(help="A shard file.", show_default=False)],
    limit: Annotated[int, typer.Option(min=1, help="At most so many samples in the table.")] = 20,
) -> None:
    """Show a shard's header and a table of its samples, without reading the hidden states."""
    from taphouse.cli import render_shard
    from taphouse.shards import open_shard

    if not path.is_file():
        raise UsageProblem(f"there is no file {path}", "give a shard file")
    with open_shard(path) as shard:
        header = shard.header
    document = {"path": str(path), "header": header.model_dump(mode="json")}
    session.show(document, lambda: render_shard.header_view(path, header, limit))


def shard_files(paths: list[Path]) -> list[Path]:
    """The files named, and the shards below directories named.

    Raises:
        UsageProblem: a path doesn't exist, or there is no shard at all.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(found for found in path.rglob(f"*{SUFFIX}") if found.is_file())
        elif path.is_file():
            files.append(path)
        else:
            raise UsageProblem(f"there is no file {path}", "give shard files or directories")
    if not files:
        raise UsageProblem(
            "there are no shards in these directories", "give a directory with .safetensors files"
        )
    return files
