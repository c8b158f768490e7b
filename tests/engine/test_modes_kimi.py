"""A tiny Kimi-K2.5 (vision tower, MLA, shared and routed experts) on two ranks.

Its text weights are the tiny DeepseekV3's, so transformers' DeepseekV3 is the reference.
"""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.engine.capturing import (
    LAYERS,
    assert_equals_reference,
    capture,
    capture_files,
    complete,
    post,
    prompt,
    status,
    until_capturing,
)
from tests.engine.checkpoints import MLA, tiny_deepseek, tiny_kimi
from tests.engine.launch import Engine, launch

pytestmark = pytest.mark.engine

IMAGE_TOKENS = 16


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Images on. Its workers do not start as forks."""
    args = ["--max-model-len", "1024", "--max-num-batched-tokens", "1024", *MLA]
    args += ["--limit-mm-per-prompt", json.dumps({"vision_chunk": 2})]
    with launch(tiny_kimi(), layers=LAYERS, tensor_parallel_size=2, args=args, forked=False) as running:
        until_capturing(running)
        yield running


def image_part(seed: int) -> dict[str, Any]:
    """A content part with a picture of noise, 112 pixels square."""
    noise = np.random.default_rng(seed).integers(0, 256, (112, 112, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat(engine: Engine, *parts: dict[str, Any]) -> dict[str, Any]:
    """An ordinary greedy chat about the parts; returns the answer."""
    body = {
        "model": engine.model,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}],
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return dict(response.json())


def answered(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def test_text_is_the_references_on_every_row(engine: Engine) -> None:
    told = status(engine)
    assert (told["num_layers"], told["hidden_size"], told["layers"]) == (5, 256, LAYERS)
    assert len(told["ranks"]) == 2 and told["canary"]["state"] == "passed"
    for length, generated in ((1, 1), (40, 12), (700, 3)):
        captured = capture(engine, prompt=prompt(length, length), max_tokens=generated, ignore_eos=True)
        assert captured.states.shape == (length + generated - 1, 3, 256)
        assert len(captured.item["slices"]) == 2
        assert_equals_reference(tiny_deepseek(), captured)


def test_a_chat_of_text_is_captured(engine: Engine) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    captured = capture(engine, messages=messages, max_tokens=5, ignore_eos=True)
    assert_equals_reference(tiny_deepseek(), captured)


def test_images_are_served_while_text_is_captured(engine: Engine) -> None:
    """Image chats answer as they do alone; captures of text in the same batches are the model's own."""
    alone = [chat(engine, image_part(seed)) for seed in (1, 2)]
    without = chat(engine)
    assert answered(alone[0]) != answered(alone[1]) != answered(without)
    template = 4  # Each picture's placeholder: begin, content, end and the word between them.
    more = alone[0]["usage"]["prompt_tokens"] - without["usage"]["prompt_tokens"]
    assert IMAGE_TOKENS < more <= IMAGE_TOKENS + template + len("image")

    done = threading.Event()

    def chat_until_done(seed: int) -> list[list[int]]:
        answers = []
        while not done.is_set():
            answers.append(answered(chat(engine, image_part(seed), image_part(seed + 10))))
        return answers

    twice = [answered(chat(engine, image_part(seed), image_part(seed + 10))) for seed in (1, 2)]
    with ThreadPoolExecutor(10) as pool:
        chats = [pool.submit(chat_until_done, seed) for seed in (1, 2)]
        try:
            futures = [
                pool.submit(
                    capture,
                    engine,
                    prompt=prompt(20 + 40 * n, 100 + n),
                    max_tokens=4 + n,
                    ignore_eos=True,
                )
                for n in range(8)
            ]
            captures = [future.result() for future in futures]
        finally:
            done.set()
        among = [future.result() for future in chats]
    for captured in captures:
        assert_equals_reference(tiny_deepseek(), captured)
    for answers, expected in zip(among, twice, strict=True):
        assert answers and all(answer == expected for answer in answers)
    assert complete(engine, prompt(30, 1))["token_ids"]
    assert capture_files(engine) == []


def test_an_image_that_opted_in_is_refused(engine: Engine) -> None:
    content = [image_part(3), {"type": "text", "text": "What is this?"}]
    refused = post(engine, messages=[{"role": "user", "content": content}])
    assert refused.status_code == 422
    assert "'image_url'; only text is captured" in refused.json()["error"]["message"]
    assert status(engine)["capture"] == "on" and capture_files(engine) == []
