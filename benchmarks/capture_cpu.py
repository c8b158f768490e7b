"""What the tap costs a server on CPUs: an engine with it beside one without it, in one run.

    python -m benchmarks.capture_cpu [--pairs N] [--model DIR]

Both engines are up; only one works at a time, in the order A B B A, so that a slow moment of the machine
hits both. Measured: inter-token latency of one and of four streams, prompt tokens/s of ordinary requests, and
of the same prompts when every request is extracted and its slices are sealed, checked and taken away.
Printed: the median of each engine, and the median of the pairs' quotients with a 95 % bootstrap interval;
A/A is the untapped engine against itself. vLLM's own hidden-states connector ends the engine on CPUs, so the
peer is measured on GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
from tests.engine.launch import Engine, launch

from taphouse.slices import join_slices, release

VOCABULARY = 4000
ARGS = ("--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-batched-tokens", "1024")
PROMPTS, PROMPT_TOKENS, DECODE_TOKENS = 4, 512, 48


@dataclass(frozen=True)
class Compared:
    """One figure, and how it is measured on either engine."""

    name: str
    unit: str
    tapped: Callable[[Engine], float]
    untapped: Callable[[Engine], float]


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(300, VOCABULARY) for _ in range(tokens)]


def stream_latency(engine: Engine, streams: int) -> float:
    """Median milliseconds between two tokens over `streams` concurrent streams."""
    rng = random.Random(streams)

    def one(tokens: list[int]) -> list[float]:
        body = {
            "model": engine.model, "prompt": tokens, "max_tokens": DECODE_TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        at = []
        with httpx.stream("POST", f"{engine.url}/v1/completions", json=body, timeout=300) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    at.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(at[1:])]

    with ThreadPoolExecutor(streams) as pool:
        gaps = list(pool.map(one, [prompt(rng, 32) for _ in range(streams)]))
    return statistics.median(gap for stream in gaps for gap in stream)


def prefill_rate(engine: Engine, seed: int = 0) -> float:
    """Prompt tokens/s of ordinary requests that generate one token."""
    rng = random.Random(time.time_ns() + seed)

    def one(tokens: list[int]) -> None:
        body = {"model": engine.model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
        httpx.post(f"{engine.url}/v1/completions", json=body, timeout=300).raise_for_status()

    return _rate(one, [prompt(rng, PROMPT_TOKENS) for _ in range(PROMPTS)])


def extraction_rate(engine: Engine) -> float:
    """Prompt tokens/s when every request is extracted, and its slices are joined, checked and released."""
    rng = random.Random(time.time_ns())

    def one(tokens: list[int]) -> None:
        answer = httpx.post(f"{engine.url}/v1/hidden_states", json={"prompt": tokens}, timeout=300)
        answer.raise_for_status()
        (item,) = answer.json()["data"]
        paths = [Path(piece["path"]) for piece in item["slices"]]
        states = join_slices(paths, item["rows"])
        release(paths[0].parent, item["tag"])
        if states.shape[0] != len(tokens):
            raise RuntimeError(f"{states.shape[0]} rows for {len(tokens)} tokens")

    return _rate(one, [prompt(rng, PROMPT_TOKENS) for _ in range(PROMPTS)])


def _rate(one: Callable[[list[int]], None], prompts: list[list[int]]) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(one, prompts))
    return sum(map(len, prompts)) / (time.perf_counter() - began)


def interval(quotients: list[float]) -> tuple[float, float]:
    """95 % percentile-bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(quotients, k=len(quotients))) for _ in range(2000))
    return medians[49], medians[1949]


def compare(figure: Compared, plain: Engine, tapped: Engine, pairs: int) -> dict[str, object]:
    sides: dict[str, list[float]] = {"untapped": [], "tapped": [], "again": []}
    for _ in range(pairs):
        first = figure.untapped(plain)
        b1, b2 = figure.tapped(tapped), figure.tapped(tapped)
        sides["untapped"].append(first)
        sides["tapped"].append((b1 + b2) / 2)
        sides["again"].append(figure.untapped(plain))
    middle = [(a + b) / 2 for a, b in zip(sides["untapped"], sides["again"], strict=True)]
    quotients = [b / a for a, b in zip(middle, sides["tapped"], strict=True)]
    low, high = interval(quotients)
    same = [b / a for a, b in zip(sides["untapped"], sides["again"], strict=True)]
    return {
        "figure": figure.name,
        "unit": figure.unit,
        "untapped": round(statistics.median(middle), 2),
        "tapped": round(statistics.median(sides["tapped"]), 2),
        "tapped/untapped": round(statistics.median(quotients), 3),
        "interval": [round(low, 3), round(high, 3)],
        "A/A": round(statistics.median(same), 3),
        "pairs": pairs,
    }


FIGURES = [
    Compared("ITL, 1 stream, tap idle", "ms", lambda e: stream_latency(e, 1), lambda e: stream_latency(e, 1)),
    Compared(
        "ITL, 4 streams, tap idle", "ms", lambda e: stream_latency(e, 4), lambda e: stream_latency(e, 4)
    ),
    Compared("prefill, tap idle", "tok/s", prefill_rate, prefill_rate),
    Compared("prefill, every request extracted", "tok/s", extraction_rate, prefill_rate),
]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--pairs", type=int, default=10)
    options.add_argument("--model", type=Path, default=Path(".cache/models/SmolLM2-135M-Instruct"))
    chosen = options.parse_args()
    model = chosen.model.resolve()
    with (
        launch(model, tap=False, args=ARGS, forked=False) as plain,
        launch(model, args=ARGS, forked=False) as tapped,
    ):
        for engine in (plain, tapped):
            prefill_rate(engine)
            stream_latency(engine, 1)
        _await_capture(tapped)
        for figure in FIGURES:
            print(json.dumps(compare(figure, plain, tapped, chosen.pairs)), flush=True)


def _await_capture(engine: Engine) -> None:
    """Wait for the start-up canary: until then the tap answers 503."""
    deadline = time.monotonic() + 120
    while httpx.post(f"{engine.url}/v1/hidden_states", json={"prompt": [1, 2, 3]}).status_code == 503:
        if time.monotonic() > deadline:
            raise RuntimeError(httpx.get(f"{engine.url}/v1/hidden_states/status").text)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
