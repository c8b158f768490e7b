from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.queue.fake_tap import FakeTap, states_of
from tests.unit.extractor.conftest import Bench, engine_of, engines_of

from taphouse.shards import open_shard, verify_shard
from taphouse_extractor.errors import EngineChanged, EngineUnavailable, JobCancelled, NoEngine
from taphouse_extractor.pipeline import Pipeline
from taphouse_extractor.records import BatchRef


def samples(bench: Bench, name: str) -> dict[str, Any]:
    with open_shard(bench.store.local_path(f"shards/{name}")) as shard:
        return {sample.id: sample for sample in shard}


def test_a_batch_becomes_a_shard_with_the_states_of_its_tokens(bench: Bench) -> None:
    job = bench.job([{"prompt": "hello", "id": "a"}, {"text": "some text"}, {"prompt": [104, 105]}])
    outcome = bench.pipeline.run(BatchRef(job_id=job.id, batch=0))

    assert (outcome.rows, outcome.succeeded, outcome.failures) == (3, 3, ())
    assert outcome.shard == f"{job.id}-000000.safetensors"
    assert verify_shard(bench.store.local_path(f"shards/{outcome.shard}")).ok
    got = samples(bench, outcome.shard)
    assert list(got) == ["a", f"{job.id}/1", f"{job.id}/2"]
    first = got["a"]
    assert first.token_ids.tolist() == list(b"hello")
    assert (first.prompt_len, first.next_token_id, first.finish_reason) == (5, 97, "length")
    assert first.loss_mask.tolist() == [1] * 5
    np.testing.assert_array_equal(first.hidden_states, states_of(list(b"hello"), (1, 2, 4), 8))
    assert outcome.tokens == 5 + 9 + 2
    assert [entry.shard for entry in bench.ledger.entries()] == [outcome.shard]
    assert bench.tap.slices_left() == []


def test_layers_come_in_the_order_asked(bench: Bench) -> None:
    job = bench.job([{"prompt": "hello", "id": "a"}], layers=[4, 1])
    outcome = bench.pipeline.run(BatchRef(job_id=job.id, batch=0))
    assert outcome.shard is not None
    got = samples(bench, outcome.shard)["a"]
    np.testing.assert_array_equal(got.hidden_states, states_of(list(b"hello"), (4, 1), 8))


def test_generated_rows_are_captured_and_alone_trained_on(bench: Bench) -> None:
    row = {"id": "a", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]}
    job = bench.job([row], max_tokens=4, temperature=0.5, stop=["\n\n"])
    outcome = bench.pipeline.run(BatchRef(job_id=job.id, batch=0))
    assert outcome.shard is not None
    got = samples(bench, outcome.shard)["a"]
    prompt = list(b"<user>q\n")
    assert got.token_ids.tolist() == [*prompt, 97, 98, 99]
    assert got.loss_mask.tolist() == [0] * len(prompt) + [1] * 3
    assert got.next_token_id == 100
    asked = bench.tap.requests[0]
    assert (asked["temperature"], asked["stop"], asked["add_generation_prompt"]) == (0.5, ["\n\n"], True)
    assert "return_loss_mask" not in asked


def test_assistant_turns_are_trained_on(bench: Bench) -> None:
    row = {"id": "a", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]}
    job = bench.job([row])
    outcome = bench.pipeline.run(BatchRef(job_id=job.id, batch=0))
    assert outcome.shard is not None
    got = samples(bench, outcome.shard)["a"]
    text = b"<user>q\n<assistant>yes\n"
    assert got.token_ids.tobytes() == np.frombuffer(text, np.uint8).astype(np.int32).tobytes()
    assert bytes(got.token_ids[got.loss_mask == 1].astype(np.uint8)) == b"yes\n"


def test_bad_rows_fail_with_their_reason_and_the_rest_is_sealed(bench: Bench) -> None:
    rows = [
        {"prompt": "good", "id": "good"},
        {"id": "nothing"},
        {"prompt": "REFUSE", "id": "refused"},
        {"prompt": "BROKEN", "id": "broken"},
        {"prompt": "NAN me", "id": "nan"},
        {"messages": [{"role": "wizard", "content": "x"}], "id": "role"},
        {"prompt": "", "id": "empty"},
        {"messages": "not a list", "id": "shape"},
        {"prompt": "very long prompt", "id": "long"},
        {"prompt": "REFUSE, longer than max_length", "id": "longer than the engine takes"},
        {"prompt": "p", "user": {"name": "no text"}, "id": "user"},
        {"prompt": "p", "user": "u" * 257, "id": "long user"},
        {"prompt": "also good", "id": "good"},
    ]
    job = bench.job(rows, max_length=12)
    outcome = bench.pipeline.run(BatchRef(job_id=job.id, batch=0))

    assert outcome.succeeded + len(outcome.failures) == outcome.rows == len(rows)
    assert outcome.shard is not None
    assert list(samples(bench, outcome.shard)) == ["good", "good#12"]
    reasons = {failure.id: failure.reason for failure in outcome.failures}
    assert "none of messages, prompt and text" in reasons["nothing"]
    assert "too long, at most 7 tokens" in reasons["refused"]
    assert "row 3 is missing" in reasons["broken"]
    assert "NaN" in reasons["nan"]
    assert "wizard" in reasons["role"]
    assert "empty" in reasons["empty"]
    assert "messages" in reasons["shape"]
    assert reasons["user"].startswith("user: ") and reasons["long user"].startswith("user: ")
    assert {f.id for f in outcome.failures if f.skipped} == {"long", "longer than the engine takes"}
    assert "30 tokens are more than max_length 12" in reasons["longer than the engine takes"]
    assert bench.tap.slices_left() == []


def test_a_batch_without_a_sample_has_an_outcome_and_no_shard(bench: Bench) -> None:
    job = bench.job([{"prompt": "REFUSE"}, {"prompt": "NAN x"}])
    outcome = bench.pipeline.run(BatchRef(job_id=job.id, batch=0))
    assert (outcome.succeeded, outcome.shard, len(outcome.failures)) == (0, None, 2)
    assert bench.store.list("shards") == []
    assert bench.ledger.head() == 0


def test_a_second_run_changes_nothing_and_asks_nothing(bench: Bench) -> None:
    job = bench.job([{"prompt": "hello"}])
    ref = BatchRef(job_id=job.id, batch=0)
    first = bench.pipeline.run(ref)
    asked = len(bench.tap.requests)
    assert bench.pipeline.run(ref) == first
    assert len(bench.tap.requests) == asked
    assert bench.ledger.head() == 1


def test_a_sealed_shard_without_outcome_is_settled_without_the_engine(bench: Bench) -> None:
    """A worker died between sealing and writing the outcome."""
    job = bench.job([{"prompt": "hello", "id": "a"}, {"prompt": "REFUSE", "id": "b"}])
    ref = BatchRef(job_id=job.id, batch=0)
    before = bench.pipeline.run(ref)
    bench.store.delete(f"jobs/{job.id}/outcomes/000/000000.json")
    bench.store.delete("ledger/000000000001.json")
    bench.store.delete(f"ledger/by-shard/{before.shard}.json")
    bench.store.delete("ledger/last")
    bench.tap.off = "must not be asked"

    after = bench.pipeline.run(ref)
    assert (after.succeeded, after.shard, after.bytes) == (1, before.shard, before.bytes)
    assert [failure.id for failure in after.failures] == ["b"]
    assert bench.ledger.head() == 1


def test_an_engine_that_is_away_decides_nothing(bench: Bench) -> None:
    job = bench.job([{"prompt": "hello"}, {"prompt": "there"}])
    ref = BatchRef(job_id=job.id, batch=0)
    bench.tap.off = "the breaker tripped"
    with pytest.raises(EngineUnavailable, match="breaker"):
        bench.pipeline.run(ref)
    assert bench.records.outcome(ref) is None
    assert bench.store.list("shards") == []
    bench.tap.off = None
    assert bench.pipeline.run(ref).succeeded == 2


def test_an_aborted_row_is_not_its_own_fault(bench: Bench) -> None:
    job = bench.job([{"prompt": "ABORT"}])
    with pytest.raises(EngineUnavailable, match="stopping"):
        bench.pipeline.run(BatchRef(job_id=job.id, batch=0))
    assert bench.tap.slices_left() == []


@pytest.mark.parametrize("change", [{"weights": "second"}, {"layers": (1, 3, 4)}])
def test_a_job_never_mixes_two_engines(
    bench: Bench, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = bench.job([{"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}], batch_size=1)
    bench.pipeline.run(BatchRef(job_id=job.id, batch=0))
    other = FakeTap(bench.tap.slice_dir, **change)
    changed = Pipeline(bench.records, bench.ledger, engines_of(engine_of(other)), 3)
    with pytest.raises(NoEngine, match="the job began with"):
        changed.run(BatchRef(job_id=job.id, batch=1))
    assert other.requests == []

    said = other.status()
    monkeypatch.setattr(other, "status", lambda: {**said, **dict.fromkeys(("layers", "fingerprint_id"))})
    with pytest.raises(EngineChanged, match="is not the job's any more"):  # its status left open what it is
        changed.run(BatchRef(job_id=job.id, batch=1))
    assert list(bench.records.finished(job.id)) == [0]

    bench.run_all(job)
    described = bench.overview.job(job.id)
    assert (described.state.value, described.succeeded, described.failed) == ("done", 3, 0)
    assert len({entry.fingerprint_id for entry in bench.ledger.entries()}) == 1


def test_a_cancelled_job_stops_within_the_batch(bench: Bench) -> None:
    job = bench.job([{"prompt": "one"}, {"prompt": "two"}])
    bench.records.cancel(job.id)
    with pytest.raises(JobCancelled):
        bench.pipeline.run(BatchRef(job_id=job.id, batch=0))
    described = bench.overview.job(job.id)
    assert (described.state.value, described.skipped, described.rows) == ("cancelled", 2, 2)
