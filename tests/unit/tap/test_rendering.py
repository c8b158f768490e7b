"""Prompts from requests, and the loss mask from prefixes of a conversation."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.unit.tap.endpoint_fakes import FakeTokenizer, make_model

from taphouse_tap.api.refusals import InvalidField
from taphouse_tap.api.rendering import render
from taphouse_tap.api.requests import Prompt, parse_request

MODEL = make_model()
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "three four"},
    {"role": "user", "content": "five"},
    {"role": "assistant", "content": "six"},
]


def rendered(tokenizer: FakeTokenizer | None = None, **body: Any) -> list[Prompt]:
    request = parse_request(json.dumps(body).encode())
    return asyncio.run(render(request, tokenizer or FakeTokenizer(), MODEL))


def words(prompt: Prompt) -> list[int]:
    """Token ids that the mask selects."""
    assert prompt.loss_mask is not None
    assert len(prompt.loss_mask) == len(prompt.token_ids)
    return [token for token, bit in zip(prompt.token_ids, prompt.loss_mask, strict=True) if bit]


def word(text: str) -> int:
    return FakeTokenizer.word(text)


def test_token_ids_stay_as_they_are_and_text_is_tokenised() -> None:
    assert [p.token_ids for p in rendered(prompt=[[5, 6], [7]])] == [[5, 6], [7]]
    assert [p.token_ids for p in rendered(prompt="a b")] == [[word("a"), word("b")]]


def test_an_empty_prompt_in_a_list_is_named() -> None:
    with pytest.raises(InvalidField, match=r"prompt\[1\]: the prompt is empty"):
        rendered(prompt=["a", ""])


def test_the_mask_covers_assistant_turns_and_their_end_but_not_what_follows() -> None:
    (prompt,) = rendered(messages=CHAT, return_loss_mask=True)
    assert words(prompt) == [word("three"), word("four"), 1, word("six"), 1]
    assert prompt.generates_loss is False


def test_without_a_last_assistant_turn_the_prompt_opens_one() -> None:
    (prompt,) = rendered(messages=CHAT[:2], return_loss_mask=True)
    assert prompt.token_ids[-2:] == [0, 5]
    assert words(prompt) == []
    assert prompt.generates_loss is True


def test_a_generation_prompt_can_be_asked_for_and_refused() -> None:
    assert rendered(messages=CHAT, add_generation_prompt=True)[0].token_ids[-2:] == [0, 5]
    assert rendered(messages=CHAT[:2], add_generation_prompt=False)[0].token_ids[-2:] == [1, 2]


def test_an_opening_that_past_turns_lack_is_not_part_of_them() -> None:
    (prompt,) = rendered(FakeTokenizer(opening=[300]), messages=CHAT, return_loss_mask=True)
    assert words(prompt) == [word("three"), word("four"), 1, word("six"), 1]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"turns up to messages\[2\] differently") as caught:
        rendered(FakeTokenizer(rewrites=True), messages=CHAT, return_loss_mask=True)
    assert caught.value.param == "return_loss_mask"


def test_tools_and_template_arguments_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    (prompt,) = rendered(messages=CHAT[1:2], tools=tools, chat_template_kwargs={"thinking": True})
    assert word("clock") in prompt.token_ids
    assert prompt.token_ids[-1] == word("thinking")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"content": "x"}], "messages[0].role: a string is needed"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'; only text"),
        ([{"role": "user", "content": [{"type": None}]}], "part of type None"),
        ([{"role": "user", "content": "w " * 70}], "messages: 76 prompt tokens"),
    ],
)
def test_messages_that_cannot_be_captured_are_refused(messages: Any, says: str) -> None:
    with pytest.raises(InvalidField) as caught:
        rendered(messages=messages)
    assert says in str(caught.value)
