"""The link's own pinned device-to-host rate: each card alone, then all at once.

python -m tap_bench.link CARDS
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

_BYTES = 256 << 20
_REPEATS = 10


def main() -> None:
    cards = int(sys.argv[1])
    if not torch.cuda.is_available():
        print(json.dumps({"error": "no CUDA device"}))
        return
    pairs = [_pair(card) for card in range(cards)]
    alone = [rate(*pair) for pair in pairs]
    print(json.dumps({"alone": alone, "at_once": _at_once(pairs), "bytes": _BYTES}))


def _pair(card: int) -> tuple[torch.Tensor, torch.Tensor]:
    device = torch.zeros(_BYTES, dtype=torch.uint8, device=f"cuda:{card}")
    return device, torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)


def _events() -> tuple[Any, Any]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def rate(device: torch.Tensor, host: torch.Tensor) -> float:
    """Bytes/s, the best of the repeats."""
    best = 0.0
    with torch.cuda.device(device.device):
        for _ in range(_REPEATS):
            first, last = _events()
            first.record()
            host.copy_(device, non_blocking=True)
            last.record()
            last.synchronize()
            best = max(best, _BYTES / (1e-3 * first.elapsed_time(last)))
    return best


def _at_once(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Bytes/s of each card while all of them copy."""
    marks = []
    for device, host in pairs:
        with torch.cuda.device(device.device):
            first, last = _events()
            first.record()
            for _ in range(_REPEATS):
                host.copy_(device, non_blocking=True)
            last.record()
            marks.append((first, last))
    for _, last in marks:
        last.synchronize()
    return [_REPEATS * _BYTES / (1e-3 * first.elapsed_time(last)) for first, last in marks]


if __name__ == "__main__":
    main()
