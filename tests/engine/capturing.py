"""Talks to a tapped engine as an extractor on the same host does, and compares with the reference."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from tests.engine import reference
from tests.engine.launch import Engine

from taphouse import slices

LAYERS = [0, 2, 5]
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Captured:
    """One prompt's answer: the item of `data`, its states [T, L, H], the trailers of its slices."""

    item: dict[str, Any]
    states: NDArray[Any]
    trailers: list[slices.Trailer]


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids, none of them special."""
    numbers = random.Random(seed)
    return [numbers.randrange(10, 1000) for _ in range(length)]


def post(engine: Engine, **body: Any) -> httpx.Response:
    return httpx.post(f"{engine.url}/v1/hidden_states", json=body, timeout=120)


def capture(engine: Engine, **body: Any) -> Captured:
    """Capture one prompt as slices and take them away."""
    (captured,) = capture_all(engine, **body)
    return captured


def capture_all(engine: Engine, **body: Any) -> list[Captured]:
    """Capture the prompts of one request as slices and take them away."""
    response = post(engine, **body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return [_taken(item, answer["layers"]) for item in answer["data"]]


def _taken(item: dict[str, Any], layers: list[int]) -> Captured:
    paths = [file["path"] for file in item["slices"]]
    try:
        states = slices.join_slices(paths, item["token_ids"][: item["rows"]], layers)
        return Captured(item, states, [slices.read_trailer(path) for path in paths])
    finally:
        slices.release(Path(paths[0]).parent, item["tag"])


def assert_equals_reference(checkpoint: Path, captured: Captured, *, greedy: bool = True) -> None:
    """Every row of every layer, prompt and generated, and the greedy tokens that the last stream gives."""
    token_ids, rows = captured.item["token_ids"], captured.item["rows"]
    prompt_len = captured.item["prompt_len"]
    assert rows == len(token_ids) - 1 or (rows, len(token_ids)) == (prompt_len, prompt_len + 1)
    expected = reference.states(checkpoint, token_ids[:rows], captured.trailers[0].layers)
    np.testing.assert_allclose(captured.states, expected, rtol=0, atol=TOLERANCE)
    if not greedy:
        return
    chosen = reference.next_tokens(checkpoint, captured.states[:, -1])
    assert chosen[prompt_len - 1 :] == token_ids[prompt_len:]


def complete(engine: Engine, token_ids: Sequence[int], **more: Any) -> dict[str, Any]:
    """An ordinary greedy completion; returns its first choice."""
    body = {
        "model": engine.model,
        "prompt": list(token_ids),
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 5,
        "return_token_ids": True,
        **more,
    }
    response = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0])


def rpc(engine: Engine, method: str, *args: Any, **kwargs: Any) -> None:
    """Call a method of every worker; the engine must be in vLLM's development mode."""
    body = {"method": method, "args": list(args), "kwargs": kwargs}
    response = httpx.post(f"{engine.url}/collective_rpc", json=body, timeout=120)
    assert response.status_code == 200, response.text


def status(engine: Engine) -> dict[str, Any]:
    return dict(httpx.get(f"{engine.url}/v1/hidden_states/status", timeout=30).json())


def ranks_counter(engine: Engine, name: str) -> float:
    """A counter of the ranks' records (published within two seconds), summed over the ranks."""
    return float(status(engine)["counters"]["ranks"][name])


def metric(engine: Engine, name: str) -> float:
    """The sum of one of the server's metrics over its labels."""
    lines = httpx.get(f"{engine.url}/metrics", timeout=30).text.splitlines()
    values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    assert values, f"no metric {name}"
    return sum(map(float, values))


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until `true()`."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def until_capturing(engine: Engine) -> None:
    """Wait for the canary of the start."""
    until(lambda: status(engine)["capture"] == "on")


def capture_files(engine: Engine) -> list[str]:
    """Names of files that belong to captures. Asks no server, which answers late when its cores are busy."""
    paths = engine.slice_dir.glob("start-*/*")
    return [path.name for path in paths if slices.is_tag(path.name.split(".")[0])]
