"""What becomes of a capture: the pin of its job, and a sample."""

from __future__ import annotations

import numpy as np

from taphouse.samples import Sample
from taphouse_extractor.engine import Capture
from taphouse_extractor.errors import CaptureFailed
from taphouse_extractor.records import Pin
from taphouse_extractor.rows import Mask, Prompt

__all__ = ["pin_of", "to_sample"]


def pin_of(capture: Capture) -> Pin:
    """What of an engine may not change during a job."""
    return Pin(
        fingerprint_id=capture.fingerprint_id,
        layers=capture.layers,
        num_layers=capture.num_layers,
        dtype=capture.dtype,
    )


def to_sample(prompt: Prompt, capture: Capture) -> Sample:
    """Cut a capture to its T rows and mask it; raises `InvalidSample`, `CaptureFailed` without a due mask."""
    rows, tokens = capture.rows, capture.token_ids
    if prompt.mask is Mask.ASSISTANT:
        if capture.loss_mask is None or len(capture.loss_mask) < rows:
            raise CaptureFailed("the engine gave no loss mask for the conversation")
        mask = capture.loss_mask[:rows].copy()
    else:
        mask = np.ones(rows, np.uint8)
        if prompt.mask is Mask.GENERATED:
            mask[: capture.prompt_len] = 0
    return Sample(
        id=prompt.id,
        token_ids=tokens[:rows].copy(),
        loss_mask=mask,
        hidden_states=capture.states,
        dtype=capture.dtype,
        prompt_len=min(capture.prompt_len, rows),
        next_token_id=int(tokens[rows]) if len(tokens) > rows else None,
        finish_reason=capture.finish_reason,
        witness=capture.witness,
    )
