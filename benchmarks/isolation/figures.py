"""Numbers from passes: pure functions on what `passes.run_pass` returns."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from .modes import rank

Pass = dict[str, Any]
Segment = tuple[float, float, int]
"""Start and end in seconds, and the tokens that extraction got between them."""

PERCENTILES = (50, 95, 99)
SAME_STEP_S = 0.02
LEAST_QUIET_S = 0.5


def quantile(values: Sequence[float], percent: float) -> float | None:
    """The percentile, interpolated between neighbours (as numpy's default); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def gaps(one: Pass) -> list[float]:
    """Inter-token latencies of all streams (s)."""
    return [b - a for served in one["served"] for a, b in itertools.pairwise(served["pieces"])]


def first_tokens(one: Pass) -> list[float]:
    """Times to the first token of all requests that got one (s)."""
    return [served["pieces"][0] - served["sent"] for served in one["served"] if served["pieces"]]


def quiet_windows(one: Pass) -> list[tuple[float, float]]:
    """Parts of the gaps between bursts, and before and after them, without any production in flight."""
    edges = [0.0, *itertools.chain.from_iterable(one["bursts"]), one["length_s"]]
    windows = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        busy_until = max((s["ended"] for s in one["served"] if s["sent"] < end), default=start)
        left = (max(start, busy_until), end)
        if left[1] - left[0] >= LEAST_QUIET_S:
            windows.append(left)
    return windows


def segments(one: Pass) -> list[Segment]:
    """When extraction's tokens came: a capture's since the one before it ended, or since it was sent."""
    found: list[Segment] = []
    events = sorted((e for e in one["extraction"] if "tokens" in e), key=lambda e: float(e["at"]))
    before = float("-inf")
    group: list[dict[str, Any]] = []
    for event in [*events, None]:
        if group and (event is None or event["at"] - group[-1]["at"] > SAME_STEP_S):
            start = max(before, min(e["sent"] for e in group))
            found.append((start, group[-1]["at"], sum(e["tokens"] for e in group)))
            before, group = group[-1]["at"], []
        if event is not None:
            group.append(event)
    return found


def tokens_within(found: Iterable[Segment], windows: Sequence[tuple[float, float]]) -> float:
    """Tokens that fall into the windows, a segment's being spread evenly over it."""
    total = 0.0
    for start, end, tokens in found:
        length = max(end - start, 1e-6)
        inside = sum(max(0.0, min(end, right) - max(start, left)) for left, right in windows)
        total += tokens * min(1.0, inside / length)
    return total


def rate(one: Pass, windows: Sequence[tuple[float, float]]) -> float | None:
    """Extraction's tokens a second inside the windows; None without any."""
    length = sum(end - start for start, end in windows)
    return tokens_within(segments(one), windows) / length if length else None


def hit_ratio(one: Pass) -> float | None:
    """Production's prompt tokens found in the prefix cache, of all its prompt tokens."""
    asked = sum(served["prompt_tokens"] for served in one["served"])
    return sum(served["cached_tokens"] for served in one["served"]) / asked if asked else None


def reactions(one: Pass, *, by_limit: bool) -> list[float | None]:
    """Seconds by burst from its first request to the first look at which extraction is bounded as when busy.

    `by_limit`: to the first look at which the limit is lower than before instead. None where it never was
    seen; 0 where it was so already.
    """
    looks = one["watch"] if one["extraction"] else []
    found: list[float | None] = []
    for number in range(len(one["bursts"])):
        sent = min((s["sent"] for s in one["served"] if s["burst"] == number), default=None)
        if sent is None or not looks:
            found.append(None)
            continue
        until = one["bursts"][number + 1][0] if number + 1 < len(one["bursts"]) else one["length_s"]
        earlier = [look for look in looks if look["at"] < sent]
        later = [look for look in looks if sent <= look["at"] < until]
        found.append(_cut(earlier, later, sent, by_limit=by_limit))
    return found


def _cut(earlier: list[Pass], later: list[Pass], sent: float, *, by_limit: bool) -> float | None:
    before = earlier[-1] if earlier else None
    if before is not None and (not before["busy_ms"] if by_limit else not before["quiet"]):
        return 0.0
    highest = before["busy_ms"] if before is not None else None
    for look in later:
        if not by_limit and not look["quiet"]:
            return float(look["at"] - sent)
        if by_limit and highest is not None and (look["busy_ms"] < highest or look["stopped"]):
            return float(look["at"] - sent)
        highest = look["busy_ms"] if highest is None else max(highest, look["busy_ms"])
    return None


def of_pass(one: Pass) -> dict[str, Any]:
    """A pass in numbers; latencies in milliseconds, rates in tokens a second."""
    itl, ttft = gaps(one), first_tokens(one)
    numbers: dict[str, Any] = {"mode": one["mode"], "engine": one["engine"], "round": one["round"]}
    for name, values in (("itl", itl), ("ttft", ttft)):
        for percent in PERCENTILES:
            found = quantile(values, percent)
            numbers[f"{name}_p{percent}_ms"] = None if found is None else found * 1e3
    queries = one["counters"].get("prefix_queries")
    events = one["extraction"]
    numbers |= {
        "requests": len(one["served"]),
        "refused": sum(served["refused"] for served in one["served"]),
        "failed": sum(served["error"] is not None for served in one["served"]),
        "errors": sorted({served["error"] for served in one["served"] if served["error"]})[:3],
        "late_ms": max((served["late"] for served in one["served"]), default=0.0) * 1e3,
        "hit_ratio": hit_ratio(one),
        "hit_ratio_metrics": one["counters"]["prefix_hits"] / queries if queries else None,
        "preemptions": one["counters"].get("preemptions"),
        "quiet_s": sum(end - start for start, end in quiet_windows(one)),
        "quiet_tok_s": rate(one, quiet_windows(one)),
        "burst_tok_s": rate(one, one["bursts"]),
        "captures": sum("tokens" in event for event in events),
        "captures_refused": sum("refused" in event for event in events),
        "captures_failed": sorted({event["failed"] for event in events if "failed" in event})[:3],
        "reaction_s": reactions(one, by_limit=False),
        "limit_reaction_s": reactions(one, by_limit=True),
    }
    return numbers


def median(values: Iterable[float | None]) -> float | None:
    """The median of those that are numbers."""
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


def summary(passes: Sequence[Pass]) -> dict[str, dict[str, Any]]:
    """By mode: medians over rounds, and medians of each round's quotients with the mode's own `none`."""
    numbers = [of_pass(one) for one in passes]
    bases = {(one["mode"], one["round"]): of for one, of in zip(passes, numbers, strict=True)}
    found: dict[str, dict[str, Any]] = {}
    for mode in sorted(dict.fromkeys(one["mode"] for one in passes), key=rank):
        mine = [(one, of) for one, of in zip(passes, numbers, strict=True) if one["mode"] == mode]
        row: dict[str, Any] = {"rounds": len(mine), "engine": mine[0][0]["engine"]}
        for name in [f"{what}_p{p}_ms" for what in ("itl", "ttft") for p in PERCENTILES]:
            row[name] = median(of[name] for _, of in mine)
            row[f"{name}_ratio"] = median(_quotient(one, of, bases, name) for one, of in mine)
        for name in ("quiet_tok_s", "burst_tok_s", "hit_ratio", "hit_ratio_metrics"):
            row[name] = median(of[name] for _, of in mine)
        row["hit_ratio_ratio"] = median(_quotient(one, of, bases, "hit_ratio") for one, of in mine)
        row["late_ms"] = max(of["late_ms"] for _, of in mine)
        for name in ("requests", "refused", "failed", "captures", "captures_refused"):
            row[name] = sum(of[name] for _, of in mine)
        for name in ("reaction_s", "limit_reaction_s"):
            seen = [value for _, of in mine for value in of[name] if value is not None]
            row[name] = {"median": median(seen), "worst": max(seen, default=None), "bursts": len(seen)}
        found[mode] = row
    return found


def _quotient(
    one: Pass, of: dict[str, Any], bases: dict[tuple[str, int], dict[str, Any]], name: str
) -> float | None:
    base = bases.get((one["base"], one["round"]))
    if base is None or not base[name] or of[name] is None:
        return None
    return float(of[name] / base[name])


def against_best_fixed(rows: dict[str, dict[str, Any]]) -> tuple[str, float] | None:
    """The fixed quota with the most extraction in the quiet, and governed extraction as a part of it."""
    fixed = {
        mode: row["quiet_tok_s"]
        for mode, row in rows.items()
        if mode.startswith("quota") and row["quiet_tok_s"]
    }
    governed = rows.get("governed", {}).get("quiet_tok_s")
    if not fixed or governed is None:
        return None
    best = max(fixed, key=lambda mode: float(fixed[mode]))
    return best, governed / fixed[best]
