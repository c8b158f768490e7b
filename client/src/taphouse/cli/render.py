"""Answers of the service and shard files as rich renderables. Pure functions: models in, renderables out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from taphouse.cli.units import age, count, ratio, size
from taphouse.wire import Check, ShardInfo

if TYPE_CHECKING:
    pass

__all__ = [
    "checks_table",
    "extract_summary",
    "facts_grid",
    "plain",
    "shards_table",
    "table",
]


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """An empty table in the manner of `kubectl get`; the columns in `right` hold numbers."""
    right = set(right)
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        result.add_column(
            column.upper(),
            justify="right" if column in right else "left",
            no_wrap=column in right,
            overflow="fold",
        )
    return result


def facts_grid(facts: Iterable[tuple[str, RenderableType]]) -> Table:
    """Names and values in two columns."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(name, value)
    return grid


def plain(text: object) -> Text:
    """Text of other people: never read as markup."""
    return Text(str(text))


# --- shards


def shards_table(shards: list[ShardInfo], head: int, now: float | None = None) -> RenderableType:
    """One line a ledger entry, in the ledger's order."""
    if not shards:
        return Text("no shards" if not head else f"no shards after this one; the newest is {head}")
    now = time.time() if now is None else now
    numbers = ("seq", "samples", "tokens", "stored", "of raw")
    result = table("seq", "shard", *numbers[1:], "layers", "dtype", "sealed", right=numbers)
    for shard in shards:
        result.add_row(
            str(shard.seq),
            plain(shard.shard),
            count(shard.samples),
            count(shard.tokens),
            size(shard.bytes),
            ratio(shard.bytes, shard.raw_bytes),
            ",".join(map(str, shard.layers)),
            shard.dtype,
            age(shard.created_at, now) if shard.gone is None else "gone",
        )
    return result


def extract_summary(facts: dict[str, Any]) -> RenderableType:
    """What `extract` wrote."""
    layers = ",".join(map(str, facts["layers"]))
    return facts_grid(
        [
            ("shard", Text(facts["path"], "bold")),
            ("samples", f"{count(facts['samples'])}, {count(facts['tokens'])} tokens"),
            ("states", f"layers {layers} × {facts['hidden_size']} × {facts['dtype']}"),
            (
                "stored",
                f"{size(facts['bytes'])} of {size(facts['raw_bytes'])} raw "
                f"({ratio(facts['bytes'], facts['raw_bytes'])})",
            ),
            ("fingerprint", facts["fingerprint_id"]),
            ("look inside", plain(f"taphouse shards show {PurePath(facts['path'])}")),
        ]
    )


# --- doctor


def checks_table(checks: list[Check]) -> RenderableType:
    """One line a link, and what to do about the ones that fail."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    result.add_column("")
    for column in ("CHECK", "WHAT IT FOUND", "DO THIS"):
        result.add_column(column, overflow="fold")
    for check in checks:
        mark = Text("ok", "green") if check.ok else Text("FAIL", "bold red")
        advice = plain(check.advice) if check.advice and not check.ok else ""
        result.add_row(mark, plain(check.check), plain(check.detail), advice)
    return result
