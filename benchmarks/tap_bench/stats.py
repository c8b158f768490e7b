"""Medians of pairs with bootstrap intervals."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 2000
_LEAST_WINDOWS = 6


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of `values` lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bootstrap(resample: Callable[[random.Random], float]) -> tuple[float, float]:
    """95 % percentile interval of what `resample` draws."""
    rng = random.Random(0)
    drawn = sorted(resample(rng) for _ in range(_RESAMPLES))
    return drawn[int(0.025 * _RESAMPLES)], drawn[int(0.975 * _RESAMPLES) - 1]


def paired(over: Sequence[Sequence[float]], under: Sequence[Sequence[float]]) -> dict[str, object]:
    """Median over rounds of mean(over) / mean(under), with its interval."""
    quotients = [
        statistics.fmean(a) / statistics.fmean(b) for a, b in zip(over, under, strict=False) if a and b
    ]
    if not quotients:
        return {"ratio": None, "interval": None, "rounds": 0}
    low, high = bootstrap(lambda rng: statistics.median(rng.choices(quotients, k=len(quotients))))
    return {
        "ratio": round(statistics.median(quotients), 5),
        "interval": [round(low, 5), round(high, 5)],
        "rounds": len(quotients),
    }


def _percentiles(values: Sequence[float], share: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """The percentile of each of `_RESAMPLES` resamples with replacement, without drawing their values.

    The value of rank k of a resample of n values is the one whose own rank is a Beta(k + 1, n - k) share of
    n: the k-th of n uniform draws has that distribution (order statistics of a uniform sample).
    """
    n = len(values)
    rank = min(n - 1, int(share * n))
    drawn = rng.beta(rank + 1, n - rank, _RESAMPLES)
    return np.sort(np.asarray(values, np.float64))[np.minimum((drawn * n).astype(int), n - 1)]


def tails(over: Sequence[float], under: Sequence[float], share: float) -> dict[str, object]:
    """The quotient of two pools' percentile, with its interval."""
    if not over or not under:
        return {"ratio": None, "interval": None}
    rng = np.random.default_rng(0)
    one, two = _percentiles(over, share, rng), _percentiles(under, share, rng)
    low, high = np.quantile(one / two, (0.025, 0.975))
    return {
        "ratio": round(percentile(over, share) / percentile(under, share), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "over": round(percentile(over, share), 4),
        "under": round(percentile(under, share), 4),
        "steps": [len(over), len(under)],
    }


def tails_of_windows(
    over: Sequence[Sequence[float]], under: Sequence[Sequence[float]], share: float
) -> dict[str, object]:
    """As `tails`, of windows: slow moments of a machine last, so whole windows are drawn for the interval.

    With fewer than `_LEAST_WINDOWS` a side there is no interval: it would seem surer than it is.
    """
    over, under = [w for w in over if w], [w for w in under if w]
    if not over or not under:
        return {"ratio": None, "interval": None}
    pooled = tails(list(chain.from_iterable(over)), list(chain.from_iterable(under)), share)
    if min(len(over), len(under)) < _LEAST_WINDOWS:
        return {**pooled, "interval": None}
    rng = np.random.default_rng(0)
    one, two = (_percentiles_of_windows(windows, share, rng) for windows in (over, under))
    low, high = np.quantile(one / two, (0.025, 0.975))
    return {**pooled, "interval": [round(float(low), 4), round(float(high), 4)]}


def _percentiles_of_windows(
    windows: Sequence[Sequence[float]], share: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """The percentile (nearest rank) of each of `_RESAMPLES` draws of as many windows, pooled."""
    arrays = [np.asarray(window, np.float64) for window in windows]
    found = np.empty(_RESAMPLES)
    for number in range(_RESAMPLES):
        pool = np.concatenate([arrays[i] for i in rng.integers(0, len(arrays), len(arrays))])
        rank = min(len(pool) - 1, int(share * len(pool)))
        found[number] = np.partition(pool, rank)[rank]
    return found


def differing(one: list[list[int]], two: list[list[int]]) -> dict[str, int]:
    """How many chats of two replays got other tokens, and how many tokens come at or after a difference."""
    chats = tokens = 0
    for a, b in zip(one, two, strict=True):
        same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        chats += a != b
        tokens += max(len(a), len(b)) - same
    total = sum(max(len(a), len(b)) for a, b in zip(one, two, strict=True))
    return {"chats": chats, "of": len(one), "tokens": tokens, "of_tokens": total}
