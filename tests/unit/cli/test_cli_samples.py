"""`taphouse samples`: what it sends, what it prints, how it exits."""

from __future__ import annotations

import json

import httpx
import pytest

from taphouse.wire import FoundSample, SamplesDeleted, SamplesFound

FOUND = SamplesFound(
    rows=1200,
    samples=[
        FoundSample(job_id="j1", row=3, id="[red]a", user="ann", shard="s.safetensors", seq=4),
        FoundSample(job_id="j1", row=4, id="b"),
    ],
)
DELETED = SamplesDeleted(rows=2, samples=1, rewritten=["s.new.safetensors"], removed=[])


@pytest.fixture
def service(api, monkeypatch):
    """The stand-in of the API, which also answers for samples."""
    ordinary = api._authorized

    def answer(request: httpx.Request, path: str) -> httpx.Response:
        known = {"/v1/samples/find": FOUND, "/v1/samples/delete": DELETED}
        if path in known and request.method == "POST":
            return httpx.Response(200, json=known[path].model_dump(mode="json"))
        return ordinary(request, path)

    monkeypatch.setattr(api, "_authorized", answer)
    return api


def test_find_shows_where_they_lie(cli, service):
    result = cli("samples", "find", "[red]a", "b")
    assert result.exit_code == 0, result.output
    assert json.loads(service.bodies[-1]) == {"ids": ["[red]a", "b"]}
    assert "[red]a" in result.stdout and "s.safetensors" in result.stdout and "ann" in result.stdout
    assert "1,198 more" in result.stdout
    assert cli.json("samples", "find", "--user", "ann")["rows"] == 1200
    assert json.loads(service.bodies[-1]) == {"user": "ann"}


def test_delete_wants_yes_and_says_what_was_done(cli, service):
    result = cli("samples", "delete", "--tenant", "acme")
    assert (
        result.exit_code == 2 and "1200 rows would be deleted" in result.stderr and "--yes" in result.stderr
    )
    assert [request.url.path for request in service.requests] == ["/v1/samples/find"]
    result = cli("samples", "delete", "--tenant", "acme", "--yes")
    assert result.exit_code == 0 and "s.new.safetensors" in result.stdout
    assert (service.requests[-1].url.path, json.loads(service.bodies[-1])) == (
        "/v1/samples/delete",
        {"tenant": "acme"},
    )


@pytest.mark.parametrize("given", [[], ["--user", ""], ["a", ""]])
@pytest.mark.parametrize("command", ["find", "delete"])
def test_one_of_the_three_is_named(cli, service, command, given):
    result = cli("samples", command, *given)
    assert result.exit_code == 2 and "one of the three" in result.stderr
    assert service.requests == []


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["a", "--user", "b"], "ids and --user"),
        (["--user", "a", "--tenant", "b"], "--user and --tenant"),
        (["a", "--user", "", "--tenant", "b"], "ids and --user and --tenant"),
    ],
)
@pytest.mark.parametrize("command", ["find", "delete"])
def test_two_of_the_three_are_too_many(cli, service, command, given, named):
    result = cli("samples", command, *given)
    assert result.exit_code == 2
    assert result.stderr == f"error: {named} were given · do this: give only one of them\n"
    assert service.requests == []


@pytest.mark.parametrize("command", [["find", "a"], ["delete", "a"], ["delete", "a", "--yes"]])
def test_what_was_left_out_is_said_and_exits_so(cli, api, monkeypatch, command):
    problems = [f"shard s{n}.safetensors: cut" for n in range(25)]

    def answer(request: httpx.Request, path: str) -> httpx.Response:
        known = FOUND if path.endswith("find") else DELETED
        return httpx.Response(
            200, json=known.model_copy(update={"problems": problems}).model_dump(mode="json")
        )

    monkeypatch.setattr(api, "_authorized", answer)
    result = cli("samples", *command)
    assert result.exit_code == 5, result.output
    assert "shard s19.safetensors: cut" in result.stderr and "and 5 more" in result.stderr
    assert "s20" not in result.stderr and ("s.safetensors" in result.stdout) == (command[0] == "find")
