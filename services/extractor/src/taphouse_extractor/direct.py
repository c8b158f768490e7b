"""A few rows, extracted at once: rows → engine → the bytes of one shard, in memory and bounded."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial

from taphouse.errors import InvalidSample
from taphouse.samples import Sample
from taphouse.shards import encode_shard
from taphouse.wire import ExtractRequest, JobOptions, Row
from taphouse_extractor.captured import pin_of, to_sample
from taphouse_extractor.engine import Capture, Engine, in_order, meta_of
from taphouse_extractor.engines import Engines
from taphouse_extractor.errors import (
    BadRow,
    CaptureFailed,
    EngineChanged,
    InvalidRequest,
    RowRefused,
    TooBusy,
    TooLarge,
)
from taphouse_extractor.fitting import Needs
from taphouse_extractor.rows import Numbered, to_prompt, too_long

__all__ = ["DirectExtraction", "DirectLimits"]


@dataclass(frozen=True)
class DirectLimits:
    """Bounds of one request (rows, `max_tokens`, raw bytes) and of requests at once."""

    max_rows: int
    max_tokens: int
    max_bytes: int
    at_once: int


class DirectExtraction:
    """Serves `POST /v1/extract`. All rows succeed, or the request fails and names the row."""

    def __init__(self, engines: Engines, limits: DirectLimits, concurrency: int) -> None:
        self._engines, self._limits, self._concurrency = engines, limits, concurrency
        self._slots = threading.BoundedSemaphore(limits.at_once)

    def run(self, request: ExtractRequest) -> tuple[bytes, int]:
        """Return a shard's bytes and its number of samples."""
        limits = self._limits
        if len(request.rows) > limits.max_rows:
            raise TooLarge(
                f"rows: {len(request.rows)}, at most {limits.max_rows}; enqueue a job", param="rows"
            )
        if request.options.max_tokens > limits.max_tokens:
            raise InvalidRequest(
                f"options.max_tokens: at most {limits.max_tokens}", param="options.max_tokens"
            )
        if not self._slots.acquire(blocking=False):
            raise TooBusy(f"{limits.at_once} direct extractions run already: try again soon")
        try:
            with self._engines.using(Needs(request.options)) as engine:
                return self._extract(engine, request), len(request.rows)
        finally:
            self._slots.release()

    def _extract(self, engine: Engine, request: ExtractRequest) -> bytes:
        samples, captures, size = list[Sample](), list[Capture](), 0
        run = partial(self._run_row, engine, request.options)
        for capture, sample in in_order(run, enumerate(_named(request.rows)), self._concurrency):
            size += sample.raw_bytes
            if size > self._limits.max_bytes:
                raise TooLarge(
                    f"the states are over {self._limits.max_bytes} bytes; enqueue a job", param="rows"
                )
            changed = pin_of(captures[0]).differs(pin_of(capture)) if captures else None
            if changed:
                raise EngineChanged(f"the engine changed between two rows: {changed}")
            captures = captures or [capture]
            samples.append(sample)
        try:
            return encode_shard(samples, meta_of(captures[0]))
        except InvalidSample as error:  # NaN, or a row of zeros
            raise CaptureFailed(f"the engine's states can't be used: {error}") from error

    def _run_row(
        self, engine: Engine, options: JobOptions, item: tuple[int, tuple[str, Row]]
    ) -> tuple[Capture, Sample]:
        at, (name, row) = item
        try:
            prompt = to_prompt(Numbered(at, name, b""), row, options)
            capture = engine.capture(prompt.body)
            long = too_long(capture.prompt_len, options)
            if long is not None:
                raise BadRow(long)
            return capture, to_sample(prompt, capture)
        except (BadRow, RowRefused, InvalidSample) as error:
            raise InvalidRequest(f"rows.{at}: {error}", param=f"rows.{at}") from error
        except CaptureFailed as error:
            raise CaptureFailed(f"rows.{at}: {error}") from error


def _named(rows: list[Row]) -> list[tuple[str, Row]]:
    """Rows with their sample ids: their own, or `row-<n>`; one taken already gets `#<n>` added."""
    named: dict[str, Row] = {}
    for at, row in enumerate(rows):
        name = row.id if row.id and row.id.isprintable() and len(row.id) <= 240 else f"row-{at}"
        while name in named:
            name = f"{name}#{at}"
        named[name] = row
    return list(named.items())
