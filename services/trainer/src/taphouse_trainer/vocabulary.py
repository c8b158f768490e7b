"""Which target tokens the draft can propose.

A draft's output layer covers the tokens that occur most. ``target_to_draft`` is a boolean mask over the
target's vocabulary, ``draft_to_target`` the offset to add to a draft id (``target = draft + offset``):
the two tensors EAGLE-3 checkpoints carry as ``t2d`` and ``d2t``.

A mapping is made once, when enough tokens were seen, and then lives in the checkpoint: another one would
give every row of the draft's output layer another meaning. Numpy only.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from taphouse_trainer.errors import VocabularyError

MappingHelper = Callable[[dict[int, int], int, int], tuple[np.ndarray, np.ndarray]]
"""(frequencies, draft size, target size) → (draft_to_target int64, target_to_draft bool)."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A mapping: ``draft_to_target`` int64 ``[draft_size]``, ``target_to_draft`` bool ``[target_size]``."""

    draft_to_target: np.ndarray
    target_to_draft: np.ndarray

    def __post_init__(self) -> None:
        chosen = np.flatnonzero(self.target_to_draft)
        offsets = np.arange(len(self.draft_to_target), dtype=np.int64)
        if not np.array_equal(chosen, offsets + self.draft_to_target):
            raise VocabularyError(
                f"t2d chooses {len(chosen)} tokens and d2t has {len(self.draft_to_target)} others"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and np.array_equal(self.target_to_draft, other.target_to_draft)

    def __hash__(self) -> int:
        return hash(self.target_to_draft.tobytes())

    @property
    def draft_size(self) -> int:
        """Tokens the draft can propose."""
        return len(self.draft_to_target)

    @property
    def target_size(self) -> int:
        """Tokens of the target."""
        return len(self.target_to_draft)

    def check(self, draft_size: int, target_size: int) -> None:
        """Refuse a mapping of other sizes.

        Raises:
            VocabularyError: the sizes differ.
        """
        if (self.draft_size, self.target_size) != (draft_size, target_size):
            raise VocabularyError(
                f"the mapping is for {self.draft_size} of {self.target_size} tokens, "
                f"this run needs {draft_size} of {target_size}"
            )


class TokenCounts:
    """How often tokens occur in trained positions, and elsewhere."""

    def __init__(self, target_size: int) -> None:
        self._trained = np.zeros(target_size, np.int64)
        self._other = np.zeros(target_size, np.int64)

    def add(self, token_ids: np.ndarray, loss_mask: np.ndarray) -> None:
        """Count one sample: both ``[T]``; positions with mask 1 are trained on."""
        size, trained = len(self._trained), loss_mask.astype(bool)
        self._trained += np.bincount(token_ids[trained], minlength=size)
        self._other += np.bincount(token_ids[~trained], minlength=size)

    @property
    def trained_tokens(self) -> int:
        """Tokens seen in positions with mask 1."""
        return int(self._trained.sum())

    def frequencies(self) -> dict[int, int]:
        """Weight by token: trained positions first, prompt tokens only to fill what they leave.

        A corpus with fewer distinct trained tokens than the draft's vocabulary then gets prompt tokens
        before arbitrary ones.
        """
        weight = self._trained * (int(self._other.sum()) + 1) + self._other
        return {int(i): int(weight[i]) for i in np.flatnonzero(weight)}


def make_vocabulary(
    counts: TokenCounts, draft_size: int, target_size: int, helper: MappingHelper
) -> Vocabulary:
    """The ``draft_size`` most frequent tokens; with fewer distinct tokens, filled up with the lowest ids.

    Raises:
        VocabularyError: the draft would have more tokens than the target.
    """
    if draft_size > target_size:
        raise VocabularyError(f"a draft of {draft_size} tokens doesn't fit a target of {target_size}")
    vocabulary = Vocabulary(*helper(counts.frequencies(), draft_size, target_size))
    vocabulary.check(draft_size, target_size)
    return vocabulary


def full_vocabulary(size: int) -> Vocabulary:
    """The mapping of a draft that can propose every token of the target."""
    return Vocabulary(np.zeros(size, np.int64), np.ones(size, bool))


def load_vocabulary(path: Path) -> Vocabulary:
    """A given mapping: ``t2d`` and ``d2t`` of a ``.safetensors`` or ``.npz`` file, or of a draft's directory.

    Raises:
        VocabularyError: the file doesn't hold a consistent mapping.
    """
    from safetensors import SafetensorError, safe_open

    file = path / "model.safetensors" if path.is_dir() else path
    try:
        if file.suffix == ".npz":
            with np.load(file) as arrays:
                return Vocabulary(arrays["d2t"].astype(np.int64), arrays["t2d"].astype(bool))
        with safe_open(file, framework="numpy") as f:
            return Vocabulary(f.get_tensor("d2t").astype(np.int64), f.get_tensor("t2d").astype(bool))
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, SafetensorError) as e:
        raise VocabularyError(f"{file} holds no vocabulary mapping (tensors t2d and d2t): {e}") from e
