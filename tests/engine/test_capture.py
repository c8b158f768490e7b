"""Captured states are the model's own, on every row, whatever else the engine does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.capturing import (
    LAYERS,
    TOLERANCE,
    assert_equals_reference,
    capture,
    capture_files,
    complete,
    post,
    prompt,
    status,
    until,
)
from tests.engine.checkpoints import tiny_llama
from tests.engine.launch import Engine
from tests.engine.reference import states

from taphouse import slices
from taphouse.samples import Sample, Witness
from taphouse.shards import ShardMeta, encode_shard, open_shard
from taphouse_trainer.verifier import read_verifier
from taphouse_trainer.witness import contradiction

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("length", "generated"), [(1, 1), (30, 1), (30, 20)])
def test_prompt_and_generated_rows(llama_engine: Engine, length: int, generated: int) -> None:
    captured = capture(llama_engine, prompt=prompt(length, 1), max_tokens=generated, ignore_eos=True)
    assert captured.states.shape == (length + generated - 1, 3, 256)
    assert_equals_reference(tiny_llama(), captured)


def test_a_prompt_of_many_steps(llama_engine: Engine) -> None:
    """1,500 tokens at 128 a step."""
    captured = capture(llama_engine, prompt=prompt(1500, 2), max_tokens=4, ignore_eos=True)
    assert_equals_reference(tiny_llama(), captured)


def test_a_prompt_that_is_in_the_prefix_cache(llama_engine: Engine) -> None:
    token_ids = prompt(400, 3)
    assert complete(llama_engine, token_ids)["token_ids"] == complete(llama_engine, token_ids)["token_ids"]
    for _ in range(2):
        assert_equals_reference(tiny_llama(), capture(llama_engine, prompt=token_ids, max_tokens=3))


def test_extractions_among_normal_requests(llama_engine: Engine) -> None:
    """16 extractions and 8 completions at once: each gets its own rows."""
    with ThreadPoolExecutor(24) as pool:
        normal = [pool.submit(complete, llama_engine, prompt(40 + n, n), max_tokens=30) for n in range(8)]
        futures = [
            pool.submit(
                capture, llama_engine, prompt=prompt(20 + 23 * n, 100 + n), max_tokens=1 + n, ignore_eos=True
            )
            for n in range(16)
        ]
        for future in futures:
            assert_equals_reference(tiny_llama(), future.result())
        assert all(len(future.result()["token_ids"]) == 30 for future in normal)
    assert capture_files(llama_engine) == []


def test_rows_past_a_stop_string_are_surplus(llama_engine: Engine) -> None:
    """The engine runs on until the front end sees the stop: the slice may hold more, the answer never."""
    token_ids = prompt(30, 4)
    whole = capture(llama_engine, prompt=token_ids, max_tokens=30, ignore_eos=True)
    word = next(n for n, token in enumerate(whole.item["token_ids"][30:]) if token > 300)
    stopped = capture(llama_engine, prompt=token_ids, max_tokens=30, ignore_eos=True, stop=["unused"])
    assert stopped.item["token_ids"] == whole.item["token_ids"][: 30 + word + 1]
    assert_equals_reference(tiny_llama(), stopped)


def test_states_through_a_sealed_shard(llama_engine: Engine, tmp_path: Path) -> None:
    """As an extractor does it: slices to a shard, and back through the public reader."""
    answer = post(llama_engine, prompt=prompt(60, 5), max_tokens=6, ignore_eos=True).json()
    (item,) = answer["data"]
    paths = [file["path"] for file in item["slices"]]
    rows, token_ids = item["rows"], item["token_ids"]
    sample = Sample(
        id="one",
        token_ids=np.array(token_ids[:rows], np.int32),
        loss_mask=np.ones(rows, np.uint8),
        hidden_states=slices.join_slices(paths, token_ids[:rows]),
        dtype=answer["dtype"],
        prompt_len=item["prompt_len"],
        next_token_id=token_ids[rows],
        finish_reason=item["finish_reason"],
    )
    slices.release(Path(paths[0]).parent, item["tag"])
    witness = item["witness"]
    sample = replace(
        sample,
        witness=Witness(
            witness["first_row"],
            tuple(map(tuple, witness["top_tokens"])),
            tuple(map(tuple, witness["top_logprobs"])),
        ),
    )
    meta = ShardMeta(
        layers=tuple(answer["layers"]),
        num_layers=answer["num_layers"],
        hidden_size=256,
        dtype=answer["dtype"],
        fingerprint=answer["fingerprint"],
        created_by="test",
        job_id="test",
        batch=0,
    )
    path = tmp_path / "one.safetensors"
    path.write_bytes(encode_shard([sample], meta))
    with open_shard(path) as shard:
        read = shard[0]
        expected = states(tiny_llama(), read.token_ids.tolist(), LAYERS)
        np.testing.assert_allclose(read.hidden_states, expected, rtol=0, atol=TOLERANCE)
        assert read.next_token_id == token_ids[-1]
        target = read_verifier(tiny_llama())
        assert contradiction(read, LAYERS.index(5), target) is None
        wrong = replace(read, hidden_states=np.roll(read.hidden_states, 1, axis=0))
        assert "nats off what the engine said" in str(contradiction(wrong, LAYERS.index(5), target))


def _answers(engine: Engine, seeds: range) -> list[dict[str, Any]]:
    return [complete(engine, prompt(20 + 11 * (n % 7), 1000 + n)) for n in seeds]


def test_ordinary_answers_are_those_of_an_untapped_engine(
    llama_engine: Engine, untapped_engine: Engine
) -> None:
    """Idle tap: the same tokens and bit for bit the same logprobs. Busy tap: the same tokens."""
    expected = _answers(untapped_engine, range(8))
    idle = _answers(llama_engine, range(8))
    assert [a["token_ids"] for a in idle] == [a["token_ids"] for a in expected]
    assert [a["logprobs"] for a in idle] == [a["logprobs"] for a in expected]
    before = status(llama_engine)["counters"]["ranks"]["sealed"]
    with ThreadPoolExecutor(8) as pool:
        extracting = [
            pool.submit(capture, llama_engine, prompt=prompt(300, 2000 + n), max_tokens=40, ignore_eos=True)
            for n in range(6)
        ]
        busy = _answers(llama_engine, range(8))
        for future in extracting:
            future.result()
    assert [a["token_ids"] for a in busy] == [a["token_ids"] for a in expected]
    until(lambda: status(llama_engine)["counters"]["ranks"]["sealed"] == before + 6)
