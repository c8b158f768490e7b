"""One command for several ids or names: each is tried, each error told, the worst is the exit code."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from taphouse.wire import Consumer, JobList, JobState


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel", "retry"])
def test_each_job_is_tried_and_each_error_told(cli, api, make, verb):
    api.jobs = [make("job", id=name) for name in ("job-a", "job-b", "job-c")]
    api.refuse[f"/v1/jobs/job-b/{verb}"] = (429, "too many requests")
    ids = ("job-x", "job-a", "job-b", "job-y", "job-c", "job-a")
    result = cli("jobs", verb, *ids, "-o", "json")
    assert result.exit_code == 4
    assert [job.id for job in JobList.model_validate_json(result.stdout).jobs] == ["job-a", "job-c"]
    told = [line.partition(" · ")[0] for line in result.stderr.splitlines()]
    assert sorted(told) == [
        "error: job-b: too many requests", "error: there is no job job-x", "error: there is no job job-y",
    ]  # fmt: skip
    assert cli("jobs", verb, "job-a", "job-b").exit_code == 3
    alone = cli("jobs", verb, "job-b")
    assert alone.stderr.startswith("error: too many requests") and alone.stdout == ""


def test_a_service_that_is_away_is_said_once_and_what_can_not_be_sent_sends_nothing(cli, api):
    wrong = cli("jobs", "cancel", "job-a", "../b")
    assert wrong.exit_code == 2 and api.requests == [] and wrong.stderr.count("\n") == 1
    api.down = True
    away = cli("jobs", "cancel", "job-a", "job-b", "job-c")
    assert away.exit_code == 3 and away.stderr.count("\n") == 1 and away.stdout == ""


def test_the_way_out_of_a_cancelled_job_is_said(cli, api, make):
    api.jobs = [
        make("job", id="job-a", state=JobState.CANCELLED),
        make("job", id="job-b", state=JobState.DONE),
    ]
    for job_id in ("job-a", "job-b"):
        api.refuse[f"/v1/jobs/{job_id}/retry"] = (409, f"job {job_id}: no", "job_id")
    api.refuse["/v1/jobs/job-z/retry"] = (409, "job job-z: no", "job_id")
    result = cli("jobs", "retry", "job-a")
    assert result.exit_code == 4
    assert result.stderr.endswith("make another job of its rows: `taphouse enqueue DATASET --again`\n")
    for other in ("job-b", "job-z"):
        assert cli("jobs", "retry", other).stderr.endswith("look at where it stands with `taphouse jobs`\n")


def test_consumers_and_shards_are_each_tried_too(cli, api, make, monkeypatch):
    ordinary = api._authorized

    def answer(request: httpx.Request, path: str) -> httpx.Response:
        if path.startswith("/v1/consumers/"):
            name = path.split("/")[3]
            return httpx.Response(200, json=Consumer(name=name, cursor=3).model_dump(mode="json"))
        return ordinary(request, path)

    monkeypatch.setattr(api, "_authorized", answer)
    api.refuse["/v1/consumers/a/forget"] = (409, "consumer a is running: stop it first", "consumer")
    result = cli("consumers", "forget", "a", "b")
    assert result.exit_code == 4 and "stop it first" in result.stderr
    assert result.stdout == "forgot b, which was at ledger entry 3\n"

    api.files = {"b.safetensors": make("shard")}
    result = cli("shards", "get", "a", "b")
    assert result.exit_code == 4 and result.stdout == "b.safetensors\n"
    assert result.stderr.startswith("error: a.safetensors: there is no such shard")
    assert Path("b.safetensors").is_file()
    api.corrupt = True
    worst = cli("shards", "get", "a", "b", "--force", "-o", "json")
    assert worst.exit_code == 6 and worst.stdout == "" and worst.stderr.count("\n") == 2
