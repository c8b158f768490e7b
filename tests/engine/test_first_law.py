"""Nothing of ours stops an engine: each hook raises, on each rank of a TP=2 engine; production goes on."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.engine.capturing import (
    LAYERS,
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
from tests.engine.conftest import FAULTY, ROOT
from tests.engine.launch import Engine, launch

from taphouse import slices

pytestmark = pytest.mark.engine

PROMPT = prompt(300, 7)


@pytest.fixture(scope="module")
def expected(faulty_engine: Engine) -> list[int]:
    """What production answers while nothing is broken."""
    return list(complete(faulty_engine, PROMPT)["token_ids"])


@pytest.fixture
def mended(faulty_engine: Engine) -> Iterator[Engine]:
    """The engine; whatever a test broke is put back afterwards."""
    yield faulty_engine
    rpc(faulty_engine, "taphouse_mend")
    until_capturing(faulty_engine)


def test_two_ranks_together_hold_the_models_states(faulty_engine: Engine) -> None:
    captured = capture(faulty_engine, prompt=PROMPT, max_tokens=10, ignore_eos=True)
    assert len(captured.item["slices"]) == 2
    assert_equals_reference(tiny_llama(), captured)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("hook", "where"),
    [
        ("before_step", "execute_model (before)"),
        ("after_step", "execute_model (after)"),
        ("row_tap", "tap"),
        ("marks_tap", "marks tap"),
        ("writer", "writer"),
        ("killed", "writer"),
        ("record", "record"),
    ],
)
def test_a_hook_that_raises_turns_capture_off_and_nothing_else(
    mended: Engine, expected: list[int], hook: str, where: str, rank: int
) -> None:
    rpc(mended, "taphouse_break", hook, rank)
    answer = post(mended, prompt=PROMPT, max_tokens=10, ignore_eos=True)
    if hook != "record":
        assert answer.status_code in (500, 503), answer.text
    until(lambda: status(mended)["capture"] == "off", seconds=10)
    told = status(mended)
    assert where in told["reason"]
    (record,) = [r for r in told["ranks"] if r["capture"] == "off"]
    assert (record["tp_rank"], record["breaker"]["where"]) == (rank, where)
    refused = post(mended, prompt=PROMPT)
    assert refused.status_code == 503 and where in refused.json()["error"]["message"]
    assert complete(mended, PROMPT)["token_ids"] == expected
    until(lambda: sum(r["in_flight"] for r in status(mended)["ranks"]) == 0, seconds=10)
    if hook == "record" and answer.status_code == 200:
        (item,) = answer.json()["data"]
        slices.release(Path(item["slices"][0]["path"]).parent, item["tag"])
    until(lambda: capture_files(mended) == [], seconds=10)


@pytest.mark.parametrize(
    ("what", "says"),
    [("after_step", "broken on purpose"), ("killed", "the writer process is gone (signal 9)")],
)
def test_a_capture_in_flight_is_answered_at_once_when_the_breaker_trips(
    mended: Engine, what: str, says: str
) -> None:
    """Rank 1 fails in the middle: its error is sealed while the request still runs."""
    rpc(mended, "taphouse_break", "pace")
    answers: list[httpx.Response] = []
    body = {"prompt": PROMPT, "max_tokens": 1600, "ignore_eos": True}
    client = threading.Thread(target=lambda: answers.append(post(mended, **body)))
    client.start()
    until(lambda: bool(answers) or any(name.endswith(".part") for name in capture_files(mended)))
    assert not answers, answers[0].text
    rpc(mended, "taphouse_break", what, 1)
    until(lambda: bool(answers) or any(n.endswith(".t1.slice") for n in capture_files(mended)), seconds=10)
    client.join()
    (answer,) = answers
    assert answer.status_code == 500 and says in answer.text, answer.text


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("mapping", "begin at position 1, the scheduler says 0"),
        ("positions", "not consecutive"),
        ("later", "begin at position 301, the scheduler says 300"),
        ("chunk", "is missing"),
        ("graph", "did not write it"),
        ("one_layer", "did not write it"),
    ],
)
def test_wrong_rows_are_caught_and_the_client_gets_no_sample(
    mended: Engine, what: str, says: str, rank: int
) -> None:
    rpc(mended, "taphouse_break", what, rank)
    answer = post(mended, prompt=PROMPT, max_tokens=4, ignore_eos=True)
    assert answer.status_code == 500
    assert says in answer.json()["error"]["message"]
    assert status(mended)["capture"] == "on"
    rpc(mended, "taphouse_mend")
    assert_equals_reference(tiny_llama(), capture(mended, prompt=PROMPT, max_tokens=4, ignore_eos=True))


@pytest.mark.parametrize("rank", [None, 0])
def test_two_requests_mistaken_for_each_other_are_caught(mended: Engine, rank: int | None) -> None:
    """Equally long prompts, other tokens: positions can all be right where they are computed in one step.

    Where they are a step apart they begin elsewhere than the scheduler says, or the ranks disagree.
    """
    rpc(mended, "taphouse_break", "swapped", rank)
    prompts = [prompt(30, 1), prompt(30, 2)]
    answer = post(mended, prompt=prompts, max_tokens=12, ignore_eos=True)
    assert answer.status_code == 500
    caught = "another request's rows|rank 0 has|the scheduler says"
    assert re.search(caught, answer.json()["error"]["message"])
    assert status(mended)["capture"] == "on"


def test_a_flipped_bit_is_caught_by_whoever_reads_the_slice(mended: Engine) -> None:
    rpc(mended, "taphouse_break", "bit", 1)
    with pytest.raises(slices.ChecksumMismatch):
        capture(mended, prompt=PROMPT)
    answer = post(mended, prompt=PROMPT, delivery="stream")
    assert answer.status_code == 500 and "crc32" in answer.text


@pytest.mark.parametrize("rank", [0, 1])
def test_the_canary_catches_rows_that_only_look_right(mended: Engine, rank: int) -> None:
    rpc(mended, "taphouse_break", "wrong_rows", rank)
    answer = httpx.post(f"{mended.url}/v1/hidden_states/canary", timeout=60)
    assert answer.status_code == 503 and answer.json()["state"] == "failed"
    assert status(mended)["capture"] == "off"
    rpc(mended, "taphouse_mend")
    assert httpx.post(f"{mended.url}/v1/hidden_states/canary", timeout=60).json()["state"] == "passed"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_proof_catches_rows_that_only_look_right(mended: Engine, rank: int) -> None:
    """As it happens, between canaries: no sample comes out, and a canary turns capture off."""
    rpc(mended, "taphouse_break", "wrong_rows", rank)
    answer = post(mended, prompt=PROMPT, max_tokens=6, ignore_eos=True, temperature=1.0)
    assert answer.status_code == 500
    assert "not those of the engine" in answer.json()["error"]["message"]
    until(lambda: status(mended)["canary"]["state"] == "failed")
    assert status(mended)["capture"] == "off"
    assert status(mended)["counters"]["endpoint"]["disproved"] >= 1
    rpc(mended, "taphouse_mend")
    assert httpx.post(f"{mended.url}/v1/hidden_states/canary", timeout=60).json()["state"] == "passed"


@pytest.mark.parametrize("fault", ["load_model:0", "load_model:1"])
def test_a_fault_while_loading_leaves_a_serving_engine(fault: str) -> None:
    env = {"PYTHONPATH": ROOT, "TEST_TAP_FAULT": fault}
    with launch(tiny_llama(), layers=LAYERS, tensor_parallel_size=2, args=FAULTY, env=env) as engine:
        assert len(complete(engine, PROMPT)["token_ids"]) == 12
        until(lambda: "broken on purpose" in str(status(engine)["reason"]), seconds=20)
        refused = post(engine, prompt=PROMPT)
        assert refused.status_code == 503 and "load_model" in refused.json()["error"]["message"]


def test_an_extension_that_does_not_import_leaves_a_serving_engine() -> None:
    env = {"PYTHONPATH": ROOT, "TEST_TAP_FAULT": "import"}
    with launch(tiny_llama(), layers=LAYERS, args=FAULTY, env=env) as engine:
        assert len(complete(engine, PROMPT)["token_ids"]) == 12
        until(lambda: "compat" in str(status(engine)["reason"]), seconds=20)
        assert post(engine, prompt=PROMPT).status_code == 503
