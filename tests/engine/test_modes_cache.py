"""vLLM's compile cache: a graph compiled without the tap is never used by a tapped engine, or it is caught.

Four starts share one cache, in this order: untapped, tapped, tapped with vLLM made to find the untapped
graph, tapped once more with its own. `mode_faults` says what has to be done for a CPU to load a graph at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.engine.capturing import (
    Captured,
    assert_equals_reference,
    capture,
    capture_files,
    complete,
    post,
    prompt,
    status,
    until,
    until_capturing,
)
from tests.engine.checkpoints import short_llama
from tests.engine.launch import Engine, launch

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = str(Path(__file__).resolve().parents[2])
COMPILED = ["--max-model-len", "1024", "--no-enforce-eager"]
EXTENSION = [*COMPILED, "--worker-extension-cls", "tests.engine.mode_faults.HiddenStatesExtension"]
LAYERS = [0, 1, 2]
PROMPT = prompt(60, 1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of all starts: an empty cache, and the same plugins, which are part of the key."""
    root = tmp_path_factory.mktemp("vllm-cache")
    return {"VLLM_CACHE_ROOT": str(root), "VLLM_PLUGINS": "taphouse", "PYTHONPATH": ROOT}


@pytest.fixture(scope="module")
def expected(cache: dict[str, str]) -> list[int]:
    """What the untapped engine answers; its compiled graph is in the cache afterwards."""
    with launch(short_llama(), args=COMPILED, env=cache, tap=False) as engine:
        assert post(engine, prompt=PROMPT).status_code == 503
        tokens = list(complete(engine, PROMPT)["token_ids"])
    assert len(graphs(cache)) == 1
    return tokens


def graphs(cache: dict[str, str]) -> list[Path]:
    """The compiled graphs in the cache."""
    return list(Path(cache["VLLM_CACHE_ROOT"]).glob("torch_compile_cache/torch_aot_compile/*/rank_0_0/model"))


def loaded(engine: Engine) -> bool:
    """Whether the engine took its graph from the cache."""
    return "mode_faults: loaded the graph" in engine.log.read_text(errors="replace")


@dataclass(frozen=True)
class Answers:
    """What a tapped engine captured, and what it answered to an ordinary request."""

    captures: list[Captured]
    tokens: list[int]


@pytest.fixture(scope="module")
def tapped(cache: dict[str, str], expected: list[int]) -> Answers:
    """The start after the untapped one; its own graph is in the cache afterwards."""
    with launch(short_llama(), layers=LAYERS, args=COMPILED, env=cache) as engine:
        return answers(engine)


def answers(engine: Engine) -> Answers:
    until_capturing(engine)
    assert status(engine)["mode"]["compilation"] != "NONE"
    lengths = ((1, 1), (40, 12), (300, 3))
    captures = [
        capture(engine, prompt=prompt(length, length), max_tokens=generated, ignore_eos=True)
        for length, generated in lengths
    ]
    return Answers(captures, list(complete(engine, PROMPT)["token_ids"]))


def assert_right(found: Answers, expected: list[int]) -> None:
    for captured in found.captures:
        assert_equals_reference(short_llama(), captured)
    assert found.tokens == expected


def test_a_tapped_engine_does_not_find_an_untapped_graph(
    cache: dict[str, str], expected: list[int], tapped: Answers
) -> None:
    assert_right(tapped, expected)
    assert len(graphs(cache)) == 2


def test_an_untapped_graph_that_is_found_is_caught(cache: dict[str, str], expected: list[int]) -> None:
    """The canary fails and every request is refused with the reason; ordinary requests are served."""
    stale = {**cache, "TEST_MODE_FAULT": "stale"}
    with launch(short_llama(), layers=LAYERS, args=EXTENSION, env=stale) as engine:
        assert loaded(engine), "vLLM did not take the untapped graph"
        until(lambda: status(engine)["canary"]["state"] == "failed")
        told = status(engine)
        assert told["capture"] == "off" and "did not write it" in told["reason"]
        refused = post(engine, prompt=PROMPT)
        assert refused.status_code == 503 and "did not write it" in refused.json()["error"]["message"]
        assert "canary failed" in engine.log.read_text(errors="replace")
        assert complete(engine, PROMPT)["token_ids"] == expected
        assert capture_files(engine) == []


def test_a_tapped_engine_finds_its_own_graph(
    cache: dict[str, str], expected: list[int], tapped: Answers
) -> None:
    """The buffers are the new process's, though the graph was compiled in another."""
    own = {**cache, "TEST_MODE_FAULT": "load"}
    with launch(short_llama(), layers=LAYERS, args=EXTENSION, env=own) as engine:
        assert loaded(engine), "vLLM compiled again"
        assert_right(answers(engine), expected)
    assert len(graphs(cache)) == 2
