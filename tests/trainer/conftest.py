"""A tiny target that has learned something, and stores of shards made from its hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.trainer.tiny import (
    HIDDEN,
    LAYERS,
    LENGTH,
    SAMPLES_PER_SHARD,
    TAPPED,
    add_shard,
    capture,
    fingerprint,
    progressions,
    tiny_model,
)  # fmt: skip
from transformers import LlamaForCausalLM

from taphouse.samples import Sample
from taphouse.shards import ShardMeta


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    model = tiny_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(150):
        ids = progressions(32, seed=1000 + step)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="session")
def target(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a checkpoint directory, float32."""
    path = tmp_path_factory.mktemp("target")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def samples(model: LlamaForCausalLM) -> list[Sample]:
    """96 samples ``s000 …``, the first eight tokens masked out."""
    mask = np.ones(LENGTH, np.uint8)
    mask[:8] = 0
    return [
        Sample(
            id=f"s{k:03d}",
            token_ids=ids.numpy().astype(np.int32),
            loss_mask=mask.copy(),
            hidden_states=capture(model, ids),
            dtype="float32",
            prompt_len=8,
        )
        for k, ids in enumerate(progressions(96, seed=7))
    ]


@pytest.fixture
def meta(target: Path, model: LlamaForCausalLM) -> ShardMeta:
    return ShardMeta(
        layers=TAPPED,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        dtype="float32",
        fingerprint=fingerprint(target, model),
        job_id="job",
        batch=0,
    )


StoreMaker = Callable[..., Path]


@pytest.fixture
def make_store(tmp_path: Path, samples: list[Sample], meta: ShardMeta) -> StoreMaker:
    """Makes ``tmp_path/store`` with one ledger entry per eight samples."""

    def make(chosen: Sequence[Sample] | None = None) -> Path:
        root = tmp_path / "store"
        chosen = samples if chosen is None else chosen
        for start in range(0, len(chosen), SAMPLES_PER_SHARD):
            add_shard(root, chosen[start : start + SAMPLES_PER_SHARD], meta)
        return root

    return make
