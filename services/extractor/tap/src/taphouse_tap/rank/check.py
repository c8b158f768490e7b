"""The canary's rank-side check: do the captured states reproduce the tokens that the engine chose?

Each rank applies the final norm and its own part of the head to the sealed rows, read back from the slices of
all ranks. No collective is used, so a rank that fails here can't leave the others waiting; `verdict.combine`
compares the ranks' answers where they are gathered anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from taphouse.slices import Start, check_slices, check_token_ids, join_rows, read_trailer
from taphouse_tap import compat_model
from taphouse_tap.verdict import verdict

_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}
"""How far below the best logit the chosen token's may lie, in standard deviations of the logits."""

_ROUNDINGS = 3
"""The same in units in the last place of the largest logit, whichever is more.

Two logits are compared, and the engine rounded both of them as we do: that can be two units alone.
"""

_LOGPROBS = 2e-6
"""The least, in nats: engines rank by float32 logprobs, and down to -32 those differ by 2**-19."""

_BLOCK = 16
"""Rows whose logits are computed at once: it bounds the memory."""


class Checker:
    """Checks one sealed capture on one rank."""

    def __init__(
        self,
        model: nn.Module,
        stack: compat_model.Stack,
        start: Start,
        device: torch.device,
        epoch_now: Callable[[], int],
    ) -> None:
        self._model, self._norm, self._last = model, stack.norm, len(stack.layers)
        self._start, self._device = start, device
        self._epoch_now = epoch_now

    @torch.inference_mode()
    def check(
        self,
        tag: str,
        token_ids: Sequence[int],
        rows: int,
        first: int | None = None,
        highest: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Check a capture with `rows` rows, which were fed the first `rows` of `token_ids`.

        The rows from `first` on must give the tokens `highest`, one each. Left out, they are the rows from
        the prompt's last on, and the tokens that the engine generated greedily, from `token_ids`.

        Returns `ok`, `reason`, `checked` (tokens in this rank's part of the vocabulary) and, for
        `verdict.combine`, `best` and `chosen` logits (None where another rank has the token) with the
        `tolerance` between them.
        Raises the slice errors.
        """
        paths = self._start.slice_paths(tag)
        check_slices(paths)
        trailer = read_trailer(paths[0])
        if (epoch := self._epoch_now()) != trailer.weights_epoch:
            reason = (
                f"the weights changed since: epoch {trailer.weights_epoch} was captured, {epoch} is loaded"
            )
            return {"ok": False, "reason": reason, "checked": 0}
        if first is None or highest is None:
            first = trailer.prompt_len - 1
            highest = token_ids[first + 1 : rows + 1]
        if not highest or not 0 <= first <= rows - len(highest):
            raise ValueError(f"{len(highest)} tokens from row {first} on don't match {rows} rows")
        check_token_ids(paths, token_ids[:rows])
        best: list[float] = []
        chosen: list[float | None] = []
        tolerance = 0.0
        for at in range(0, len(highest), _BLOCK):
            block = highest[at : at + _BLOCK]
            logits = self._logits(paths, first + at, len(block), trailer.dtype)
            best += logits.values.max(dim=1).values.tolist()
            tolerance = max(tolerance, _tolerance(logits.values, trailer.dtype))
            for row, token in enumerate(block):
                here = 0 <= token - logits.first < logits.values.shape[1]
                chosen.append(float(logits.values[row, token - logits.first]) if here else None)
        return {
            **verdict(best, chosen, tolerance),
            "tp_rank": trailer.tp_rank,
            "best": best,
            "chosen": chosen,
            "tolerance": tolerance,
        }

    def _logits(self, paths: Sequence[Path], first: int, count: int, dtype: str) -> compat_model.LocalLogits:
        """This rank's logits of rows [first, first + count)."""
        raw = join_rows(paths, first, count, [self._last])[:, 0]
        normed = self._norm(_tensor(raw, dtype).to(self._device))
        return compat_model.local_logits(self._model, normed[0] if isinstance(normed, tuple) else normed)


def _tolerance(logits: torch.Tensor, dtype: str) -> float:
    """How far below the best of `logits` [rows, n] the chosen one may lie."""
    unit = float(torch.finfo(getattr(torch, dtype)).eps * logits.abs().max())
    return max(_TOLERANCE[dtype] * float(logits.std()), _ROUNDINGS * unit, _LOGPROBS)


def _tensor(raw: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    raw = np.ascontiguousarray(raw)
    return (
        torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
        if dtype == "bfloat16"
        else torch.from_numpy(raw)
    )
