"""The benchmark's client and its extraction against a small server that speaks as the engine does."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from benchmarks.isolation.client import Target, replay
from benchmarks.isolation.extraction import Extraction, Load
from benchmarks.isolation.trace import Plan, make_trace

PLAN = Plan(
    seed=1,
    lead_s=0.0,
    bursts=1,
    burst_s=0.3,
    quiet_s=0.1,
    rate=20.0,
    assistants=1,
    system_tokens=8,
    user_tokens=(2, 4),
    output_tokens=(3, 5),
)


class Handler(BaseHTTPRequestHandler):
    """Streams as many tokens as asked for; the first prompt is refused, the second one's stream is short."""

    seen: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)  # type: ignore[attr-defined]
        if self.path == "/v1/hidden_states":
            self.send_response(429)
            self.send_header("Retry-After", "0.1")
            self.end_headers()
            return
        number = len(self.server.seen)  # type: ignore[attr-defined]
        if number == 1:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b"busy")
            return
        self.send_response(200)
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self._piece({"choices": [{"text": "a"}], "usage": None})
            time.sleep(0.005)
        if number == 2:
            return
        details = {"cached_tokens": 8}
        usage = {
            "prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": details,
        }  # fmt: skip
        self._piece({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _piece(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        httpd.seen = []  # type: ignore[attr-defined]
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield httpd
        httpd.shutdown()


def test_a_trace_is_replayed_and_every_end_is_accounted_for(server: ThreadingHTTPServer) -> None:
    trace = make_trace(PLAN)
    target = Target(f"http://127.0.0.1:{server.server_port}", "target", (10, 100))
    _, found = asyncio.run(replay(trace, target, "salt"))
    assert len(found) == len(trace.requests) >= 3
    by_error: dict[str | None, int] = {}
    for one in found:
        by_error[one.error] = by_error.get(one.error, 0) + 1
        if one.error is None:
            assert len(one.pieces) == one.output_tokens == one.wanted
            assert one.cached_tokens == 8
            assert one.sent <= one.pieces[0] <= one.ended
            assert one.ttft is not None and one.ttft >= 0
    assert by_error == {"HTTP 503: b'busy'": 1, "the stream broke off": 1, None: len(found) - 2}
    assert sum(one.refused for one in found) == 1


def test_extraction_waits_as_long_as_it_is_told(server: ThreadingHTTPServer) -> None:
    load = Load(f"http://127.0.0.1:{server.server_port}", 1, 16, (10, 100), priority=5)
    extraction = Extraction(load)
    deadline = time.monotonic() + 20
    while len(extraction.events()) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    events = extraction.stop()
    assert len(events) >= 4
    assert {event.get("refused") for event in events} == {429}
    waits = [later["at"] - earlier["at"] for earlier, later in itertools.pairwise(events)]
    assert min(waits) >= 0.1
    bodies = server.seen  # type: ignore[attr-defined]
    assert all(body["priority"] == 5 and len(body["prompt"]) == 16 for body in bodies)
