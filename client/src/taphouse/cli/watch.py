"""`taphouse watch`: the service, live: a redrawn view on a terminal, one line an update in a pipe."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taphouse.cli.session import Session, with_session

if TYPE_CHECKING:
    from taphouse.cli.render_watch import Moment
    from taphouse.client import Taphouse

__all__ = ["watch"]

JOBS_ASKED = 20


@with_session()
def watch(
    session: Session,
    *,
    interval: Annotated[float, typer.Option(min=0.1, max=86400, help="Seconds between updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One update, then exit.")] = False,
) -> None:
    """Watch queue depth, throughput, ETA, shards, trainer, governor and production's latency, live.

    Redrawn on a terminal, one line an update in a pipe, one JSON document a line with -o json.
    Ctrl-C ends it.
    """
    from taphouse.cli.render_watch import Moment, watch_line

    start = Moment(url=str(session.settings.url), now=time.time())
    with session.client() as client:
        if once:
            _once(session, _ask(client, start))
        elif session.json or not session.out.is_terminal:
            moment = start
            while True:
                moment = _next(client, moment)
                if session.json:
                    session.write_json(_document(moment), indent=None)
                else:
                    session.line(watch_line(moment))
                time.sleep(interval)
        else:
            _live(session, client, start, interval)


def _live(session: Session, client: Taphouse, moment: Moment, interval: float) -> None:
    from rich.live import Live

    from taphouse.cli.render_watch import watch_view

    console = session.out
    with Live(watch_view(moment, *console.size), console=console, auto_refresh=False) as live:
        while True:
            moment = _next(client, moment)
            live.update(watch_view(moment, *console.size), refresh=True)
            time.sleep(interval)


def _once(session: Session, moment: Moment) -> None:
    from taphouse.cli.render_watch import watch_line, watch_view

    if session.json:
        session.write_json(_document(moment))
    elif session.out.is_terminal:
        session.out.print(watch_view(moment, *session.out.size))
    else:
        session.line(watch_line(moment))


def _next(client: Taphouse, before: Moment) -> Moment:
    """The next moment; when the service gives no answer, the last one with the problem named."""
    from taphouse.errors import TooBusy, Unavailable, Unreachable

    try:
        return _ask(client, before)
    except (Unreachable, Unavailable, TooBusy) as error:
        return replace(before, now=time.time(), problem=error.message, new_shards=0)


def _ask(client: Taphouse, before: Moment) -> Moment:
    from taphouse.cli.render_watch import SHARDS_SHOWN, follow

    status = client.queue()
    jobs = client.jobs(limit=JOBS_ASKED)
    seen = before.shards[-1].seq if before.shards else max(0, status.ledger_head - SHARDS_SHOWN)
    shards = client.shards(after=seen).shards if status.ledger_head > seen else []
    return follow(before, time.time(), status, jobs, shards)


def _document(moment: Moment) -> dict[str, Any]:
    status = moment.status
    return {
        "now": moment.now,
        "problem": moment.problem,
        "status": status.model_dump(mode="json") if status is not None else None,
        "jobs": [job.model_dump(mode="json") for job in moment.jobs],
        "shards": [shard.model_dump(mode="json") for shard in moment.shards],
        "new_shards": moment.new_shards,
    }
