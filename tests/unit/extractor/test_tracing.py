"""OpenTelemetry: a span a batch, sent over HTTP, without prompts; nothing where it is off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.unit.extractor.conftest import Bench, FakeLeases

from taphouse_extractor.errors import EngineTimeout
from taphouse_extractor.leases import Tries
from taphouse_extractor.records import BatchRef
from taphouse_extractor.tracing import Tracer, tracer_to
from taphouse_extractor.worker import Backoff, BatchRunner, Links


class Leases(FakeLeases):
    @contextmanager
    def hold(self, ref: BatchRef, holder: str, *, deadline_s: float) -> Iterator[None]:
        yield

    def tries_of(self, ref: BatchRef) -> Tries:
        return self.counted.get(ref, Tries())


def runner(bench: Bench, tracer: Tracer) -> BatchRunner:
    @contextmanager
    def links() -> Iterator[Links]:
        yield Links(Leases(), bench.pipeline, tracer)  # type: ignore[arg-type]

    return BatchRunner("w", links, Backoff(0.0, 0.0), 60.0)


def test_a_batch_is_a_span(bench: Bench) -> None:
    exporter = InMemorySpanExporter()
    job = bench.job([{"id": "SECRET-ID", "prompt": "SECRET"}, {"prompt": "SECRET REFUSE"}])
    runner(bench, Tracer(exporter))(BatchRef(job_id=job.id, batch=0), 1.5)
    [span] = exporter.get_finished_spans()
    told = dict(span.attributes or {})
    assert (span.name, told["taphouse.job"], told["taphouse.batch"]) == ("batch", job.id, 0)
    assert (told["taphouse.rows"], told["taphouse.succeeded"], told["taphouse.queue_wait_s"]) == (2, 1, 1.5)
    assert "SECRET" not in span.to_json()


def test_a_batch_that_ended_badly_is_a_span_with_the_kind_of_error() -> None:
    exporter = InMemorySpanExporter()
    with pytest.raises(EngineTimeout), Tracer(exporter).span("batch", job="j"):
        raise EngineTimeout("SECRET")
    [span] = exporter.get_finished_spans()
    assert (span.status.description, span.events) == ("engine_timeout", ())
    assert "SECRET" not in span.to_json()


def test_without_a_collector_there_is_nothing(bench: Bench) -> None:
    job = bench.job([{"prompt": "x"}])
    runner(bench, tracer_to(None))(BatchRef(job_id=job.id, batch=0))
    assert bench.overview.job(job.id).succeeded == 1


def test_a_span_reaches_a_collector() -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with tracer_to(f"http://127.0.0.1:{server.server_port}/v1/traces").span(
            "batch", job="the-job"
        ) as note:
            note(rows=3)
        thread.join(10)
    [(path, body)] = received
    assert path == "/v1/traces" and b"the-job" in body and b"taphouse-extractor" in body
