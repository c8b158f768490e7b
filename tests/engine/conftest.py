"""Engines that several test files share: each starts once, when the first test asks for it.

`llama_engine` and `untapped_engine` serve the same tiny Llama with the same flags, with the tap and without;
`faulty_engine` serves it on two ranks that can be broken.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.capturing import LAYERS, until_capturing
from tests.engine.checkpoints import tiny_llama
from tests.engine.launch import Engine, launch

FLAGS = ["--max-model-len", "2048", "--max-num-seqs", "32"]
FAULTY = ["--worker-extension-cls", "tests.engine.faults.FaultyExtension", "--max-model-len", "2048"]
FAULTY += ["--weight-transfer-config", '{"backend": "file"}']
ROOT = str(Path(__file__).resolve().parents[2])
OFTEN = {"TAPHOUSE_TAP_PROOF_INTERVAL_S": "0.001"}
"""Every capture is proven."""


@pytest.fixture(scope="session")
def llama_engine() -> Iterator[Engine]:
    """Tiny Llama, TP=1, eager, 128 tokens a step, prefix caching on, layers 0, 2, 5 tapped, all proven."""
    with launch(tiny_llama(), layers=LAYERS, args=FLAGS, env=OFTEN) as engine:
        until_capturing(engine)
        yield engine


@pytest.fixture(scope="session")
def untapped_engine() -> Iterator[Engine]:
    """The same engine without the tap."""
    with launch(tiny_llama(), args=FLAGS, tap=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def faulty_engine() -> Iterator[Engine]:
    """TP=2, with the RPCs that break the tap. Whoever breaks it mends it."""
    env = {**OFTEN, "PYTHONPATH": ROOT, "VLLM_SERVER_DEV_MODE": "1"}
    with launch(tiny_llama(), layers=LAYERS, tensor_parallel_size=2, args=FAULTY, env=env) as engine:
        until_capturing(engine)
        yield engine
