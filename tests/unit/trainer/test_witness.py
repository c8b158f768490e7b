"""Samples whose states give, or don't give, the tokens that the engine ranked highest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.trainer.test_verifier import HIDDEN, NORM, VOCAB, single

from taphouse.samples import Sample, Witness
from taphouse_trainer.verifier import Verifier, read_verifier
from taphouse_trainer.witness import contradiction

RANDOM = np.random.default_rng(0)
HEAD = RANDOM.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
STATES = RANDOM.normal(size=(6, 2, HIDDEN)).astype(np.float32)
FINAL = 1


def target(path: Path, **config: Any) -> Verifier:
    tensors = {"model.embed_tokens.weight": HEAD, "model.norm.weight": NORM, "lm_head.weight": HEAD}
    return read_verifier(single(path, tensors, rms_norm_eps=1e-5, **config))


def engine_said(rows: range, count: int = 3) -> Witness:
    """What an engine with these weights ranks highest, in float64."""
    tokens, logprobs = [], []
    for row in rows:
        x = STATES[row, FINAL].astype(np.float64)
        logits = HEAD @ (x / np.sqrt((x * x).mean() + 1e-5) * NORM)
        values = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-values)[:count]
        tokens.append(tuple(int(token) for token in best))
        logprobs.append(tuple(float(values[token]) for token in best))
    return Witness(rows.start, tuple(tokens), tuple(logprobs))


def sample(witness: Witness | None, states: np.ndarray = STATES) -> Sample:
    return Sample(
        id="a",
        token_ids=np.arange(6, dtype=np.int32),
        loss_mask=np.ones(6, np.uint8),
        hidden_states=states,
        dtype="float32",
        prompt_len=3,
        witness=witness,
    )


def test_the_engines_tokens_follow_from_the_right_states(tmp_path: Path) -> None:
    verifier = target(tmp_path)
    assert contradiction(sample(engine_said(range(2, 6))), FINAL, verifier) is None
    assert contradiction(sample(None), FINAL, verifier) is None


@pytest.mark.parametrize(
    "states",
    [np.roll(STATES, 1, axis=0), STATES[:, ::-1].copy(), -STATES, STATES + np.float32(0.5)],
    ids=["shifted", "other layer", "negated", "moved"],
)
def test_wrong_states_contradict_the_engine(tmp_path: Path, states: np.ndarray) -> None:
    problem = contradiction(sample(engine_said(range(2, 6)), states), FINAL, target(tmp_path))
    assert problem is not None and "nats off what the engine said" in problem


def test_tokens_that_the_target_lacks_contradict_it(tmp_path: Path) -> None:
    witness = replace(engine_said(range(2, 3), 1), top_tokens=((VOCAB,),))
    assert "the target knows" in str(contradiction(sample(witness), FINAL, target(tmp_path)))


@pytest.mark.parametrize("key", ["final_logit_softcapping", "logits_scaling", "logit_scale"])
def test_targets_that_change_their_logits_are_left_out(tmp_path: Path, key: str) -> None:
    wrong = sample(engine_said(range(2, 6)), -STATES)
    assert contradiction(wrong, FINAL, target(tmp_path, **{key: 30.0})) is None
