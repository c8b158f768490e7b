"""What the tap's benchmark counts: greedy tokens that differ, captures that are not what they should be."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.tap_bench.consumer import take
from benchmarks.tap_bench.report import _figures
from benchmarks.tap_bench.stats import differing, percentile, tails, tails_of_windows

from taphouse.slices import SliceWriter, Trailer

TAG = "0123456789abcdef" * 2
IDS = [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("one", "two", "chats", "tokens"),
    [
        ([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]], 0, 0),
        ([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]], 1, 2),
        ([[1, 2, 3], [4, 5]], [[1, 2], [4, 5]], 1, 1),
        ([[1], [2]], [[2], [1]], 2, 2),
    ],
)
def test_tokens_that_differ(one: list[list[int]], two: list[list[int]], chats: int, tokens: int) -> None:
    total = sum(map(len, one))
    assert differing(one, two) == {"chats": chats, "of": 2, "tokens": tokens, "of_tokens": total}


def seal(directory: Path) -> Path:
    """A whole capture of one rank, two layers of four columns, fed with `IDS`."""
    (directory / f"{TAG}.claim").write_text("{}")
    trailer = Trailer(
        **{"tag": TAG, "start_id": "ab123", "tap_version": "0", "tp_rank": 0, "tp_size": 1, "dp_rank": 0},
        **{"layers": (0, 2), "dtype": "bfloat16", "hidden_size": 4, "column_offset": 0, "width": 4},
        **{"rows": 0, "prompt_len": 4, "weights_epoch": 0, "crc32": 0, "token_crc32": 0},
    )
    writer = SliceWriter(directory, trailer, len(IDS))
    writer.write(0, np.arange(len(IDS) * 8, dtype=np.uint16).reshape(len(IDS), 2, 4))
    assert writer.seal(np.array(IDS)) is not None
    return Path(writer.final)


def taken() -> dict[str, int | str | None]:
    return {"slices": 0, "bytes": 0, "errors": 0, "error": None}


def test_a_capture_is_verified_against_its_tokens_and_taken(tmp_path: Path) -> None:
    path, counts = seal(tmp_path), taken()
    assert not take(tmp_path, 1, counts, {})  # nobody said what to expect
    assert take(tmp_path, 1, counts, {TAG: IDS})
    assert counts == {"slices": 1, "bytes": len(IDS) * 2 * 4 * 2, "errors": 0, "error": None}
    assert not path.exists()


@pytest.mark.parametrize("how", ["other tokens", "a flipped byte"])
def test_a_capture_that_is_wrong_is_an_error(tmp_path: Path, how: str) -> None:
    path, counts, ids = seal(tmp_path), taken(), list(IDS)
    if how == "other tokens":
        ids[2] += 1
    else:
        whole = bytearray(path.read_bytes())
        whole[whole.index(np.array([20, 21], np.uint16).tobytes())] ^= 1
        path.write_bytes(whole)
    assert take(tmp_path, 1, counts, {TAG: ids})
    assert (counts["slices"], counts["errors"]) == (0, 1)
    assert ("WrongTokens" if how == "other tokens" else "Checksum") in str(counts["error"])


def test_the_interval_of_a_percentile_is_that_of_drawn_resamples() -> None:
    """`tails` draws ranks, not values: the same distribution (300 steps, against 2,000 real resamples)."""
    rng = random.Random(1)
    over, under = ([rng.expovariate(1.0) for _ in range(300)] for _ in range(2))
    found = tails(over, under, 0.9)
    drawn = sorted(
        percentile(rng.choices(over, k=300), 0.9) / percentile(rng.choices(under, k=300), 0.9)
        for _ in range(2000)
    )
    assert found["interval"] == pytest.approx([drawn[50], drawn[1949]], rel=0.06)
    assert found["ratio"] == pytest.approx(percentile(over, 0.9) / percentile(under, 0.9), abs=1e-4)


def test_slow_moments_that_last_make_the_interval_of_windows_wide() -> None:
    """One window of eight is slow: drawn step by step its p99 seems sure, drawn by windows it isn't."""
    rng = random.Random(2)
    even = [[rng.gauss(5.0, 0.1) for _ in range(200)] for _ in range(8)]
    slow = [[value + (3.0 if number == 5 else 0.0) for value in w] for number, w in enumerate(even)]
    pooled = tails(list(chain(*slow)), list(chain(*even)), 0.99)
    found = tails_of_windows(slow, even, 0.99)
    assert found["ratio"] == pooled["ratio"] and found["steps"] == [1600, 1600]
    low, high = found["interval"]  # type: ignore[misc]
    assert low < 1.05 and high > 1.5 and pooled["interval"][0] > 1.5  # type: ignore[index]
    assert tails_of_windows(even, even, 0.5)["interval"] == pytest.approx([1.0, 1.0], abs=0.01)
    assert tails_of_windows([], even, 0.5)["ratio"] is None


def test_the_tapped_engine_is_compared_with_the_mean_of_both_untapped_ones() -> None:
    values = {
        "decode": {
            "untapped": {0: [4.0, 4.0], 1: [4.0]},
            "untapped2": {0: [4.4], 1: [4.4, 4.4]},
            "tapped": {0: [4.2, 4.2], 1: [4.2, 4.2]},
        },
        "prefill": {"untapped": {0: [100.0]}, "tapped": {0: [99.0]}},
    }
    decode, prefill = _figures(SimpleNamespace(values=values))  # type: ignore[arg-type]
    assert decode["ratio"] == pytest.approx(1.0) and decode["same"]["ratio"] == pytest.approx(1.1)
    assert prefill["ratio"] == pytest.approx(0.99)
