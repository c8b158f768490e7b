"""A capture that a rank has failed is answered while its request still runs, and the request is ended."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tap.worker_fakes import admitted, opened, template

from taphouse.slices import Claim, Trailer, seal_error
from taphouse_tap.api import collect
from taphouse_tap.api.collect import Collector, Generated
from taphouse_tap.api.refusals import CaptureFailed
from taphouse_tap.api.requests import CaptureRequest, ModelFacts, Prompt


class Endless:
    """An engine whose request never ends; one rank seals an error for it."""

    def __init__(self, start: Any) -> None:
        self.start, self.aborted = start, False

    async def generate(
        self, token_ids: list[int], request: CaptureRequest, opt_in: dict[str, Any], *_: Any, **__: Any
    ) -> Generated:
        base = template(self.start)
        trailer = Trailer(**{**vars(base), "tag": opt_in["tag"], "prompt_len": len(token_ids)})
        seal_error(self.start.directory, trailer, "the breaker tripped")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.aborted = True
            raise
        raise AssertionError("unreachable")


def test_a_failed_capture_ends_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "WATCH_S", 0.01)
    start = opened(tmp_path)
    engine = Endless(start)
    facts = ModelFacts.__new__(ModelFacts)
    collector = Collector(engine, start, facts, seal_timeout_s=5, why_off=lambda: None)
    opt_in = admitted(start, 3, 100)
    claim = Claim(opt_in.tag, 1000, time.time(), 3, 100)
    request = CaptureRequest(prompt=[1, 2, 3], max_tokens=98)
    with pytest.raises(CaptureFailed, match="the breaker tripped"):
        asyncio.run(collector.capture(request, Prompt([1, 2, 3]), claim))
    assert engine.aborted and not collector.in_flight
