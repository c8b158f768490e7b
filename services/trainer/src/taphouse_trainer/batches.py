"""From samples to the tensors of one training step.

Samples are packed into one sequence of ``S`` rows. Row ``i`` of a sample pairs the token at ``i + 1`` with
the states at ``i``: that is what a draft has when the target has just produced token ``i + 1``, and it is
asked for token ``i + 2``, whose distribution the target's last state at ``i + 1`` gives. A row counts in
the loss when the token it is *given* is masked in: the first trained row of an answer is given the answer's
first token, which the target always makes itself.

A draft is unrolled ``ttt_steps`` times and its targets shift by one each time, so samples are kept
``ttt_steps - 1`` empty rows apart: nothing of one sample is ever the target of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from taphouse.samples import Sample

_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Batch:
    """One packed sequence of ``S`` rows with ``A`` auxiliary layers of width ``H``.

    ``input_ids`` int64 ``[1, S]``; ``hidden_states`` ``[1, S, A*H]``; ``last_hidden_states`` ``[1, S, H]``
    (not normed); ``loss_mask`` bool ``[1, S]``; ``document_ids`` int64 ``[1, S]``, -1 between samples;
    ``position_ids`` int64 ``[1, S]``. ``tokens`` counts the rows of samples, ``trained_tokens`` those in
    the loss.
    """

    input_ids: torch.Tensor
    hidden_states: torch.Tensor
    last_hidden_states: torch.Tensor
    loss_mask: torch.Tensor
    document_ids: torch.Tensor
    position_ids: torch.Tensor
    tokens: int
    trained_tokens: int


@dataclass(frozen=True)
class Packing:
    """How samples become batches.

    ``columns``: where the auxiliary layers stand on the layer axis, in the draft's order; ``last_column``:
    where the stream entering the final norm stands. ``sequence_length``: rows kept of a sample.
    ``ttt_steps``: how often the draft is unrolled. ``multiple``: ``S`` is padded up to a multiple of it.
    """

    sequence_length: int
    ttt_steps: int
    multiple: int = 1

    def pack(
        self,
        samples: Sequence[Sample],
        columns: Sequence[Sequence[int]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> Batch:
        """Pack ``samples``; ``columns[k]`` names sample ``k``'s layer columns, the last one un-normed final
        stream.
        """
        windows = [window(s.loss_mask, self.sequence_length) for s in samples]
        rows = [end - start - 1 for start, end in windows]
        gap = self.ttt_steps - 1
        total = sum(rows) + gap * len(rows)
        total += -total % self.multiple
        aux, hidden = len(columns[0]) - 1, samples[0].hidden_states.shape[2]
        ids = torch.zeros(total, dtype=torch.long)
        mask = torch.zeros(total, dtype=torch.bool)
        documents = torch.full((total,), -1, dtype=torch.long)
        positions = torch.zeros(total, dtype=torch.long)
        states = torch.zeros((total, aux, hidden), dtype=dtype)
        last = torch.zeros((total, hidden), dtype=dtype)
        at = 0
        for k, (sample, cols, (start, end), n) in enumerate(
            zip(samples, columns, windows, rows, strict=True)
        ):
            here, given = slice(at, at + n), slice(start + 1, end)
            raw = _as_torch(sample)
            ids[here] = torch.from_numpy(sample.token_ids[given].astype(np.int64))
            mask[here] = torch.from_numpy(sample.loss_mask[given].astype(bool))
            documents[here] = k
            positions[here] = torch.arange(start + 1, end)
            states[here] = raw[start : end - 1, list(cols[:-1])].to(dtype)
            last[here] = raw[given, cols[-1]].to(dtype)
            at += n + gap
        return Batch(
            input_ids=ids.unsqueeze(0).to(device),
            hidden_states=states.reshape(1, total, aux * hidden).to(device),
            last_hidden_states=last.unsqueeze(0).to(device),
            loss_mask=mask.unsqueeze(0).to(device),
            document_ids=documents.unsqueeze(0).to(device),
            position_ids=positions.unsqueeze(0).to(device),
            tokens=sum(rows),
            trained_tokens=int(mask.sum()),
        )


def window(loss_mask: np.ndarray, length: int) -> tuple[int, int]:
    """Which rows of a long sample to keep: the last ``length`` up to its last trained token."""
    trained = np.flatnonzero(loss_mask)
    end = int(trained[-1]) + 1 if len(trained) else len(loss_mask)
    return max(0, end - length), end


def _as_torch(sample: Sample) -> torch.Tensor:
    """``[T, L, H]`` in the sample's own dtype, sharing its memory."""
    tensor = torch.from_numpy(sample.hidden_states)
    return tensor.view(torch.bfloat16) if sample.dtype == "bfloat16" else tensor


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a dtype's name."""
    return _TORCH_DTYPES[name]
