"""Looks at every link of the service, and says what to do about each that fails."""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis

from taphouse.errors import StoreError, TaphouseError
from taphouse.ledger import Ledger
from taphouse.slices import start_id_of
from taphouse.store import Store
from taphouse.wire import Check, Consumer, Worker
from taphouse_extractor import consumers
from taphouse_extractor.abreast import abreast
from taphouse_extractor.engine import Engine
from taphouse_extractor.errors import EngineError
from taphouse_extractor.gate import Gate
from taphouse_extractor.governor.panel import Panel
from taphouse_extractor.governor.report import read_report
from taphouse_extractor.leases import Leases

__all__ = ["Doctor"]

QUIET_CONSUMER_S = 60.0
LEDGER_S = 2.0


class Doctor:
    """Runs the checks. None of them raises."""

    def __init__(
        self,
        *,
        engines: Sequence[Engine],
        store: Store,
        leases: Leases,
        gate: Gate,
        governor: Panel,
        workers: Callable[[], tuple[Worker, ...]],
        ledger: Ledger,
    ) -> None:
        self._engines, self._store = engines, store
        self._leases, self._gate, self._workers, self._ledger = leases, gate, workers, ledger
        self._governor = governor

    def ready(self) -> list[Check]:
        """What the service needs to take work: store and Redis."""
        return [self._check_store(), self._check_redis()]

    def examine(self, *, canary: bool = False) -> list[Check]:
        """Every link; with `canary` every engine runs its canary first."""
        checks = [*self.ready(), self._check_disk(), *self._check_ledger()]
        said = abreast(_ask_after_canary if canary else _ask, self._engines)
        for engine, status in zip(self._engines, said, strict=True):
            several = f" of {engine.url}" if len(self._engines) > 1 else ""
            found = _links(engine, status)
            checks += [check.model_copy(update={"check": check.check + several}) for check in found]
        if len(self._engines) > 1:
            checks.append(_models([status for status in said if isinstance(status, dict)]))
        return [*checks, self._governor.check(), self._check_workers(), *self._check_consumers()]

    def _check_store(self) -> Check:
        wrong = self._gate.wrong_store()
        if wrong is not None:
            return Check(check="store", ok=False, detail=wrong, advice="Nothing is taken or run until then")
        path, nonce = f"doctor-{os.getpid()}-{secrets.token_hex(4)}", secrets.token_bytes(16)
        try:
            self._store.put(path, nonce)
            same = self._store.read(path) == nonce
            self._store.delete(path)
        except TaphouseError as error:
            return Check(
                check="store",
                ok=False,
                detail=error.message,
                advice=error.advice or "Check the store's directory",
            )
        advice = None if same else "The store gives back other bytes than it was given: check its file system"
        return Check(check="store", ok=same, detail="written, read back and removed", advice=advice)

    def _check_redis(self) -> Check:
        try:
            self._leases.probe()
        except redis.RedisError as error:
            advice = (
                "Start Redis or give it room, and check redis_url. "
                "Nothing is lost: the queue is rebuilt from the store"
            )
            return Check(check="redis", ok=False, detail=str(error), advice=advice)
        return Check(check="redis", ok=True, detail="answers, and takes writes")

    def _check_disk(self) -> Check:
        try:
            problem, free = self._gate.disk_problem(), self._store.free_bytes()
        except TaphouseError as error:
            return Check(check="disk", ok=False, detail=error.message, advice="Check the store's file system")
        if problem:
            return Check(
                check="disk", ok=False, detail=problem, advice="Extraction pauses until there is room"
            )
        return Check(check="disk", ok=True, detail=f"{free / 1e9:.1f} GB free")

    def _check_ledger(self) -> list[Check]:
        """Says nothing of a store that isn't the service's: a lock would leave a file there."""
        if self._gate.wrong_store() is not None:
            return []
        try:
            free = self._ledger.takes_entries(LEDGER_S)
        except TaphouseError as error:
            return [Check(check="ledger", ok=False, detail=error.message, advice=error.advice or None)]
        if free:
            return [Check(check="ledger", ok=True, detail="takes entries")]
        return [
            Check(
                check="ledger",
                ok=False,
                detail=f"somebody held its lock for {LEDGER_S:g} s and made no entry: no batch ends",
                advice="`fuser <store>/ledger/lock` says who. Is it frozen, or its container paused? Let it "
                "go on, or kill it. A deletion that writes a large shard anew takes a while, too",
            )
        ]

    def _check_workers(self) -> Check:
        workers = self._workers()
        if not workers:
            advice = "Start one: taphouse-extractor worker, with the API's settings"
            return Check(check="workers", ok=False, detail="none is alive", advice=advice)
        busy = sum(worker.state == "busy" for worker in workers)
        return Check(check="workers", ok=True, detail=f"{len(workers)} alive, {busy} busy")

    def _check_consumers(self) -> list[Check]:
        try:
            found, unread = consumers.readable(self._store, self._ledger.head())
        except TaphouseError as error:
            return [Check(check="consumers", ok=False, detail=error.message, advice=error.advice or None)]
        if not found and not unread:
            return [
                Check(check="consumers", ok=True, detail="no consumer is registered: nothing waits for one")
            ]
        now = time.time()
        return [*(_consumer(consumer, now) for consumer in found), *map(_unread, unread.items())]


def _consumer(consumer: Consumer, now: float) -> Check:
    name, age = f"consumer {consumer.name}", max(0.0, now - (consumer.updated_at or 0.0))
    where = f"at entry {consumer.cursor}, {consumer.lag} behind"
    if consumer.ended is not None:
        ended = f"ended at step {consumer.step} ({consumer.ended}), {where}, {age:.0f} s ago"
        return Check(check=name, ok=True, detail=ended)
    if consumer.refused:
        return Check(
            check=name,
            ok=False,
            detail=f"{where}; it refused {consumer.refused} shards",
            advice="`taphouse consumers -o json` has the reasons (`refused_shards`), and its log",
        )
    quiet = age > QUIET_CONSUMER_S
    advice = "Is the trainer running? It says where it is every few seconds"
    return Check(
        check=name,
        ok=not quiet,
        detail=f"{where}, heard of {age:.0f} s ago",
        advice=f"{advice}. For good: `taphouse consumers forget {consumer.name}`" if quiet else None,
    )


def _unread(consumer: tuple[str, StoreError]) -> Check:
    name, error = consumer
    advice = (
        "Deletions wait for it, and feeding where unconsumed bytes are bounded. Its trainer writes it anew: "
        f"start that. For good: `taphouse consumers forget {name}`"
    )
    return Check(check=f"consumer {name}", ok=False, detail=error.message, advice=advice)


def _ask(engine: Engine) -> dict[str, Any] | EngineError:
    """An engine's status, or why it can't be had."""
    try:
        return engine.status()
    except EngineError as error:
        return error


def _ask_after_canary(engine: Engine) -> dict[str, Any] | EngineError:
    """The same once its canary has run; where it can't, the status says so in the canary's place."""
    try:
        ran = engine.canary()
    except EngineError as error:
        ran = {"state": "not run", "reason": str(error)}
    said = _ask(engine)
    return {**said, "canary": ran} if isinstance(said, dict) else said


def _links(engine: Engine, status: dict[str, Any] | EngineError) -> list[Check]:
    """One engine's links."""
    if isinstance(status, EngineError):
        advice = "Start vLLM with the tap's launch flags, and check the engine's URL and key in the settings"
        return [Check(check="engine", ok=False, detail=str(status), advice=advice)]
    return [
        _engine(engine.url, status),
        _canary(status),
        _slices(engine.slice_dir, status),
        _scheduler(status),
    ]


def _models(statuses: list[dict[str, Any]]) -> Check:
    """Whether the engines that answer can stand in for each other: the same fingerprint and layers."""
    kinds = Counter(
        f"{status.get('fingerprint_id')!s:.16}, layers {status.get('layers')}" for status in statuses
    )
    named = "; ".join(f"{count} of fingerprint {kind}" for kind, count in sorted(kinds.items()))
    if len(kinds) < 2:
        return Check(check="engines", ok=True, detail=f"all alike: {named}" if named else "none answers")
    why = "a job keeps to the kind that it began with; the governor judges and limits all of them together"
    return Check(check="engines", ok=True, detail=f"not alike: {named}: {why}")


def _part(status: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of an engine's status; empty where the engine says something else there."""
    part = status.get(name)
    return part if isinstance(part, dict) else {}


def _engine(url: str, status: dict[str, Any]) -> Check:
    versions, plugins = _part(status, "versions"), _part(status, "plugins")
    detail = (
        f"{url}, vLLM {versions.get('vllm')}, tap {versions.get('tap')}, layers {status.get('layers')}, "
        f"plugins in use {plugins.get('allowed')}, left out by VLLM_PLUGINS {plugins.get('left_out')}"
    )
    if status.get("capture") == "on":
        return Check(check="engine", ok=True, detail=detail)
    return Check(
        check="engine",
        ok=False,
        detail=f"{detail}: capture is off: {status.get('reason')}",
        advice="Production goes on. Mend what the reason names; most need a restart with the tap's flags",
    )


def _slices(slice_dir: Path, status: dict[str, Any]) -> Check:
    """The engine made a directory of a random name at its start: finding it here is finding its mount."""
    start_id = str(status.get("start_id"))
    try:
        directory = slice_dir / f"start-{start_id_of(start_id)}"
        found = directory.is_dir()
    except (ValueError, OSError):
        found = False
    if not found:
        return Check(
            check="slices",
            ok=False,
            detail=f"the engine's start-{start_id:.80} is not in {slice_dir}",
            advice="Mount the engine's TAPHOUSE_TAP_SLICE_DIR here and set slice_dir to it",
        )
    probe = directory / f".doctor-{secrets.token_hex(4)}"
    try:
        probe.touch(mode=0o600)
        probe.unlink()
    except OSError as error:
        return Check(
            check="slices",
            ok=False,
            detail=f"{directory} can't be written: {error.strerror}",
            advice="Run API and workers as the engine's user: slices are removed when they were read",
        )
    return Check(check="slices", ok=True, detail=f"{directory} is the engine's, and can be written")


def _canary(status: dict[str, Any]) -> Check:
    canary = _part(status, "canary")
    ok = canary.get("state") == "passed"
    detail = f"{canary.get('state', 'unknown')}{': ' + str(canary['reason']) if canary.get('reason') else ''}"
    advice = (
        None
        if ok
        else "Captured states must give the engine's own tokens; `taphouse doctor --canary` runs it again"
    )
    return Check(check="canary", ok=ok, detail=detail, advice=advice)


def _scheduler(status: dict[str, Any]) -> Check:
    report = read_report(status)
    if report.scheduled:
        return Check(check="scheduler", ok=True, detail="two classes: production before extraction")
    said = report.isolation.scheduler if report.isolation is not None else "unknown to this tap"
    why = f": {report.isolation.reason}" if report.isolation is not None and report.isolation.reason else ""
    advice = "Launch with --scheduler-cls taphouse_tap.scheduler.two_class_scheduler at the next restart"
    if said == "off":
        advice = (
            "The reason says what would help; until then `taphouse governor stop` is what protects production"
        )
    return Check(
        check="scheduler",
        ok=False,
        detail=f"two-class scheduler {said}{why}; production is served, less protected from extraction",
        advice=advice,
    )
