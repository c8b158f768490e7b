"""The API's HTTP server: uvicorn's, which says when it serves, and hears early that it is to end."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping
from types import FrameType

import uvicorn

__all__ = ["Server"]

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """`facts` are fields of the line that it logs once it serves.

    uvicorn waits for open answers when it is told to end; streams hear of it by `leaving`.
    """

    def __init__(self, config: uvicorn.Config, leaving: threading.Event, facts: Mapping[str, object]) -> None:
        super().__init__(config)
        self._leaving, self._facts = leaving, facts

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; port 0 is a port by now."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            log.info("serves", extra={"address": address, **self._facts})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGTERM and SIGINT."""
        self._leaving.set()
        super().handle_exit(sig, frame)
