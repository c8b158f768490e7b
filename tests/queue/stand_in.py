"""A `FakeTap` behind HTTP, as a process that tests start, kill and start again.

python -m tests.queue.stand_in PORT SLICE_DIR [--delay-s 0.1] [--weights first] [--layers 1,2,4]

`PUT /trouble` with `{"failing": 500}` or `{"hanging": true}` makes captures do so until it is told otherwise.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.queue.fake_tap import FakeTap

METRICS = """# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{le="0.01",model_name="m"} %d
vllm:inter_token_latency_seconds_bucket{le="0.02",model_name="m"} %d
vllm:inter_token_latency_seconds_bucket{le="+Inf",model_name="m"} %d
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 2.0
"""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer on a kept connection takes 40 ms
    tap: FakeTap

    def do_GET(self) -> None:
        if self.path == "/metrics":
            count = 10 * len(self.tap.requests)
            self._send(200, {}, (METRICS % (count // 2, count, count)).encode())
            return
        self._answer({})

    def do_POST(self) -> None:
        self._answer(self._body())

    def do_PUT(self) -> None:
        if self.path == "/trouble":
            for name, value in self._body().items():
                setattr(self.tap, name, value)
            self._send(200, {}, b"{}")
            return
        self._answer(self._body())

    def _body(self) -> dict[str, object]:
        body: dict[str, object] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return body

    def _answer(self, body: dict[str, object]) -> None:
        status, headers, answer = self.tap.handle(
            self.command, self.path, self.headers.get("Authorization"), body
        )
        self._send(status, headers, json.dumps(answer).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("slice_dir", type=Path)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--weights", default="first")
    parser.add_argument("--layers", default="1,2,4")
    given = parser.parse_args()
    Handler.tap = FakeTap(
        given.slice_dir,
        delay_s=given.delay_s,
        weights=given.weights,
        layers=tuple(int(layer) for layer in given.layers.split(",")),
    )
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
