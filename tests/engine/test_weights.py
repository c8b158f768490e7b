"""Weights that change while the engine serves: the fingerprint follows, and no sample mixes two."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.engine.capturing import (
    assert_equals_reference,
    capture,
    capture_files,
    complete,
    post,
    prompt,
    rpc,
    status,
    until,
    until_capturing,
)
from tests.engine.checkpoints import tiny_llama
from tests.engine.launch import Engine

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama after some training: every matrix a little different."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("trained") / "llama"
    shutil.copytree(tiny_llama(), directory)
    tensors = load_file(directory / "model.safetensors")
    changed = {name: tensor * 1.25 if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    save_file(changed, directory / "model.safetensors", {"format": "pt"})
    return directory


def reload(engine: Engine, checkpoint: Path) -> None:
    rpc(engine, "reload_weights", weights_path=str(checkpoint))


def test_captures_follow_reloaded_weights_with_a_fingerprint_of_their_own(
    faulty_engine: Engine, trained: Path
) -> None:
    engine = faulty_engine
    old, epoch = status(engine)["fingerprint_id"], status(engine)["canary"]["weights_epoch"]
    before = complete(engine, prompt(40, 1))["token_ids"]
    reload(engine, trained)
    until(lambda: status(engine)["capture"] == "on" and status(engine)["fingerprint_id"] != old)
    assert status(engine)["canary"]["weights_epoch"] == epoch + 1
    assert complete(engine, prompt(40, 1))["token_ids"] != before
    assert_equals_reference(trained, capture(engine, prompt=prompt(300, 2), max_tokens=9, ignore_eos=True))
    reload(engine, tiny_llama())
    again = epoch + 2
    until(lambda: status(engine)["capture"] == "on" and status(engine)["canary"]["weights_epoch"] == again)
    assert status(engine)["fingerprint_id"] == old
    assert_equals_reference(tiny_llama(), capture(engine, prompt=prompt(300, 2), max_tokens=9))


def control(engine: Engine, route: str, **body: object) -> None:
    """One call of a trainer's to vLLM."""
    response = httpx.post(f"{engine.url}/{route}", json=body, timeout=120)
    assert response.status_code == 200, response.text


def update(engine: Engine, checkpoint: Path, parts: int = 3) -> list[str]:
    """Send weights as a trainer does; returns what capture was after every chunk.

    The last looks are late: a canary would have had the time to pass.
    """
    control(engine, "start_weight_update")
    until(lambda: status(engine)["capture"] == "off")
    seen = []
    for part in range(parts):
        chunk = {"checkpoint": str(checkpoint), "part": part, "parts": parts}
        control(engine, "update_weights", update_info=chunk)
        seen.append(status(engine)["capture"])
    time.sleep(1.0)
    seen.append(status(engine)["capture"])
    control(engine, "finish_weight_update")
    return seen


def test_captures_follow_weights_that_a_trainer_sends(faulty_engine: Engine, trained: Path) -> None:
    """`start_weight_update`, chunks by `update_weights`, `finish_weight_update`: no sample in between."""
    engine = faulty_engine
    old = status(engine)["fingerprint_id"]
    assert set(update(engine, trained)) == {"off"}
    until(lambda: status(engine)["capture"] == "on" and status(engine)["fingerprint_id"] != old)
    assert_equals_reference(trained, capture(engine, prompt=prompt(300, 2), max_tokens=9, ignore_eos=True))
    update(engine, tiny_llama())
    until(lambda: status(engine)["capture"] == "on" and status(engine)["fingerprint_id"] == old)
    assert_equals_reference(tiny_llama(), capture(engine, prompt=prompt(300, 2), max_tokens=9))


def test_a_capture_that_straddles_a_change_fails_and_leaves_nothing(
    faulty_engine: Engine, trained: Path
) -> None:
    engine = faulty_engine
    rpc(engine, "taphouse_break", "pace")
    answers: list[httpx.Response] = []
    body = {"prompt": prompt(300, 3), "max_tokens": 1500, "ignore_eos": True}
    client = threading.Thread(target=lambda: answers.append(post(engine, **body)))
    client.start()
    until(lambda: bool(answers) or any(name.endswith(".part") for name in capture_files(engine)))
    assert not answers, answers[0].text
    reload(engine, trained)
    client.join()
    (answer,) = answers
    assert answer.status_code == 500 and "weights changed while it ran" in answer.text
    until_capturing(engine)
    until(lambda: capture_files(engine) == [])
    rpc(engine, "taphouse_mend")
    reload(engine, tiny_llama())
    until_capturing(engine)
