"""The captures in flight on one rank: one request's rows each, from the first step to the sealed slice."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from taphouse.slices import OptIn, SliceWriter, Trailer, seal_error
from taphouse_tap.errors import BadRows


class Capture:
    """One request's rows on this rank. After the first step only the writer's thread touches it."""

    def __init__(self, opt_in: OptIn, trailer: Trailer, directory: Path, prompt: Sequence[int]) -> None:
        self.opt_in = opt_in
        self._prompt = prompt
        self._token_ids = np.full(opt_in.max_rows, -1, np.int32)
        self._trailer = trailer
        self._directory = directory
        self._seen = np.zeros(opt_in.max_rows, np.bool_)
        self._file: SliceWriter | None = None

    @property
    def tag(self) -> str:
        """The capture's name, made by our endpoint."""
        return self.opt_in.tag

    @property
    def sealed(self) -> bool:
        """Whether this rank's slice is there already: the tag is an old one."""
        return (self._directory / f"{self.tag}.t{self._trailer.tp_rank}.slice").exists()

    @property
    def abandoned(self) -> bool:
        """Whether the claim is gone: the client left, nobody waits for this capture."""
        return not (self._directory / f"{self.tag}.claim").exists()

    def drop(self) -> None:
        """Remove what was written. Idempotent."""
        if self._file is not None:
            self._file.abort()

    def place(self, marks: NDArray[np.int64]) -> range:
        """Return where the rows with these recorded `marks` [n, 2] go, and note that they are there.

        A mark is a row's position and token id. The first rows are to be written with `write` before anything
        else happens to the capture. Later ones win, so recomputed and rejected rows come out right. Rows past
        `max_rows` have no place. Raises `BadRows` when the marks were not recorded, the positions are not
        consecutive, or a token is not the prompt's, and what making the file raises.
        """
        positions, token_ids = marks[:, 0], marks[:, 1]
        first, count = int(positions[0]), len(positions)
        if first < 0:
            raise BadRows("the graph recorded no positions: it runs without the tap")
        if count > 1 and not (np.diff(positions) == 1).all():
            raise BadRows(f"positions {positions[:8].tolist()}... of one chunk are not consecutive")
        kept = min(count, self.opt_in.max_rows - first)
        if kept <= 0:
            return range(first, first)
        self._check_tokens(first, token_ids[:kept])
        if self._file is None:
            self._file = SliceWriter(self._directory, self._trailer, self.opt_in.max_rows)
        self._token_ids[first : first + kept] = token_ids[:kept]
        self._seen[first : first + kept] = True
        return range(first, first + kept)

    def write(self, row: int, rows: NDArray[np.uint8]) -> None:
        """Write rows [n, row bytes] at row number `row`; any number of threads may, at places of their own.

        Raises what writing to the file raises.
        """
        if self._file is not None:
            self._file.write(row, rows)

    def _check_tokens(self, first: int, token_ids: NDArray[np.int64]) -> None:
        """The prompt's rows must be of the prompt's tokens; whoever reads the slice checks the others."""
        if (token_ids < 0).any():
            raise BadRows("the graph recorded no token ids: it runs without the tap, or is not fed ids")
        prompt = np.asarray(self._prompt[first : first + len(token_ids)], np.int64)
        wrong = np.flatnonzero(token_ids[: len(prompt)] != prompt)
        if len(wrong):
            row = int(wrong[0])
            raise BadRows(
                f"row {first + row} is of token {token_ids[row]}, the prompt has {prompt[row]} there: "
                "these are another request's rows"
            )

    def seal(self, pool: Executor | None = None) -> Trailer | None:
        """Seal the slice; None when the client has gone. Raises `BadRows` when a row is missing.

        The threads of `pool` share the checksum of a large one.
        """
        rows = int(self._seen.argmin()) if not self._seen.all() else len(self._seen)
        if self._seen[rows:].any():
            raise BadRows(f"row {rows} is missing and later ones are there")
        if rows < self.opt_in.prompt_len or self._file is None:
            raise BadRows(f"row {rows} is missing: the prompt has {self.opt_in.prompt_len}")
        return self._file.seal(self._token_ids[:rows], pool=pool)

    def fail(self, reason: str, *, retry: bool) -> None:
        """Seal the reason in place of rows, so that whoever waits is answered at once."""
        self.drop()
        seal_error(self._directory, self._trailer, reason, retry=retry)


@dataclass
class Captures:
    """The captures in flight, by tag; shared by the engine's and the writer's thread."""

    _by_tag: dict[str, Capture] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self._by_tag)

    def add(self, capture: Capture) -> bool:
        """Admit a capture; False if one of that tag is in flight already (a replay)."""
        with self._lock:
            if capture.tag in self._by_tag:
                return False
            self._by_tag[capture.tag] = capture
            return True

    def remove(self, capture: Capture) -> bool:
        """Forget a capture; False if it was not in flight (already sealed or failed)."""
        with self._lock:
            return self._by_tag.pop(capture.tag, None) is not None

    def __contains__(self, capture: Capture) -> bool:
        return self._by_tag.get(capture.tag) is capture

    def all(self) -> list[Capture]:
        """Return those in flight now."""
        with self._lock:
            return list(self._by_tag.values())
