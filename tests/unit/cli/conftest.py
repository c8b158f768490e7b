"""A written fake of the extractor's API (an httpx transport), and a runner through the real client."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from taphouse.cli.app import app
from taphouse.cli.settings import Settings
from taphouse.client import Taphouse
from taphouse.samples import Sample
from taphouse.shards import ShardMeta, encode_shard
from taphouse.wire import (
    Batches,
    Check,
    Consumer,
    Engine,
    Governor,
    GovernorOrder,
    Health,
    Job,
    JobList,
    JobOptions,
    JobState,
    Latency,
    QueueStatus,
    Rate,
    ShardInfo,
    ShardList,
    Worker,
)

NOW = 1_790_000_000.0
TOKEN = "s3cret"
LAYERS = (0, 1, 2)
FINGERPRINT = {"architecture": "TinyForCausalLM", "dtype": "float32", "revision": "abc"}


def make_shard(job_id: str = "job-a", batch: int = 0, ids: tuple[str, ...] = ("x/0", "x/1")) -> bytes:
    """A real shard of small samples."""
    random = np.random.default_rng(7)
    samples = [
        Sample(
            id=name,
            token_ids=np.arange(5, dtype=np.int32),
            loss_mask=np.array([0, 0, 0, 1, 1], dtype=np.uint8),
            hidden_states=random.standard_normal((5, len(LAYERS), 8)).astype(np.float32),
            dtype="float32",
            prompt_len=3,
            next_token_id=9,
            finish_reason="stop",
        )
        for name in ids
    ]
    meta = ShardMeta(
        layers=LAYERS, num_layers=2, hidden_size=8, dtype="float32", fingerprint=FINGERPRINT,
        job_id=job_id, batch=batch,
    )  # fmt: skip
    return encode_shard(samples, meta)


def make_job(**changed: Any) -> Job:
    given: dict[str, Any] = {
        "id": "job-a",
        "name": "humaneval",
        "state": JobState.RUNNING,
        "options": JobOptions(max_tokens=64),
        "rows": 100,
        "succeeded": 40,
        "failed": 1,
        "skipped": 2,
        "batches": Batches(pending=2, queued=1, running=1, finished=3),
        "tokens": 12_345,
        "shards": 3,
        "bytes": 7_000_000,
        "raw_bytes": 10_000_000,
        "created_at": NOW - 120,
        "rate": 2.5,
        "eta_s": 23.0,
    }
    return Job.model_validate(given | changed)


def make_status(**changed: Any) -> QueueStatus:
    """A service at work: one engine, two workers, one trainer."""
    given: dict[str, Any] = {
        "depth": Batches(pending=2, queued=4, waiting=1, running=2, finished=30),
        "jobs": {JobState.RUNNING: 1, JobState.DONE: 5},
        "rows_left": 57,
        "rates": [
            Rate(window_s=60, samples=2.5, tokens=1280, bytes=700_000, raw_bytes=1_000_000, batches=0.1),
            Rate(window_s=300, samples=2.0, tokens=1000, bytes=600_000, raw_bytes=900_000, batches=0.1),
        ],
        "eta_s": 23.0,
        "workers": [
            Worker(name="worker-1", state="busy", batch="job-a:3", last_heartbeat=NOW - 1),
            Worker(name="worker-2", state="idle", last_heartbeat=NOW - 2),
        ],
        "engines": [
            Engine(
                url="http://engine:8000", capture="on", layers=[2, 15, 27, 30], fingerprint_id="f" * 32,
                in_flight=3,
                latency=Latency(window_s=60, ttft_p50=0.11, ttft_p95=0.42, itl_p50=0.021, itl_p95=0.0483,
                                requests_running=4, requests_waiting=1),
            )
        ],
        "consumers": [
            Consumer(name="trainer", cursor=28, lag=2, epoch=0.5, step=420, loss=3.217, accuracy=0.4567,
                     updated_at=NOW - 3)
        ],
        "ledger_head": 30,
        "updated_at": NOW,
    }  # fmt: skip
    return QueueStatus.model_validate(given | changed)


def make_governor(**changed: Any) -> Governor:
    given: dict[str, Any] = {
        "mode": "auto",
        "busy_ms": 2.5,
        "reason": "production's ITL p95 is 1.03 of its baseline: raised",
        "slowdown": 1.03,
        "itl_p95_s": 0.0242,
        "itl_p95_baseline_s": 0.0235,
        "ttft_p95_s": 0.118,
        "ttft_p95_baseline_s": 0.117,
        "updated_at": NOW,
    }
    return Governor.model_validate(given | changed)


def make_entry(seq: int, body: bytes = b"x" * 700) -> ShardInfo:
    return ShardInfo(
        seq=seq, shard=f"job-a-{seq:06d}.safetensors", path=f"shards/job-a-{seq:06d}.safetensors",
        bytes=len(body), raw_bytes=1000, sha256=hashlib.sha256(body).hexdigest(), samples=32, tokens=4096,
        layers=[2, 15, 27, 30], num_layers=30, hidden_size=576, dtype="bfloat16", fingerprint_id="f" * 32,
        job_id="job-a", batch=seq, created_at=NOW - 10,
    )  # fmt: skip


@dataclass
class FakeApi(httpx.BaseTransport):
    """The extractor's API as notes and wire models describe it. `requests` remembers what was asked."""

    status: QueueStatus = field(default_factory=make_status)
    jobs: list[Job] = field(default_factory=lambda: [make_job()])
    later: list[Job] = field(default_factory=list)
    """What `GET /v1/jobs/{id}` answers, one after the other, before it answers from `jobs`."""
    files: dict[str, bytes] = field(default_factory=dict)
    entries: list[ShardInfo] = field(default_factory=lambda: [make_entry(seq) for seq in range(1, 31)])
    checks: list[Check] = field(default_factory=lambda: [Check(check="redis", ok=True, detail="answers")])
    governor: Governor = field(default_factory=make_governor)
    version: str = "0.1.0"
    down: bool = False
    corrupt: bool = False
    refuse: dict[str, tuple[int, str] | tuple[int, str, str]] = field(default_factory=dict)
    """Path → status, message and `param` of an error to answer with."""
    instead: dict[str, bytes] = field(default_factory=dict)
    """Path → what something else than the service answers there, with status 200."""
    requests: list[httpx.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            raise httpx.ConnectError("[Errno 111] Connection refused", request=request)
        self.bodies.append(request.read())
        self.requests.append(request)
        path = request.url.path
        if path in self.refuse:
            return _error(*self.refuse[path])
        if path in self.instead:
            return httpx.Response(200, content=self.instead[path])
        if path == "/health":
            return _json(Health(version=self.version))
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _error(401, "the bearer token is missing or wrong")
        return self._authorized(request, path)

    def _authorized(self, request: httpx.Request, path: str) -> httpx.Response:
        routes: dict[tuple[str, str], Callable[[httpx.Request], httpx.Response]] = {
            ("GET", "/v1/queue"): lambda _: _json(self.status),
            ("GET", "/v1/governor"): lambda _: _json(self.governor),
            ("POST", "/v1/governor"): self._order,
            ("GET", "/v1/doctor"): self._doctor,
            ("POST", "/v1/doctor"): self._doctor,
            ("POST", "/v1/extract"): lambda _: _file(make_shard(), self.corrupt),
            ("POST", "/v1/jobs"): self._new_job,
            ("GET", "/v1/jobs"): lambda asked: _json(
                JobList(jobs=self.jobs[: int(asked.url.params["limit"])])
            ),
            ("GET", "/v1/shards"): self._ledger,
        }
        if (request.method, path) in routes:
            return routes[request.method, path](request)
        if path.startswith("/v1/shards/"):
            body = self.files.get(path.rpartition("/")[2])
            return _error(404, "there is no such shard") if body is None else _file(body, self.corrupt)
        return self._one_job(path.removeprefix("/v1/jobs/"))

    def _ledger(self, request: httpx.Request) -> httpx.Response:
        after, limit = int(request.url.params["after"]), int(request.url.params["limit"])
        shards = [entry for entry in self.entries if entry.seq > after][:limit]
        head = self.entries[-1].seq if self.entries else 0
        return _json(ShardList(shards=shards, next_after=shards[-1].seq if shards else after, head=head))

    def _doctor(self, request: httpx.Request) -> httpx.Response:
        ran = [Check(check="canary", ok=True, detail="passed")] if request.method == "POST" else []
        return httpx.Response(200, json=[check.model_dump() for check in [*self.checks, *ran]])

    def _order(self, request: httpx.Request) -> httpx.Response:
        order = GovernorOrder.model_validate_json(self.bodies[-1])
        limit = 2.5 if order.busy_ms is None else order.busy_ms
        self.governor = make_governor(mode=order.mode, busy_ms=limit, stopped=order.mode.value == "stopped")
        return _json(self.governor)

    def _new_job(self, request: httpx.Request) -> httpx.Response:
        body, query = self.bodies[-1], request.url.params
        if request.headers["Content-Type"] == "application/json":
            asked = json.loads(body)
            job = make_job(id="job-n", name=asked.get("name"), state="queued", rows=7)
        else:
            rows = sum(bool(line.strip()) for line in body.splitlines())
            options = JobOptions.model_validate_json(query["options"])
            job = make_job(id="job-n", name=query.get("name"), state="queued", rows=rows, options=options,
                           succeeded=0, failed=0, skipped=0)  # fmt: skip
        return _json(job, 202)

    def _one_job(self, rest: str) -> httpx.Response:
        job_id, _, verb = rest.partition("/")
        known = {job.id: job for job in self.jobs}
        if verb == "failures" and job_id in known:
            return httpx.Response(
                200, text="".join(f.model_dump_json() + "\n" for f in known[job_id].failures)
            )
        if verb in AFTER and job_id in known:
            return _json(known[job_id].model_copy(update={"state": AFTER[verb]}))
        if not verb and self.later:
            return _json(self.later.pop(0))
        return (
            _json(known[job_id]) if job_id in known and not verb else _error(404, f"there is no job {job_id}")
        )


AFTER = {
    "pause": JobState.PAUSED,
    "resume": JobState.RUNNING,
    "cancel": JobState.CANCELLED,
    "retry": JobState.RUNNING,
}


def _json(model: Any, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=model.model_dump(mode="json"))


def _error(status: int, message: str, param: str | None = None) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "type": "test", "param": param}})


def _file(body: bytes, corrupt: bool) -> httpx.Response:
    sha256 = hashlib.sha256(body).hexdigest()
    sent = body[:-1] + bytes([body[-1] ^ 1]) if corrupt else body
    headers = {"X-Taphouse-SHA256": sha256, "Content-Length": str(len(sent))}
    return httpx.Response(200, headers=headers, stream=httpx.ByteStream(sent))


@dataclass
class Cli:
    """Runs the command against a fake API, in an environment of its own."""

    api: FakeApi
    settings: list[Settings] = field(default_factory=list)
    env: dict[str, str | None] = field(default_factory=dict)

    def __call__(self, *args: str, stdin: str | bytes | None = None, token: bool = True) -> Result:
        env = {"TAPHOUSE_TOKEN": TOKEN if token else None, **self.env}
        return CliRunner(env=env).invoke(
            app, list(args), input=stdin, obj=self._connect, prog_name="taphouse"
        )

    def json(self, *args: str, exit_code: int = 0, **given: Any) -> Any:
        """The one JSON document on stdout."""
        result = self(*args, "-o", "json", **given)
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    def _connect(self, settings: Settings) -> Taphouse:
        self.settings.append(settings)
        return Taphouse(str(settings.url), token=settings.bearer(), transport=self.api)


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def cli(api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command, in an empty directory, with no settings of the person who runs the tests."""
    for name in ("URL", "TOKEN", "TOKEN_FILE", "TIMEOUT_S", "CONFIG"):
        monkeypatch.delenv(f"TAPHOUSE_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("TERM", "dumb")
    for name in ("FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return Cli(api)


@pytest.fixture
def make() -> Callable[..., Any]:
    """Builders of wire models by name: `make("job", rows=3)`."""
    makers: dict[str, Callable[..., Any]] = {
        "job": make_job,
        "status": make_status,
        "entry": make_entry,
        "governor": make_governor,
        "shard": make_shard,
    }
    return lambda what, *args, **given: makers[what](*args, **given)


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time passes at once; the list says how long would have been slept."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept
