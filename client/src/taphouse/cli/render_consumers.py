"""Consumers of the ledger, and what waits for them, as rich renderables."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from taphouse.cli.render import plain, table
from taphouse.cli.units import age, count, duration, size
from taphouse.wire import Consumer, QueueStatus, Retention, Unconsumed

__all__ = [
    "consumers_table",
    "heard",
    "holds",
    "number_text",
    "pressure_line",
    "retention_text",
    "unconsumed_text",
]


def number_text(value: float | None) -> str:
    """A number without needless decimals; None → "–"."""
    return "–" if value is None else f"{value:,.2f}".rstrip("0").rstrip(".")


def heard(consumer: Consumer, now: float) -> str:
    """When a consumer last spoke, why it ended or what it does before it trains, and what it left out."""
    does = consumer.ended or (consumer.phase if consumer.phase != "training" else None)
    text = age(consumer.updated_at, now) + (f": {does}" if does else "")
    return f"{text}, {count(consumer.refused)} shards refused" if consumer.refused else text


def over_bound(found: Unconsumed) -> bool:
    """Whether extraction waits: one shard alone is never too much."""
    return found.bound_bytes is not None and found.shards > 1 and found.bytes >= found.bound_bytes


def holds(status: QueueStatus, name: str) -> list[str]:
    """What waits for a consumer now: `feeding`, `deletion`."""
    behind, retention = status.unconsumed, status.retention
    held = []
    if behind is not None and over_bound(behind) and name in behind.slowest:
        held.append("feeding")
    if retention is not None and name in retention.held_by:
        held.append("deletion")
    return held


def unconsumed_text(found: Unconsumed) -> str:
    """How much waits for whom, of how much may."""
    text = f"{count(found.shards)} shard{'' if found.shards == 1 else 's'}, {size(found.bytes)}"
    text += " so far" if not found.counted else ""
    text += f" of {size(found.bound_bytes)}" if found.bound_bytes is not None else ", no bound"
    if found.shards:
        text += f", for {', '.join(found.slowest)}" if found.slowest else ", no consumer is registered"
    return text


def retention_text(retention: Retention) -> str:
    """When shards are deleted, and what holds the next one."""
    if retention.mode == "keep":
        return "all shards are kept"
    when = "once consumed" if retention.mode == "consumed" else f"after {duration(retention.age_s)}"
    return f"deleted {when}{f'; {retention.held}' if retention.held else ''}"


def pressure_line(status: QueueStatus) -> Text | None:
    """Both in one line; it stands out while extraction waits, or waits for a consumer that has ended."""
    behind, retention = status.unconsumed, status.retention
    if behind is None and retention is None:
        return None
    ended = {consumer.name for consumer in status.consumers if consumer.ended is not None}
    alarm = any(holds(status, name) for name in ended) or (behind is not None and over_bound(behind))
    text = Text(no_wrap=True, overflow="ellipsis")
    if behind is not None:
        text.append("unconsumed ", "dim").append(unconsumed_text(behind), "bold yellow" if alarm else "")
    if retention is not None:
        text.append(" · " if text else "", "dim").append("retention ", "dim")
        text.append(retention_text(retention), "bold yellow" if alarm and retention.held_by else "")
    return text


def consumers_table(status: QueueStatus, now: float) -> RenderableType:
    """One line a consumer."""
    if not status.consumers:
        return Text("no consumer is registered", "dim")
    numbers = ("cursor", "lag", "acknowledged")
    result = table(
        "consumer", *numbers, "epoch", "step", "loss", "accuracy", "heard", "holds back", right=numbers
    )
    for consumer in status.consumers:
        facts = (consumer.cursor, consumer.lag, consumer.acknowledged, consumer.epoch, consumer.step)
        result.add_row(
            plain(consumer.name),
            *(number_text(value) for value in facts),
            "–" if consumer.loss is None else f"{consumer.loss:.3f}",
            "–" if consumer.accuracy is None else f"{consumer.accuracy:.1%}",
            plain(f"ended {heard(consumer, now)}" if consumer.ended else heard(consumer, now)),
            Text(", ".join(holds(status, consumer.name)) or "–", "" if not consumer.ended else "bold yellow"),
        )
    return result
