"""What the outside sees: Prometheus metrics, and a thread that answers ``/metrics`` and ``/health``."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

_PREFIX = "taphouse_trainer_"


class Metrics:
    """The trainer's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.step = self._gauge("step", "Optimizer steps done, over all runs")
        self.epoch = self._gauge("epoch", "Pass over the ledger, from 0")
        self.loss = self._gauge("loss", "Training loss of the last step")
        self.held_out_loss = self._gauge("held_out_loss", "Loss on held-out samples at the last evaluation")
        self.accuracy = self._gauge(
            "accuracy", "Share of rows where this and all earlier proposals were right", ["set", "position"]
        )
        self.acceptance_length = self._gauge("acceptance_length", "Expected tokens per target step", ["set"])
        self.learning_rate = self._gauge("learning_rate", "Learning rate of the next step")
        self.tokens = self._counter("tokens", "Rows trained on by this process")
        self.samples = self._counter("samples", "Samples trained on by this process")
        self.tokens_per_second = self._gauge("tokens_per_second", "Rows trained per second, smoothed")
        self.cursor = self._gauge("ledger_cursor", "Ledger entries reached")
        self.lag = self._gauge("ledger_lag", "Ledger entries not reached yet")
        self.refused = self._counter("shards_refused", "Shards left out", ["reason"])
        self.skipped_steps = self._counter("steps_skipped", "Steps whose gradients were not finite")
        self.checkpoint_step = self._gauge("checkpoint_step", "Step of the newest checkpoint")

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(_PREFIX + name, text, labels or [], registry=self.registry)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(_PREFIX + name, text, labels or [], registry=self.registry)


class HealthServer:
    """Answers ``GET /health`` (JSON) and ``GET /metrics`` from a thread, on ``port``."""

    def __init__(self, host: str, port: int, metrics: Metrics, health: Callable[[], dict[str, Any]]) -> None:
        """Bind. ``health`` is called at every request; its ``status`` decides between 200 ("ok") and 503.

        Raises:
            OSError: the address is taken or not ours.
        """

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(metrics.registry))
                elif self.path == "/health":
                    body = health()
                    status = 200 if body.get("status") == "ok" else 503
                    self._answer(status, "application/json", json.dumps(body).encode())
                else:
                    self._answer(
                        404, "application/json", b'{"error": {"message": "try /health or /metrics"}}'
                    )

            def _answer(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Requests are not logged."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
