"""Speed and size of the shard codec beside plain zstd and blosc2, on one core.

    python benchmarks/codec.py [--shard FILE ...] [--repeats N] [--json]

With `--shard` it measures the hidden states of real shards; without, synthetic bfloat16 states, and says so.
Every repeat runs all contenders one after the other, beginning with another one each time; the medians are
printed, and speed beside raw zstd-1 as the median of each repeat's own quotient, so that a slow moment of the
machine hits all. MB are 10^6 bytes of the decoded states. "shard" is what writing and reading a shard costs:
codec, sha256 and the checks of values. blosc2 takes part when it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from taphouse.samples import Sample
from taphouse.shards import Shard, ShardMeta, encode_shard, open_shard
from taphouse.shards.codec import decode, encode

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Contender:
    """One way to store states: `write` gives something that `read` opens again; `size` is its bytes."""

    name: str
    write: Callable[[Array], Any]
    read: Callable[[Any], object]
    size: Callable[[Any], int] = len


@dataclass(frozen=True)
class Result:
    """Medians of a contender over the repeats, and its size as a part of the raw size."""

    name: str
    ratio: float
    write_mb_s: float
    read_mb_s: float
    write_beside_zstd1: float
    read_beside_zstd1: float


def synthetic_states(tokens: int, layers: int, hidden: int) -> Array:
    """States [tokens, layers, hidden] as bfloat16 bits: a scale a channel, heavy tails, random mantissas."""
    rng = np.random.default_rng(0)
    scale = np.exp(0.7 * rng.standard_normal((1, layers, hidden))).astype(np.float32)
    depth = np.linspace(0.3, 3.0, layers, dtype=np.float32).reshape(1, layers, 1)
    wide = rng.standard_t(5, (tokens, layers, hidden)).astype(np.float32) * scale * depth
    return (wide.view(np.uint32) >> 16).astype(np.uint16)


def real_states(paths: list[Path]) -> tuple[Array, str]:
    """States of all samples of the shards, joined along the tokens, and their dtype's name."""
    parts: list[Array] = []
    dtypes = set()
    for path in paths:
        with open_shard(path) as shard:
            dtypes.add(shard.header.dtype)
            parts.extend(sample.hidden_states for sample in shard)
    if len(dtypes) != 1:
        sys.exit(f"shards of one dtype are needed, these have {sorted(dtypes)}")
    return np.concatenate(parts), dtypes.pop()


def contenders(states: Array, dtype: str) -> list[Contender]:
    """What is compared; raw zstd-1 comes first and is the measure of the others."""
    meta = ShardMeta(
        layers=tuple(range(1, states.shape[1] + 1)),
        num_layers=states.shape[1],
        hidden_size=states.shape[2],
        dtype=dtype,
        fingerprint={},
    )
    found = [
        Contender(
            "zstd-1, raw bytes", lambda a: zstandard.compress(a.data.cast("B"), 1), zstandard.decompress
        ),
        Contender(
            "zstd-3, raw bytes", lambda a: zstandard.compress(a.data.cast("B"), 3), zstandard.decompress
        ),
        Contender("planes, top zstd-1", lambda a: split(a, 1), join, size_of_planes),
        Contender("planes, top zstd-3", lambda a: split(a, 3), join, size_of_planes),
        Contender(
            "codec planes-zstd1 (with sha256)",
            lambda a: encode(a, "planes-zstd1"),
            lambda e: decode(
                b"".join(e.parts),
                codec=e.codec,
                dtype=dtype,
                shape=states.shape,
                planes=e.planes,
                sha256=e.sha256,
            ),
            lambda e: e.nbytes,
        ),
        Contender(
            "shard",
            lambda a: encode_shard([as_sample(a, dtype)], meta),
            lambda body: Shard.from_bytes(body)[0],
        ),
    ]
    if importlib.util.find_spec("blosc2"):
        found.append(blosc2_contender())
    return found


def split(states: Array, level: int) -> list[bytes | memoryview]:
    """Byte planes with the top one compressed, and nothing else."""
    planes = states.view(np.uint8).reshape(-1, states.itemsize)
    top = np.ascontiguousarray(planes[:, -1])
    rest = [np.ascontiguousarray(planes[:, byte]).data for byte in reversed(range(states.itemsize - 1))]
    return [zstandard.compress(top.data, level), *rest]


def join(planes: list[bytes | memoryview]) -> Array:
    """The reverse of `split`."""
    opened = [zstandard.decompress(planes[0]), *planes[1:]]
    out = np.empty((len(opened[0]), len(opened)), np.uint8)
    for byte, plane in zip(reversed(range(len(opened))), opened, strict=True):
        out[:, byte] = np.frombuffer(plane, np.uint8)
    return out


def as_sample(states: Array, dtype: str) -> Sample:
    count = len(states)
    return Sample(
        "benchmark", np.arange(count, dtype=np.int32), np.ones(count, np.uint8), states, dtype, count
    )


def blosc2_contender() -> Contender:
    blosc2 = importlib.import_module("blosc2")
    blosc2.set_nthreads(1)
    return Contender(
        "blosc2 shuffle, zstd-1",
        lambda a: blosc2.compress2(
            a,
            typesize=a.itemsize,
            clevel=1,
            codec=blosc2.Codec.ZSTD,
            filters=[blosc2.Filter.SHUFFLE],
            nthreads=1,
        ),
        lambda blob: blosc2.decompress2(blob, nthreads=1),
    )


def measure(states: Array, dtype: str, repeats: int) -> list[Result]:
    """Run every contender `repeats` times, interleaved."""
    all_ = contenders(states, dtype)
    writes: dict[str, list[float]] = {each.name: [] for each in all_}
    reads: dict[str, list[float]] = {each.name: [] for each in all_}
    ratios: dict[str, float] = {}
    for repeat in range(-1, repeats):  # the first round warms up and isn't counted
        start = repeat % len(all_)
        for each in all_[start:] + all_[:start]:
            began = time.perf_counter()
            stored = each.write(states)
            written = time.perf_counter()
            each.read(stored)
            ended = time.perf_counter()
            ratios[each.name] = each.size(stored) / states.nbytes
            if repeat >= 0:
                writes[each.name].append(written - began)
                reads[each.name].append(ended - written)
    megabytes = states.nbytes / 1e6
    base = all_[0].name

    def beside(times: dict[str, list[float]], name: str) -> float:
        return statistics.median(b / a for a, b in zip(times[name], times[base], strict=True))

    return [
        Result(
            name=each.name,
            ratio=ratios[each.name],
            write_mb_s=megabytes / statistics.median(writes[each.name]),
            read_mb_s=megabytes / statistics.median(reads[each.name]),
            write_beside_zstd1=beside(writes, each.name),
            read_beside_zstd1=beside(reads, each.name),
        )
        for each in all_
    ]


def size_of_planes(planes: list[bytes | memoryview]) -> int:
    """Bytes of all planes."""
    return sum(map(len, planes))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shard", type=Path, action="append", default=[], help="a real shard to measure on")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--tokens", type=int, default=2048, help="of the synthetic states, or at most of the real"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the synthetic states")
    parser.add_argument("--hidden", type=int, default=1024, help="of the synthetic states")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if options.shard:
        states, dtype = real_states(options.shard)
        states = np.ascontiguousarray(states[: options.tokens])
        what = f"states of {', '.join(path.name for path in options.shard)}"
    else:
        states, dtype = synthetic_states(options.tokens, options.layers, options.hidden), "bfloat16"
        what = "SYNTHETIC states (random; give --shard for real ones)"
    results = measure(states, dtype, options.repeats)
    if options.json:
        data = {"data": what, "dtype": dtype, "shape": states.shape, "repeats": options.repeats}
        print(json.dumps(data | {"results": [vars(result) for result in results]}, indent=1))
        return
    print(
        f"{what}: {dtype} {list(states.shape)}, {states.nbytes / 1e6:.1f} MB raw, {options.repeats} repeats"
    )
    print(f"{'':34}{'size':>7}{'write MB/s':>12}{'read MB/s':>11}{'write':>8}{'read':>7}  (x zstd-1)")
    for result in results:
        print(
            f"{result.name:34}{result.ratio:7.3f}{result.write_mb_s:12.0f}{result.read_mb_s:11.0f}"
            f"{result.write_beside_zstd1:8.2f}{result.read_beside_zstd1:7.2f}"
        )
    if not importlib.util.find_spec("blosc2"):
        print("blosc2 is not installed: left out")


if __name__ == "__main__":
    main()
