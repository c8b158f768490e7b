"""A tiny Llama target, its states and stores of shards: plain functions for fixtures and tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from taphouse.ledger import Ledger
from taphouse.samples import Sample
from taphouse.shards import ShardMeta, shard_name, write_shard
from taphouse.store import LocalStore
from taphouse.store.identity import begin

VOCAB, HIDDEN, LAYERS, LENGTH = 128, 64, 4, 40
TAPPED = (1, 2, 3, LAYERS)
SAMPLES_PER_SHARD = 8


def progressions(count: int, seed: int) -> torch.Tensor:
    """``[count, LENGTH]`` token ids, each row an arithmetic progression modulo the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCAB, (count, 1), generator=generator)
    stride = torch.tensor([1, 2, 3, 5])[torch.randint(0, 4, (count, 1), generator=generator)]
    return (start + stride * torch.arange(LENGTH)) % VOCAB


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=256,
        )
    )


def fingerprint(target: Path, model: LlamaForCausalLM) -> dict[str, Any]:
    """What the tap would say of this checkpoint, worked out here by other means than the trainer's."""
    norm = model.model.norm.weight.detach().numpy().astype("<f4").tobytes()
    return {
        "config": hashlib.sha256((target / "config.json").read_bytes()).hexdigest(),
        "final_norm": hashlib.sha256(norm).hexdigest(),
        "revision": None,
    }


def capture(model: LlamaForCausalLM, ids: torch.Tensor) -> np.ndarray:
    """``[T, L, H]`` float32: streams entering the tapped layers, the last one before the final norm."""
    kept: dict[str, torch.Tensor] = {}
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: kept.update(last=args[0]))
    with torch.no_grad():
        states = model.model(ids.unsqueeze(0), output_hidden_states=True).hidden_states
    hook.remove()
    return torch.stack([*(states[i][0] for i in TAPPED[:-1]), kept["last"][0]], dim=1).contiguous().numpy()


def add_shard(root: Path, samples: Sequence[Sample], meta: ShardMeta) -> Path:
    """Append one shard to the store and its ledger; returns its file."""
    store = LocalStore(root)
    begin(store)
    ledger = Ledger(store)
    batch = ledger.head()
    facts = write_shard(store, shard_name("job", batch), samples, meta.model_copy(update={"batch": batch}))
    return store.local_path(ledger.append(facts).path)


def step_lines(output: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The metrics log's entries of one kind."""
    lines = (json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]
