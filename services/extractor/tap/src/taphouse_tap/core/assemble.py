"""Composition root of the engine core's half: start directory, quota, record, and the policy around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from taphouse import slices
from taphouse_tap.core.board import Board
from taphouse_tap.core.two_class import Scheduler, TwoClasses
from taphouse_tap.errors import CaptureRefused
from taphouse_tap.settings import load_settings


@dataclass(frozen=True)
class EngineCore:
    """Facts of one engine core. `refused` says why two classes can't be right here, or is None."""

    instance_id: str
    dp_rank: int
    version: str
    refused: str | None
    unknown_version: bool


@dataclass(frozen=True)
class Classes:
    """What the scheduler works with: the policy, and who is extraction's."""

    policy: TwoClasses
    is_extraction: Callable[[Any], bool]


def assemble(scheduler: Scheduler, core: EngineCore) -> Classes:
    """Build everything and start the thread.

    Raises: `CaptureRefused` when this engine can't have two classes, and whatever a directory that can't be
    opened raises; the reason is published first where there is a directory.
    """
    settings = load_settings()
    start = slices.open_start(settings.slice_dir, core.instance_id)
    refused = core.refused
    if refused is None and core.unknown_version and not settings.allow_unknown_version:
        refused = (
            f"the scheduler never ran on vLLM {core.version}; TAPHOUSE_TAP_ALLOW_UNKNOWN_VERSION=1 tries it"
        )

    def state() -> dict[str, Any]:
        reason = refused or policy.reason
        waiting = [scheduler.waiting(request) for request in list(policy.extraction.values())]
        return {
            "scheduler": "off" if reason else "on",
            "reason": reason,
            "version": core.version,
            "steps": dict(policy.counts),
            "running": sum(found is None for found in waiting),
            "held": sum(found is not None for found in waiting),
            "quiet": policy.quiet,
            "cost": policy.cost.as_dict(),
        }

    policy = TwoClasses(scheduler, lambda: board.quota)
    board = Board(start.directory, core.dp_rank, settings.quota(), state)
    board.start()
    if refused is not None:
        raise CaptureRefused(refused)

    def is_extraction(opt_in: Any) -> bool:
        try:
            slices.verify_opt_in(start.secret, opt_in)
        except Exception:  # whatever a customer put there is production's
            return False
        return True

    return Classes(policy, is_extraction)
