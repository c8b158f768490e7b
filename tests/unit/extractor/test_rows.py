from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taphouse.samples import id_problem
from taphouse.wire import JobOptions
from taphouse_extractor.errors import BadRow
from taphouse_extractor.rows import Mask, Numbered, number_rows, parse_row, to_prompt


def prompt_of(row: dict[str, Any], **options: Any) -> Any:
    line = json.dumps(row).encode()
    return to_prompt(Numbered(0, "id", line), parse_row(line), JobOptions(**options))


def test_messages_come_before_prompt_before_text() -> None:
    row = {"messages": [{"role": "user", "content": "m"}], "prompt": "p", "text": "t", "other": {"x": 1}}
    assert "messages" in prompt_of(row).body
    del row["messages"]
    assert prompt_of(row).body["prompt"] == "p"
    del row["prompt"]
    assert prompt_of(row).body["prompt"] == "t"


def test_what_is_trained_on() -> None:
    asked = {"role": "user", "content": "q"}
    answered = {"role": "assistant", "content": "a"}
    assert prompt_of({"text": "t"}).mask is Mask.ALL
    assert prompt_of({"messages": [asked]}).mask is Mask.ALL
    assert prompt_of({"messages": [asked, answered]}).mask is Mask.ASSISTANT
    assert prompt_of({"messages": [asked, answered]}, max_tokens=9).mask is Mask.GENERATED
    assert prompt_of({"prompt": "p"}, max_tokens=9).mask is Mask.GENERATED


def test_a_conversation_for_the_engine() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "tools": tools,
    }
    body = prompt_of(row, layers=[4, 1], chat_template_kwargs={"thinking": False}).body
    assert (body["add_generation_prompt"], body["return_loss_mask"]) == (False, True)
    assert (body["tools"], body["layers"]) == (tools, [4, 1])
    assert body["chat_template_kwargs"] == {"thinking": False}
    assert (body["delivery"], body["max_tokens"]) == ("slices", 1)
    generating = prompt_of(row, max_tokens=5, seed=7).body
    assert [m["role"] for m in generating["messages"]] == ["user"]
    assert (generating["add_generation_prompt"], generating["seed"]) == (True, 7)
    assert "ignore_eos" not in generating and "temperature" not in generating


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "none of messages, prompt and text"),
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"messages": []}, "nothing is left"),
        ({"messages": [{"role": "human", "content": "x"}]}, "messages.0.role: 'human'"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": "text"}, "messages"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": "x", "tools": "f"}, "tools"),
    ],
)
def test_rows_that_are_no_prompt_say_why(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow, match=message):
        prompt_of(row)


def test_a_lone_answer_leaves_nothing_to_generate_from() -> None:
    with pytest.raises(BadRow, match="nothing is left"):
        prompt_of({"messages": [{"role": "assistant", "content": "x"}]}, max_tokens=2)


def test_errors_never_quote_the_row() -> None:
    with pytest.raises(BadRow) as caught:
        parse_row(b'{"prompt": {"secret": "password123"}}')
    assert "password123" not in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from(["id", "prompt", "messages", "text"]), json_values), max_size=12)
)
def test_ids_are_usable_distinct_and_the_same_at_every_run(rows: list[dict[str, Any]]) -> None:
    lines = [json.dumps(row).encode() for row in rows]
    once = list(number_rows(lines, first_row=32, job_id="j1"))
    again = list(number_rows(lines, first_row=32, job_id="j1"))
    assert once == again
    assert [numbered.row for numbered in once] == list(range(32, 32 + len(rows)))
    assert len({numbered.id for numbered in once}) == len(rows)
    assert all(id_problem(numbered.id) is None for numbered in once)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_row_or_a_bad_row(line: bytes) -> None:
    numbered = next(number_rows([line], first_row=0, job_id="j1"))
    try:
        to_prompt(numbered, parse_row(line), JobOptions())
    except BadRow as error:
        assert str(error)


def test_an_id_that_another_row_would_be_given() -> None:
    lines = [json.dumps({"id": name}).encode() for name in ("a#2", "a", "a")]
    assert [row.id for row in number_rows(lines, first_row=0, job_id="j")] == ["a#2", "a", "a#2#2"]
