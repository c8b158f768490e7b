"""Shard files as rich renderables: a header with its samples, and reports of verification."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from taphouse.cli.render import facts_grid, plain, table
from taphouse.cli.units import count, ratio, size

if TYPE_CHECKING:
    from taphouse.shards import Report, ShardHeader
    from taphouse.wire import Pruned

__all__ = ["header_view", "pruned_view", "report_document", "reports_table"]

FINDINGS_SHOWN = 5


def pruned_view(pruned: Pruned) -> RenderableType:
    """What was taken away, or would be, and what kept the rest."""
    done = " would be deleted: give --yes to delete them" if pruned.dry_run else " deleted"
    facts: list[tuple[str, RenderableType]] = [
        ("shards", f"{count(pruned.shards)} ({size(pruned.bytes)}){done}")
    ]
    return facts_grid([*facts, ("the next", plain(pruned.held))] if pruned.held else facts)


def header_view(path: Path, header: ShardHeader, limit: int) -> RenderableType:
    """The header's facts, and the first `limit` samples."""
    facts: list[tuple[str, RenderableType]] = [
        ("shard", Text(str(path), "bold")),
        ("samples", f"{count(len(header.samples))}, {count(header.tokens)} tokens"),
        (
            "states",
            f"layers {','.join(map(str, header.layers))} of {header.num_layers} × {header.hidden_size} "
            f"× {header.dtype}",
        ),
        ("codec", header.codec),
        (
            "stored",
            f"{size(header.stored_bytes)} of {size(header.raw_bytes)} raw "
            f"({ratio(header.stored_bytes, header.raw_bytes)})",
        ),
        (
            "job",
            plain(header.job_id or "–") + (f", batch {header.batch}" if header.batch is not None else ""),
        ),
        ("made by", plain(header.created_by)),
        ("witnessed", f"{sum(s.witness is not None for s in header.samples)} samples"),
        ("fingerprint", header.fingerprint_id),
        *((f"  {name}", plain(value)) for name, value in sorted(header.fingerprint.items())),
    ]
    numbers = ("tokens", "prompt", "next token")
    samples = table("#", "id", *numbers, "finish", "stored", right=("#", *numbers, "stored"))
    for number, sample in enumerate(header.samples[:limit]):
        samples.add_row(
            str(number),
            plain(sample.id),
            count(sample.tokens),
            count(sample.prompt_len),
            "–" if sample.next_token_id is None else str(sample.next_token_id),
            sample.finish_reason or "–",
            size(sum(tensor.bytes for tensor in sample.tensors.values())),
        )
    parts: list[RenderableType] = [facts_grid(facts), "", samples]
    if len(header.samples) > limit:
        parts.append(
            Text(f"and {count(len(header.samples) - limit)} more: --limit {len(header.samples)}", "dim")
        )
    return Group(*parts)


def reports_table(reports: list[Report]) -> RenderableType:
    """One line a file, and below it what is wrong with it."""
    result = table(
        "",
        "shard",
        "samples",
        "witnessed",
        "tokens",
        "stored",
        "problem",
        right=("samples", "witnessed", "tokens", "stored"),
    )
    for report in reports:
        mark = Text("ok", "green") if report.ok else Text("BAD", "bold red")
        first, *more = _problems(report) or [""]
        result.add_row(
            mark,
            plain(report.source),
            count(report.samples),
            count(report.witnessed),
            count(report.tokens),
            size(report.bytes),
            plain(first),
        )
        for problem in more:
            result.add_row("", "", "", "", "", "", plain(problem))
    return result


def _problems(report: Report) -> list[str]:
    problems = [report.problem] if report.problem else []
    for finding in report.bad[:FINDINGS_SHOWN]:
        tensor = f" {finding.tensor}" if finding.tensor else ""
        problems.append(f"sample {finding.index} {finding.id!r}{tensor}: {finding.problem}")
    if len(report.bad) > FINDINGS_SHOWN:
        problems.append(f"and {len(report.bad) - FINDINGS_SHOWN} more samples")
    return problems


def report_document(report: Report) -> dict[str, Any]:
    """A report as JSON-able data."""
    return {"ok": report.ok, **asdict(report)}
