"""What the captured states must be: Hugging Face transformers' own, in float32 on the same checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@functools.lru_cache(maxsize=2)
def _model(checkpoint: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")


def states(checkpoint: Path, token_ids: Sequence[int], layers: Sequence[int]) -> NDArray[np.float32]:
    """Return [T, L, H]: the stream entering each of `layers` (id = number of layers: before the norm)."""
    import torch

    model = _model(checkpoint)
    before_norm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    try:
        with torch.no_grad():
            out = model(torch.tensor([list(token_ids)]), output_hidden_states=True)
    finally:
        hook.remove()
    streams = [*out.hidden_states[:-1], before_norm[0]]
    return np.stack([streams[layer][0].numpy() for layer in layers], axis=1)


def next_tokens(checkpoint: Path, last: NDArray[np.float32]) -> list[int]:
    """Return the greedy token that each row of the last stream [T, H] gives: argmax lm_head(norm(h))."""
    import torch

    model = _model(checkpoint)
    with torch.no_grad():
        logits = model.lm_head(model.model.norm(torch.from_numpy(np.ascontiguousarray(last))))
    return [int(token) for token in logits.argmax(dim=-1)]
