"""What people read: the Markdown tables and the JSON file."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .figures import Pass, against_best_fixed, summary

Row = dict[str, Any]
LATE_MS = 100.0
TARGETS = {"latency": 1.10, "quiet": 0.8, "hits": 0.98, "reaction_s": 2.0}


def machine() -> str:
    """The processor or, where there is one, the accelerator; cores, Python, vLLM."""
    name = platform.machine()
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        models = [
            line.split(":", 1)[1].strip() for line in cpus.read_text().splitlines() if "model name" in line
        ]
        name = f"{len(models)} cores of {models[0]}" if models else name
    return f"{name}, Python {platform.python_version()}"


def write_json(path: Path, about: Mapping[str, Any], passes: Sequence[Pass]) -> None:
    """Everything that was measured, and what it comes to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "summary": summary(passes), "passes": list(passes)}))


def markdown(about: Mapping[str, Any], passes: Sequence[Pass]) -> str:
    """The section for `docs/benchmarks.md`."""
    rows = summary(passes)
    parts = [
        f"{about['machine']}, {about['engine']}, {about['date']}, `{about['command']}`: {about['what']}",
        _latency(rows),
        _extraction(rows),
        _targets(rows),
    ]
    if about.get("picture"):
        parts.append(f"![Production beside extraction, mode by mode]({about['picture']})")
    late = [f"{mode} (by {row['late_ms']:,.0f} ms)" for mode, row in rows.items() if row["late_ms"] > LATE_MS]
    if late:
        parts.append(f"Clients had no processor for a while and sent late: {', '.join(late)}.")
    if about.get("left_out"):
        parts.append(f"Left out: {'; '.join(about['left_out'])}.")
    return "\n\n".join(parts)


def _latency(rows: Mapping[str, Row]) -> str:
    head = [
        "production in bursts",
        "ITL p50 / p95 / p99 (ms)",
        "beside none",
        "TTFT p50 / p95 / p99 (ms)",
        "beside none",
    ]
    body = [
        [
            mode,
            _three(row, "itl_p{}_ms", 1),
            _three(row, "itl_p{}_ms_ratio", 2),
            _three(row, "ttft_p{}_ms", 0),
            _three(row, "ttft_p{}_ms_ratio", 2),
        ]
        for mode, row in rows.items()
    ]
    return table(head, body)


def _extraction(rows: Mapping[str, Row]) -> str:
    head = [
        "", "extraction, quiet (tok/s)", "in bursts (tok/s)", "prefix hits", "beside none",
        "burst to cut, median / worst (s)", "requests", "refused, failed", "rounds",
    ]  # fmt: skip
    body = [
        [
            mode,
            _number(row["quiet_tok_s"] if row["captures"] else None, 0),
            _number(row["burst_tok_s"] if row["captures"] else None, 0),
            _number(row["hit_ratio"], 3),
            _number(row["hit_ratio_ratio"], 3),
            _reaction(row),
            str(row["requests"]),
            f"{row['refused']}, {row['failed']}",
            str(row["rounds"]),
        ]
        for mode, row in rows.items()
    ]
    return table(head, body)


def _reaction(row: Row) -> str:
    cut = row["reaction_s"]
    if not row["captures"] or not cut["bursts"]:
        return "–"
    return f"{_number(cut['median'], 2)} / {_number(cut['worst'], 2)}"


def targets(rows: Mapping[str, Row]) -> list[tuple[str, float | None, str, bool | None]]:
    """Each figure of the contract: its name, what was measured, the bound, and whether it holds."""
    governed = rows.get("governed", {})
    best, share = against_best_fixed(dict(rows)) or ("none measured", None)
    failed = governed["refused"] + governed["failed"] if governed else None
    latency, cut = TARGETS["latency"], governed.get("reaction_s", {}).get("worst")
    at_most: list[tuple[str, float | None, float]] = [
        ("production's p95 ITL in bursts, governed / none", governed.get("itl_p95_ms_ratio"), latency),
        ("production's p95 TTFT in bursts, governed / none", governed.get("ttft_p95_ms_ratio"), latency),
        ("a burst's first request to the quota's cut, worst (s)", cut, TARGETS["reaction_s"]),
        ("production's requests refused or failed, governed", failed, 0.0),
    ]
    at_least: list[tuple[str, float | None, float]] = [
        (f"extraction in the quiet, governed / best fixed ({best})", share, TARGETS["quiet"]),
        ("production's prefix hits, governed / none", governed.get("hit_ratio_ratio"), TARGETS["hits"]),
    ]
    return [
        *((what, x, f"≤ {bound:g}", None if x is None else x <= bound) for what, x, bound in at_most),
        *((what, x, f"≥ {bound:g}", None if x is None else x >= bound) for what, x, bound in at_least),
    ]


def _targets(rows: Mapping[str, Row]) -> str:
    verdicts = {True: "yes", False: "no", None: "not measured"}
    body = [[what, _number(found, 3), bound, verdicts[holds]] for what, found, bound, holds in targets(rows)]
    return table(["figure", "measured", "target", "met"], body)


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _three(row: Row, name: str, digits: int) -> str:
    return " / ".join(_number(row[name.format(percent)], digits) for percent in (50, 95, 99))


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
