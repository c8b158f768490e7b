"""One capture on one rank: a request's rows, from the first step to the sealed slice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from taphouse.slices import SliceWriter, Trailer, cut, seal_error
from taphouse_tap.errors import BadRows


class Capture:
    """One request's rows on this rank. Only the writer process has it."""

    def __init__(self, trailer: Trailer, directory: Path, max_rows: int, prompt: NDArray[np.int32]) -> None:
        self._prompt, self._max_rows = prompt, max_rows
        self._token_ids = np.full(max_rows, -1, np.int32)
        self._trailer = trailer
        self._directory = directory
        self._seen = np.zeros(max_rows, np.bool_)
        self._file: SliceWriter | None = None

    @property
    def tag(self) -> str:
        """The capture's name, made by our endpoint."""
        return self._trailer.tag

    @property
    def sealed(self) -> bool:
        """Whether this rank's slice of that name is there already."""
        return (self._directory / f"{self.tag}.t{self._trailer.tp_rank}.slice").exists()

    @property
    def abandoned(self) -> bool:
        """Whether the claim is gone: the client left, nobody waits for this capture."""
        return not (self._directory / f"{self.tag}.claim").exists()

    @property
    def spent(self) -> tuple[float, float]:
        """Seconds of checksums and of copying to the file, over all threads."""
        return (self._file.checksum_s, self._file.copy_s) if self._file is not None else (0.0, 0.0)

    def drop(self) -> None:
        """Remove what was written. Idempotent."""
        if self._file is not None:
            self._file.abort()

    def place(self, marks: NDArray[np.int64], told: int | None = None) -> range:
        """Return where the rows with these recorded `marks` [n, 2] go, and note that they are there.

        A mark is a row's position and token id; `told` is the first position by the scheduler, where it is
        exact. The first rows are to be written with `write` before anything else happens to the capture.
        Later ones win, so recomputed and rejected rows come out right. Rows past `max_rows` have no place.
        Raises `BadRows` when the marks were not recorded, the positions are not consecutive or not the
        scheduler's, or a token is not the prompt's, and what making the file raises.
        """
        positions, token_ids = marks[:, 0], marks[:, 1]
        first, count = int(positions[0]), len(positions)
        if first < 0:
            raise BadRows("the graph recorded no positions: it runs without the tap")
        if count > 1 and not (np.diff(positions) == 1).all():
            raise BadRows(f"positions {positions[:8].tolist()}... of one chunk are not consecutive")
        if told is not None and first != told:
            raise BadRows(f"the rows begin at position {first}, the scheduler says {told}")
        kept = min(count, self._max_rows - first)
        if kept <= 0:
            return range(first, first)
        self._check_tokens(first, token_ids[:kept])
        if self._file is None:
            self._file = SliceWriter(self._directory, self._trailer, self._max_rows)
        self._token_ids[first : first + kept] = token_ids[:kept]
        self._seen[first : first + kept] = True
        return range(first, first + kept)

    def pieces(self, row: int, rows: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Cut rows [n, row bytes] for row number `row` into what is given to `write`, one after the other."""
        return cut(row * rows.shape[1], rows.reshape(-1))

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Write a piece; any number of threads may, at places of their own.

        Raises what writing to the file raises.
        """
        if self._file is not None:
            self._file.write_piece(offset, data)

    def _check_tokens(self, first: int, token_ids: NDArray[np.int64]) -> None:
        """The prompt's rows must be of the prompt's tokens; whoever reads the slice checks the others."""
        if (token_ids < 0).any():
            raise BadRows("the graph recorded no token ids: it runs without the tap, or is not fed ids")
        prompt = self._prompt[first : first + len(token_ids)]
        wrong = np.flatnonzero(token_ids[: len(prompt)] != prompt)
        if len(wrong):
            row = int(wrong[0])
            raise BadRows(
                f"row {first + row} is of token {token_ids[row]}, the prompt has {prompt[row]} there: "
                "these are another request's rows"
            )

    def seal(self) -> Trailer | None:
        """Seal the slice; None when the client has gone. Raises `BadRows` when a row is missing."""
        rows = int(self._seen.argmin()) if not self._seen.all() else len(self._seen)
        if self._seen[rows:].any():
            raise BadRows(f"row {rows} is missing and later ones are there")
        if rows < self._trailer.prompt_len or self._file is None:
            raise BadRows(f"row {rows} is missing: the prompt has {self._trailer.prompt_len}")
        return self._file.seal(self._token_ids[:rows])

    def fail(self, reason: str, *, retry: bool) -> None:
        """Seal the reason in place of rows, so that whoever waits is answered at once."""
        self.drop()
        seal_error(self._directory, self._trailer, reason, retry=retry)
