"""The engine's end of its writer process: starts it, tells it what to do, notices when it is gone.

Nothing here waits: what can't be sent now is kept, or refused. A thread sleeps in the kernel until the writer
has trouble or dies.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from taphouse.slices import OptIn, SliceError, Trailer, seal_error
from taphouse_tap.errors import WriterFailed

from .area import Area, Word
from .breaker import Breaker
from .messages import MAX_BYTES, Admit, Fail, FailAll, Finish, Message, Step, encode
from .process import READY
from .rings import Ring

logger = logging.getLogger("vllm.taphouse")

_START_S = 20.0
"""A writer process that is not ready by then is given up; it takes a fraction of a second."""

_SILENT_S = 60.0
"""A writer that did not go round its loop for so long is ended: what is in flight is answered then."""

_SOCKET_BYTES = 1 << 20


_REASON_CHARS = 4000
"""What is told of an error at most, so that a message always fits a packet."""


class Link:
    """One writer process. `take_rows` and `step` are the engine's thread's alone; any may call all else."""

    def __init__(self, area: Area, directory: Path, template: Trailer, breaker: Breaker) -> None:
        self.gone: str | None = None
        self._area, self._directory, self._template, self._breaker = area, directory, template, breaker
        self._rows, self._prompts = Ring(area.layout.rows), Ring(area.layout.prompt_tokens)
        self._lock = threading.RLock()
        self._sent = 0
        self._number = 0
        self._waiting = 0
        self._unsent: deque[tuple[Message, bytes]] = deque()
        self._taken: deque[tuple[int, Ring]] = deque()
        self._open: dict[int, Trailer] = {}
        self._ending: deque[tuple[int, int, int]] = deque()  # after which message which numbers end
        self._silent = self._closed = False

    def start(self) -> None:
        """Start the process and wait until it is ready. Raises `WriterFailed` when it isn't."""
        self._area.words[Word.HANDLED] = 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        with theirs:
            self.process = self._spawn(theirs.fileno())
        self._socket.settimeout(_START_S)
        try:
            first = self._socket.recv(MAX_BYTES)
        except OSError as error:
            self.close()
            raise WriterFailed(f"it was not ready after {_START_S:.0f} s: {error}") from error
        if first != READY:
            self.close()
            raise WriterFailed(f"it ended at its start with exit status {self.process.returncode}")
        self._socket.settimeout(None)
        self._breaker.on_trip(lambda: self.fail_all(f"capture is off: {self._breaker.reason}"))
        threading.Thread(target=self._watch, name="taphouse-writer", daemon=True).start()

    def _spawn(self, theirs: int) -> subprocess.Popen[bytes]:
        spec = {
            "socket": theirs,
            "memory": self._area.fd,
            "layout": asdict(self._area.layout),
            "directory": str(self._directory),
            "template": self._template.to_json(),
            "parent": os.getpid(),
        }
        paths = os.pathsep.join(path for path in sys.path if path)
        return subprocess.Popen(
            [sys.executable, "-m", "taphouse_tap.rank.process", json.dumps(spec)],
            pass_fds=(theirs, self._area.fd),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    @property
    def in_flight(self) -> int:
        """Captures that were admitted and not yet sealed or failed, as far as is known here."""
        with self._lock:
            self._collect()
            return len(self._open)

    @property
    def rows_used(self) -> int:
        """Rows of the area in use."""
        with self._lock:
            self._collect()
            return self._rows.used

    def admit(self, opt_in: OptIn, epoch: int, prompt: object) -> int | None:
        """Begin a capture; return its number, or None if one of that tag is in flight (a replay)."""
        with self._lock:
            self._collect()
            if any(trailer.tag == opt_in.tag for trailer in self._open.values()):
                return None
            self._number += 1
            ids = np.asarray(prompt, np.int32)
            at = self._prompts.take(len(ids)) if len(ids) else 0
            if at is not None and len(ids):
                self._taken.append((self._next, self._prompts))
                self._area.prompts[at : at + len(ids)] = ids
            self._open[self._number] = replace(
                self._template, tag=opt_in.tag, prompt_len=opt_in.prompt_len, weights_epoch=epoch
            )
            where = (at, len(ids)) if at is not None else (0, 0)
            self.put(Admit(self._number, opt_in.tag, opt_in.prompt_len, opt_in.max_rows, epoch, *where))
            if at is None:
                self.put(Fail(self._number, "the memory for prompts on their way is full", retry=True))
            return self._number

    def take_rows(self, count: int) -> int | None:
        """Return where `count` rows of the area are free, or None. They go with the next step sent."""
        with self._lock:
            self._collect()
            at = self._rows.take(count)
            self._waiting += at is not None
            return at

    def step(self, step: Step) -> bool:
        """Send a step; False when it can't be sent now: its rows are lost, their memory is not."""
        with self._lock:
            line = encode(step)
            if len(line) <= MAX_BYTES:
                self._unsent.append((step, line))
                self.flush()
            sent = len(line) <= MAX_BYTES and not self._unsent
            if self._unsent and self._unsent[-1][0] is step:
                self._unsent.pop()
            # The memory of rows that were not sent may be taken again at once: what still moves there now
            # moves before what comes next.
            after = self._sent if sent else self._next
            self._taken.extend((after, self._rows) for _ in range(self._waiting))
            self._waiting = 0
            return sent

    def put(self, message: Admit | Finish | Fail | FailAll) -> None:
        """Have a message sent with the next `flush`, in order; nothing is lost when that can't be at once."""
        with self._lock:
            if isinstance(message, Fail | FailAll):
                message = replace(message, reason=message.reason[:_REASON_CHARS])
            if isinstance(message, Finish | Fail):
                self._ending.append((self._next, message.number, message.number))
            elif isinstance(message, FailAll):
                self._ending.append((self._next, 0, self._number))
            self._unsent.append((message, encode(message)))

    def fail_all(self, reason: str) -> None:
        """Fail everything in flight; if the writer is gone, it is done here."""
        with self._lock:
            if self.gone is None:
                self.put(FailAll(reason))
                self.flush()
                return
            left, self._open = self._open, {}
            self._unsent.clear()
        for trailer in left.values():
            self._fail_here(trailer, reason)

    def flush(self) -> None:
        """Send what waits for it, several messages a packet, as far as it can be sent now."""
        with self._lock:
            while self._unsent:
                lines: list[bytes] = []
                room = MAX_BYTES
                for _, line in self._unsent:
                    room -= len(line)
                    if room < 0:
                        break
                    lines.append(line)
                if not self._send(lines):
                    return
                for _ in lines:
                    self._unsent.popleft()

    def look(self) -> None:
        """Send what is left, and end a writer that stopped answering. Called every second or two."""
        self.flush()
        silent_s = 1e-9 * (time.monotonic_ns() - int(self._area.words[Word.ALIVE]))
        if self.gone is None and silent_s > _SILENT_S:
            self._silent = True
            self.process.kill()

    def close(self) -> None:
        """End the process and forget it; what it had in flight is lost."""
        self._closed = True
        self.process.kill()
        self.process.wait()
        self._socket.close()

    @property
    def _next(self) -> int:
        """How many messages are sent once the next one is."""
        return self._sent + len(self._unsent) + 1

    def _collect(self) -> None:
        """Take back what the writer is done with."""
        handled = int(self._area.words[Word.HANDLED])
        while self._taken and self._taken[0][0] <= handled:
            self._taken.popleft()[1].give_back()
        while self._ending and self._ending[0][0] <= handled:
            _, first, last = self._ending.popleft()
            for number in [number for number in self._open if first <= number <= last]:
                del self._open[number]

    def _send(self, lines: Sequence[bytes]) -> bool:
        """Send messages as one packet."""
        try:
            self._socket.send(b"".join(lines), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False  # full; if it is broken, `_watch` knows
        self._sent += len(lines)
        return True

    def _watch(self) -> None:
        """Wait for trouble: a packet says what tripped the writer, the end of packets that it is gone."""
        while True:
            try:
                packet = self._socket.recv(MAX_BYTES)
            except OSError as error:
                packet = b""
                if not self._closed:
                    logger.warning("Taphouse lost its slice writer: %s", error)
            if not packet:
                break
            self._breaker.trip("writer", WriterFailed(packet.decode(errors="replace")))
        if self._closed:
            return
        code = self.process.wait()
        how = f"did not answer for {_SILENT_S:.0f} s" if self._silent else "is gone"
        why = f"signal {-code}" if code < 0 else f"exit status {code}"
        with self._lock:
            self.gone = f"the writer process {how} ({why})"
        self._breaker.trip("writer", WriterFailed(self.gone))
        self.fail_all(f"capture is off: {self._breaker.reason}")

    def _fail_here(self, trailer: Trailer, reason: str) -> None:
        """Seal the error of a capture in the writer's place, unless its slice or its client is gone."""
        name = f"{trailer.tag}.t{trailer.tp_rank}.slice"
        part = (self._directory / name).with_suffix(".part")
        if (self._directory / name).exists() or not (self._directory / f"{trailer.tag}.claim").exists():
            part.unlink(missing_ok=True)
            return
        try:
            seal_error(self._directory, trailer, reason)
        except (SliceError, OSError) as error:
            logger.warning("Taphouse could not seal the error of capture %s: %s", trailer.tag, error)
