"""The writer process: `python -m taphouse_tap.rank.process SPEC`, started by `link.py` of the same rank.

It ends with the engine's process: at the end of its socket, or at once when the thread that started it dies.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from taphouse.slices import Trailer

from .area import Area, Layout
from .messages import MAX_BYTES, decode
from .writer import Writer

READY = b"ready"
"""The first packet that it sends; every later one says why capture has to be turned off."""

_PR_SET_PDEATHSIG = 1
_HEARTBEAT_S = 0.5


def main() -> None:
    """Run the writer that the first argument describes, until its engine is gone."""
    spec = json.loads(sys.argv[1])
    _end_with(spec["parent"])
    logging.basicConfig(format="taphouse-writer %(levelname)s %(message)s")
    engine = socket.socket(fileno=spec["socket"])
    area = Area(Layout(**spec["layout"]), spec["memory"])
    area.close()
    packets: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    ended = threading.Event()
    threading.Thread(target=_read, args=(engine, packets, ended), daemon=True).start()

    def tripped(reason: str) -> None:
        engine.send(reason.encode()[:MAX_BYTES])

    template = Trailer.from_json(spec["template"])
    run(Writer(area, Path(spec["directory"]), template, tripped, ended.is_set), packets, engine)


def run(writer: Writer, packets: queue.SimpleQueue[bytes], engine: socket.socket) -> None:
    """Say that it is ready, and handle packets until an empty one comes."""
    writer.alive()
    engine.send(READY)
    while True:
        try:
            packet = packets.get(timeout=_HEARTBEAT_S)
        except queue.Empty:
            writer.alive()
            continue
        if not packet:
            writer.drop()
            return
        for message in decode(packet):
            writer.alive()
            writer.handle(message)


def _read(engine: socket.socket, packets: queue.SimpleQueue[bytes], ended: threading.Event) -> None:
    """Take packets off the socket at once, so that it is never full; an empty one stands for its end."""
    while True:
        try:
            packet = engine.recv(MAX_BYTES)
        except OSError:
            packet = b""
        if not packet:
            ended.set()
        packets.put(packet)
        if not packet:
            return


def _end_with(parent: int) -> None:
    """Die when the engine dies; leave an interrupt from the terminal to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc: Any = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the engine is gone already")


if __name__ == "__main__":
    main()
