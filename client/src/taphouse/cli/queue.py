"""`taphouse queue`: the queue as it stands."""

from __future__ import annotations

from taphouse.cli.session import Session, with_session

__all__ = ["queue"]


@with_session()
def queue(session: Session) -> None:
    """Show the queue: depth by state, rates, workers, engines, trainers."""
    from taphouse.cli import render_queue

    with session.client() as client:
        status = client.queue()
    session.show(status, lambda: render_queue.queue_view(status))
