"""The tap's endpoint on the real engine: what it answers, what it refuses, and that nothing stays behind."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.checkpoints import VOCABULARY, tiny_llama
from tests.engine.launch import Engine, launch

from taphouse import slices

pytestmark = pytest.mark.engine

OWN_KEY, CUSTOMER_KEY = "tap-key", "customer-key"
LAYERS = [0, 2, 5]
ROW_BYTES = 3 * 256 * 4
PROMPT = [10 + at * 7 % 900 for at in range(30)]
URL = "/v1/hidden_states"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}{% if m.role == 'cook' %}{{ raise_exception('no cooks here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if mood %}{{ mood }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    with launch(
        tiny_llama(),
        layers=LAYERS,
        args=["--api-key", CUSTOMER_KEY, "--chat-template", str(template), "--max-model-len", "2048"],
        env={
            "TAPHOUSE_TAP_API_KEY": OWN_KEY,
            "TAPHOUSE_TAP_SLICE_DIR_LIMIT_BYTES": "8000000",
            "TAPHOUSE_TAP_STREAM_LIMIT_BYTES": "2000000",
            "TAPHOUSE_TAP_MAX_BODY_BYTES": "100000",
            "TAPHOUSE_TAP_MAX_PROMPTS": "4",
        },
    ) as running:
        yield running


@pytest.fixture
def tap(engine: Engine) -> Iterator[httpx.Client]:
    """A client with the tap's own key, once capture is on; afterwards every capture is released."""
    headers = {"Authorization": f"Bearer {OWN_KEY}"}
    with httpx.Client(base_url=engine.url, headers=headers, timeout=120) as client:
        until(lambda: client.get(f"{URL}/status").json()["capture"] == "on")
        yield client
        for tag in {path.name.split(".")[0] for path in files(client)}:
            slices.release(start_dir(client), tag)


def until(true: Any, seconds: float = 60) -> None:
    """Wait until ``true()``."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def start_dir(tap: httpx.Client) -> Path:
    return Path(tap.get(f"{URL}/status").json()["start_dir"])


def files(tap: httpx.Client) -> list[Path]:
    """Files of captures."""
    return [path for path in start_dir(tap).iterdir() if slices.is_tag(path.name.split(".")[0])]


def captured(tap: httpx.Client, **body: Any) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Capture as slices; returns the answer and the joined states of each item."""
    response = tap.post(URL, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    states = []
    for item in answer["data"]:
        paths = [file["path"] for file in item["slices"]]
        states.append(slices.join_slices(paths, item["token_ids"][: item["rows"]], answer["layers"]))
        assert list(states[-1].shape) == item["shape"]
        slices.release(Path(paths[0]).parent, item["tag"])
    return answer, states


def test_slices_of_token_ids(tap: httpx.Client) -> None:
    answer, (states,) = captured(tap, prompt=PROMPT, request_id="one")
    (item,) = answer["data"]
    assert item["token_ids"][:-1] == PROMPT
    assert (item["prompt_len"], item["rows"], item["shape"]) == (30, 30, [30, 3, 256])
    assert (answer["layers"], answer["dtype"], answer["num_layers"]) == (LAYERS, "float32", 5)
    assert (answer["request_id"], item["error"], item["finish_reason"]) == ("one", None, "length")
    assert answer["fingerprint_id"] == slices.fingerprint_id(answer["fingerprint"])
    assert all(answer["fingerprint"][name] for name in ("config", "weights", "tokenizer", "chat_template"))
    assert np.isfinite(states).all() and (np.abs(states).max(axis=(1, 2)) > 0).all()
    assert files(tap) == []


def test_a_stream_is_the_same_states_in_the_order_asked_and_leaves_nothing(tap: httpx.Client) -> None:
    _, (whole,) = captured(tap, prompt=PROMPT, max_tokens=5, ignore_eos=True)
    response = tap.post(
        "/hidden_states",
        json={"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, "layers": [5, 0], "delivery": "stream"},
    )
    assert int(response.headers["content-length"]) == len(response.content)
    stream = slices.parse_stream(response.content)
    (states,) = stream.states
    assert states is not None and stream.header["layers"] == [5, 0]
    assert stream.header["data"][0]["shape"] == [34, 2, 256]
    np.testing.assert_allclose(states, whole[:, [2, 0]], atol=1e-4)
    with pytest.raises(slices.BadStream):
        slices.parse_stream(response.content[:-1])
    assert files(tap) == []


def test_a_list_of_prompts_is_answered_in_order(tap: httpx.Client) -> None:
    prompts = [PROMPT, PROMPT[5:20], PROMPT[:3]]
    answer, states = captured(tap, prompt=prompts)
    assert [item["token_ids"][:-1] for item in answer["data"]] == prompts
    _, alone = zip(*(captured(tap, prompt=prompt) for prompt in prompts), strict=True)
    for together, (single,) in zip(states, alone, strict=True):
        np.testing.assert_allclose(together, single, atol=1e-4)


def test_text_is_tokenised_as_completions_are(engine: Engine, tap: httpx.Client) -> None:
    answer, _ = captured(tap, prompt="Some text, and more.")
    tokens = tokenize(engine, {"prompt": "Some text, and more."})
    assert answer["data"][0]["token_ids"][:-1] == tokens


def test_messages_with_tools_render_as_chats_do(engine: Engine, tap: httpx.Client) -> None:
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "What time is it?"}],
        "tools": [{"type": "function", "function": {"name": "clock", "parameters": {}}}],
        "chat_template_kwargs": {"mood": "gladly"},
    }
    answer, _ = captured(tap, **chat)
    tokens = tokenize(engine, {**chat, "add_generation_prompt": True})
    assert answer["data"][0]["token_ids"][:-1] == tokens
    text = detokenize(engine, tokens)
    assert "clock" in text and text.endswith("gladly")


def test_the_loss_mask_is_on_the_assistants_words(engine: Engine, tap: httpx.Client) -> None:
    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two three"},
        {"role": "user", "content": "four"},
        {"role": "assistant", "content": "five"},
    ]
    answer, _ = captured(tap, messages=chat, return_loss_mask=True)
    (item,) = answer["data"]
    chosen = [t for t, bit in zip(item["token_ids"], item["loss_mask"], strict=True) if bit]
    assert detokenize(engine, chosen) == "two three<|im_end|>five<|im_end|>"
    answer, _ = captured(tap, messages=chat[:3], return_loss_mask=True, max_tokens=4, ignore_eos=True)
    (item,) = answer["data"]
    assert item["loss_mask"][item["prompt_len"] :] == [1, 1, 1, 1]


def test_generation_stops_where_it_is_told_and_rows_follow(tap: httpx.Client) -> None:
    answer, (states,) = captured(tap, prompt=PROMPT, max_tokens=40, ignore_eos=True)
    generated = answer["data"][0]["token_ids"][30:]
    assert (len(generated), states.shape[0]) == (40, 69)
    third = generated[2]
    answer, (states,) = captured(tap, prompt=PROMPT, max_tokens=40, ignore_eos=True, stop_token_ids=[third])
    (item,) = answer["data"]
    end = generated.index(third) + 1
    assert item["token_ids"][30:] == generated[:end]
    assert (item["finish_reason"], states.shape[0]) == ("stop", 30 + end - 1)
    first_word = next(at for at, token in enumerate(generated) if token > 300)
    answer, (states,) = captured(tap, prompt=PROMPT, max_tokens=40, ignore_eos=True, stop=["unused"])
    (item,) = answer["data"]
    assert item["token_ids"][30:] == generated[: first_word + 1]
    assert (item["finish_reason"], states.shape[0]) == ("stop", 30 + first_word)


def test_temperature_samples(tap: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 16, "top_p": 0.9, "ignore_eos": True}
    (greedy, _), (again, _) = captured(tap, **body, seed=5), captured(tap, **body)
    (sampled, _) = captured(tap, **body, temperature=1.0)
    assert greedy["data"][0]["token_ids"] == again["data"][0]["token_ids"]
    assert sampled["data"][0]["token_ids"] != greedy["data"][0]["token_ids"]


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        (b"{", 400, None, "not valid JSON"),
        ({"prompt": PROMPT, "layers": [1]}, 422, "layers", "this engine taps [0, 2, 5]"),
        ({"prompt": ""}, 422, "prompt", "empty"),
        ({"prompt": []}, 422, "prompt", "empty"),
        ({"prompt": [5] * 2048}, 422, "prompt", "max_model_len=2048"),
        ({"prompt": PROMPT, "max_tokens": 2048}, 422, "prompt", "max_model_len=2048"),
        ({"prompt": PROMPT, "temperature": 1.0, "seed": 5}, 422, "seed", "could die"),
        ({"prompt": [VOCABULARY]}, 422, "prompt", f"(0 to {VOCABULARY - 1})"),
        ({"prompt": [-1]}, 422, "prompt", "token id -1"),
        ({"prompt": PROMPT, "n": 2}, 422, "n", "unknown field"),
        ({"prompt": [[5]] * 5}, 422, "prompt", "the limit is 4"),
        ({"messages": [{"role": "cook", "content": "x"}]}, 422, "messages", "no cooks here"),
        ({"messages": [{"role": "user"}], "tools": [{"type": "x"}]}, 422, "messages", "tools"),
        ({"messages": [{"content": "x"}]}, 422, "messages", "role"),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "x"}},
            422,
            "messages",
            "trust",
        ),
        ({"prompt": "x" * 200_000}, 413, None, "100000"),
        ({"prompt": PROMPT, "max_tokens": 900, "delivery": "stream"}, 413, "delivery", "2000000"),
        ({"prompt": [PROMPT] * 4, "max_tokens": 900}, 413, "max_tokens", "8000000"),
    ],
)
def test_refusals_name_the_field_and_the_limit(
    tap: httpx.Client, body: Any, status: int, param: str | None, says: str
) -> None:
    response = tap.post(URL, content=body if isinstance(body, bytes) else json.dumps(body))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, status, param), error
    assert says in error["message"]
    assert files(tap) == []


def test_only_the_taps_own_key_opens_it(engine: Engine, tap: httpx.Client) -> None:
    for path in (URL, "/hidden_states"):
        for key in (CUSTOMER_KEY, "wrong", None):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            for method, tail in (("POST", ""), ("GET", "/status"), ("POST", "/canary")):
                answer = httpx.request(method, f"{engine.url}{path}{tail}", headers=headers, json={})
                assert answer.status_code == 401
    assert tap.post("/v1/chat/completions", json={}).status_code == 401
    assert chat(engine, "Hello").status_code == 200


@pytest.mark.parametrize(
    "forged",
    [
        "x",
        1,
        ["0" * 32, 3, 3, "0" * 64],
        json.dumps({"tag": "0" * 32, "prompt_len": 5, "max_rows": 9, "sig": "0" * 64}),
        {"tag": "0" * 32, "prompt_len": 5, "max_rows": 9, "sig": "0" * 64},
    ],
)
def test_a_forged_opt_in_on_a_chat_captures_nothing(engine: Engine, tap: httpx.Client, forged: Any) -> None:
    def counter(name: str) -> float:
        return float(tap.get(f"{URL}/status").json()["counters"]["ranks"][name])

    before = counter("forged"), counter("sealed")
    answer = chat(engine, "Hello", vllm_xargs={"taphouse": forged})
    if isinstance(forged, dict):
        assert answer.status_code == 400
    else:
        assert answer.status_code == 200
        until(lambda: counter("forged") == before[0] + 1)
    assert counter("sealed") == before[1]
    assert files(tap) == []


def test_a_client_that_leaves_aborts_its_request_and_leaves_nothing(tap: httpx.Client) -> None:
    def running() -> float:
        text = tap.get("/metrics").text
        line = next(line for line in text.splitlines() if line.startswith("vllm:num_requests_running"))
        return float(line.rsplit(" ", 1)[1])

    def leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            tap.post(URL, json={"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}, timeout=1.0)

    leaving = threading.Thread(target=leave)
    leaving.start()
    until(lambda: len(files(tap)) > 0)
    leaving.join()
    until(lambda: files(tap) == [] and running() == 0, seconds=15)
    time.sleep(3)
    assert files(tap) == []
    status = tap.get(f"{URL}/status").json()
    assert (status["capture"], status["in_flight"]["claims"]) == ("on", 0)
    assert sum(record["in_flight"] for record in status["ranks"]) == 0
    assert status["counters"]["endpoint"]["aborted"] >= 1
    captured(tap, prompt=PROMPT)


def test_a_full_slice_directory_answers_429_until_it_is_consumed(engine: Engine, tap: httpx.Client) -> None:
    body = {"prompt": PROMPT * 20}
    answers = [tap.post(URL, json=body) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 429]
    assert int(answers[-1].headers["retry-after"]) > 0
    assert "8000000" in answers[-1].json()["error"]["message"]
    assert chat(engine, "Hello").status_code == 200  # production is served all the same
    (item,) = answers[0].json()["data"]
    slices.release(start_dir(tap), item["tag"])
    captured(tap, **body)


def test_the_canary_runs_on_demand_and_the_status_says_how_it_went(tap: httpx.Client) -> None:
    answer = tap.post(f"{URL}/canary")
    assert answer.status_code == 200
    assert answer.json()["state"] == "passed" and answer.json()["checked"] == 4
    status = tap.get(f"{URL}/status").json()
    assert (status["capture"], status["reason"], status["breaker"]) == ("on", None, None)
    assert status["canary"]["state"] == "passed" and status["canary"]["at"] == answer.json()["at"]
    assert (status["layers"], status["num_layers"], status["hidden_size"]) == (LAYERS, 5, 256)
    assert status["versions"]["vllm"].startswith("0.") and status["versions"]["tap"]
    assert status["mode"]["device"] == "cpu" and status["key"] == "own key"
    assert status["limits"]["prompts"] == 4 and len(status["ranks"]) == 1
    assert status["counters"]["ranks"]["sealed"] >= 1
    assert files(tap) == []
    assert "taphouse_captures_total" in tap.get("/metrics").text


def chat(engine: Engine, text: str, **more: Any) -> httpx.Response:
    """A customer's chat request."""
    body = {"model": engine.model, "messages": [{"role": "user", "content": text}], "max_tokens": 5, **more}
    headers = {"Authorization": f"Bearer {CUSTOMER_KEY}"}
    return httpx.post(f"{engine.url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def tokenize(engine: Engine, body: dict[str, Any]) -> list[int]:
    answer = httpx.post(f"{engine.url}/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["tokens"])


def detokenize(engine: Engine, tokens: list[int]) -> str:
    return str(httpx.post(f"{engine.url}/detokenize", json={"tokens": tokens}).json()["prompt"])
