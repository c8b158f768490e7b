"""The error boundary: one readable line, the documented exit code, no traceback unless asked for."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from taphouse import __version__
from taphouse.cli.exits import ExitCode


@pytest.mark.parametrize(
    ("status", "exit_code", "advice"),
    [
        (400, 4, ""),
        (401, 4, "TAPHOUSE_TOKEN"),
        (404, 4, ""),
        (409, 4, ""),
        (413, 4, ""),
        (422, 4, ""),
        (429, 3, "later"),
        (500, 3, "doctor"),
        (503, 3, "doctor"),
    ],
)
def test_every_refusal_is_one_line_and_its_exit_code(cli, api, status, exit_code, advice):
    api.refuse["/v1/queue"] = (status, "no\nsuch [red]luck[/red]")
    result = cli("queue")
    assert result.exit_code == exit_code and result.stdout == ""
    assert result.stderr.startswith("error: no such [red]luck[/red]") and result.stderr.count("\n") == 1
    assert advice in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("command", "path", "answer", "exit_code", "advice"),
    [
        (
            "jobs cancel job-a", "/v1/jobs/job-a/cancel", (409, "job job-a is done already", "job_id"),
            4, "look at where it stands with `taphouse jobs`",
        ),
        ("enqueue -", "/v1/jobs", (409, "these rows were enqueued before", "again"), 4,
         "add --again for another job of them"),
        ("enqueue -", "/v1/jobs", (409, "one is under way", "Idempotency-Key"), 4,
         "send it again when that has ended"),
        ("enqueue -", "/v1/jobs", (422, "the key made another job", "Idempotency-Key"), 4,
         "give another --key"),
        ("consumers forget a", "/v1/consumers/a/forget", (409, "a is running: stop it first", "consumer"), 4,
         "see how far it is with `taphouse consumers`"),
        ("jobs job-a", "/v1/jobs/job-a", (404, "no", "job_id"), 4, "see what there is with `taphouse jobs`"),
        ("shards get a", "/v1/shards/a.safetensors", (404, "no", "name"), 4,
         "see what there is with `taphouse shards`"),
        ("queue", "/v1/queue", (404, "Not Found"), 4,
         "check --api-url, and that this command is of the service's version"),
        ("enqueue -", "/v1/jobs", (408, "the body stood still"), 4,
         "send it from a file, if what makes it pauses"),
        ("enqueue -", "/v1/jobs", (413, "over 9 bytes", "body"), 4, "queue it in parts"),
        ("enqueue -", "/v1/jobs", (413, "line 3 is over 9 bytes", "line 3"), 4,
         "shorten that row, or leave it out"),
        ("extract x", "/v1/extract", (413, "rows: 20, at most 16", "rows"), 4,
         "queue them with `taphouse enqueue`"),
        ("extract x", "/v1/extract", (422, "rows.0: too long", "rows.0"), 4, "correct that row"),
        ("enqueue -", "/v1/jobs", (422, "line 3 is not JSON", "line 3"), 4, "correct that row"),
        ("enqueue --server-path b", "/v1/jobs", (422, "no file", "path"), 4,
         "name a file below the service's dataset roots, or upload it: leave --server-path out"),
        ("enqueue -", "/v1/jobs", (422, "options.seed: no", "options"), 4, "correct it: see `--help`"),
        ("doctor", "/health", (503, "going down"), 3,
         "see the log of the service, and of what stands before it"),
        ("doctor", "/v1/doctor", (500, "unexpected"), 6, "see the advice beside them"),
    ],
)  # fmt: skip
def test_the_advice_fits_what_was_refused(cli, api, *, command, path, answer, exit_code, advice):
    api.refuse[path] = answer
    result = cli(*command.split(), stdin='{"prompt": "x"}')
    assert result.exit_code == exit_code
    assert result.stderr.endswith(f" · do this: {advice}\n"), result.stderr
    assert command != "doctor" or "taphouse doctor" not in result.output


@pytest.mark.parametrize("said", [b"<html>", b"null", b"{}", b"\xff\xfe", b'{"row":'])
def test_failures_of_something_else_than_the_service(cli, api, said):
    api.instead["/v1/jobs/j1/failures"] = said
    result = cli("jobs", "failures", "j1")
    assert result.exit_code == 3 and "did not answer like Taphouse's API" in result.stderr


def test_an_existing_dataset_is_asked_for_where_it_can_be_given(cli):
    for command in (["extract", "-f", "missing.jsonl"], ["enqueue", "missing.jsonl"]):
        result = cli(*command)
        assert result.exit_code == 2 and "--server-path" not in result.stderr


def test_debug_is_not_advised_to_who_gave_it(cli, api, monkeypatch):
    def burst(*args: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(api, "handle_request", burst)
    assert cli("queue", "--debug").stderr.endswith("do this: report it\n")


def test_a_service_that_is_away(cli, api):
    api.down = True
    for command in (["queue"], ["jobs"], ["shards"], ["extract", "x"], ["watch", "--once"]):
        result = cli(*command, "-o", "json")
        assert result.exit_code == 3 and result.stdout == "" and "127.0.0.1:8900" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["quue"], "Did you mean 'queue'"),
        (["queue", "--nope"], "--nope"),
        (["jobs", "--limit", "many"], "--limit"),
        (["jobs", "cancel"], "JOB_ID"),
        (["queue", "-o", "yaml"], "yaml"),
    ],
)
def test_usage_errors_point_at_help(cli, api, args, message):
    result = cli(*args)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert message in result.stderr and "--help" in result.stderr and api.requests == []


@pytest.mark.parametrize(
    "args",
    [
        ["enqueue", "DATASET", "--key", "k\nx"],
        ["enqueue", "DATASET", "--key", "\u00e9"],
        ["enqueue", "DATASET", "--key", ""],
        ["enqueue", "DATASET", "--key", " k"],
        ["enqueue", "DATASET", "--key", "k" * 256],
        ["jobs", "x" * 5000],
        ["jobs", "pause", ".."],
        ["jobs", "a\nb"],
        ["jobs", "\udcff"],  # a byte that is no UTF-8
        ["enqueue", "DATASET", "--name", "\udcff"],
        ["--api-url", "http://\N{GRINNING FACE}.example:1", "queue"],
        ["shards", "get", "x" * 300],
        ["shards", "get", "../../etc/passwd"],
        ["shards", "prune", "--older-than", "1e308"],
        ["shards", "prune", "--older-than", "nan"],
        ["consumers", "forget", "../jobs/x"],
        ["watch", "--interval", "1e300"],
    ],
)
def test_what_can_not_be_sent_is_a_usage_error(cli, api, tmp_path, args):
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text('{"prompt":"x"}\n')
    result = cli(*(str(dataset) if arg == "DATASET" else arg for arg in args))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and len(result.stderr) < 400
    assert "do this: " in result.stderr and api.requests == []


@pytest.mark.parametrize(
    ("pack", "kind"), [(gzip.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "xz")]
)
def test_a_compressed_dataset_is_called_that(cli, api, tmp_path, pack, kind):
    dataset = tmp_path / "rows.jsonl.packed"
    dataset.write_bytes(pack(b'{"prompt":"x"}\n'))
    for more in ([], ["--dry-run"]):
        result = cli("enqueue", str(dataset), *more)
        assert result.exit_code == 2 and f"compressed ({kind})" in result.stderr and api.requests == []


def test_an_unexpected_error_has_a_traceback_only_with_debug(cli, api, monkeypatch):
    def burst(*args: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(api, "handle_request", burst)
    result = cli("queue")
    assert result.exit_code == 1 and "Traceback" not in result.stderr and "--debug" in result.stderr
    assert "Traceback" in cli("queue", "--debug").stderr
    assert "Traceback" in cli("--debug", "queue").stderr


def test_ctrl_c_exits_130(cli, api, monkeypatch):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "handle_request", interrupt)
    result = cli("queue")
    assert result.exit_code == 130 and "Traceback" not in result.output


def test_version_help_and_exit_codes_are_documented(cli):
    assert cli("--version").stdout == f"taphouse {__version__}\n"
    assert cli().stdout == cli("--help").stdout
    for code in ExitCode:
        assert any(line.split()[:1] == [str(code.value)] for line in cli("--help").stdout.splitlines()), code


def test_without_the_extra_it_is_one_readable_line():
    blocked = "import sys\nsys.modules['typer'] = None\nfrom taphouse.cli.main import main\nmain()\n"
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and 'pip install "taphouse[cli]"' in done.stderr


def test_help_needs_no_client_and_no_numpy():
    code = (
        "import sys\n"
        "from taphouse.cli.app import app\n"
        "try:\n    app(['--help'], prog_name='taphouse')\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'httpx', 'numpy', 'safetensors', 'pydantic', 'pydantic_settings'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


COMMAND = [sys.executable, "-c", "from taphouse.cli.main import main; main()"]


@pytest.mark.parametrize(
    ("given", "exit_code"), [(["--help"], 0), (["enqueue", "-", "--dry-run", "-o", "json"], 0), (["no"], 2)]
)
def test_a_reader_that_goes_away_is_no_error(given, exit_code):
    read, write = os.pipe()
    os.close(read)
    rows = {"input": '{"prompt": "x"}', "text": True}
    try:
        done = subprocess.run([*COMMAND, *given], stdout=write, stderr=subprocess.PIPE, check=False, **rows)
        assert (done.returncode, done.stderr.startswith("error: No such command")) == (
            exit_code,
            exit_code > 0,
        )
        both = subprocess.run([*COMMAND, *given], stdout=write, stderr=write, check=False, **rows)
        assert both.returncode == exit_code
    finally:
        os.close(write)


@pytest.mark.parametrize(
    ("shell", "exit_code", "said"),
    [
        ("--help >&-", 0, ""),
        ("--version 1>&- 2>&- <&-", 0, ""),
        ("no -o json 2>&-", 2, ""),
        ("extract <&-", 2, "error: all prompts are empty · do this: give at least one that holds text\n"),
    ],
)
def test_a_stream_that_is_closed_at_the_start_is_nowhere(shell, exit_code, said):
    command = f"exec {shlex.join(COMMAND)} {shell}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, "", said)


def test_a_locale_without_the_signs_stops_nothing(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x"}\n')
    code = "from taphouse.cli.main import main; main()"
    command = [sys.executable, "-c", code, "enqueue", str(rows), "--dry-run", "--stop", "\u00e9"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    for more in ([], ["-o", "json"]):
        done = subprocess.run([*command, *more], capture_output=True, check=False, env=environment)
        assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["options"]["stop"] == ["\u00e9"]


AGAINST_A_FAKE = """
import sys
from tests.unit.cli.conftest import TOKEN, FakeApi, make_job
from taphouse.cli import waiting
from taphouse.cli.app import app
from taphouse.client import Taphouse
waiting.INTERVAL_S = 0.0
api = FakeApi()
api.later = [make_job(id="job-n", state="running", reason="no engine"), make_job(id="job-n", state="done")]
app(sys.argv[1:], obj=lambda s: Taphouse(str(s.url), token=TOKEN, transport=api), prog_name="taphouse")
"""


@pytest.mark.parametrize(
    ("gone", "given", "exit_code"),
    [
        ("stderr", ["enqueue", "-"], 0),  # its answer, then a note
        ("stderr", ["enqueue", "-", "--wait", "-o", "json"], 0),  # notes, then its answer
        ("stderr", ["enqueue", "-", "--wait", "--fail-on-error", "-o", "json"], 5),
        ("stdout", ["enqueue", "-"], 0),
        ("stdout", ["enqueue", "-", "--wait", "-o", "json"], 0),
        ("stdout", ["jobs", "-o", "json"], 0),
    ],
)
def test_without_a_reader_of_its_notes_a_command_goes_on_and_without_one_of_its_answer_it_ends(
    gone, given, exit_code, tmp_path
):
    read, write = os.pipe()
    os.close(read)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", AGAINST_A_FAKE, *given]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, gone: write}
    try:
        done = subprocess.run(
            command,
            input=b'{"prompt": "x"}\n',
            check=False,
            cwd=Path(__file__).parents[3],
            env={**environment, "XDG_CONFIG_HOME": str(tmp_path)},
            **streams,
        )
    finally:
        os.close(write)
    assert done.returncode == exit_code
    if gone == "stderr":
        assert b"job-n" in done.stdout
    else:
        assert b"Error" not in done.stderr and b"error" not in done.stderr


def test_a_full_disk_under_stdout_is_an_error_with_its_own_exit_code():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "--version"], stdout=full, stderr=subprocess.PIPE, check=False, env=environment
        )
    assert done.returncode == ExitCode.UNEXPECTED and b"No space left" in done.stderr
