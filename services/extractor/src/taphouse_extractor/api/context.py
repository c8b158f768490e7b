"""What the routes work with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from taphouse.ledger import Ledger
from taphouse.store import Store
from taphouse_extractor.direct import DirectExtraction
from taphouse_extractor.doctor import Doctor
from taphouse_extractor.gate import Gate
from taphouse_extractor.governor.panel import Panel
from taphouse_extractor.overview import Overview
from taphouse_extractor.records import Records
from taphouse_extractor.spool import Limits

__all__ = ["Context", "Here"]


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
    limits: Limits
    dataset_roots: tuple[Path, ...]


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Here = Annotated[Context, Depends(_context)]
