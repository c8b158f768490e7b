"""The model's part of the fingerprint: which weights made the states."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn


def model_fingerprint(
    model: nn.Module, norm: nn.Module, identity: dict[str, str | None], dtype: str
) -> dict[str, Any]:
    """Return the fingerprint of loaded weights: `identity` plus checksums of tensors (TP rank 0's)."""
    return {
        **identity,
        "dtype": dtype,
        "weights": weights_checksum(model),
        "final_norm": final_norm_checksum(norm),
    }


def weights_checksum(model: nn.Module) -> str:
    """Return sha256 over a corner of every parameter, by name: first 8 rows, 64 of every further axis."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        corner = parameter.detach()
        if corner.dim():
            corner = corner[(slice(8), *[slice(64)] * (corner.dim() - 1))]
        digest.update(name.encode())
        digest.update(corner.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def final_norm_checksum(norm: nn.Module) -> str | None:
    """Return sha256 of the final norm's weight as float32, little endian; None if it has none."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    return hashlib.sha256(weight.detach().float().cpu().numpy().astype("<f4").tobytes()).hexdigest()
