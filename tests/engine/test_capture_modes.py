"""Captured states are the model's own in other modes: MLA and MoE over two ranks, and compiled graphs."""

from __future__ import annotations

import pytest
from tests.engine.capturing import (
    LAYERS,
    assert_equals_reference,
    capture,
    complete,
    prompt,
    status,
    until_capturing,
)
from tests.engine.checkpoints import MLA, short_llama, tiny_deepseek
from tests.engine.launch import launch

pytestmark = pytest.mark.engine


def test_deepseek_on_two_ranks() -> None:
    args = ["--max-model-len", "1024", "--max-num-batched-tokens", "1024", *MLA]
    with launch(tiny_deepseek(), layers=LAYERS, tensor_parallel_size=2, args=args) as engine:
        until_capturing(engine)
        for length, generated in ((1, 1), (40, 12), (700, 3)):
            captured = capture(engine, prompt=prompt(length, length), max_tokens=generated, ignore_eos=True)
            assert_equals_reference(tiny_deepseek(), captured)
        assert len(complete(engine, prompt(30, 1))["token_ids"]) == 12


def test_a_compiled_llama() -> None:
    args = ["--max-model-len", "2048", "--no-enforce-eager"]
    with launch(short_llama(), layers=[0, 1, 2], args=args) as engine:
        until_capturing(engine)
        assert status(engine)["mode"]["compilation"] != "NONE"
        for length, generated in ((1, 1), (40, 12), (700, 3)):
            captured = capture(engine, prompt=prompt(length, length), max_tokens=generated, ignore_eos=True)
            assert_equals_reference(short_llama(), captured)
