"""What the ranks' answers to the canary's check come to. No torch in here: API servers use it too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def combine(answers: Sequence[Any]) -> dict[str, Any]:
    """Join all ranks' answers: `ok`, `reason`, and tokens `checked` against the whole vocabulary."""
    for rank, answer in enumerate(answers):
        if not isinstance(answer, dict) or not answer.get("ok"):
            reason = answer.get("reason") if isinstance(answer, dict) else repr(answer)
            return {"ok": False, "reason": f"rank {rank}: {reason}", "checked": 0}
    if not answers:
        return {"ok": False, "reason": "no rank answered", "checked": 0}
    best = np.max([a["best"] for a in answers], axis=0).tolist()
    chosen = [
        next((c for c in column if c is not None), None)
        for column in zip(*(a["chosen"] for a in answers), strict=True)
    ]
    joined = verdict(best, chosen, max(a["tolerance"] for a in answers))
    if joined["ok"] and joined["checked"] < len(best):
        missing = len(best) - joined["checked"]
        return {**joined, "ok": False, "reason": f"{missing} tokens are in no rank's part of the vocabulary"}
    return joined


def verdict(best: Sequence[float], chosen: Sequence[float | None], tolerance: float) -> dict[str, Any]:
    """Say whether every `chosen` logit (None: not held here) is the `best` within `tolerance`."""
    gaps = [b - c for b, c in zip(best, chosen, strict=True) if c is not None]
    wrong = sum(not gap <= tolerance for gap in gaps)
    reason = None if not wrong else (
        f"{wrong} of {len(gaps)} tokens that the engine chose are not what the captured states give "
        f"(worst by {max(gaps):.3g} in the logits)"
    )  # fmt: skip
    return {"ok": not wrong, "reason": reason, "checked": len(gaps)}
