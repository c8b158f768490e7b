"""Errors and answers are in the command's own words, not in those of a library."""

from __future__ import annotations

import json

import pytest

from taphouse.cli import dataset
from taphouse.cli.rows import FIELDS
from taphouse.wire import Row
from taphouse_extractor.settings import Settings as ServiceSettings


@pytest.mark.parametrize(
    "message",
    [
        "this needs the role admin; this token's is read",
        "this tells of all tenants, and the token is one tenant's",
    ],
)
def test_a_token_that_may_not_is_not_called_missing(cli, api, message):
    api.refuse["/v1/queue"] = (403, message)
    result = cli("queue")
    assert result.exit_code == 4 and result.stderr.startswith(
        f"error: {message} · do this: give a token that may"
    )
    assert "--token-file" not in result.stderr and "TAPHOUSE_TOKEN" not in result.stderr
    for role in ("read", "submit", "admin", "tenant"):
        assert role in result.stderr.partition("do this")[2]
    api.refuse = {"/v1/doctor": (403, message)}
    assert "TAPHOUSE_TOKEN" not in cli("doctor").stdout


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "a\tb"}', "not JSON: Invalid control character at character 14"),
        (b'{"prompt": "a', "not JSON: Unterminated string starting at character 12"),
        (b'{"prompt": {"a": 1}}', "prompt: it must be text, or a list of token ids"),
        (b'{"prompt": ["a"]}', "prompt: it must be text, or a list of token ids"),
        (b'{"text": 1}', "text: it must be text"),
        (b'{"text": "a", "user": {}}', "user: it must be text of at most 256 characters, or a whole number"),
        (b'{"messages": ["a"]}', "messages: it must be a list of objects"),
        (b'{"prompt": "a", "id": [1]}', "id: it must be text of at most 256 characters, or a whole number"),
    ],
)
def test_a_row_is_refused_in_words_for_people(cli, line, reason):
    result = cli("enqueue", "-", "--dry-run", "-o", "json", stdin=line)
    assert [found["reason"] for found in json.loads(result.stdout)["problems"]] == [reason]
    assert result.exit_code == 2
    assert set(FIELDS) == set(Row.model_fields)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--layers", "3,3"], "--layers: layers must be distinct"),
        (["--batch-size", "0"], "--batch-size: it must be at least 1"),
        (["--job-priority", "1001"], "--job-priority: it must be at most 1000"),
        (
            ["--output-prefix", "a/b"],
            "--output-prefix: it must be letters, digits, . _ and -, at most 64, the first",
        ),
        (["--timeout", "-1"], "setting timeout_s: it must be greater than 0"),
    ],
)
def test_an_option_is_refused_in_words_for_people(cli, args, said):
    result = cli("enqueue", "-", *args, stdin="")
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {said}")


@pytest.mark.parametrize("number", ["-1", "-0.5"])
def test_a_negative_limit_is_a_number_and_no_option(cli, api, number):
    result = cli("governor", "pin", number, "-o", "json")
    assert result.exit_code == 2 and f"{number} ms is no limit" in result.stderr and api.requests == []
    assert "No such option: --nope" in cli("governor", "--nope").stderr
    assert cli("governor", "pin", "--nope").exit_code == 2 and api.requests == []
    assert cli.json("governor", "pin", "3")["busy_ms"] == 3


def test_a_dry_run_says_what_it_does_not_check(cli, api, tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"text": "a"}\n' + json.dumps({"text": "x" * 100}) + "\r\n" + json.dumps({"text": "x" * 90})
    )
    ordinary = cli("enqueue", str(rows), "--dry-run", "--stop-on-error").stdout
    assert "not checked" in ordinary and "layers" in ordinary and "MAX_ROW_BYTES" not in ordinary
    assert "stop-on-error" in ordinary and "on_error" not in ordinary
    monkeypatch.setattr(dataset, "ROW_BYTES", 112)
    exactly = cli("enqueue", str(rows), "--dry-run").stdout
    assert "MAX_ROW_BYTES" not in exactly, "without its line end it is just as long as allowed"
    monkeypatch.setattr(dataset, "ROW_BYTES", 100)
    long = cli("enqueue", str(rows), "--dry-run")
    assert long.exit_code == 0 and "2, first line 2: over 4 MiB" in long.stdout
    assert "TAPHOUSE_EXTRACTOR_MAX_ROW_BYTES" in long.stdout and api.requests == []
    assert cli.json("enqueue", str(rows), "--dry-run")["over_row_bytes"] == 2


def test_the_bytes_of_a_row_are_the_services_default():
    assert ServiceSettings.model_fields["max_row_bytes"].default == dataset.ROW_BYTES == 4 << 20


def test_a_jobs_samples_are_counted_as_samples(cli, api, make):
    api.jobs = [make("job", succeeded=1, shards=1, options={"on_error": "fail", "batch_size": 4})]
    text = " ".join(cli("jobs", "job-a").stdout.split())
    assert "extracted 1 sample of 12,345 tokens in 1 shard " in text
    assert "options batch-size=4, stop-on-error" in text
