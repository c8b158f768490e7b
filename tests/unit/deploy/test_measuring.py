"""What the demo measures with, against a written server: traffic, acceptance, the split of the prompts."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import drafts
import humaneval
import pytest
from traffic import Traffic

STEPS_A_REQUEST = 4


class Engine(ThreadingHTTPServer):
    """Answers chat requests with three tokens, streamed or not; every `broken`th stream breaks off.

    Its counters say that each request took `STEPS_A_REQUEST` proposals, half of whose first and none of
    whose second tokens were accepted.
    """

    def __init__(self, broken: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.broken = broken
        self.lock = threading.Lock()
        self.asked: list[dict[str, object]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def metrics(self) -> str:
        n = len(self.asked) * STEPS_A_REQUEST
        labels = 'engine="0",model_name="m"'
        return "\n".join(
            [
                "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
                f"vllm:spec_decode_num_drafts_total{{{labels}}} {n}.0",
                f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {n / 2}",
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} {n / 2}',
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} 0.0',
                f"vllm:spec_decode_num_accepted_tokens_created{{{labels}}} 1.7e9",
            ]
        )


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        self._answer("text/plain", self.server.metrics().encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            number = len(self.server.asked)
        if not body.get("stream"):
            self._answer("application/json", json.dumps({"usage": {"completion_tokens": 10}}).encode())
            return
        self.send_response(200)
        self.end_headers()
        for text in ("", "a", "b", "c"):  # the first chunk carries the role alone
            chunk = {"choices": [{"delta": {"content": text}}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        if not self.server.broken or number % self.server.broken:
            self.wfile.write(b"data: [DONE]\n\n")

    def _answer(self, content_type: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = Engine()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def wait_for_requests(engine: Engine, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(engine.asked) < count:
        assert time.monotonic() < deadline, "too few requests came"
        time.sleep(0.01)


def test_a_phase_counts_answers_tokens_and_gaps(engine: Engine) -> None:
    traffic = Traffic(engine.url, "m", rate=200, max_tokens=8)
    traffic.start("alone")
    wait_for_requests(engine, 10)
    traffic.stop()
    (phase,) = traffic.phases
    assert phase.failed == 0
    assert phase.answered == len(engine.asked)
    assert phase.tokens == 3 * phase.answered
    assert len(phase.gaps) == 2 * phase.answered
    assert len(phase.first) == phase.answered


def test_a_stream_that_breaks_off_is_a_failure(engine: Engine) -> None:
    engine.broken = 2
    traffic = Traffic(engine.url, "m", rate=200, max_tokens=8)
    traffic.start("alone")
    wait_for_requests(engine, 10)
    traffic.stop()
    answered, failed = traffic.totals
    assert failed == len(engine.asked) // 2
    assert answered == len(engine.asked) - failed
    assert "broke off" in traffic.phases[0].errors[0]


def test_a_server_that_is_gone_is_a_failure(engine: Engine) -> None:
    traffic = Traffic("http://127.0.0.1:9", "m", rate=200, max_tokens=8)
    traffic.start("alone")
    deadline = time.monotonic() + 20
    while not traffic.totals[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    traffic.stop()
    assert traffic.totals[0] == 0
    assert traffic.totals[1] > 0


def test_every_phase_asks_the_same_questions(engine: Engine) -> None:
    traffic = Traffic(engine.url, "m", rate=100, max_tokens=8)
    traffic.start("one")
    wait_for_requests(engine, 10)
    boundary = len(engine.asked)
    traffic.phase("two")
    wait_for_requests(engine, boundary + 12)
    traffic.stop()
    keys = [json.dumps(body, sort_keys=True) for body in engine.asked]
    assert set(keys[:8]) <= set(keys[boundary:])


def test_acceptance_comes_from_the_growth_of_the_counters(engine: Engine) -> None:
    engine.asked.append({})  # something before
    ticks: list[int] = []
    found = drafts.measure(
        "x", engine.url, "m", ["one", "two", "three"], max_tokens=8, tick=lambda: ticks.append(1)
    )
    assert (found.prompts, found.tokens, found.drafts, found.accepted) == (3, 30, 12, 6)
    assert found.acceptance_length == 1.5
    assert found.positions == (0.5, 0.0)
    assert found.tokens_a_step == 30 / 24
    assert len(ticks) == 3


def test_nothing_proposed_is_no_acceptance_length() -> None:
    found = drafts.Measured("x", prompts=1, tokens=10, drafts=0, accepted=0, positions=())
    assert found.acceptance_length is None
    assert found.tokens_a_step == 1.0


def test_held_out_prompts_are_never_extracted() -> None:
    everything = humaneval.split(0, 164)
    assert len(everything.extracted) + len(everything.held_out) == 164
    assert not everything.extracted.keys() & everything.held_out.keys()
    assert 10 <= len(everything.held_out) <= 30
    few = humaneval.split(10, 4)
    assert len(few.extracted) == 10
    assert len(few.held_out) == 4
    assert few.held_out.keys() <= everything.held_out.keys()
