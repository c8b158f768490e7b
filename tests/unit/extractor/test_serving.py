"""The API's server: it says where it serves, ends when told to, and is bounded."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from taphouse_extractor.serving import Bounds, Server


@dataclass
class App:
    """Answers `/` with nothing, and anything else with bytes for ever. `cut_off`: an endless answer was."""

    begun: threading.Event = field(default_factory=threading.Event)
    cut_off: threading.Event = field(default_factory=threading.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        if scope["path"] == "/":
            await send({"type": "http.response.start", "status": 204})
            await send({"type": "http.response.body"})
            return
        await send({"type": "http.response.start", "status": 200})
        left = asyncio.ensure_future(_left(receive))
        try:
            while not left.done():
                await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
                self.begun.set()
                await asyncio.sleep(0)
        finally:
            left.cancel()
            self.cut_off.set()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass
class Running:
    app: App
    leaving: threading.Event
    server: Server
    thread: threading.Thread
    line: logging.LogRecord

    def asked(self, path: str) -> socket.socket:
        """A connection on which a request was sent and nothing is read."""
        address = httpx.URL(self.line.__dict__["address"])
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect((address.host, address.port or 0))
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return client


Run = Callable[[Bounds], AbstractContextManager[Running]]


@pytest.fixture
def run(caplog: pytest.LogCaptureFixture) -> Run:
    @contextmanager
    def running(bounds: Bounds) -> Iterator[Running]:
        app, leaving = App(), threading.Event()
        server = Server(app, ("127.0.0.1", 0), bounds, leaving, {"governor": "on"})
        thread = threading.Thread(target=server.run, daemon=True)
        with caplog.at_level(logging.INFO, "taphouse_extractor"):
            thread.start()
            try:
                until = time.monotonic() + 10
                while not caplog.records and time.monotonic() < until:
                    thread.join(0.01)
                yield Running(app, leaving, server, thread, caplog.records[0])
            finally:
                server.handle_exit(15, None)
                thread.join(20)
        assert leaving.is_set() and not thread.is_alive()

    return running


def test_it_says_once_where_it_serves(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with run(Bounds(1 << 16, 60, 10)) as running:
        assert httpx.get(running.line.__dict__["address"]).status_code == 204
    line = caplog.records[0]
    assert (line.getMessage(), line.__dict__["governor"]) == ("serves", "on")


def test_it_ends_although_a_client_reads_nothing(run: Run) -> None:
    with run(Bounds(1 << 16, 3600, 0)) as running:
        client = running.asked("/endless")
        assert running.app.begun.wait(10)
    client.close()
    assert running.app.cut_off.is_set()


def test_who_takes_nothing_of_an_answer_is_cut_off_and_nobody_else(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    with run(Bounds(1 << 16, 0.5, 10)) as running:
        idle, client = running.asked("/"), running.asked("/endless")
        assert running.app.cut_off.wait(20)
        idle.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"204" in idle.recv(100)
        client.close()
        idle.close()
    assert "took nothing of its answer for 0.5 s: cut off" in caplog.text


def test_heads_of_requests_are_bounded(run: Run) -> None:
    with run(Bounds(8192, 60, 10)) as running:
        client = running.asked("/")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        sent = 0
        with pytest.raises(OSError):
            while sent < 64 << 20:
                client.sendall(b"X-More: " + b"a" * 100_000 + b"\r\n")
                sent += 100_000
        assert sent < 16 << 20
        assert httpx.get(running.line.__dict__["address"], headers={"X-A": "a" * 7000}).status_code == 204
