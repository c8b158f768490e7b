"""Stopping, killing and resuming."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.trainer.conftest import StoreMaker
from tests.trainer.runs import losses, seen, settings, train
from tests.trainer.tiny import VOCAB, add_shard

from taphouse.samples import Sample
from taphouse.shards import ShardMeta
from taphouse.store import LocalStore
from taphouse.store.identity import begin
from taphouse_trainer.errors import AlreadyRunning, CheckpointError, SettingsConflict, VocabularyError
from taphouse_trainer.main import run
from taphouse_trainer.shard_stream import HeldOut


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    tmp_path: Path, make_store: StoreMaker, target: Path
) -> None:
    store, whole, parts = make_store(), tmp_path / "whole", tmp_path / "parts"
    common = {"epochs": 2, "lr_decay_steps": 40}
    train(tmp_path, store, target, output=whole, **common)
    train(tmp_path, store, target, output=parts, stop_after_steps=7, **common)
    assert len(losses(parts)) == 7
    train(tmp_path, store, target, output=parts, stop_after_steps=30, **common)
    train(tmp_path, store, target, output=parts, **common)

    assert losses(parts) == losses(whole)
    assert seen(parts) == seen(whole)
    finals = [(out / "latest" / "model.safetensors").read_bytes() for out in (whole, parts)]
    assert finals[0] == finals[1]


def command(store: Path, target: Path, output: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "taphouse_trainer.main", "--store", str(store), "--target", str(target),
        "--output", str(output), "--port", "0", "--draft-vocab-size", "96", "--vocabulary-min-tokens", "1000",
        "--batch-size", "4", "--poll-s", "0.01", "--threads", "1", "--replay-after-s", "0",
        "--held-out-fraction", "0.1", *more,
    ]  # fmt: skip


def wait_for_step(output: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Until the log has a line for ``step``."""
    log = output / "metrics.jsonl"
    while process.poll() is None:
        lines = log.read_text().splitlines() if log.exists() else []
        if any(f'"step": {step},' in line for line in lines):
            return
        time.sleep(0.02)
    pytest.fail(f"the trainer ended with {process.returncode} before step {step}")


def test_killed_runs_see_every_sample_exactly_once_an_epoch(
    tmp_path: Path, make_store: StoreMaker, target: Path, samples: list[Sample]
) -> None:
    store, output = make_store(), tmp_path / "out"
    going = command(store, target, output, "--epochs", "4", "--checkpoint-every-steps", "5")
    for step in (12, 33):  # neither is where a checkpoint is due
        process = subprocess.Popen(going)
        wait_for_step(output, step, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        # What a kill in the middle of a save leaves behind must not be taken for a checkpoint.
        (output / ".checkpoint-99.1").mkdir(exist_ok=True)
    done = subprocess.run([*going, "--stop-when-idle-s", "0"], check=False)

    assert done.returncode == 0
    trained = {s.id for s in samples if not HeldOut(0.1, 64).holds(s.id)}
    assert Counter(seen(output)) == {(epoch, i): 1 for epoch in range(4) for i in trained}
    steps = [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert not list(output.glob(".checkpoint-*"))
    kept = sorted(p.name for p in output.glob("checkpoint-*"))
    assert len(kept) == 4 and "checkpoint-0" in kept


def test_sigterm_saves_and_exits_cleanly(tmp_path: Path, make_store: StoreMaker, target: Path) -> None:
    store, output = make_store(), tmp_path / "out"
    process = subprocess.Popen(command(store, target, output, "--epochs", "null"))
    wait_for_step(output, 6, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    state = json.loads((output / "latest" / "training_state" / "state.json").read_text())
    assert state["step"] == len(losses(output)) >= 6
    assert sum(1 for _ in seen(output)) == state["samples"]
    record = json.loads((store / "consumers" / "trainer.json").read_text())
    assert (record["phase"], record["step"], record["lag"]) == ("stopped", state["step"], record["lag"])


def test_waits_for_shards_and_goes_on_when_they_land(
    tmp_path: Path, make_store: StoreMaker, target: Path, samples: list[Sample], meta: ShardMeta
) -> None:
    store, stop, ended = make_store(samples[:32]), threading.Event(), []
    options = settings(tmp_path, store, target, stop_when_idle_s=None, vocabulary_min_tokens=100)
    thread = threading.Thread(target=lambda: ended.append(run(options, stop)))
    thread.start()
    first = {s.id for s in samples[:32] if not HeldOut(0.1, 64).holds(s.id)}
    second = first | {s.id for s in samples[32:40] if not HeldOut(0.1, 64).holds(s.id)}

    def trained() -> set[str]:
        return {i for _, i in seen(options.output)} if (options.output / "metrics.jsonl").exists() else set()

    while len(trained()) < len(first) // 4 * 4 and thread.is_alive():
        time.sleep(0.02)
    add_shard(store, samples[32:40], meta)
    while len(trained()) < len(second) // 4 * 4 and thread.is_alive():
        time.sleep(0.02)
    stop.set()
    thread.join()
    assert ended == ["stopped"]
    assert max(Counter(seen(options.output)).values()) == 1
    train(tmp_path, store, target, vocabulary_min_tokens=100)
    assert Counter(seen(options.output)) == {(0, i): 1 for i in second}


def test_the_vocabulary_outlives_the_run_that_made_it(
    tmp_path: Path, make_store: StoreMaker, target: Path, samples: list[Sample], meta: ShardMeta
) -> None:
    store, output = make_store(samples[:48]), tmp_path / "out"
    train(tmp_path, store, target, draft_vocab_size=40, vocabulary_min_tokens=500)
    first = np.load(output / "latest" / "training_state" / "vocabulary.npz")["t2d"]
    assert first.sum() == 40

    # Later data has other frequencies: the rarest tokens so far become the most common ones.
    rare = np.flatnonzero(~first)[:8].astype(np.int32)
    for k in range(6):
        changed = [
            Sample(
                id=f"late{k}-{s.id}",
                token_ids=np.resize(rare, len(s.token_ids)).astype(np.int32),
                loss_mask=s.loss_mask,
                hidden_states=s.hidden_states,
                dtype=s.dtype,
                prompt_len=s.prompt_len,
            )
            for s in samples[:8]
        ]
        add_shard(store, changed, meta)
    train(tmp_path, store, target, draft_vocab_size=40)
    latest = np.load(output / "latest" / "training_state" / "vocabulary.npz")["t2d"]
    assert np.array_equal(first, latest)
    assert any(i.startswith("late") for _, i in seen(output))

    with pytest.raises(VocabularyError, match="40 of 128"):
        train(tmp_path, store, target, draft_vocab_size=48)
    other = tmp_path / "other.npz"
    t2d = np.zeros(VOCAB, bool)
    t2d[-40:] = True
    np.savez(other, t2d=t2d, d2t=np.flatnonzero(t2d) - np.arange(40))
    with pytest.raises(VocabularyError, match="is not the mapping"):
        train(tmp_path, store, target, draft_vocab_size=40, vocabulary=other)


def test_a_given_mapping_is_taken(tmp_path: Path, make_store: StoreMaker, target: Path) -> None:
    t2d = np.zeros(VOCAB, bool)
    t2d[::2] = True
    np.savez(tmp_path / "given.npz", t2d=t2d, d2t=np.flatnonzero(t2d) - np.arange(64))
    train(
        tmp_path,
        make_store(),
        target,
        draft_vocab_size=64,
        vocabulary=tmp_path / "given.npz",
        stop_after_steps=1,
    )
    stored = np.load(tmp_path / "out" / "latest" / "training_state" / "vocabulary.npz")["t2d"]
    assert np.array_equal(stored, t2d)


def test_fewer_distinct_tokens_than_the_draft_has(
    tmp_path: Path, make_store: StoreMaker, target: Path, samples: list[Sample]
) -> None:
    few = [s for s in samples if s.loss_mask.any()][:8]
    distinct = {int(t) for s in few for t in s.token_ids[s.loss_mask.astype(bool)]}
    train(
        tmp_path, make_store(few), target, draft_vocab_size=127, vocabulary_min_tokens=10, stop_after_steps=2,
        held_out_fraction=0,
    )  # fmt: skip
    stored = np.load(tmp_path / "out" / "latest" / "training_state" / "vocabulary.npz")["t2d"]
    assert stored.sum() == 127
    assert all(stored[t] for t in list(distinct)[:127] if len(distinct) <= 127)


@pytest.mark.parametrize("changes", [{"ttt_steps": 2}, {"layers": (1, 2)}, {"held_out_fraction": 0.3}])
def test_resuming_with_other_settings_is_refused(
    tmp_path: Path, make_store: StoreMaker, target: Path, changes: dict[str, object]
) -> None:
    store = make_store()
    train(tmp_path, store, target, stop_after_steps=2)
    with pytest.raises(SettingsConflict, match=next(iter(changes))):
        train(tmp_path, store, target, **changes)


def test_resuming_on_a_store_that_lost_its_ledger_is_refused(
    tmp_path: Path, make_store: StoreMaker, target: Path
) -> None:
    train(tmp_path, make_store(), target)
    begin(LocalStore(tmp_path / "empty"))
    with pytest.raises(SettingsConflict, match="ledger"):
        train(tmp_path, tmp_path / "empty", target)


def test_resuming_on_a_store_that_went_back_and_grew_again_is_refused(
    tmp_path: Path, make_store: StoreMaker, target: Path, samples: list[Sample], meta: ShardMeta
) -> None:
    store = make_store()
    shutil.copytree(store, tmp_path / "backup")
    add_shard(store, samples[:4], meta)
    train(tmp_path, store, target, stop_after_steps=2)
    train(tmp_path, store, target)
    shutil.rmtree(store)
    (tmp_path / "backup").rename(store)
    add_shard(store, samples[:4], meta)
    with pytest.raises(SettingsConflict, match=r"another ledger entry .* restored from a backup"):
        train(tmp_path, store, target)


def test_two_trainers_share_neither_an_output_nor_a_name(
    tmp_path: Path, make_store: StoreMaker, target: Path
) -> None:
    store, stop = make_store(), threading.Event()
    thread = threading.Thread(
        target=run, args=(settings(tmp_path, store, target, stop_when_idle_s=None), stop), daemon=True
    )
    thread.start()
    while not (tmp_path / "out" / "latest").exists() and thread.is_alive():
        time.sleep(0.02)
    with pytest.raises(AlreadyRunning, match="another trainer is writing"):
        train(tmp_path, store, target)
    with pytest.raises(AlreadyRunning, match="under the name 'trainer'"):
        train(tmp_path / "other", store, target)
    assert train(tmp_path / "other", store, target, name="second", stop_after_steps=1) == "limit reached"
    stop.set()
    thread.join()
    assert train(tmp_path / "other", store, target, stop_after_steps=2) == "limit reached"
    assert sorted(path.name for path in (store / "consumers").glob("*.json")) == [
        "second.json",
        "trainer.json",
    ]


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.pt", "vocabulary.npz", "state.json"])
def test_a_damaged_checkpoint_is_named(
    tmp_path: Path, make_store: StoreMaker, target: Path, name: str
) -> None:
    store = make_store()
    train(tmp_path, store, target, stop_after_steps=2)
    file = tmp_path / "out" / "checkpoint-2" / "training_state" / name
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="checkpoint-2"):
        train(tmp_path, store, target)


def test_random_state_is_restored(tmp_path: Path, make_store: StoreMaker, target: Path) -> None:
    store = make_store()
    train(tmp_path, store, target, stop_after_steps=2)
    kept = torch.load(tmp_path / "out" / "latest" / "training_state" / "optimizer.pt", weights_only=True)
    torch.manual_seed(12345)
    train(tmp_path, store, target, stop_after_steps=2)  # nothing to do but to restore
    assert torch.equal(torch.get_rng_state(), kept["random"]["cpu"])
