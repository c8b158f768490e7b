"""Captures from an engine that itself serves with speculative decoding: drafts rejected and accepted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from tests.engine.capturing import (
    LAYERS,
    Captured,
    assert_equals_reference,
    capture,
    capture_all,
    capture_files,
    complete,
    metric,
    prompt,
    status,
    until,
    until_capturing,
)
from tests.engine.checkpoints import tiny_draft, tiny_llama
from tests.engine.launch import Engine, launch
from tests.engine.test_isolation import held_back, isolation, production, set_quota

pytestmark = pytest.mark.engine

DRAFTS = 3
MAX_LEN = 512
CACHE = ["--block-size", "32", "--num-gpu-blocks-override", "64"]
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@dataclass(frozen=True)
class Speculating:
    """An engine and the method it speculates with."""

    engine: Engine
    method: str

    def drafted(self) -> tuple[float, float]:
        """Draft tokens proposed and accepted so far."""
        proposed, accepted = (
            metric(self.engine, f"vllm:spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted")
        )
        return proposed, accepted


@pytest.fixture(scope="module", params=["eagle3", "ngram"])
def speculating(request: pytest.FixtureRequest) -> Iterator[Speculating]:
    """Tiny Llama with an EAGLE-3 draft of random weights, or with n-gram lookup, and a small KV cache."""
    eagle3 = {"method": "eagle3", "model": str(tiny_draft()), "num_speculative_tokens": DRAFTS}
    config = NGRAM if request.param == "ngram" else eagle3
    args = ["--max-model-len", str(MAX_LEN), "--max-num-seqs", "32"]
    args += [*CACHE, "--speculative-config", json.dumps(config)]
    with launch(tiny_llama(), layers=LAYERS, args=args) as engine:
        until_capturing(engine)
        yield Speculating(engine, request.param)


@pytest.fixture
def quota(speculating: Speculating) -> Iterator[Callable[..., None]]:
    """Sets a quota, named `note`; the engine's own is back afterwards."""
    yield lambda **fields: set_quota(speculating.engine, **fields)
    set_quota(speculating.engine, ttl_s=0.001)
    until(lambda: isolation(speculating.engine)["quota"]["note"] == "the engine's settings")


def repeating(length: int, seed: int) -> list[int]:
    """A prompt that says the same 7 tokens again and again: n-gram lookup finds something to propose."""
    return (prompt(7, seed) * length)[:length]


def check(captured: Captured, generated: int) -> None:
    """Rows and token ids agree, nothing of a draft is in the sample, states are the model's own."""
    item = captured.item
    assert len(item["token_ids"]) == item["prompt_len"] + generated
    assert item["rows"] == captured.states.shape[0] == item["prompt_len"] + generated - 1
    assert_equals_reference(tiny_llama(), captured)


def test_the_draft_shares_the_embedding_that_the_tap_is_hooked_to(speculating: Speculating) -> None:
    """What the next tests rely on: the draft looks tokens up in the very module whose ids are recorded."""
    shares = "Sharing target model embedding weights with the draft model"
    assert (shares in speculating.engine.log.read_text(errors="replace")) == (speculating.method == "eagle3")
    assert status(speculating.engine)["canary"]["state"] == "passed"


def test_generated_rows_are_the_models_own(speculating: Speculating) -> None:
    before = speculating.drafted()
    for length, generated in ((1, 1), (30, 2), (30, 60), (300, 40)):
        for token_ids in (prompt(length, length), repeating(length, length)):
            captured = capture(speculating.engine, prompt=token_ids, max_tokens=generated, ignore_eos=True)
            check(captured, generated)
    proposed, accepted = (now - then for now, then in zip(speculating.drafted(), before, strict=True))
    assert proposed > 100
    if speculating.method == "ngram":
        assert accepted > 10
    else:
        assert accepted < 0.05 * proposed


def test_drafts_past_the_end_of_the_context(speculating: Speculating) -> None:
    """Prompt and `max_tokens` fill the context: drafts would lie past the last row."""
    captured = capture(speculating.engine, prompt=repeating(MAX_LEN - 40, 8), max_tokens=40, ignore_eos=True)
    check(captured, 40)


def test_a_stop_in_the_middle_of_accepted_drafts(speculating: Speculating) -> None:
    """The engine has computed rows past the stop when it sees it: they are cut."""
    token_ids = repeating(40, 9)
    whole = capture(speculating.engine, prompt=token_ids, max_tokens=60, ignore_eos=True)
    generated = whole.item["token_ids"][40:]
    firsts = {token: at for at, token in reversed(list(enumerate(generated)))}
    for token, at in sorted(firsts.items(), key=lambda item: item[1])[:8]:
        stopped = capture(
            speculating.engine, prompt=token_ids, max_tokens=60, ignore_eos=True, stop_token_ids=[token]
        )
        assert stopped.item["token_ids"] == [*token_ids, *generated[: at + 1]]
        assert stopped.item["finish_reason"] == "stop"
        check(stopped, at + 1)


def test_a_list_of_prompts_among_ordinary_requests(speculating: Speculating) -> None:
    """Ordinary answers are the same alone and beside captures; each capture has its own rows."""
    engine = speculating.engine
    ordinary = [repeating(60, 20), prompt(50, 21), repeating(150, 22), prompt(20, 23)]
    alone = [complete(engine, token_ids, max_tokens=40)["token_ids"] for token_ids in ordinary]
    before = speculating.drafted()
    lists = [[repeating(30 + 20 * n, 100 + n), prompt(25 + 30 * n, 200 + n)] for n in range(6)]
    with ThreadPoolExecutor(16) as pool:
        futures = [
            pool.submit(capture_all, engine, prompt=pair, max_tokens=20 + n, ignore_eos=True)
            for n, pair in enumerate(lists)
        ]
        beside = [pool.submit(complete, engine, token_ids, max_tokens=40) for token_ids in ordinary]
        for n, future in enumerate(futures):
            captures = future.result()
            assert [c.item["token_ids"][: c.item["prompt_len"]] for c in captures] == lists[n]
            for captured in captures:
                check(captured, 20 + n)
        assert [future.result()["token_ids"] for future in beside] == alone
    assert speculating.drafted()[0] > before[0]
    assert capture_files(engine) == []


def test_productions_prefix_stays_in_the_cache_beside_drafts(speculating: Speculating) -> None:
    """Through a cache of 64 blocks go 120 and more of extraction's; a draft costs a hit its last block."""
    engine = speculating.engine
    assert isolation(engine)["scheduler"] == "on"
    production(engine, 1)
    alone = production(engine, 2)
    assert alone >= 224
    assert len(capture_all(engine, prompt=[prompt(300, 300 + n) for n in range(12)], max_tokens=1)) == 12
    assert production(engine, 3) == alone


def test_nothing_is_extracted_beside_production_that_drafts(
    speculating: Speculating, quota: Callable[..., None]
) -> None:
    """Not a token at a quota of zero, and everything once production is gone."""
    before = speculating.drafted()[0]
    answered, captures = held_back(speculating.engine, lambda seed: repeating(30, seed))
    assert answered >= 200
    for captured in captures:
        check(captured, 3)
    assert speculating.drafted()[0] > before


def test_a_prompt_of_one_token_begins_beside_production_that_drafts(
    speculating: Speculating, quota: Callable[..., None]
) -> None:
    """vLLM pads it to a step of a decode with drafts, and passes it by where fewer tokens are left."""
    engine, enough = speculating.engine, threading.Event()
    quota(note="room", busy_ms=1000.0, ttl_s=600)

    def serve(n: int) -> int:
        answered = 0
        while not enough.is_set():
            answered += len(complete(engine, repeating(30, 60 + n), max_tokens=200)["token_ids"])
        return answered

    with ThreadPoolExecutor(4) as pool:
        served = [pool.submit(serve, n) for n in range(3)]
        try:
            until(lambda: metric(engine, "vllm:num_requests_running") == 3)
            for n in range(6):
                one = pool.submit(capture, engine, prompt=prompt(1, 700 + n), max_tokens=3, ignore_eos=True)
                check(one.result(timeout=20), 3)
        finally:
            enough.set()
        assert all(one.result() for one in served)


def test_captures_that_give_way_to_production_that_drafts_are_whole(
    speculating: Speculating, quota: Callable[..., None]
) -> None:
    """Production wants more blocks than there are: captures are cut and preempted, and all is right.

    Captures may be over before a late server has passed production on, so bursts follow one another until one
    has preempted a capture; whatever happened in a burst, its answers and samples are right.
    """
    engine = speculating.engine
    served_prompts = [repeating(250, 50 + n) for n in range(8)]
    alone = [complete(engine, token_ids, max_tokens=60)["token_ids"] for token_ids in served_prompts]
    quota(note="some", busy_ms=5.0, quiet_ms=0.1, kv_share=1.0, ttl_s=600)  # a step's least: sixteen tokens
    before = isolation(engine)["steps"]["preempted"]

    def burst(pool: ThreadPoolExecutor) -> None:
        lists = [pool.submit(capture_all, engine, prompt=[repeating(100, 400 + n), prompt(150, 500 + n)],
                             max_tokens=300, ignore_eos=True) for n in range(6)]  # fmt: skip
        until(lambda: bool(capture_files(engine)))
        served = [pool.submit(complete, engine, token_ids, max_tokens=60) for token_ids in served_prompts]
        assert [one.result()["token_ids"] for one in served] == alone
        for future in lists:
            for captured in future.result():
                check(captured, 300)

    with ThreadPoolExecutor(16) as pool:
        for _ in range(8):
            burst(pool)
            if isolation(engine)["steps"]["preempted"] > before:
                break
        else:
            pytest.fail("no capture gave way in eight bursts")
    assert isolation(engine)["scheduler"] == "on" and capture_files(engine) == []
