"""The loaded weights as captures see them: whose they are, how often they changed, whether they are there.

An engine may change its weights while it serves (`reload_weights`) or put them away (`sleep`, and from
`start_weight_update` to `finish_weight_update`). Every change begins a new epoch. A capture belongs to one
epoch, and what straddles two fails.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn

_LOOKS = 16
"""Parameters looked at again by one `look_again`; it goes round all of them."""


@dataclass(frozen=True)
class Loaded:
    """What is loaded, as one value: no other thread sees the epoch of one change with another's fingerprint.

    `away` says why there are no whole weights now; None when there are.
    """

    epoch: int
    fingerprint: dict[str, Any]
    away: str | None = None


class Weights:
    """The weights of one rank. Only the engine's thread changes it."""

    def __init__(
        self, model: nn.Module, norm: nn.Module, identity: dict[str, str | None], dtype: str
    ) -> None:
        self._model, self._norm = model, norm
        self._identity = {**identity, "dtype": dtype}
        self.now = Loaded(0, self._read())

    @property
    def epoch(self) -> int:
        """How often they changed."""
        return self.now.epoch

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The model's part of the fingerprint: identity, dtype and checksums of this rank's tensors."""
        return self.now.fingerprint

    def put_away(self, why: str) -> None:
        """They are about to change or to go away: until `renew`, nobody may touch them."""
        self.now = replace(self.now, away=why)

    def renew(self) -> None:
        """Begin a new epoch with the weights that are loaded now; while some are missing they stay away."""
        if not any(parameter.is_meta for parameter in self._model.parameters()):
            self.now = Loaded(self.now.epoch + 1, self._read())

    def look_again(self) -> bool:
        """Read a few parameters again, others at each call; whether they are what they were."""
        parameters = dict(self._model.named_parameters())
        return all(
            name in parameters and corner_checksum(parameters[name]) == self._checksums[name]
            for name in islice(self._round, min(_LOOKS, len(self._checksums)))
        )

    def _read(self) -> dict[str, Any]:
        """Take the checksums of all tensors, and return the fingerprint that follows."""
        self._checksums = {name: corner_checksum(p) for name, p in sorted(self._model.named_parameters())}
        self._round = cycle(self._checksums)
        return {
            **self._identity,
            "weights": _joined(self._checksums),
            "final_norm": final_norm_checksum(self._norm),
        }


def corner_checksum(parameter: torch.Tensor) -> str:
    """Return sha256 of a corner of a tensor: first 8 rows, 64 of every further axis."""
    corner = parameter.detach()
    if corner.dim():
        corner = corner[(slice(8), *[slice(64)] * (corner.dim() - 1))]
    return hashlib.sha256(
        corner.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def final_norm_checksum(norm: nn.Module) -> str | None:
    """Return sha256 of the final norm's weight as float32, little endian; None if it has none."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    return hashlib.sha256(weight.detach().float().cpu().numpy().astype("<f4").tobytes()).hexdigest()


def _joined(checksums: dict[str, str]) -> str:
    text = "\n".join(f"{name} {checksum}" for name, checksum in sorted(checksums.items()))
    return hashlib.sha256(text.encode()).hexdigest()
