"""The consumer of a steady run, a process of its own: takes sealed slices away as they come.

    python -m tap_bench.consumer START_DIR RANKS [--verify]

With `--verify` its standard input has a line `[tag, token ids]` for each capture, which is then joined, its
checksums and token ids compared. Prints a JSON line when its counts changed; ends at the end of its input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from taphouse.slices import SliceError, check_slices, join_slices, release

_PAUSE_S = 0.005


def main() -> None:
    directory, ranks = Path(sys.argv[1]), int(sys.argv[2])
    expected: dict[str, list[int]] | None = {} if "--verify" in sys.argv else None
    ended = threading.Event()
    threading.Thread(target=listen, args=(expected, ended), daemon=True).start()
    taken = {"slices": 0, "bytes": 0, "errors": 0, "error": None}
    while not ended.is_set():
        if take(directory, ranks, taken, expected):
            print(json.dumps(taken), flush=True)
        time.sleep(_PAUSE_S)


def listen(expected: dict[str, list[int]] | None, ended: threading.Event) -> None:
    """Read what to expect, to the end of the input."""
    for line in sys.stdin:
        tag, token_ids = json.loads(line)
        if expected is not None:
            expected[tag] = token_ids
    ended.set()


def take(
    directory: Path,
    ranks: int,
    taken: dict[str, int | str | None],
    expected: dict[str, list[int]] | None = None,
) -> bool:
    """Take away every capture that all ranks sealed; tell whether there was one.

    With `expected`, only those whose token ids [rows] are known, which are then verified whole.
    """
    sealed = Counter(e.name.split(".", 1)[0] for e in os.scandir(directory) if e.name.endswith(".slice"))
    whole = [tag for tag, count in sealed.items() if count == ranks and (expected is None or tag in expected)]
    for tag in whole:
        try:
            paths = [directory / f"{tag}.t{rank}.slice" for rank in range(ranks)]
            if expected is not None:
                join_slices(paths, expected.pop(tag))
            trailers = check_slices(paths)
            taken["slices"] += 1
            taken["bytes"] += sum(t.rows * t.row_bytes for t in trailers)
        except (SliceError, OSError) as error:
            taken["errors"] += 1
            taken["error"] = f"{type(error).__name__}: {error}"
        release(directory, tag)
    return bool(whole)


if __name__ == "__main__":
    main()
