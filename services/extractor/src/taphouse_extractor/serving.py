"""The API's HTTP server: uvicorn's, which says when it serves, hears early that it is to end, and is bounded.

Its requests are parsed by h11, which bounds their heads; httptools has no bound.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn

__all__ = ["Bounds", "Server"]

log = logging.getLogger(__name__)
TICKS_A_LOOK = 10  # of uvicorn's, of 0.1 s


@dataclass(frozen=True)
class Bounds:
    """Bytes of a request's head; seconds that an answer may stand still, and that the end waits for one."""

    head_bytes: int
    send_timeout_s: float
    shutdown_s: int


class Server(uvicorn.Server):
    """`facts` are fields of the line that it logs once it serves.

    uvicorn waits for open answers when it is told to end; streams hear of it by `leaving`, and what isn't
    over after `shutdown_s` is cut off. So is whoever takes nothing of an answer for `send_timeout_s`.
    """

    def __init__(
        self,
        app: Any,
        address: tuple[str, int],
        bounds: Bounds,
        leaving: threading.Event,
        facts: Mapping[str, object],
    ) -> None:
        config = uvicorn.Config(
            app,
            host=address[0],
            port=address[1],
            log_level="warning",
            access_log=False,
            http="h11",
            h11_max_incomplete_event_size=bounds.head_bytes,
            timeout_graceful_shutdown=bounds.shutdown_s,
        )
        super().__init__(config)
        self._leaving, self._facts = leaving, facts
        self._unread = _Unread(bounds.send_timeout_s)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; port 0 is a port by now."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            log.info("serves", extra={"address": address, **self._facts})

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if counter % TICKS_A_LOOK == 0:
            now = asyncio.get_running_loop().time()
            self._unread.look((each.transport for each in self.server_state.connections), now)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGTERM and SIGINT."""
        self._leaving.set()
        super().handle_exit(sig, frame)


class _Unread:
    """Cuts off connections whose bytes nobody takes: what waits to be sent has not shrunk for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: dict[asyncio.Transport, tuple[int, float]] = {}

    def look(self, transports: Iterable[asyncio.Transport], now: float) -> None:
        """One look at all that are open; `now` in seconds."""
        seen: dict[asyncio.Transport, tuple[int, float]] = {}
        for transport in transports:
            size = transport.get_write_buffer_size()
            if not size:
                continue
            before, since = self._waiting.get(transport, (size, now))
            seen[transport] = (size, now if size < before else since)
            if now - seen[transport][1] >= self._seconds:
                address = transport.get_extra_info("peername")
                log.warning("%s took nothing of its answer for %g s: cut off", address, self._seconds)
                transport.abort()
        self._waiting = seen
