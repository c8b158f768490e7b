"""Turns a request into prompts: token ids, and for chats the loss mask.

Text and chats are tokenised by the server's own tokenisation service, so that they come out as they do for
production requests. The loss mask is found by rendering prefixes of the conversation: what a turn adds to the
rendering of the turns before it is that turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from taphouse_tap.api.refusals import InvalidField
from taphouse_tap.api.requests import CaptureRequest, ModelFacts, Prompt, check_prompt

TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
"""Content parts that are text; images and the like have no token ids of their own."""


class Tokenizer(Protocol):
    """What rendering needs of the server. Methods raise `InvalidField` for text they cannot take."""

    async def text(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens the model's completions get."""
        ...

    async def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None,
        chat_template_kwargs: dict[str, Any] | None,
    ) -> list[int]:
        """Token ids of a conversation through the server's chat template."""
        ...

    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of some token ids."""
        ...


async def render(request: CaptureRequest, tokenizer: Tokenizer, model: ModelFacts) -> list[Prompt]:
    """Tokenise what the request holds and check every prompt's length.

    Token ids in the request come back as they are. Raises: `InvalidField`.
    """
    if request.messages is not None:
        return [await _render_chat(request, request.messages, tokenizer, model)]
    prompts: list[Prompt] = []
    given = request.prompts()
    for index, item in enumerate(given):
        token_ids = item if isinstance(item, list) else await tokenizer.text(item)
        check_prompt(
            token_ids, request.max_tokens, model, "prompt" if len(given) == 1 else f"prompt[{index}]"
        )
        prompts.append(Prompt(token_ids))
    return prompts


async def _render_chat(
    request: CaptureRequest, messages: list[dict[str, Any]], tokenizer: Tokenizer, model: ModelFacts
) -> Prompt:
    _check_messages(messages)
    chat = _Chat(request, messages, tokenizer)
    opens_turn = request.wants_generation_prompt()
    token_ids = await chat.prefix(len(messages), opens_turn)
    check_prompt(token_ids, request.max_tokens, model, "messages")
    mask = await loss_mask(chat, token_ids) if request.return_loss_mask else None
    return Prompt(token_ids, mask, generates_loss=opens_turn)


async def loss_mask(chat: _Chat, token_ids: list[int]) -> list[int]:
    """1 on tokens of assistant turns including their end-of-turn token, 0 elsewhere; ``[P]``.

    Raises: `InvalidField` when the template renders earlier turns differently once later ones follow.
    """
    mask = [0] * len(token_ids)
    for index, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        start = await _turn_start(chat, index, token_ids)
        through = await chat.prefix(index + 1, False)
        if token_ids[: len(through)] != through:
            raise _rewritten(index)
        end = _turn_end(chat.tokenizer, token_ids, start, len(through))
        mask[start:end] = [1] * (end - start)
    return mask


async def _turn_start(chat: _Chat, index: int, token_ids: list[int]) -> int:
    """Where turn ``index`` begins: after the header that a generation prompt would have written."""
    before = await chat.prefix(index, True)
    shared = _common_prefix(before, token_ids)
    if shared == len(before):
        return shared
    # The generation prompt says more than the header of a past turn (an opening of thoughts, say).
    bare = await chat.prefix(index, False)
    if shared < len(bare) or token_ids[: len(bare)] != bare:
        raise _rewritten(index)
    return shared


def _turn_end(tokenizer: Tokenizer, token_ids: list[int], start: int, end: int) -> int:
    """Where a turn ends: white space that the template puts after the end-of-turn token is not part of it."""
    special = tokenizer.special_ids()
    last = next((at for at in range(end - 1, start - 1, -1) if token_ids[at] in special), None)
    if last is not None and last + 1 < end and not tokenizer.decode(token_ids[last + 1 : end]).strip():
        return last + 1
    return end


class _Chat:
    """Renders prefixes of one request's conversation."""

    def __init__(self, request: CaptureRequest, messages: list[dict[str, Any]], tokenizer: Tokenizer) -> None:
        self.messages = messages
        self.tokenizer = tokenizer
        self._request = request

    async def prefix(self, turns: int, add_generation_prompt: bool) -> list[int]:
        """Token ids of the first ``turns`` messages."""
        return await self.tokenizer.chat(
            self.messages[:turns],
            add_generation_prompt=add_generation_prompt,
            tools=self._request.tools,
            chat_template_kwargs=self._request.chat_template_kwargs,
        )


def _check_messages(messages: list[dict[str, Any]]) -> None:
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message.get("role"), str):
            raise InvalidField(f"{where}.role: a string is needed", param="messages")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for part in parts:
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind not in TEXT_PARTS:
                raise InvalidField(
                    f"{where}.content: part of type {kind!r}; only text is captured", param="messages"
                )


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)


def _rewritten(index: int) -> InvalidField:
    return InvalidField(
        f"return_loss_mask: the chat template renders the turns up to messages[{index}] differently once "
        "later turns follow, so the assistant's tokens cannot be told apart; send the conversation cut after "
        "one assistant turn at a time, or token ids with a mask of your own",
        param="return_loss_mask",
    )
