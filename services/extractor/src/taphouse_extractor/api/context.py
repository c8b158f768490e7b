"""What the routes work with."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from taphouse.ledger import Ledger, LedgerEntry
from taphouse.store import Store
from taphouse_extractor.api.threads import Threads
from taphouse_extractor.direct import DirectExtraction
from taphouse_extractor.doctor import Doctor
from taphouse_extractor.gate import Gate
from taphouse_extractor.governor.panel import Panel
from taphouse_extractor.overview import Overview
from taphouse_extractor.pulse import Pulse, Watchers
from taphouse_extractor.records import Records
from taphouse_extractor.retention import Retention
from taphouse_extractor.retries import Retries
from taphouse_extractor.samples import Samples
from taphouse_extractor.spool import Limits

__all__ = ["Context", "Here", "with_store"]

SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,180}\.safetensors")


@dataclass(frozen=True)
class Context:
    """Everything that the routes use; built by `main`."""

    store: Store
    records: Records
    ledger: Ledger
    overview: Overview
    gate: Gate
    direct: DirectExtraction
    doctor: Doctor
    governor: Panel
    retries: Retries
    limits: Limits
    samples: Samples
    retention: Retention
    dataset_roots: tuple[Path, ...]
    pulse: Pulse
    watchers: Watchers
    max_jobs: int
    """Unfinished jobs of one token; 0 bounds nothing."""
    threads: Threads = field(default_factory=Threads)

    def shard(self, name: str) -> LedgerEntry | None:
        """The entry of a shard, None when none has it now, or no shard can have this name."""
        entry = self.ledger.find(name) if SHARD_NAME.fullmatch(name) else None
        now = self.ledger.entry(entry.seq) if entry is not None else None
        return now if now is not None and now.shard == name else None


async def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Here = Annotated[Context, Depends(_context)]


def with_store(here: Here) -> None:
    """A dependency of routes that tell what the store holds, or take it away. Raises `NotAccepting`."""
    here.gate.require_store()
