"""What the answers of a wave come to, and the tables at the end."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from .stats import differing, paired, tails, tails_of_windows
from .wave import Wave

_PAIRED_WITH = {"prefill, all captured (tok/s)": "prefill, tap idle (tok/s)"}


def summarize(wave: Wave) -> None:
    """Print the wave's results, one JSON line each."""
    parts = (_figures, _bitwise, _mixed, _steady, _traffic, _rates)
    for summary in itertools.chain.from_iterable(part(wave) for part in parts):
        name = summary.pop("name")
        wave.emit(name, **wave.label, **summary)
    if wave.left_out:
        wave.emit("left_out", **wave.label, steps=dict(wave.left_out))


def _figures(wave: Wave) -> Iterator[dict[str, Any]]:
    for figure, engines in wave.values.items():
        if figure == "steady":
            continue
        beside = wave.values.get(_PAIRED_WITH.get(figure, figure), {})
        base = _both(beside.get("untapped", {}), beside.get("untapped2", {}))
        other = engines.get("peer" if figure.startswith("peer") else "tapped", {})
        if not other or not base:
            continue
        summary = {"name": "ratio", "figure": figure, "untapped": _median(base), "other": _median(other)}
        rounds = sorted(base.keys() & other.keys())
        summary |= paired([other[r] for r in rounds], [base[r] for r in rounds])
        if not figure.startswith("peer") and figure not in _PAIRED_WITH:
            summary["same"] = _same(engines.get("untapped", {}), engines.get("untapped2", {}))
        yield summary


def _both(first: dict[int, list[float]], second: dict[int, list[float]]) -> dict[int, list[float]]:
    """The means of both untapped engines in each round: two of them differ by as much as the tap costs.

    Where there is a second one, rounds that it lacks (cut off by the budget) are left out.
    """
    if not second:
        return {number: [statistics.fmean(values)] for number, values in first.items()}
    return {
        number: [statistics.fmean(first[number]), statistics.fmean(second[number])]
        for number in first.keys() & second.keys()
    }


def _same(base: dict[int, list[float]], second: dict[int, list[float]]) -> dict[str, object]:
    """A/A: the second untapped engine against the first; without one, the first against itself."""
    if second:
        rounds = sorted(base.keys() & second.keys())
        return paired([second[r] for r in rounds], [base[r] for r in rounds])
    twice = [values for values in base.values() if len(values) > 1]
    return paired([v[-1:] for v in twice], [v[:1] for v in twice]) | {"engine": "itself"}


def _median(rounds: dict[int, list[float]]) -> float:
    return statistics.median(itertools.chain.from_iterable(rounds.values()))


def _answers(wave: Wave, section: str) -> list[tuple[Any, Any]]:
    return [(step, answer) for step, answer in wave.answers if step.section == section]


def _bitwise(wave: Wave) -> Iterator[dict[str, Any]]:
    bits = {step.engine: answer for step, answer in _answers(wave, "bitwise")}
    for one, two in (("untapped", "tapped"), ("untapped", "untapped2")):
        if one in bits and two in bits:
            summary: dict[str, Any] = {"name": "bitwise", "engines": [one, two]}
            for how in ("alone", "batch"):
                a, b = bits[one][how], bits[two][how]
                same = sum(x == y for x, y in zip(a, b, strict=False))
                summary[how] = {"same": same, "of": max(len(a), len(b)), "equal": a == b}
            yield summary
    for engine, answer in bits.items():
        # Not expected to be equal: other batch sizes take other kernels. It shows what "equal" is worth.
        same = sum(x == y for x, y in zip(answer["alone"], answer["batch"], strict=False))
        yield {"name": "bitwise_alone_batch", "engine": engine, "same": same, "of": len(answer["alone"])}


def _mixed(wave: Wave) -> Iterator[dict[str, Any]]:
    """Percentiles over all windows; A/A: each round's second idle window beside its first."""
    windows: dict[str, dict[str, list[list[float]]]] = {}
    taken, expected, errors = 0, 0, 0
    for step, answer in _answers(wave, "mixed"):
        for name in ("prompt_steps_ms", "decode_steps_ms", "gaps_ms"):
            windows.setdefault(name, {}).setdefault(step.figure, []).append(answer[name])
        taken += answer.get("taken_bytes", 0)
        expected += answer.get("bytes_expected", 0)
        errors += answer.get("taken_errors", 0)
    for name, kinds in windows.items():
        captured, idle = kinds.get("captured", []), kinds.get("idle", [])
        summary: dict[str, Any] = {"name": "captured_over_idle", "of": name, "windows": len(idle)}
        for label, share in _SHARES.items():
            summary[label] = tails_of_windows(captured, idle, share)
            same = tails_of_windows(idle[1::2], idle[0::2], share)
            summary[f"{label}_same"] = {k: same[k] for k in ("ratio", "interval")}
        yield summary
    hosts: dict[str, list[tuple[float, float, float]]] = {}
    for step, answer in _answers(wave, "mixed"):
        told = zip(answer["prompt_steps_ms"], answer["prompt_steps_host_ms"], strict=True)
        hosts.setdefault(step.figure, []).extend((ms, *host) for ms, host in told)
    for figure, steps in hosts.items():
        yield {"name": "slowest_prompt_steps", "figure": figure, **_slowest(steps)}
    if windows:
        bytes_ = {"bytes_taken": taken, "bytes_expected": expected, "equal": taken == expected}
        yield {"name": "mixed_bytes", **bytes_, "errors": errors}


def _slowest(steps: list[tuple[float, float, float]]) -> dict[str, Any]:
    """Medians over all steps and over the slowest 2 %: ms, host ms before the step, host ms in the worker."""
    slowest = sorted(steps, reverse=True)[: max(1, len(steps) // 50)]
    return {
        name: [round(statistics.median(part), 2) for part in zip(*chosen, strict=True)]
        for name, chosen in (("all", steps), ("slowest", slowest))
    } | {"some": [[round(part, 1) for part in step] for step in slowest[:: max(1, len(slowest) // 12)]]}


def _steady(wave: Wave) -> Iterator[dict[str, Any]]:
    windows = _answers(wave, "steady")
    values = wave.values.get("steady", {})
    if not windows:
        return
    untapped, tapped = values.get("untapped", {}), values.get("tapped", {})
    rounds = sorted(untapped.keys() & tapped.keys())
    summary: dict[str, Any] = {"name": "steady", "seconds": wave.args.steady_s}
    if rounds:
        summary |= {"untapped": _median(untapped), "tapped": _median(tapped)}
        summary |= paired([tapped[r] for r in rounds], [untapped[r] for r in rounds])
    mine = [answer for step, answer in windows if step.engine == "tapped"]
    summary["bytes_taken"] = sum(a.get("taken_bytes", 0) for a in mine)
    summary["bytes_expected"] = sum(a.get("bytes_expected", 0) for a in mine)
    summary["equal"] = summary["bytes_taken"] == summary["bytes_expected"]
    summary["errors"] = [a["taken_error"] for a in mine if a.get("taken_error")]
    summary["drain_s"] = [a["drain_s"] for a in mine]
    yield summary
    steps: dict[str, list[float]] = {}
    for step, answer in windows:
        steps.setdefault(step.engine, []).extend(answer["full_steps_ms"])
    if steps.get("untapped") and steps.get("tapped"):
        both = {label: tails(steps["tapped"], steps["untapped"], share) for label, share in _SHARES.items()}
        yield {"name": "steady_full_steps", "of": "tapped, captured / untapped", **both}


def _traffic(wave: Wave) -> Iterator[dict[str, Any]]:
    """What became of chats and captures; greedy tokens of each replay beside the first, untapped one's."""
    windows = [(step.engine, answer) for step, answer in _answers(wave, "traffic")]
    for engine, answer in windows:
        shown = {k: v for k, v in answer.items() if k != "token_ids"}
        yield {"name": "traffic", "engine": engine, "failed": answer["chats"] - answer["answered"], **shown}
    for engine, answer in windows[1:]:
        other = differing(windows[0][1]["token_ids"], answer["token_ids"])
        yield {"name": "traffic_differing", "engines": [windows[0][0], engine], **other}


_SHARES = {"p50": 0.5, "p99": 0.99}


def _rates(wave: Wave) -> Iterator[dict[str, Any]]:
    for step, answer in _answers(wave, "rates"):
        for rank, part in enumerate(answer):
            if step.figure == "d2h":
                yield {"name": "tap_d2h", "rank": rank, **part}
                continue
            counters = part["counters"]
            summary = {"name": "writer", "rank": rank, "counters": counters, "memory": part["memory"]}
            if counters["write_s"]:
                spent = counters["write_s"] + counters["seal_s"]
                summary["write_gb_s"] = counters["bytes"] / spent / 1e9
            yield summary | {"mode": part["mode"], "layers": part["layers"], "versions": part["versions"]}


def tables(results: Sequence[dict[str, Any]]) -> None:
    """Print what a reader wants to see of all results."""
    interval = f"{'95 %':>17}"
    heads = f"{'untapped':>11} {'other':>11} {'ratio':>8} {interval} {'A/A':>8} {interval} rounds"
    print(f"\n{'':10} {'figure':38} {heads}")
    for r in (r for r in results if r["result"] == "ratio"):
        same = r.get("same") or {}
        numbers = f"{r['untapped']:11.3f} {r['other']:11.3f} {_ratio(r)} {_ratio(same)}"
        print(f"{r['runner']:10} {r['figure']:38} {numbers} {r['rounds']:3}")
    for r in (r for r in results if r["result"] in _SHOWN):
        shown = {k: v for k, v in r.items() if k not in ("result", "at_s", "mode", "versions", "layers")}
        print(f"{r['result']}: {_compact(shown)}")
    checks = [c for r in results if r["result"] == "check" for c in r["verdicts"]]
    good = sum(c["checked"] for c in checks if c["ok"])
    print(f"greedy tokens reproduced from captured states: {good} of {sum(c['generated'] for c in checks)}")


_SHOWN = (
    "kv_tokens",
    "bitwise",
    "captured_over_idle",
    "mixed_bytes",
    "slowest_prompt_steps",
    "steady",
    "steady_full_steps",
    "traffic",
    "traffic_differing",
    "link",
    "tap_d2h",
    "writer",
    "draft",
    "sleep",
    "one_by_one",
    "failed",
    "left_out",
)


def _ratio(part: dict[str, Any]) -> str:
    if not part or part.get("ratio") is None:
        return " " * 26
    low, high = part["interval"]
    return f"{part['ratio']:8.4f} {f'{low:.4f} to {high:.4f}':>17}"


def _compact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_compact(v)}" for k, v in value.items())
    if isinstance(value, list):
        return "[" + ", ".join(_compact(v) for v in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
