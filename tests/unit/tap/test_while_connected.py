"""A caller that left gets no answer, whatever came first."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from taphouse_tap.api.endpoint import while_connected


async def answer() -> str:
    return "done"


def asking(*messages: Message) -> Request:
    """A request whose caller says `messages` and then nothing."""
    left = list(messages)

    async def receive() -> Message:
        if left:
            return left.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


def test_who_left_as_the_answer_came_gets_none() -> None:
    with pytest.raises(ClientDisconnect):
        asyncio.run(while_connected(asking({"type": "http.disconnect"}), answer()))


def test_who_stays_gets_it() -> None:
    assert asyncio.run(while_connected(asking({"type": "http.request"}), answer())) == "done"
