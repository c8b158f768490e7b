"""The draft model itself: its shape for several targets, and what its loss looks at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.tiny import VOCAB

from taphouse.samples import Sample
from taphouse_trainer.batches import Packing, window
from taphouse_trainer.draft import Draft, DraftShape, Objective, library_mapping
from taphouse_trainer.errors import CheckpointError, TargetError
from taphouse_trainer.optimizer import Optimizer, Schedule
from taphouse_trainer.verifier import RawTensor, Verifier, read_verifier
from taphouse_trainer.vocabulary import TokenCounts, Vocabulary, make_vocabulary

COLUMNS = (0, 1, 2, 3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def verifier(target: Path) -> Verifier:
    return read_verifier(target)


@pytest.fixture(scope="module")
def vocabulary(samples: list[Sample]) -> Vocabulary:
    counts = TokenCounts(VOCAB)
    for sample in samples:
        counts.add(sample.token_ids, sample.loss_mask)
    return make_vocabulary(counts, 96, VOCAB, library_mapping)


def build(verifier: Verifier, vocabulary: Vocabulary, **shape: Any) -> Draft:
    torch.manual_seed(0)
    return Draft(verifier, vocabulary, DraftShape((1, 2, 3), **shape), Objective(), device=CPU)


def loss_of(draft: Draft, samples: list[Sample]) -> float:
    batch = Packing(4096, draft.shape.ttt_steps).pack(samples, [COLUMNS] * len(samples), CPU, torch.float32)
    return float(draft.evaluate(batch).loss)


def test_targets_are_the_models_own_distribution(
    verifier: Verifier, vocabulary: Vocabulary, samples: list[Sample], model: Any
) -> None:
    """The frozen norm and head, applied to the un-normed last state, give the target's logits."""
    draft = build(verifier, vocabulary)
    last = torch.from_numpy(samples[0].hidden_states[:, -1])
    with torch.no_grad():
        ours = draft.model.verifier_lm_head(draft.model.verifier_norm(last))
        whole = model(input_ids=torch.from_numpy(samples[0].token_ids).long().unsqueeze(0)).logits[0]
    kept = torch.from_numpy(vocabulary.target_to_draft)
    assert torch.allclose(ours, whole[:, kept], atol=1e-4)


def test_packing_changes_nothing_for_any_sample(
    verifier: Verifier, vocabulary: Vocabulary, samples: list[Sample]
) -> None:
    draft = build(verifier, vocabulary)
    mixed = [samples[0], replace(samples[1], loss_mask=np.ones_like(samples[1].loss_mask)), samples[2]]
    alone = [Packing(4096, 3).pack([s], [COLUMNS], CPU, torch.float32) for s in mixed]
    together = Packing(4096, 3).pack(mixed, [COLUMNS] * 3, CPU, torch.float32)
    # Later unrolled steps have fewer targets, and the loss is a mean over all trained rows.
    weights = [b.trained_tokens for b in alone]
    expected = sum(float(draft.evaluate(b).loss) * w for b, w in zip(alone, weights, strict=True)) / sum(
        weights
    )
    assert float(draft.evaluate(together).loss) == pytest.approx(expected, rel=0.01)
    # Whatever a neighbour says must not matter to the first sample's rows.
    other = replace(
        samples[1], token_ids=samples[1].token_ids[::-1].copy(), loss_mask=samples[1].loss_mask * 0
    )
    quiet = replace(samples[1], loss_mask=samples[1].loss_mask * 0)
    assert loss_of(draft, [samples[0], quiet]) == pytest.approx(loss_of(draft, [samples[0], other]), abs=1e-6)


def test_only_masked_in_rows_count(verifier: Verifier, vocabulary: Vocabulary, samples: list[Sample]) -> None:
    draft = build(verifier, vocabulary)
    mask = np.zeros_like(samples[0].loss_mask)
    mask[20:30] = 1
    sample = replace(samples[0], loss_mask=mask)
    states = sample.hidden_states.copy()
    states[:19, -1] += 5.0  # targets of masked-out rows only
    states[30:, -1] += 5.0
    changed = replace(sample, hidden_states=states)
    assert loss_of(draft, [sample]) == pytest.approx(loss_of(draft, [changed]), abs=1e-6)
    states[25, -1] += 5.0
    assert loss_of(draft, [sample]) != pytest.approx(
        loss_of(draft, [replace(sample, hidden_states=states)]), abs=1e-3
    )


def test_long_samples_keep_what_is_trained() -> None:
    mask = np.zeros(100, np.uint8)
    mask[60:80] = 1
    assert window(mask, 30) == (50, 80)
    assert window(mask, 500) == (0, 80)


def test_layers_attend_to_everything_unless_told(verifier: Verifier, vocabulary: Vocabulary) -> None:
    full = build(verifier, vocabulary).model.config.transformer_layer_config
    assert full.layer_types == ["full_attention"]
    short = build(verifier, vocabulary, sliding_window=8).model.config.transformer_layer_config
    assert (short.layer_types, short.sliding_window) == (["sliding_attention"], 8)


def test_head_size_of_latent_attention_targets(verifier: Verifier, vocabulary: Vocabulary) -> None:
    config = {
        **verifier.config, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 2,
        "num_key_value_heads": 2, "rope_theta": 50_000.0, "rope_parameters": None,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "mscale": 1.0},
    }  # fmt: skip
    config.pop("head_dim", None)
    layer = build(replace(verifier, config=config), vocabulary).model.config.transformer_layer_config
    assert layer.head_dim == 128
    assert layer.rope_parameters == {"rope_type": "default", "rope_theta": 50_000.0}


def test_bfloat16_targets_are_read_to_the_bit(verifier: Verifier, vocabulary: Vocabulary) -> None:
    weights = torch.randn(VOCAB, verifier.hidden_size).bfloat16()
    raw = RawTensor("lm_head.weight", "bfloat16", weights.view(torch.uint16).numpy())
    draft = build(replace(verifier, lm_head=raw), vocabulary)
    kept = torch.from_numpy(vocabulary.target_to_draft)
    assert torch.equal(draft.model.lm_head.weight, weights[kept].float())


def test_frozen_and_trained(verifier: Verifier, vocabulary: Vocabulary, samples: list[Sample]) -> None:
    draft = build(verifier, vocabulary)
    before = {n: p.detach().clone() for n, p in draft.model.named_parameters()}
    optimizer = Optimizer(
        (p for _, p in draft.trainable()), Schedule(1e-2), weight_decay=0.0, max_grad_norm=1.0
    )
    batch = Packing(4096, 3).pack(samples[:2], [COLUMNS] * 2, CPU, torch.float32)
    assert optimizer.step(draft.loss(batch).loss)
    changed = {n for n, p in draft.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n, _ in draft.trainable()}
    assert not any(n.startswith(("embed_tokens", "lm_head", "verifier")) for n in changed)


def test_gradients_that_are_not_finite_change_nothing(
    verifier: Verifier, vocabulary: Vocabulary, samples: list[Sample]
) -> None:
    draft = build(verifier, vocabulary)
    before = {n: p.detach().clone() for n, p in draft.trainable()}
    optimizer = Optimizer(
        (p for _, p in draft.trainable()), Schedule(1e-2), weight_decay=0.1, max_grad_norm=1.0
    )
    batch = Packing(4096, 3).pack(samples[:1], [COLUMNS], CPU, torch.float32)
    assert not optimizer.step(draft.loss(batch).loss * float("nan"))
    assert all(torch.equal(p, before[n]) for n, p in draft.trainable())


def test_weights_of_another_shape_are_refused(
    tmp_path: Path, verifier: Verifier, vocabulary: Vocabulary
) -> None:
    build(verifier, vocabulary, num_layers=2).save_exact(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="another shape"):
        build(verifier, vocabulary).load_exact(tmp_path / "weights.safetensors")


def test_the_second_generation_trains_too(
    verifier: Verifier, vocabulary: Vocabulary, samples: list[Sample]
) -> None:
    draft = build(verifier, vocabulary, generation="3.1")
    assert draft.model.config.norm_output and draft.model.config.norm_before_fc
    assert np.isfinite(loss_of(draft, samples[:2]))


def test_schedule() -> None:
    schedule = Schedule(1.0, warmup_steps=10, decay_steps=100)
    assert schedule.factor(0) == pytest.approx(0.1)
    assert schedule.factor(9) == pytest.approx(1.0, abs=0.05)
    assert schedule.factor(100) == schedule.factor(10_000) == pytest.approx(0.1)
    assert Schedule(1.0).factor(10_000) == 1.0


@pytest.mark.parametrize(
    ("key", "value"), [("num_attention_heads", None), ("num_attention_heads", "x"), ("rope_scaling", 3)]
)
def test_a_target_config_that_makes_no_draft_is_named(
    verifier: Verifier, vocabulary: Vocabulary, key: str, value: Any
) -> None:
    config = {**verifier.config, key: value, "rope_parameters": None if key == "rope_scaling" else {}}
    with pytest.raises(TargetError, match=r"config\.json makes no draft"):
        build(replace(verifier, config=config), vocabulary)
