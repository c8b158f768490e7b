"""The tap of one API server: connects to the engine's ranks, runs the canary, says whether capture is on.

States, in order: *starting* (the ranks have not answered), *canary* (it has not passed), *on*. Only
`Service.why_off` decides; every state but *on* is a 503 with that reason, and production never notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from taphouse import slices
from taphouse_tap.api.admission import Admission, Limits
from taphouse_tap.api.canary import RETRIES, Canary
from taphouse_tap.api.collect import Collector, Engine
from taphouse_tap.api.isolation import Isolation
from taphouse_tap.api.latency_reports import LatencyReports
from taphouse_tap.api.metrics import Metrics
from taphouse_tap.api.proof import TOP, Proofs
from taphouse_tap.api.refusals import CaptureOff
from taphouse_tap.api.rendering import Tokenizer
from taphouse_tap.api.requests import ModelFacts
from taphouse_tap.settings import TapSettings

logger = logging.getLogger("vllm.taphouse")

STALE_S = 15.0
"""Ranks publish at least every 2 s; an older record means that a rank no longer looks after captures."""

CONNECT_S = 60.0
SEAL_TIMEOUT_S = 60.0
"""How long after a request's last token its slices may take."""

TIDY_S = 2.0
RECORDS_AGE_S = 0.25


class Server(Protocol):
    """The vLLM server around us."""

    engine: Engine
    tokenizer: Tokenizer
    dp_size: int
    dp_here: int

    async def start_id(self) -> str:
        """Ask the ranks which start they belong to. Raises `CaptureOff` when no rank carries the tap."""
        ...

    async def check(
        self,
        tag: str,
        token_ids: list[int],
        rows: int,
        first: int | None = None,
        highest: list[int] | None = None,
    ) -> list[Any]:
        """The canary's and the proofs' question to every rank: `rank.check.Checker.check`."""
        ...

    def model(self, record: dict[str, Any]) -> ModelFacts:
        """Facts of the model, from the server's configuration and a rank's record."""
        ...

    async def tokenizer_fingerprint(self) -> dict[str, str | None]:
        """Digests of the tokenizer and the chat template."""
        ...

    def plugins(self) -> dict[str, list[str]]:
        """vLLM plugins that are installed: those `allowed`, and those that ``VLLM_PLUGINS`` leaves out."""
        ...


@dataclass(frozen=True)
class Tap:
    """What the routes work with once the ranks have answered."""

    start: slices.Start
    model: ModelFacts
    tokenizer: Tokenizer
    admission: Admission
    collector: Collector
    isolation: Isolation
    canary: Canary
    proofs: Proofs
    fingerprint: dict[str, Any]
    weights_epoch: int


class Service:
    """Holds the `Tap`, or the reason why there is none."""

    def __init__(
        self, settings: TapSettings, server: Server, metrics: Metrics, latency: LatencyReports
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.latency = latency
        self.plugins = server.plugins()
        self.tap: Tap | None = None
        self.start: slices.Start | None = None
        self._server = server
        self._problem = "starting: the engine's ranks have not answered yet"
        self._task: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._opening: asyncio.Task[None] | None = None
        self._doubted = self._again = False
        self._records: tuple[float, list[dict[str, Any]]] = (0.0, [])

    def begin(self) -> None:
        """Start in the background. Needs a running event loop; a second call changes nothing."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="taphouse")
            self.latency.begin()

    async def close(self) -> None:
        """Stop the background work and let go of the start's directory."""
        await self.latency.close()
        for task in (self._task, self._opening):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self.start is not None:
            self.start.close()

    async def _run(self) -> None:
        self._begin_opening()
        while True:
            await asyncio.sleep(TIDY_S)
            try:
                await self._look_after()
            except Exception:  # a server out of file descriptors, say; the next round may go well
                logger.exception("Taphouse: looking after captures failed")

    async def _look_after(self) -> None:
        if self.tap is not None:
            await self._tidy()
            await self._follow_weights(self.tap)
            self._canary_again()
        elif self.start is not None and self._ranks_off() is None:
            self._begin_opening()

    def _begin_opening(self) -> None:
        """Open up beside everything else: a canary may take minutes, captures are looked after meanwhile."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(self._open_up())

    async def _open_up(self) -> None:
        """Connect and run a canary. Never raises: what went wrong is logged, and stays for `why_off`."""
        while True:
            self._again = False
            try:
                tap = await self.connect()
                result = await tap.canary.run(retries=RETRIES)
                logger.info("Taphouse: canary %s %s", result.state, result.reason or "")
                if result.state in ("passed", "failed") and not self._again:
                    self._doubted = False
            except Exception as error:
                logger.warning("Taphouse: capture is off: %s", error)
            if not self._again:
                return

    async def _follow_weights(self, tap: Tap) -> None:
        """Once all ranks have other weights: take their fingerprint, and have a canary pass on them."""
        epochs = {record.get("weights_epoch") for record in self.records()}
        if self._ranks_off() is not None or len(epochs) != 1 or epochs == {tap.weights_epoch}:
            return
        self.tap = await self._with_weights(tap)
        self._again = True
        self._begin_opening()

    def _canary_again(self) -> None:
        """A canary that found no room or a busy engine has said nothing yet."""
        if self.tap is None or self._ranks_off() is not None:
            return
        if self._doubted or self.tap.canary.result.state == "pending":
            self._begin_opening()

    async def _with_weights(self, tap: Tap) -> Tap:
        record = self.records()[0]
        epoch = int(record["weights_epoch"])
        return replace(
            tap,
            fingerprint=await self._fingerprint(record),
            canary=self._canary(tap.start, tap.admission, tap.collector, tap.model, epoch),
            weights_epoch=epoch,
        )

    async def _fingerprint(self, record: dict[str, Any]) -> dict[str, Any]:
        return {**(record.get("model_fingerprint") or {}), **await self._server.tokenizer_fingerprint()}

    def _canary(
        self,
        start: slices.Start,
        admission: Admission,
        collector: Collector,
        model: ModelFacts,
        weights_epoch: int,
    ) -> Canary:
        return Canary(
            start=start,
            admission=admission,
            collector=collector,
            tokenizer=self._server.tokenizer,
            model=model,
            check=self._server.check,
            dp_size=self._server.dp_size,
            weights_epoch=weights_epoch,
            top=TOP if self.settings.proof_interval_s else 0,
        )

    async def _tidy(self) -> None:
        if self.tap is None:
            return
        try:
            expired = await asyncio.to_thread(self.tap.collector.tidy, self.settings.slice_ttl_s)
            self.metrics.add("expired", len(expired))
        except Exception:
            logger.exception("Taphouse: tidying the slice directory failed")

    async def connect(self) -> Tap:
        """Find the ranks' start directory and build the `Tap`; a later call returns it.

        Raises `CaptureOff`; the reason stays for `why_off`.
        """
        async with self._connecting:
            if self.tap is None:
                try:
                    self.tap = await asyncio.wait_for(self._connect(), CONNECT_S)
                except CaptureOff as error:
                    self._problem = str(error)
                    raise
                except Exception as error:
                    self._problem = f"the tap did not start: {type(error).__name__}: {error}"
                    raise CaptureOff(self._problem) from error
            return self.tap

    async def _connect(self) -> Tap:
        settings, server = self.settings, self._server
        if self.start is None:
            start_id = await server.start_id()
            self.start = await asyncio.to_thread(slices.open_start, settings.slice_dir, start_id)
            self.latency.connect(self.start)
        start = self.start
        records = await _await_records(start, server.dp_here)
        if (reason := why_ranks_off(records, time.time(), server.dp_here)) is not None:
            raise CaptureOff(reason)
        model = server.model(records[0])
        limits = Limits(
            settings.slice_dir_limit_bytes,
            settings.max_in_flight,
            settings.stream_limit_bytes,
            settings.max_bytes_per_s,
        )
        admission = Admission(start, model, limits)
        isolation = Isolation(start.directory, settings.quota(), server.dp_here)
        collector = Collector(
            server.engine,
            start,
            model,
            seal_timeout_s=SEAL_TIMEOUT_S,
            why_off=self._ranks_off,
            check_running=isolation.check,
        )
        epoch = int(records[0]["weights_epoch"])
        canary = self._canary(start, admission, collector, model, epoch)
        fingerprint = await self._fingerprint(records[0])
        return Tap(
            start=start,
            model=model,
            tokenizer=server.tokenizer,
            admission=admission,
            collector=collector,
            isolation=isolation,
            canary=canary,
            proofs=Proofs(server.check, settings.proof_interval_s, self.metrics, why_off=self._ranks_off),
            fingerprint=fingerprint,
            weights_epoch=epoch,
        )

    def open(self) -> Tap:
        """The tap, when capture is on.

        Raises: `CaptureOff` with the reason.
        """
        reason = self.why_off()
        if reason is not None or self.tap is None:
            raise CaptureOff(f"capture is off: {reason}")
        return self.tap

    def why_off(self) -> str | None:
        """Why nothing is captured now; None when capture is on."""
        if self.tap is None:
            return self._problem
        if (reason := self._ranks_off()) is not None:
            return reason
        if (reason := self._weights_off(self.tap)) is not None:
            return reason
        if self._doubted:
            return "a capture was disproved; a canary is to say whether captures can be right"
        canary = self.tap.canary.result
        if canary.state == "passed":
            return None
        return f"canary {canary.state}" + (f": {canary.reason}" if canary.reason else "")

    def _weights_off(self, tap: Tap) -> str | None:
        """Why captures would not be of the weights that the fingerprint names."""
        epochs = {record["weights_epoch"] for record in self.records()}
        if len(epochs) > 1:
            return f"the ranks' weights changed {sorted(epochs)} times: restart the engine if it stays so"
        if epochs != {tap.weights_epoch}:
            return "the engine's weights changed; capture goes on once a canary has passed on the new ones"
        return None

    def doubt(self) -> None:
        """A capture was disproved: nothing is captured until a canary says that captures can be right."""
        self._doubted = self._again = True
        self._begin_opening()

    def records(self) -> list[dict[str, Any]]:
        """The ranks' records, read at most every quarter of a second."""
        read_at, records = self._records
        if self.start is not None and time.monotonic() - read_at > RECORDS_AGE_S:
            records = self.start.records()
            self._records = (time.monotonic(), records)
        return records

    def _ranks_off(self) -> str | None:
        return why_ranks_off(self.records(), time.time(), self._server.dp_here)


def why_ranks_off(records: Sequence[dict[str, Any]], now: float, dp_here: int = 1) -> str | None:
    """Why the ranks capture nothing (off, silent or missing); None when all of them capture.

    `dp_here` data-parallel engines run on this host.
    """
    if missing := _missing_ranks(records, dp_here):
        return f"no record of {missing}"
    for record in records:
        name = _rank_name(record)
        if record.get("capture") != "on":
            return f"{name}: {record.get('reason') or 'capture is off'}"
        age = now - float(record.get("updated_at") or 0.0)
        if age > STALE_S:
            return f"{name} has not reported for {age:.0f} s"
    return None


async def _await_records(start: slices.Start, dp_here: int) -> list[dict[str, Any]]:
    while True:
        records = await asyncio.to_thread(start.records)
        if records and not _missing_ranks(records, dp_here):
            return records
        await asyncio.sleep(0.1)


def _missing_ranks(records: Sequence[dict[str, Any]], dp_here: int) -> str | None:
    """Names the TP ranks that an engine with a record lacks, and counts the engines without any."""
    if not records:
        return "any rank"
    there = {(int(record["dp_rank"]), int(record["tp_rank"])) for record in records}
    size = int(records[0]["tp_size"])
    wanted = [(dp, tp) for dp in sorted({dp for dp, _ in there}) for tp in range(size)]
    missing = [f"rank dp{dp} tp{tp}" for dp, tp in wanted if (dp, tp) not in there]
    unseen = dp_here - len({dp for dp, _ in there})
    if unseen > 0:
        missing.append(f"{unseen} of {dp_here} data-parallel engines")
    return ", ".join(missing) or None


def _rank_name(record: dict[str, Any]) -> str:
    return f"rank dp{record.get('dp_rank')} tp{record.get('tp_rank')}"
