"""A job's life by the `taphouse` command, on a service of real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.queue.conftest import TOKEN, Cluster, wait_for
from typer.testing import CliRunner

from taphouse.cli.app import app
from taphouse.cli.exits import ExitCode

CUT = ("--batch-size", "8", "--max-shard-bytes", "5000")
"""Shards of three rows or less."""
SLOWLY_S = 0.5
"""What a capture takes while a job must not end."""


class Command:
    """The command as a person runs it, in this process: it is started as one of its own once."""

    def __init__(self, cluster: Cluster) -> None:
        self.env = {"TAPHOUSE_URL": f"http://127.0.0.1:{cluster.api_port}", "TAPHOUSE_TOKEN": TOKEN}

    def __call__(self, *given: str, code: int = 0) -> str:
        result = CliRunner(env=self.env).invoke(app, list(given), prog_name="taphouse")
        assert result.exit_code == code, result.output
        return result.stdout if code == 0 else result.stderr

    def json(self, *given: str) -> Any:
        return json.loads(self(*given, "-o", "json"))

    def jobs(self, *given: str) -> tuple[str, str]:
        """Id and state of the one job that an action answers with."""
        job = self.json("jobs", *given)
        return job["id"], job["state"]


@pytest.fixture
def taphouse(cluster: Cluster) -> Command:
    return Command(cluster)


def dataset(cluster: Cluster, name: str, rows: int, refused: int = 0) -> str:
    path = cluster.directory / name
    texts = [f"REFUSE {n}" if n < refused else f"prompt number {n}" for n in range(rows)]
    path.write_text("".join(json.dumps({"id": f"row-{n}", "prompt": t}) + "\n" for n, t in enumerate(texts)))
    return str(path)


def test_pause_resume_retry_and_keys(cluster: Cluster, taphouse: Command) -> None:
    cluster.start(delay_s=SLOWLY_S)
    rows = dataset(cluster, "rows.jsonl", 48, refused=3)
    started = subprocess.run(
        [
            sys.executable,
            "-m",
            "taphouse.cli",
            "enqueue",
            rows,
            *CUT,
            "--key",
            "k",
            "-o",
            "json",
        ],
        env={**os.environ, **taphouse.env},
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    job = json.loads(started.stdout)["id"]
    assert taphouse.jobs("pause", job) == (job, "paused")
    cluster.trouble(delay_s=0.0)
    held = cluster.wait_idle(job)
    assert held.state.value == "paused" and held.succeeded < 45
    assert "every unfinished job is" in taphouse("queue")
    assert taphouse.jobs("pause", job) == (job, "paused"), "twice is once"
    assert taphouse.json("enqueue", rows, *CUT, "--key", "k")["id"] == job
    assert "key made job" in taphouse("enqueue", rows, "--key", "k", code=ExitCode.REFUSED)
    assert job in taphouse("enqueue", rows, *CUT, code=ExitCode.REFUSED)
    assert cluster.client.job(job).batches.finished == held.batches.finished, "nothing ran meanwhile"

    assert taphouse.jobs("resume", job)[0] == job
    done = cluster.wait_done(job)
    assert (done.state.value, done.succeeded, done.failed) == ("done", 45, 3)
    failures = [json.loads(line) for line in taphouse("jobs", "failures", job).splitlines()]
    assert [failure["id"] for failure in failures] == ["row-0", "row-1", "row-2"]
    assert "pause does nothing" in taphouse("jobs", "pause", job, code=ExitCode.REFUSED)

    cluster.trouble(refusing=False)
    assert taphouse.jobs("retry", job) == (job, "running")
    assert cluster.wait_done(job).succeeded == 48
    assert taphouse("jobs", "failures", job) == ""
    assert "nothing to retry" in taphouse("jobs", "retry", job, code=ExitCode.REFUSED)
    assert all(entry.raw_bytes <= 5000 for entry in cluster.ledger.entries())
    assert cluster.ledger.head() > 6, "batches were cut"
    assert sorted(cluster.sample_ids(), key=lambda i: int(i[4:])) == [f"row-{n}" for n in range(48)]


def test_cancel_keeps_what_is_sealed_and_the_same_rows_may_come_again(
    cluster: Cluster, taphouse: Command
) -> None:
    cluster.start(delay_s=SLOWLY_S)
    rows = dataset(cluster, "rows.jsonl", 24)
    job = taphouse.json("enqueue", rows, "--batch-size", "4")["id"]
    wait_for("a first shard", lambda: cluster.ledger.head() > 0)
    assert taphouse.jobs("cancel", job) == (job, "cancelled")
    cluster.trouble(delay_s=0.0)
    ended = cluster.wait_idle(job)
    assert 0 < ended.succeeded < 24 and ended.succeeded + ended.skipped == 24
    assert len(cluster.sample_ids()) == ended.succeeded
    assert taphouse.jobs("cancel", job) == (job, "cancelled")
    for action in ("resume", "pause", "retry"):
        assert "cancelled" in taphouse("jobs", action, job, code=ExitCode.REFUSED)
    again = taphouse.json("enqueue", rows, "--batch-size", "4", "--wait")
    assert (again["state"], again["succeeded"]) == ("done", 24)
    assert len(cluster.sample_ids()) == ended.succeeded + 24
