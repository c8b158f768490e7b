"""Whole training runs against a tiny target, on CPU."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch
from safetensors import safe_open
from speculators.models.eagle3 import Eagle3DraftModel
from tests.trainer.conftest import StoreMaker
from tests.trainer.runs import losses, seen, train
from tests.trainer.tiny import VOCAB, step_lines

from taphouse.samples import Sample
from taphouse_trainer.shard_stream import HeldOut


def test_learns_and_leaves_a_servable_checkpoint(
    tmp_path: Path, make_store: StoreMaker, target: Path, samples: list[Sample]
) -> None:
    ending = train(tmp_path, make_store(), target, epochs=6)

    assert ending == "data ended"
    held_out = [line["loss"] for line in step_lines(tmp_path / "out", "held_out")]
    quarter = len(held_out) // 4
    assert quarter >= 2
    assert sum(held_out[-quarter:]) < 0.8 * sum(held_out[:quarter])

    kept_out = {s.id for s in samples if HeldOut(0.1, 64).holds(s.id)}
    assert 3 <= len(kept_out) <= 20
    trained = {s.id for s in samples} - kept_out
    assert Counter(seen(tmp_path / "out")) == {(epoch, i): 1 for epoch in range(6) for i in trained}

    latest = tmp_path / "out" / "latest"
    config = json.loads((latest / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["draft_vocab_size"] == 96
    assert config["transformer_layer_config"]["layer_types"] == ["full_attention"]
    with safe_open(latest / "model.safetensors", framework="pt") as f:
        names = set(f.keys())
        assert {"fc.weight", "norm.weight", "lm_head.weight", "t2d", "d2t"} <= names
        assert not any(n.startswith(("verifier_", "embed_tokens")) for n in names)
        t2d, d2t = f.get_tensor("t2d"), f.get_tensor("d2t")
        assert torch.equal(torch.nonzero(t2d).flatten(), torch.arange(96) + d2t)
        assert len(t2d) == VOCAB
        saved = f.get_tensor("fc.weight")
    # speculators itself reads it back, filling in what is the target's.
    again = Eagle3DraftModel.from_pretrained(latest)
    assert torch.equal(again.fc.weight, saved)
    assert not any(p.isnan().any() for p in again.parameters())
    assert losses(tmp_path / "out")[-1] < losses(tmp_path / "out")[0]
