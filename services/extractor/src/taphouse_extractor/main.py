"""Composition root: builds the objects of a process and runs it.

taphouse-extractor api     the HTTP API, with feeder, governor and the engines' monitors on threads
taphouse-extractor worker  one worker: run as many as the engines can feed
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from fastapi import FastAPI
from pydantic import ValidationError

from taphouse import logs
from taphouse.errors import TaphouseError
from taphouse.ledger import Ledger
from taphouse.service_settings import settings_problems
from taphouse.store import LocalStore
from taphouse_extractor import __version__
from taphouse_extractor.api import Context, create_app
from taphouse_extractor.api.audit import write_to
from taphouse_extractor.api.guards import Names
from taphouse_extractor.backlog import Backlog
from taphouse_extractor.direct import DirectExtraction, DirectLimits
from taphouse_extractor.doctor import Doctor
from taphouse_extractor.errors import MissingExtra
from taphouse_extractor.feeder import Feeder, FeederLimits
from taphouse_extractor.gate import Gate
from taphouse_extractor.governor.loop import Governor
from taphouse_extractor.governor.orders import Orders
from taphouse_extractor.governor.panel import Panel
from taphouse_extractor.jobs import BatchQueue, run_worker
from taphouse_extractor.leases import PRESENCE_TTL_S, connect, keep_renewing
from taphouse_extractor.monitor import Monitors
from taphouse_extractor.overview import Overview
from taphouse_extractor.pipeline import Pipeline
from taphouse_extractor.progress import Progress
from taphouse_extractor.pulse import Pulse, Watchers
from taphouse_extractor.records import BatchRef, Records
from taphouse_extractor.retention import Retention, RetentionPolicy
from taphouse_extractor.retries import Retries
from taphouse_extractor.samples import Samples
from taphouse_extractor.serving import Bounds, Server
from taphouse_extractor.settings import Settings
from taphouse_extractor.spool import Limits
from taphouse_extractor.sums import SumKeeper, Sums
from taphouse_extractor.tracing import tracer_to
from taphouse_extractor.wiring import bounds_of, check_of, engines_of, home_of, leases_of, memory_of
from taphouse_extractor.worker import Backoff, BatchRunner, Links

__all__ = ["build_api", "main", "work"]

LEASE_AFTER_TIMEOUT_S = 30.0
WATCHED_JOBS = 100
RETENTION_EVERY_S = 30.0
SUMS_EVERY_S = 5.0


def build_api(settings: Settings) -> FastAPI:
    """The API process: routes, and beside them feeder, governor and monitor, from start-up to shutdown."""
    store = LocalStore(settings.store)
    home = home_of(settings, store)
    home.enter_if_known()
    records, ledger = Records(store), Ledger(store)
    progress = Progress(records)
    engines, leases = engines_of(settings), leases_of(settings)
    pipeline = Pipeline(records, ledger, engines, settings.engine_concurrency)
    url = settings.redis()
    queue = BatchQueue(connect(url, text=False), settings.queue_name, timeout_s=settings.batch_timeout_s)
    monitors = Monitors(engines)
    memory = memory_of(settings)
    orders = Orders(store, home.problem)
    governor = Governor(
        engines=engines.each,
        memory=memory,
        bounds=bounds_of(settings),
        ttl_s=settings.governor_ttl_s,
        order=orders.now,
    )
    panel = Panel(memory, orders, enabled=settings.governor, lead=governor.take_over)
    backlog = Backlog(store, ledger, settings.max_unconsumed_bytes)
    policy = RetentionPolicy(settings.retention, settings.retention_age_s)
    retention = Retention(records, ledger, policy, wrong=home.problem)
    gate = Gate(
        store,
        monitors,
        settings.min_free_bytes,
        home=home.problem,
        stopped=panel.stopped,
        backlog=backlog.problem,
    )
    overview = Overview(
        progress=progress,
        store=store,
        ledger=ledger,
        queue=queue,
        leases=leases,
        monitors=monitors,
        governor=panel.shown,
        unconsumed=backlog.shown,
        retention=retention.shown,
    )
    pulse = Pulse(lambda: overview.queue(gate.paused()), lambda: overview.jobs(WATCHED_JOBS))
    feeder = Feeder(
        records=records,
        progress=progress,
        ledger=ledger,
        queue=queue,
        leases=leases,
        limits=FeederLimits(settings.max_queued, settings.max_attempts, settings.start_grace_s),
        give_up=pipeline.give_up,
        close=pipeline.close,
        paused=gate.paused,
        unfit=monitors.unfit,
        check=home.check,
    )
    context = Context(
        store=store,
        records=records,
        ledger=ledger,
        overview=overview,
        gate=gate,
        direct=DirectExtraction(
            engines,
            DirectLimits(
                settings.extract_max_rows,
                settings.extract_max_tokens,
                settings.extract_max_bytes,
                settings.extract_concurrency,
            ),
            settings.engine_concurrency,
        ),
        doctor=Doctor(
            engines=engines.each,
            store=store,
            leases=leases,
            gate=gate,
            governor=panel,
            workers=lambda: overview.live().workers,
            ledger=ledger,
        ),
        governor=panel,
        retries=Retries(records),
        limits=Limits(settings.max_upload_bytes, settings.max_rows, settings.max_row_bytes),
        samples=Samples(records, ledger, overview.settled, pipeline.close),
        retention=retention,
        dataset_roots=settings.dataset_roots,
        pulse=pulse,
        watchers=Watchers(settings.max_streams, settings.max_streams_per_token, settings.stream_s),
        max_jobs=settings.max_jobs_per_token,
    )

    sums = SumKeeper(Sums(records), progress.known)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        stop = threading.Event()
        threads = [
            threading.Thread(target=feeder.run, args=(stop, settings.feeder_interval_s), name="feeder"),
            threading.Thread(target=pulse.run, args=(stop,), name="pulse"),
            threading.Thread(target=backlog.run, args=(stop,), name="backlog"),
            threading.Thread(target=sums.run, args=(stop, SUMS_EVERY_S), name="sums"),
        ]
        for monitor in monitors.each:
            every = settings.engine_poll_s
            threads.append(threading.Thread(target=monitor.run, args=(stop, every), name="monitor"))
        if settings.retention != "keep":
            every = RETENTION_EVERY_S
            threads.append(threading.Thread(target=retention.run, args=(stop, every), name="retention"))
        if settings.governor:
            every = settings.governor_tick_s
            threads.append(threading.Thread(target=governor.run, args=(stop, every), name="governor"))
            threads.append(threading.Thread(target=orders.run, args=(stop,), name="orders"))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            await asyncio.to_thread(_join, threads)  # meanwhile requests that were cut off clean up
            engines.close()

    return create_app(
        context,
        tokens=settings.tokens(),
        requests_per_minute=settings.requests_per_minute,
        open_metrics=settings.open_metrics,
        max_request_bytes=settings.max_request_bytes,
        body_timeout_s=settings.body_timeout_s,
        names=Names.of(settings.host, settings.allowed_hosts),
        lifespan=lifespan,
    )


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


def work(settings: Settings) -> None:
    """The worker process: takes batches until it is told to stop."""
    name = f"{socket.gethostname()}-{os.getpid()}"
    tracer_to(settings.otlp_endpoint)  # what is missing is said at the start
    engines_of(settings).close()  # a first client imports for 0.13 s: here once, not in every work-horse
    records = Records(LocalStore(settings.store))
    home = home_of(settings, records.store)
    check = check_of(settings, records.store, home)

    @contextmanager
    def open_links() -> Iterator[Links]:
        with engines_of(settings) as engines:
            pipeline = Pipeline(records, Ledger(records.store), engines, settings.engine_concurrency)
            yield Links(leases_of(settings), pipeline, tracer_to(settings.otlp_endpoint), check)

    leases = leases_of(settings)
    runner = BatchRunner(
        name,
        open_links,
        Backoff(settings.backoff_base_s, settings.backoff_cap_s),
        settings.batch_timeout_s + LEASE_AFTER_TIMEOUT_S,
    )

    def present() -> None:
        leases.present(name, {"pid": os.getpid(), "seen_at": time.time()})

    def died(ref: BatchRef, reason: str) -> None:
        runner.died(ref, reason, leases)

    url, queue = settings.redis(), settings.queue_name
    try:
        with keep_renewing(f"the sign of life of worker {name}", present, PRESENCE_TTL_S / 5):
            run_worker(url, queue, name=name, run=runner, on_death=died, enter=home.enter)
    finally:
        leases.absent(name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `taphouse-extractor`."""
    parser = argparse.ArgumentParser(
        prog="taphouse-extractor",
        description="Taphouse's extraction service. `taphouse-extractor api --help` lists the settings.",
    )
    parser.add_argument("command", choices=("api", "worker"))
    parser.add_argument("--env-file", type=Path, help="File of TAPHOUSE_EXTRACTOR_* lines.")
    parser.add_argument("--version", action="version", version=__version__)
    given = list(sys.argv[1:] if arguments is None else arguments)
    wants_help = bool({"-h", "--help"} & set(given[1:]))
    known, rest = parser.parse_known_args(
        [a for a in given if a not in ("-h", "--help")] if wants_help else given
    )
    logs.set_up("text")
    try:
        settings = _settings(
            known.env_file, f"taphouse-extractor {known.command}", [*rest, "--help"] if wants_help else rest
        )
        logs.set_up(settings.log_format, secrets=settings.secrets())
        run_api(settings) if known.command == "api" else work(settings)
    except ValidationError as error:
        for line in settings_problems(error, Settings):
            print(f"taphouse-extractor: {line}", file=sys.stderr)
        sys.exit(2)
    except _SettingsUnread as error:
        print(f"taphouse-extractor: {error}", file=sys.stderr)
        sys.exit(2)
    except (TaphouseError, OSError, MissingExtra) as error:
        print(f"taphouse-extractor: {error}", file=sys.stderr)
        sys.exit(1)


class _SettingsUnread(Exception):
    """The environment file, or a value in it or in the environment, can't be read."""


def _settings(env_file: Path | None, name: str, arguments: list[str]) -> Settings:
    """Settings as they are said; raises `ValidationError` or `_SettingsUnread`."""
    try:
        if env_file is not None:
            env_file.read_text(encoding="utf-8")  # one that is not there would be passed over in silence
        return Settings(_env_file=env_file, _cli_parse_args=arguments, _cli_prog_name=name)  # type: ignore[call-arg]
    except ValidationError:
        raise
    except UnicodeDecodeError as error:
        raise _SettingsUnread(f"{env_file} is not UTF-8 ({error})") from error
    except (OSError, ValueError) as error:
        raise _SettingsUnread(str(error)) from error


def run_api(settings: Settings) -> None:
    """Serve the API until SIGTERM or SIGINT."""
    write_to(settings.audit_log)
    app = build_api(settings)
    facts = {
        "version": __version__,
        "store": settings.store,
        "engines": [engine.url for engine in settings.each_engine()],
        "governor": "on" if settings.governor else "off",
    }
    bounds = Bounds(settings.max_header_bytes, settings.send_timeout_s, settings.shutdown_s)
    Server(app, (settings.host, settings.port), bounds, app.state.context.pulse.leaving, facts).run()


if __name__ == "__main__":
    main()
