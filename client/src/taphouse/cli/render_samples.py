"""Single samples as rich renderables. Pure functions."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from taphouse.cli.render import facts_grid, plain, table
from taphouse.cli.units import count
from taphouse.wire import SamplesDeleted, SamplesFound

__all__ = ["deleted_view", "found_table"]


def found_table(found: SamplesFound) -> RenderableType:
    """One line a row that was found; how many more there are."""
    if not found.rows:
        return Text("no such rows")
    result = table("job", "row", "id", "user", "shard", "seq", right=("row", "seq"))
    for sample in found.samples:
        result.add_row(
            sample.job_id,
            count(sample.row),
            plain(sample.id),
            plain(sample.user or "–"),
            plain(sample.shard or "–"),
            "–" if sample.seq is None else str(sample.seq),
        )
    left = found.rows - len(found.samples)
    return Group(result, Text(f"and {count(left)} more")) if left else result


def deleted_view(deleted: SamplesDeleted) -> RenderableType:
    """What was deleted, and which shards there are instead."""
    facts: list[tuple[str, RenderableType]] = [
        ("rows", count(deleted.rows)),
        ("samples", count(deleted.samples)),
        ("shards rewritten", plain("\n".join(deleted.rewritten) or "–")),
        ("shards gone", plain("\n".join(deleted.removed) or "–")),
    ]
    return facts_grid(facts)
