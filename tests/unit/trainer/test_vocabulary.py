"""Token counts and mappings, without the library's helper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from taphouse_trainer.errors import VocabularyError
from taphouse_trainer.vocabulary import (
    TokenCounts,
    Vocabulary,
    full_vocabulary,
    load_vocabulary,
    make_vocabulary,
)


def most_frequent(frequencies: dict[int, int], draft: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    chosen = sorted(sorted(frequencies, key=lambda t: (-frequencies[t], t))[:draft])
    t2d = np.zeros(target, bool)
    t2d[chosen] = True
    return np.array(chosen) - np.arange(len(chosen)), t2d


def counts(trained: list[int], other: list[int]) -> TokenCounts:
    made = TokenCounts(10)
    ids = np.array(trained + other, np.int32)
    made.add(ids, np.array([1] * len(trained) + [0] * len(other), np.uint8))
    return made


def test_trained_tokens_come_before_frequent_prompt_tokens() -> None:
    made = counts(trained=[7, 7, 3], other=[1] * 50 + [2] * 40 + [3])
    assert made.trained_tokens == 3
    vocabulary = make_vocabulary(made, 3, 10, most_frequent)
    assert list(np.flatnonzero(vocabulary.target_to_draft)) == [1, 3, 7]
    assert list(np.arange(3) + vocabulary.draft_to_target) == [1, 3, 7]


def test_a_draft_larger_than_its_target_is_refused() -> None:
    with pytest.raises(VocabularyError, match="11 tokens"):
        make_vocabulary(counts([1], []), 11, 10, most_frequent)


def test_a_mapping_that_contradicts_itself_is_refused() -> None:
    t2d = np.zeros(10, bool)
    t2d[[1, 4]] = True
    with pytest.raises(VocabularyError, match="2 tokens"):
        Vocabulary(np.array([1, 2]), t2d)
    assert Vocabulary(np.array([1, 3]), t2d).draft_size == 2


def test_a_mapping_of_another_size_is_refused() -> None:
    with pytest.raises(VocabularyError, match="10 of 10"):
        full_vocabulary(10).check(10, 12)


def test_files(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    d2t, t2d = most_frequent({5: 3, 2: 2}, 2, 10)
    save_file({"t2d": t2d, "d2t": d2t}, tmp_path / "model.safetensors")
    np.savez(tmp_path / "map.npz", t2d=t2d, d2t=d2t)
    expected = Vocabulary(d2t, t2d)
    assert load_vocabulary(tmp_path) == load_vocabulary(tmp_path / "map.npz") == expected
    assert expected != full_vocabulary(10)
    save_file({"t2d": t2d}, tmp_path / "half.safetensors")
    with pytest.raises(VocabularyError, match="half"):
        load_vocabulary(tmp_path / "half.safetensors")
    with pytest.raises(VocabularyError, match="nowhere"):
        load_vocabulary(tmp_path / "nowhere.npz")
