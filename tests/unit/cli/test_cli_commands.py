"""Each command as a user types it: what it sends, what it prints, how it exits."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from taphouse.cli import dataset, waiting
from taphouse.cli.jobs import STATES
from taphouse.shards import open_shard
from taphouse.wire import (
    Check,
    ExtractRequest,
    Governor,
    Job,
    JobList,
    JobRequest,
    JobState,
    QueueStatus,
    RowFailure,
    ShardList,
)
from taphouse_extractor.errors import BadRow
from taphouse_extractor.rows import parse_row


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


# --- extract


def test_extract_writes_a_shard_and_says_what_is_in_it(cli, api):
    result = cli("extract", "one", "two", "--layers", "2,0", "--max-tokens", "4")
    assert result.exit_code == 0, result.output
    [path] = Path().glob("extract-*.safetensors")
    with open_shard(path) as shard:
        assert [shard[i].id for i in range(len(shard))] == ["x/0", "x/1"]
    assert str(path) in result.stdout and "2, 10 tokens" in result.stdout
    sent = ExtractRequest.model_validate_json(api.bodies[-1])
    assert [row.prompt for row in sent.rows] == ["one", "two"]
    assert sent.options.layers == [2, 0] and sent.options.max_tokens == 4


def test_extract_takes_prompts_from_stdin_and_rows_from_a_file(cli, api, tmp_path):
    assert cli("extract", "--out", "a.safetensors", stdin="first\n\nsecond\n").exit_code == 0
    assert [row.prompt for row in ExtractRequest.model_validate_json(api.bodies[-1]).rows] == [
        "first",
        "second",
    ]
    rows = write_rows(tmp_path / "r.jsonl", {"id": 7, "messages": [{"role": "user", "content": "hi"}]})
    document = cli.json("extract", "-f", str(rows), "--out", "b.safetensors")
    assert document["samples"] == 2 and document["path"] == "b.safetensors"
    assert ExtractRequest.model_validate_json(api.bodies[-1]).rows[0].id == "7"


def test_extract_sends_a_prompt_through_the_chat_template_when_told(cli, api):
    assert cli("extract", "one", "two", "--chat").exit_code == 0
    rows = ExtractRequest.model_validate_json(api.bodies[-1]).rows
    assert [row.messages for row in rows] == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "two"}],
    ]
    assert [row.prompt for row in rows] == [None, None]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["extract", "--chat", "-f", "rows.jsonl"], "--chat is for prompts"),
        (["extract"], "all prompts are empty"),
        (["extract", "x", "-f", "rows.jsonl"], "prompts and a file"),
        (["extract", "x", "--layers", "a,b"], "--layers"),
        (["extract", "x", "--layers", "3,3"], "distinct"),
        (["extract", "x", "--max-tokens", "0"], "--max-tokens"),
        (["extract", "x", "--out", "nowhere/s.safetensors"], "nowhere"),
        (["extract", "x", "--out", "/proc/s.safetensors"], "/proc"),
        (["extract", "x", "--out", "s" * 300], "File name too long"),
        (["extract", "x", "--out", ".", "--force"], ". exists already · do this: give another --out"),
        (["extract", "x", "--chat-template-kwargs", "[]"], "--chat-template-kwargs"),
        (["extract", "-f", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_extract_refuses_before_anything_is_sent(cli, api, args, message):
    result = cli(*args, stdin="")
    assert result.exit_code == 2
    assert message in result.stderr and " · do this: " in result.stderr
    assert len(result.stderr.splitlines()) == 1 and result.stdout == ""
    assert api.requests == []


def test_extract_replaces_a_file_only_when_told(cli):
    Path("s.safetensors").write_text("mine")
    assert cli("extract", "x", "--out", "s.safetensors").exit_code == 2
    assert Path("s.safetensors").read_text() == "mine"
    assert cli("extract", "x", "--out", "s.safetensors", "--force").exit_code == 0
    with open_shard("s.safetensors") as shard:
        assert len(shard) == 2


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("command", [["extract", "x"], ["shards", "get", "a"]])
def test_a_link_is_written_through(cli, api, make, command, there):
    api.files = {"a.safetensors": make("shard")}
    link, disk = Path("s.safetensors"), Path("disk")
    disk.mkdir()
    link.symlink_to("disk/kept.safetensors")
    if there:
        (disk / "kept.safetensors").write_text("mine")
        assert cli(*command, "--out", str(link)).exit_code == 2
        assert link.read_text() == "mine"
    result = cli(*command, "--out", str(link), *(["--force"] if there else []))
    assert result.exit_code == 0 and "s.safetensors" in result.stdout
    assert link.is_symlink() and [path.name for path in disk.iterdir()] == ["kept.safetensors"]
    with open_shard("disk/kept.safetensors"):
        pass


def test_an_extraction_that_fails_leaves_nothing_behind(cli, api):
    before = set(Path().iterdir())
    api.refuse["/v1/extract"] = (503, "busy")
    assert cli("extract", "x", "--out", "s.safetensors").exit_code == 3
    assert set(Path().iterdir()) == before
    api.refuse.clear()
    assert cli("extract", "x", "--out", "s.safetensors").exit_code == 0
    assert set(Path().iterdir()) - before == {Path("s.safetensors")}


def test_a_body_that_changed_on_the_way_is_no_shard_file(cli, api):
    api.corrupt = True
    result = cli("extract", "x", "--out", "s.safetensors")
    assert result.exit_code == 6 and not Path("s.safetensors").exists()


# --- enqueue


def test_enqueue_streams_the_file_and_prints_the_job(cli, api, tmp_path):
    rows = write_rows(tmp_path / "data.jsonl", {"prompt": "a"}, {"prompt": "b"})
    result = cli("enqueue", str(rows), "--max-tokens", "64", "--temperature", "0.5", "--batch-size", "8")
    assert result.exit_code == 0, result.output
    assert "job job-n: 2 rows, queued" in result.stdout
    assert api.bodies[-1] == rows.read_bytes()
    query = api.requests[-1].url.params
    assert json.loads(query["options"]) == {
        "max_tokens": 64, "temperature": 0.5, "ignore_eos": False, "batch_size": 8,
        "job_priority": 0, "on_error": "skip", "output_prefix": "",
    }  # fmt: skip
    assert query["name"] == "data.jsonl"


def test_enqueue_sends_stdin_and_only_the_first_rows(cli, api):
    job = Job.model_validate(
        cli.json("enqueue", "-", "--max-samples", "2", stdin='{"text": "a"}\n\n{"text": "b"}\n{"text": "c"}')
    )
    assert job.rows == 2 and api.bodies[-1] == b'{"text": "a"}\n{"text": "b"}\n'


def test_enqueue_names_a_file_of_the_service(cli, api):
    job = Job.model_validate(cli.json("enqueue", "--server-path", "sets/a.jsonl", "--name", "a"))
    assert job.id == "job-n"
    sent = JobRequest.model_validate_json(api.bodies[-1])
    assert (sent.path, sent.name) == ("sets/a.jsonl", "a")
    assert cli.json("enqueue", "--server-path", "sets/b.jsonl")["name"] == "b.jsonl"


def test_dry_run_counts_rows_and_sends_nothing(cli, api, tmp_path):
    rows = write_rows(tmp_path / "d.jsonl", *[{"prompt": "a"}] * 5, {"messages": [{"role": "user"}]}, "")
    document = cli.json("enqueue", str(rows), "--dry-run", "--batch-size", "4", "--max-tokens", "8")
    assert document["rows"] == 6 and document["kinds"] == {"prompt": 5, "messages": 1}
    assert document["batches"] == 2 and document["options"]["max_tokens"] == 8
    assert api.requests == []
    assert cli("enqueue", str(rows), "--dry-run", "--max-samples", "3").exit_code == 0


def test_dry_run_refuses_what_python_reads_and_json_does_not_have(cli, api, tmp_path):
    rows = tmp_path / "d.jsonl"
    rows.write_bytes(
        b'{"prompt": "x", "score": NaN}\n{"messages": [{"role": "user", "content": NaN}]}\n'
        b'{"prompt": "\\ud800"}\n{"prompt": "\\u00e9\\ud83d\\ude00"}\n'
    )
    result = cli("enqueue", str(rows), "--dry-run", "-o", "json")
    problems = {p["line"]: p["reason"] for p in json.loads(result.stdout)["problems"]}
    assert sorted(problems) == [2, 3] and "NaN" in problems[2] and "surrogate" in problems[3]
    for args in (["extract", "-f", str(rows)], ["extract", "x\udcff"]):
        assert cli(*args).exit_code == 2
    wrong = cli("enqueue", str(rows), "--chat-template-kwargs", '{"a": NaN}')
    assert wrong.exit_code == 2 and api.requests == []


@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_rows_nested_too_deeply_for_the_service_are_named(cli, api, tmp_path, more):
    def nested(depth):
        return {"messages": [{"role": "user", "content": json.loads("[" * depth + "1" + "]" * depth)}]}

    rows = write_rows(
        tmp_path / "d.jsonl", nested(190), nested(300), {"prompt": "\u00e9", "other": nested(300)}
    )
    result = cli("enqueue", str(rows), *more)
    assert result.exit_code == 2 and "2 of 3 rows" in result.stderr and api.requests == []
    assert "line 2: nested too deeply; line 3: nested too deeply" in result.stderr
    for line in rows.read_bytes().splitlines()[1:]:
        with pytest.raises(BadRow):
            parse_row(line)
    parse_row(rows.read_bytes().splitlines()[0])


def test_dry_run_names_the_lines_that_are_no_rows(cli, api, tmp_path):
    rows = write_rows(
        tmp_path / "d.jsonl", {"prompt": "a"}, "", "{not json", "[1]", {"question": "?"}, {"prompt": ""},
        {"messages": [{"role": "wizard"}]}, {"messages": [{"role": "assistant", "content": "x"}]},
        {"text": 3},
    )  # fmt: skip
    result = cli("enqueue", str(rows), "--dry-run", "--max-tokens", "8", "-o", "json")
    assert result.exit_code == 2 and "7 of 8 rows" in result.stderr
    problems = {p["line"]: p["reason"] for p in json.loads(result.stdout)["problems"]}
    assert sorted(problems) == [3, 4, 5, 6, 7, 8, 9]
    for line, reason in {
        3: "not JSON",
        4: "a list",
        5: "none of",
        6: "empty",
        7: "wizard",
        8: "nothing is left",
    }.items():
        assert reason in problems[line]
    assert api.requests == []


BAD_ROWS = ({"prompt": "a"}, "{not json", {"question": "?"}, "", {"prompt": ""}, {"text": 3})


def test_enqueue_names_the_first_bad_rows_of_a_file_and_sends_nothing(cli, api, tmp_path):
    rows = write_rows(tmp_path / "d.jsonl", *BAD_ROWS)
    result = cli("enqueue", str(rows), "-o", "json")
    assert result.exit_code == 2 and api.requests == [] and result.stdout == ""
    assert "4 of 5 rows can't be used: line 2: not JSON" in result.stderr and "line 3: " in result.stderr
    assert "line 5: " in result.stderr and "and 1 more" in result.stderr
    assert "--allow-bad-rows" in result.stderr and result.stderr.count("\n") == 1
    assert cli("enqueue", str(rows), "--max-samples", "1").exit_code == 0
    assert api.bodies[-1] == b'{"prompt": "a"}\n'
    assert cli("enqueue", str(rows), "--allow-bad-rows").exit_code == 0
    assert api.bodies[-1] == rows.read_bytes()
    assert cli("enqueue", str(rows), "--dry-run", "--allow-bad-rows").exit_code == 0


def test_enqueue_stops_at_the_first_bad_row_of_stdin(cli, api, tmp_path):
    rows = write_rows(tmp_path / "d.jsonl", *BAD_ROWS).read_bytes()
    result = cli("enqueue", "-", stdin=rows)
    assert result.exit_code == 2 and "line 2 is no row: not JSON" in result.stderr
    assert api.requests == []
    assert cli("enqueue", "-", "--allow-bad-rows", stdin=rows).exit_code == 0
    assert api.bodies[-1] == rows


def test_a_dataset_is_checked_as_the_service_reads_it(cli, api, tmp_path):
    rows = tmp_path / "d.jsonl"
    rows.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert cli("enqueue", str(rows)).exit_code == 0 and api.bodies[-1] == rows.read_bytes()
    rows.write_bytes('{"prompt": "a"}'.encode("utf-16"))
    assert "not UTF-8" in cli("enqueue", str(rows)).stderr
    rows.write_bytes(b"")
    assert "holds no rows" in cli("enqueue", str(rows)).stderr and len(api.requests) == 1


def test_a_line_without_an_end_is_not_gathered_in_memory(cli, api, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "LINE_BYTES", 1000)
    rows = write_rows(tmp_path / "d.jsonl", {"prompt": "a"}, {"prompt": "x" * 2000})
    result = cli("enqueue", str(rows))
    assert result.exit_code == 2 and "line 2 is over 1000 bytes" in result.stderr and api.requests == []


@pytest.mark.parametrize(
    "args",
    [
        ["enqueue"],
        ["enqueue", "--server-path", "b.jsonl", "--allow-bad-rows"],
        ["enqueue", "a.jsonl", "--server-path", "b.jsonl"],
        ["enqueue", "--server-path", "b.jsonl", "--dry-run"],
        ["enqueue", "--server-path", "b.jsonl", "--max-samples", "3"],
        ["enqueue", "-", "--fail-on-error"],
        ["enqueue", "missing.jsonl"],
        ["enqueue", "-", "--dry-run"],
    ],
)
def test_enqueue_refuses_what_makes_no_sense(cli, api, args):
    result = cli(*args, stdin="")
    assert result.exit_code == 2 and api.requests == []
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1


def test_wait_follows_the_job_to_its_end(cli, api, make, no_sleep):
    running = make("job", id="job-n", state="running")
    stuck = make("job", id="job-n", state="running", reason="the engine is away")
    done = make("job", id="job-n", state="done", rows=100, succeeded=98, failed=0, skipped=2)
    api.later = [running, stuck, stuck, done]
    assert cli("enqueue", "-", "--wait", stdin='{"text": "a"}').stderr.count("the engine is away") == 1
    no_sleep.clear()
    api.later = [running, running, done]
    job = Job.model_validate(cli.json("enqueue", "-", "--wait", stdin='{"text": "a"}'))
    assert job == done and len(no_sleep) == 3


@pytest.mark.parametrize(
    ("changed", "args", "exit_code", "message"),
    [
        ({"state": "done", "succeeded": 90, "failed": 10, "skipped": 0}, [], 0, ""),
        (
            {"state": "done", "succeeded": 90, "failed": 10, "skipped": 0},
            ["--fail-on-error"],
            5,
            "10 of 100 rows failed",
        ),
        ({"state": "done", "succeeded": 90, "failed": 0, "skipped": 10}, ["--fail-on-error"], 0, ""),
        ({"state": "failed", "reason": "other weights"}, [], 7, "failed: other weights"),
        ({"state": "cancelled"}, [], 7, "was cancelled"),
    ],
)
def test_the_end_of_a_job_is_the_exit_code(cli, api, make, no_sleep, *, changed, args, exit_code, message):
    api.later = [make("job", id="job-n", **changed)]
    result = cli("enqueue", "-", "--follow", *args, stdin='{"text": "a"}')
    assert result.exit_code == exit_code and message in result.stderr
    assert "= " in result.stdout and "succeeded" in result.stdout


def test_waiting_outlasts_a_restart_but_not_for_ever(cli, api, make, monkeypatch):
    done = make("job", id="job-n", state="done")
    slept = 0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += 1
        api.down = slept < back_after
        api.later = [done]

    monkeypatch.setattr(time, "sleep", sleep)
    back_after = 20
    assert cli("enqueue", "-", "--wait", stdin='{"text": "a"}').exit_code == 0 and slept == 20
    slept, back_after, api.down = 0, 10**9, False
    assert cli("enqueue", "-", "--wait", stdin='{"text": "a"}').exit_code == 3
    assert slept == waiting.GIVE_UP_AFTER_S / waiting.INTERVAL_S


# --- jobs, queue


def test_enqueue_says_again_and_sends_its_key(cli, api, tmp_path):
    rows = write_rows(tmp_path / "data.jsonl", {"prompt": "a"})
    given = ("--again", "--key", "mine", "--stop-on-error", "--job-priority", "3", "--output-prefix", "run7")
    assert cli("enqueue", str(rows), *given).exit_code == 0
    request = api.requests[-1]
    assert (request.url.params["again"], request.headers["Idempotency-Key"]) == ("true", "mine")
    options = json.loads(request.url.params["options"])
    assert (options["on_error"], options["job_priority"], options["output_prefix"]) == ("fail", 3, "run7")


@pytest.mark.parametrize(
    ("verb", "state"), [("pause", "paused"), ("resume", "running"), ("retry", "running")]
)
def test_jobs_are_paused_resumed_and_retried(cli, api, make, verb, state):
    api.jobs = [make("job", id="job-a")]
    assert Job.model_validate(cli.json("jobs", verb, "job-a")).state == state
    assert api.requests[-1].url.path == f"/v1/jobs/job-a/{verb}"


def test_failures_are_printed_as_lines(cli, api, make):
    found = [RowFailure(row=3, id="x", reason="it broke"), RowFailure(row=4, reason="too long", skipped=True)]
    api.jobs = [make("job", id="job-a", failures=found)]
    lines = cli("jobs", "failures", "job-a").stdout.splitlines()
    assert [RowFailure.model_validate_json(line) for line in lines] == found
    assert cli("jobs", "failures", "job-z").exit_code != 0


def test_jobs_lists_shows_and_cancels(cli, api, make):
    api.jobs = [make("job"), make("job", id="job-b", name=None, state="done", eta_s=None)]
    assert [job.id for job in JobList.model_validate(cli.json("jobs")).jobs] == ["job-a", "job-b"]
    assert [job.id for job in JobList.model_validate(cli.json("jobs", "--state", "done")).jobs] == ["job-b"]
    assert Job.model_validate(cli.json("jobs", "job-b")).id == "job-b"
    assert Job.model_validate(cli.json("jobs", "list", "job-b")).id == "job-b"
    assert Job.model_validate(cli.json("jobs", "cancel", "job-a")).state == "cancelled"
    assert api.requests[-1].url.path == "/v1/jobs/job-a/cancel"
    both = JobList.model_validate(cli.json("jobs", "cancel", "job-a", "job-b"))
    assert [job.state for job in both.jobs] == ["cancelled", "cancelled"]
    assert tuple(state.value for state in JobState) == STATES
    assert "running" in cli("jobs", "--state", "resting").stderr
    text = cli("jobs").stdout
    assert "humaneval" in text and "43%" in text and "2.5/s" in text


def test_a_job_is_shown_with_the_rows_that_failed(cli, api, make):
    failures = [{"row": 3, "id": "r3", "reason": "the prompt [bold] is too long", "skipped": True}]
    api.jobs = [make("job", reason="waits for the engine", failures=failures)]
    text = cli("jobs", "job-a").stdout
    assert "the prompt [bold] is too long" in text and "and 2 more" in text and "57 to do" in text
    assert "waits for the engine" in text
    api.jobs = [make("job", state="done", succeeded=97, finished_at=api.jobs[0].created_at + 97)]
    assert "1.0 samples/s over 1m 37s" in cli("jobs", "job-a").stdout


def test_an_unknown_job_is_refused_in_one_line(cli):
    result = cli("jobs", "job-z")
    assert result.exit_code == 4 and result.stdout == ""
    assert result.stderr.startswith("error: there is no job job-z") and len(result.stderr.splitlines()) == 1
    assert cli("jobs", "a/../b").exit_code == 2


def test_queue_is_one_look(cli, api):
    assert QueueStatus.model_validate(cli.json("queue")) == api.status
    text = cli("queue").stdout
    for word in ("running", "worker-1", "http://engine:8000", "48.3 ms", "all requests", "45.7%", "3.217"):
        assert word in text


# --- governor


def test_the_governor_is_shown_and_told_what_to_do(cli, api):
    assert Governor.model_validate(cli.json("governor")) == api.governor
    text = cli("governor").stdout
    for word in ("auto", "2.5 ms a step beside production", "24.2 ms / 23.5 ms", "1.03×", "raised"):
        assert word in text, word
    assert cli.json("governor", "pin", "7.5")["busy_ms"] == 7.5
    assert json.loads(api.bodies[-1]) == {"mode": "pinned", "busy_ms": 7.5}
    assert "7.5 ms a step beside production (pinned)" in cli("governor").stdout
    assert "extraction stopped" in cli("governor", "stop").stdout
    assert json.loads(api.bodies[-1]) == {"mode": "stopped"}
    assert cli.json("governor", "auto")["mode"] == "auto"


@pytest.mark.parametrize(
    "args", [["fast"], ["pin"], ["auto", "3"], ["stop", "0"], ["pin", "1e9"], ["pin", "nan"], ["pin", "x"]]
)
def test_orders_that_make_no_sense_are_not_sent(cli, api, args):
    result = cli("governor", *args)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert api.requests == []


def test_an_api_without_a_governor_refuses(cli, api):
    api.refuse = {"/v1/governor": (409, "the governor is switched off", "mode")}
    result = cli("governor", "stop")
    assert result.exit_code == 4 and "TAPHOUSE_EXTRACTOR_GOVERNOR=true" in result.stderr


# --- shards


def test_shards_lists_the_newest_or_those_after(cli, api):
    newest = ShardList.model_validate(cli.json("shards", "--limit", "5"))
    assert [s.seq for s in newest.shards] == [26, 27, 28, 29, 30] and newest.head == 30
    after = ShardList.model_validate(cli.json("shards", "list", "--after", "2", "--limit", "3"))
    assert [s.seq for s in after.shards] == [3, 4, 5] and after.next_after == 5
    assert "job-a-000030.safetensors" in cli("shards").stdout
    api.entries = []
    assert "no shards" in cli("shards").stdout


def test_shards_beyond_a_page_are_all_listed(cli, api, make):
    api.entries = [make("entry", seq) for seq in range(1, 251)]
    listed = ShardList.model_validate(cli.json("shards", "--after", "0", "--limit", "1000"))
    assert [s.seq for s in listed.shards] == list(range(1, 251))


def test_get_fetches_checks_and_never_overwrites(cli, api, make):
    api.files = {"a.safetensors": make("shard"), "b.safetensors": make("shard", batch=1)}
    document = cli.json("shards", "get", "a.safetensors", "b.safetensors")
    assert [f["path"] for f in document["files"]] == ["a.safetensors", "b.safetensors"]
    assert Path("a.safetensors").read_bytes() == api.files["a.safetensors"]
    assert cli("shards", "get", "a.safetensors").exit_code == 2
    assert cli("shards", "get", "a.safetensors", "--force").stdout == "a.safetensors\n"
    assert cli("shards", "get", "a.safetensors", "--out", "copy.safetensors").exit_code == 0
    assert cli("shards", "get", "a", "b", "--out", "copy.safetensors", "--force").exit_code == 2
    assert cli("shards", "get", "z.safetensors").exit_code == 4


def test_get_makes_the_directory_and_takes_names_without_the_suffix(cli, api, make):
    api.files = {"a.safetensors": make("shard"), "b.safetensors": make("shard", batch=1)}
    result = cli("shards", "get", "a", "b.safetensors", "b", "--out", "new/dir")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in Path("new/dir").iterdir()) == ["a.safetensors", "b.safetensors"]
    assert cli("shards", "get", "a", "--out", "other").exit_code == 0
    assert Path("other/a.safetensors").read_bytes() == api.files["a.safetensors"]
    assert cli("shards", "get", "a", "--out", "third/mine.safetensors").exit_code == 0
    assert Path("third/mine.safetensors").is_file()
    Path("file").write_text("mine")
    for out in ("file", "file/below"):
        refused = cli("shards", "get", "b", "a", "--out", out, "--force")
        assert refused.exit_code == 2 and refused.stderr.count("\n") == 1


def test_get_of_a_changed_body_leaves_nothing(cli, api, make):
    api.files, api.corrupt = {"a.safetensors": make("shard")}, True
    result = cli("shards", "get", "a.safetensors")
    assert result.exit_code == 6 and list(Path().iterdir()) == []


def test_verify_finds_the_bad_file_among_good_ones(cli, make):
    body = make("shard")
    Path("d").mkdir()
    Path("d/good.safetensors").write_bytes(body)
    Path("d/flipped.safetensors").write_bytes(body[:-3] + bytes([body[-3] ^ 4]) + body[-2:])
    Path("d/cut.safetensors").write_bytes(body[:-10])
    result = cli("shards", "verify", "d")
    assert result.exit_code == 6 and "2 of 3 files failed" in result.stderr
    document = cli.json("shards", "verify", "d", exit_code=6)
    assert {Path(r["source"]).stem: r["ok"] for r in document["reports"]} == {
        "cut": False, "flipped": False, "good": True,
    }  # fmt: skip
    good = cli.json("shards", "verify", "d/good.safetensors")
    assert good["ok"] and good["reports"][0]["samples"] == 2


def test_verify_of_nothing_is_a_usage_error(cli):
    assert cli("shards", "verify", "nowhere").exit_code == 2
    assert cli("shards", "verify", ".").exit_code == 2


def test_show_prints_header_and_samples(cli, make):
    Path("s.safetensors").write_bytes(make("shard", ids=("p/0", "p/1", "p/2")))
    text = cli("shards", "show", "s.safetensors", "--limit", "2").stdout
    assert "p/1" in text and "p/2" not in text and "and 1 more" in text
    assert "TinyForCausalLM" in text and "layers 0,1,2 of 2 × 8 × float32" in text
    header = cli.json("shards", "show", "s.safetensors")["header"]
    assert header["job_id"] == "job-a" and len(header["samples"]) == 3
    assert cli("shards", "show", "missing.safetensors").exit_code == 2
    Path("bad.safetensors").write_bytes(b"\0" * 50)
    assert cli("shards", "show", "bad.safetensors").exit_code == 6


# --- doctor


def test_doctor_says_all_is_well(cli, api):
    document = cli.json("doctor")
    assert document["ok"] and [check["check"] for check in document["checks"]] == ["api", "redis"]
    assert cli("doctor").exit_code == 0


def test_doctor_has_canaries_run_when_asked(cli, api):
    assert [check["check"] for check in cli.json("doctor", "--canary")["checks"]] == [
        "api",
        "redis",
        "canary",
    ]


def test_doctor_says_what_fails_and_what_to_do(cli, api):
    api.checks.append(
        Check(check="canary", ok=False, detail="other tokens", advice="relaunch with [version]")
    )
    result = cli("doctor")
    assert result.exit_code == 6 and "canary" in result.stderr
    assert "other tokens" in result.stdout and "relaunch with [version]" in result.stdout
    document = cli.json("doctor", exit_code=6)
    assert not document["ok"] and Check.model_validate(document["checks"][-1]) == api.checks[-1]


def test_doctor_of_a_service_that_is_down(cli, api):
    api.down = True
    document = cli.json("doctor", exit_code=3)
    assert [check["ok"] for check in document["checks"]] == [False]


def test_doctor_names_a_wrong_token_and_another_version(cli, api):
    api.version = "9.9.9"
    document = cli.json("doctor", exit_code=6, token=False)
    failed = {check["check"]: check for check in document["checks"] if not check["ok"]}
    assert set(failed) == {"version", "api's own checks"}
    assert "9.9.9" in failed["version"]["advice"] and "TAPHOUSE_TOKEN" in failed["api's own checks"]["advice"]
