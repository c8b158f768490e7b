"""Modes and versions where capture is not proven right: served as ever, refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from tests.engine.capturing import (
    LAYERS,
    assert_equals_reference,
    capture,
    complete,
    post,
    prompt,
    status,
    until,
    until_capturing,
)
from tests.engine.checkpoints import MLA, tiny_deepseek, tiny_llama
from tests.engine.launch import Engine, launch
from tests.engine.other_checkpoints import tiny_gpt2, tiny_lfm2

pytestmark = pytest.mark.engine

ROOT = str(Path(__file__).resolve().parents[2])
PROMPT = prompt(200, 1)
SHORT = ["--max-model-len", "512"]
EXTENSION = [*SHORT, "--worker-extension-cls", "tests.engine.mode_faults.HiddenStatesExtension"]
UNKNOWN = {"PYTHONPATH": ROOT, "TEST_MODE_FAULT": "version:9.9.9"}


def assert_refused(engine: Engine, reason: str) -> None:
    """Ordinary requests are answered; the endpoint, the status and the log say why nothing is captured."""
    assert len(complete(engine, PROMPT)["token_ids"]) == 12
    until(lambda: reason in str(status(engine)["reason"]), seconds=20)
    told = status(engine)
    assert told["capture"] == "off"
    assert all(rank["capture"] == "off" and reason in rank["reason"] for rank in told["ranks"])
    for body in ({"prompt": PROMPT}, {"messages": [{"role": "user", "content": "Hi"}], "delivery": "stream"}):
        refused = post(engine, **body)
        assert refused.status_code == 503
        assert reason in refused.json()["error"]["message"]
    assert reason in engine.log.read_text(errors="replace")
    assert len(complete(engine, PROMPT)["token_ids"]) == 12
    assert sum(rank["in_flight"] for rank in status(engine)["ranks"]) == 0


@pytest.mark.parametrize(
    ("model", "args", "env", "reason"),
    [
        pytest.param(
            tiny_deepseek,
            [*SHORT, *MLA, "--dtype", "float16", "--max-num-batched-tokens", "512"],
            {},
            "DeepseekV2DecoderLayer rescales the residual stream in float16",
            id="float16",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            tiny_lfm2,
            SHORT,
            {},
            "hybrid models never ran with a tap",
            id="hybrid",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            tiny_gpt2,
            SHORT,
            {},
            "no decoder stack (layers beside embed_tokens and norm) found in GPT2LMHeadModel",
            id="stack",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            tiny_llama,
            [*SHORT, "--enable-lora"],
            {},
            "LoRA never ran with a tap",
            id="lora",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            tiny_llama,
            EXTENSION,
            UNKNOWN,
            "vLLM 9.9.9 on cpu with the V1 model runner never ran with this tap; "
            "TAPHOUSE_TAP_ALLOW_UNKNOWN_VERSION=true lets the canary decide",
            id="unknown-version",
        ),
    ],
)
def test_a_refused_mode_serves_and_says_why(
    model: Callable[[], Path], args: Sequence[str], env: Mapping[str, str], reason: str
) -> None:
    with launch(model(), layers=LAYERS, args=args, env=env) as engine:
        assert_refused(engine, reason)


def test_an_unknown_version_that_is_allowed_is_the_canarys_to_judge() -> None:
    env = {**UNKNOWN, "TAPHOUSE_TAP_ALLOW_UNKNOWN_VERSION": "true"}
    with launch(tiny_llama(), layers=LAYERS, args=EXTENSION, env=env) as engine:
        until_capturing(engine)
        told = status(engine)
        assert told["versions"]["vllm"] == "9.9.9" and told["canary"]["state"] == "passed"
        assert_equals_reference(tiny_llama(), capture(engine, prompt=PROMPT, max_tokens=5, ignore_eos=True))
