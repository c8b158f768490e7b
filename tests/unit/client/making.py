"""Samples and shards for tests, and a second shard writer that goes by FORMAT.md and checks nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import safetensors.numpy

from taphouse.samples import STORAGE_DTYPES, Sample
from taphouse.shards import ShardMeta
from taphouse.slices import fingerprint_id

LAYERS = (1, 3, 6)
NUM_LAYERS = 6
HIDDEN = 16
FINGERPRINT = {"config": "0" * 64, "dtype": "bfloat16", "weights": "1" * 64}


def make_meta(dtype: str = "bfloat16", **fields: Any) -> ShardMeta:
    values: dict[str, Any] = {
        "layers": LAYERS,
        "num_layers": NUM_LAYERS,
        "hidden_size": HIDDEN,
        "dtype": dtype,
        "fingerprint": FINGERPRINT,
        "job_id": "job",
        "batch": 0,
        "created_by": "a test",
    }
    return ShardMeta(**(values | fields))


def make_states(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Bell-shaped states whose scale differs by channel, as those of real models do."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=shape[-1])).astype(np.float32)
    states = (rng.standard_normal(shape).astype(np.float32) * scale + np.float32(0.001)).astype(np.float32)
    if dtype == "bfloat16":
        return (states.view(np.uint32) >> 16).astype(np.uint16)
    return states.astype(STORAGE_DTYPES[dtype])


def make_sample(number: int = 0, tokens: int = 5, dtype: str = "bfloat16", **fields: Any) -> Sample:
    rng = np.random.default_rng(number)
    values: dict[str, Any] = {
        "id": f"sample-{number}",
        "token_ids": rng.integers(0, 50_000, tokens).astype(np.int32),
        "loss_mask": rng.integers(0, 2, tokens).astype(np.uint8),
        "hidden_states": make_states((tokens, len(LAYERS), HIDDEN), dtype, number),
        "dtype": dtype,
        "prompt_len": max(1, tokens // 2),
        "next_token_id": 7,
        "finish_reason": "length",
    }
    return Sample(**(values | fields))


def make_samples(count: int = 3, dtype: str = "bfloat16") -> list[Sample]:
    return [make_sample(number, 4 + number, dtype) for number in range(count)]


def hand_made(
    samples: Sequence[Sample],
    meta: ShardMeta | None = None,
    *,
    edit: Callable[[dict[str, Any]], None] | None = None,
    blobs: dict[str, bytes] | None = None,
    metadata: dict[str, str] | None = None,
) -> bytes:
    """A shard of codec `stored`, written with the safetensors library and nothing of taphouse's writer.

    `edit` changes the header before its checksum is made; `blobs` replaces tensors' blobs by name; `metadata`
    overrides the container's. Values are not checked: NaN and zeros go in.
    """
    meta = meta or make_meta(samples[0].dtype)
    header: dict[str, Any] = meta.model_dump(mode="json")
    header["fingerprint_id"] = fingerprint_id(meta.fingerprint)
    header["samples"] = []
    tensors: dict[str, np.ndarray] = {}
    for number, sample in enumerate(samples):
        entry: dict[str, Any] = {
            name: getattr(sample, name)
            for name in ("id", "tokens", "prompt_len", "next_token_id", "finish_reason")
        }
        entry["tensors"] = {}
        for name, dtype in (("token_ids", "int32"), ("loss_mask", "uint8"), ("hidden_states", sample.dtype)):
            raw = getattr(sample, name).tobytes()
            entry["tensors"][name] = {
                "codec": "stored",
                "dtype": dtype,
                "shape": list(getattr(sample, name).shape),
                "bytes": len(raw),
                "raw_bytes": len(raw),
                "sha256": hashlib.sha256(raw).hexdigest(),
            }
            tensors[f"{number:06d}.{name}"] = np.frombuffer(raw, np.uint8)
        header["samples"].append(entry)
    if edit:
        edit(header)
    for name, blob in (blobs or {}).items():
        tensors[name] = np.frombuffer(blob, np.uint8)
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    outer = {
        "format": "taphouse-shard",
        "version": "1",
        "header": text,
        "header_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    return safetensors.numpy.save(tensors, outer | (metadata or {}))
