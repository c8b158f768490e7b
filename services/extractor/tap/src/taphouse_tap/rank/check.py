"""The canary's rank-side check: do the captured states reproduce the tokens that the engine chose?

Each rank applies the final norm and its own part of the head to the sealed rows, read back from the slices of
all ranks. No collective is used, so a rank that fails here can't leave the others waiting; `verdict.combine`
compares the ranks' answers where they are gathered anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from taphouse.slices import Start, check_token_ids, join_rows, read_trailer
from taphouse_tap import compat
from taphouse_tap.verdict import verdict

_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}
"""How far below the best logit the chosen token's may lie, in standard deviations of the logits."""


class Checker:
    """Checks one sealed capture on one rank."""

    def __init__(
        self,
        model: nn.Module,
        stack: compat.Stack,
        start: Start,
        device: torch.device,
        epoch_now: Callable[[], int],
    ) -> None:
        self._model, self._norm, self._last = model, stack.norm, len(stack.layers)
        self._start, self._device = start, device
        self._epoch_now = epoch_now

    @torch.inference_mode()
    def check(self, tag: str, token_ids: Sequence[int], rows: int) -> dict[str, Any]:
        """Check the greedy tokens of a capture with `rows` rows; `token_ids` are prompt + generated.

        Returns `ok`, `reason`, `checked` (tokens in this rank's part of the vocabulary) and, for
        `verdict.combine`, `best` and `chosen` logits (None where another rank has the token) with the
        `tolerance` between them.
        Raises the slice errors.
        """
        paths = self._start.slice_paths(tag)
        trailer = read_trailer(paths[0])
        if (epoch := self._epoch_now()) != trailer.weights_epoch:
            reason = (
                f"the weights changed since: epoch {trailer.weights_epoch} was captured, {epoch} is loaded"
            )
            return {"ok": False, "reason": reason, "checked": 0}
        first = trailer.prompt_len - 1
        check_token_ids(paths, token_ids[:rows])
        raw = join_rows(paths, first, rows - first, [self._last])[:, 0]
        chosen_ids = list(token_ids[first + 1 : rows + 1])
        if not chosen_ids or len(chosen_ids) != rows - first:
            raise ValueError(
                f"{len(token_ids)} token ids don't match {rows} rows of a {first + 1}-token prompt"
            )
        hidden = _tensor(raw, trailer.dtype).to(self._device)
        normed = self._norm(hidden)
        normed = normed[0] if isinstance(normed, tuple) else normed
        logits = compat.local_logits(self._model, normed)
        best = logits.values.max(dim=1).values
        tolerance = float(_TOLERANCE[trailer.dtype] * logits.values.std())
        chosen: list[float | None] = []
        for row, token in enumerate(chosen_ids):
            here = 0 <= token - logits.first < logits.values.shape[1]
            chosen.append(float(logits.values[row, token - logits.first]) if here else None)
        return {
            **verdict(best.tolist(), chosen, tolerance),
            "tp_rank": trailer.tp_rank,
            "best": best.tolist(),
            "chosen": chosen,
            "tolerance": tolerance,
        }


def _tensor(raw: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    raw = np.ascontiguousarray(raw)
    return (
        torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
        if dtype == "bfloat16"
        else torch.from_numpy(raw)
    )
