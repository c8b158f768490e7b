"""The body of a request: what is taken, and that every refusal names the field and the limit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.tap.endpoint_fakes import make_model

from taphouse_tap.api.refusals import InvalidField, MalformedBody
from taphouse_tap.api.requests import CaptureRequest, check_prompt, parse_request

MODEL = make_model()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted(CaptureRequest.model_fields)


def parse(**body: Any) -> CaptureRequest:
    return parse_request(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("hello", ["hello"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_every_shape_of_prompt_is_a_list_of_prompts(prompt: Any, prompts: Any) -> None:
    assert parse(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, None, "exactly one of `prompt` and `messages`"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, None, "exactly one"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": [1, "a"]}, "prompt", "[1] is a string"),
        ({"prompt": [1, True]}, "prompt", "[1] is a boolean"),
        ({"prompt": [[1], [2, 1.5]]}, "prompt", "[1][1] is a number"),
        ({"prompt": {"a": 1}}, "prompt", "must be a string"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"prompt": "a", "max_tokens": "3"}, "max_tokens", "valid integer"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens", "valid integer"),
        ({"prompt": "a", "temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
        ({"prompt": "a", "top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({"prompt": "a", "stop": [""]}, "stop", "non-empty"),
        ({"prompt": "a", "delivery": "mail"}, "delivery", "'slices' or 'stream'"),
        ({"prompt": "a", "layers": []}, "layers", "at least 1"),
        ({"prompt": "a", "layers": ["x"]}, "layers", "layers[0]"),
        ({"prompt": "a", "request_id": "x" * 300}, "request_id", "256"),
        ({"prompt": "a", "tools": []}, None, "`tools` goes with `messages`"),
        ({"prompt": "a", "return_loss_mask": True}, None, "`return_loss_mask` goes with `messages`"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "valid list"),
        ({"prompt": "a", "n": 2}, "n", "unknown field; the fields are prompt, messages"),
        ({"prompt": "a", "vllm_xargs": {}}, "vllm_xargs", "unknown field"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], param: str | None, says: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse(**body)
    assert says in str(caught.value)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"x"',
        b'{"prompt": NaN}',
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
    ],
)
def test_what_is_not_a_json_object_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedBody):
        parse_request(body)


def test_several_errors_are_named_at_once() -> None:
    with pytest.raises(InvalidField, match=r"max_tokens: .*; top_p: "):
        parse(prompt="a", max_tokens=0, top_p=3)


@pytest.mark.parametrize("layers", [[1], [0, 3], [-1], [5]])
def test_a_layer_that_is_not_tapped_is_refused_with_those_that_are(layers: list[int]) -> None:
    with pytest.raises(
        InvalidField, match=r"not tapped; this engine taps \[0, 2, 4\].*4 enters the final norm"
    ):
        parse(prompt="a", layers=layers).check(MODEL, 8)


def test_a_layer_named_twice_is_refused() -> None:
    with pytest.raises(InvalidField, match="twice"):
        parse(prompt="a", layers=[2, 2]).check(MODEL, 8)


def test_layers_are_answered_as_asked() -> None:
    assert parse(prompt="a", layers=[4, 0]).asked_layers(MODEL) == [4, 0]
    assert parse(prompt="a").asked_layers(MODEL) == [0, 2, 4]


def test_too_many_prompts_and_stop_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidField, match="3 prompts in one request, the limit is 2"):
        parse(prompt=["a", "b", "c"]).check(MODEL, 2)
    with pytest.raises(
        InvalidField, match=r"stop_token_ids: token id 512 is outside the vocabulary \(0 to 511\)"
    ):
        parse(prompt="a", stop_token_ids=[1, 512]).check(MODEL, 8)


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "says"),
    [
        ([], 1, "the prompt is empty"),
        ([1] * 64, 1, "64 prompt tokens and max_tokens=1 make 65, over the model's limit max_model_len=64"),
        ([1], 64, "max_model_len=64"),
        ([1, 512], 1, "token id 512 is outside the vocabulary"),
        ([1, -1], 1, "token id -1 is outside the vocabulary"),
    ],
)
def test_a_prompt_the_model_cannot_take_is_refused(token_ids: list[int], max_tokens: int, says: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_prompt(token_ids, max_tokens, MODEL, "prompt[3]")
    assert says in str(caught.value)
    assert caught.value.param == "prompt[3]"
    told = caught.value.body()["error"].get("prompt_tokens")
    assert told == (len(token_ids) if "max_model_len" in says else None)


def test_a_prompt_that_just_fits_is_taken() -> None:
    check_prompt([511] * 63, 1, MODEL, "prompt")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_refusal(body: bytes) -> None:
    try:
        assert isinstance(parse_request(body), CaptureRequest)
    except (MalformedBody, InvalidField) as refusal:
        assert str(refusal)


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), JSON, max_size=6))
def test_any_object_is_a_request_or_a_refusal_that_names_a_field(body: dict[str, Any]) -> None:
    try:
        request = parse_request(json.dumps(body).encode())
        request.check(MODEL, 4)
    except (MalformedBody, InvalidField) as refusal:
        assert refusal.param is None or refusal.param in str(refusal) or not refusal.param
    else:
        assert set(body) <= set(FIELDS)
        for name, value in body.items():
            assert getattr(request, name) == value


@given(st.lists(st.integers(0, 511), min_size=1, max_size=63))
def test_token_ids_come_through_unchanged(token_ids: list[int]) -> None:
    assert parse(prompt=token_ids).prompts() == [token_ids]


def test_seeded_sampling_is_refused_where_it_could_stop_the_engine() -> None:
    sampled = parse(prompt=[1], seed=3, temperature=0.5)
    sampled.check(make_model(), 1)
    parse(prompt=[1], seed=3).check(make_model(seeds=False), 1)
    with pytest.raises(InvalidField, match="leave out seed, or set temperature to 0"):
        sampled.check(make_model(seeds=False), 1)
