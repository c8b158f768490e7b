"""The consumer of a steady run, a process of its own: takes sealed slices away as they come.

    python -m tap_bench.consumer START_DIR RANKS

Prints a JSON line when its counts changed; ends at the end of its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from taphouse.slices import SliceError, check_slices, release

_PAUSE_S = 0.005


def main() -> None:
    directory, ranks = Path(sys.argv[1]), int(sys.argv[2])
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    taken = {"slices": 0, "bytes": 0, "errors": 0, "error": None}
    while not ended.is_set():
        if take(directory, ranks, taken):
            print(json.dumps(taken), flush=True)
        time.sleep(_PAUSE_S)


def take(directory: Path, ranks: int, taken: dict[str, int | str | None]) -> bool:
    """Take away every capture that all ranks sealed; tell whether there was one."""
    sealed = Counter(e.name.split(".", 1)[0] for e in os.scandir(directory) if e.name.endswith(".slice"))
    whole = [tag for tag, count in sealed.items() if count == ranks]
    for tag in whole:
        try:
            trailers = check_slices([directory / f"{tag}.t{rank}.slice" for rank in range(ranks)])
            taken["slices"] += 1
            taken["bytes"] += sum(t.rows * t.row_bytes for t in trailers)
        except (SliceError, OSError) as error:
            taken["errors"] += 1
            taken["error"] = f"{type(error).__name__}: {error}"
        release(directory, tag)
    return bool(whole)


if __name__ == "__main__":
    main()
