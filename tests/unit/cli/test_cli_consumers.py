"""`taphouse consumers`, and what `queue` and `watch` say of what waits for a consumer."""

from __future__ import annotations

import io

import httpx
import pytest
from rich.console import Console

from taphouse.cli.render_watch import Moment, watch_line, watch_view
from taphouse.wire import Consumer, Retention, Unconsumed

NOW = 1_790_000_000.0


@pytest.fixture
def held(make):
    """A service whose trainer ended, and which waits for it."""
    old = Consumer(
        name="old", cursor=4, acknowledged=2, ended="stopped after [10] steps", updated_at=NOW - 60
    )
    return make(
        "status",
        paused="12 shards are sealed that consumer old has not reached",
        consumers=[*make("status").consumers, old],
        unconsumed=Unconsumed(shards=12, bytes=3_200_000_000, bound_bytes=3_000_000_000, slowest=["old"]),
        retention=Retention(mode="consumed", held="consumer old acknowledged 2 of 30", held_by=["old"]),
    )


def test_the_list_says_what_each_holds_back(cli, api, held):
    api.status = held
    result = cli("consumers")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "12 shards, 3.2 GB of 3.0 GB, for old" in text
    assert "deleted once consumed; consumer old acknowledged 2 of 30" in text
    assert "stopped after [10] steps" in text and "feeding, deletion" in text
    document = cli.json("consumers", "list")
    assert [one["name"] for one in document["consumers"]] == ["trainer", "old"]
    assert document["unconsumed"]["bytes"] == 3_200_000_000
    assert "12 shards, 3.2 GB of 3.0 GB" in " ".join(cli("queue").stdout.split())


def test_below_the_bound_nothing_waits_for_feeding(cli, api, held):
    below = held.unconsumed.model_copy(update={"bytes": 2_000_000_000})
    api.status = held.model_copy(update={"unconsumed": below, "retention": Retention(mode="keep")})
    text = cli("consumers").stdout
    assert "feeding" not in text and "deletion" not in text and "all shards are kept" in text


def test_an_older_service_tells_less(cli, api, make):
    api.status = make("status", consumers=[])
    assert "no consumer is registered" in cli("consumers").stdout
    assert "unconsumed" not in cli("queue").stdout


def test_forget_asks_for_each(cli, api, monkeypatch):
    ordinary = api._authorized

    def answer(request: httpx.Request, path: str) -> httpx.Response:
        if path.startswith("/v1/consumers/") and request.method == "POST":
            name = path.split("/")[3]
            return httpx.Response(200, json=Consumer(name=name, cursor=1234).model_dump(mode="json"))
        return ordinary(request, path)

    monkeypatch.setattr(api, "_authorized", answer)
    result = cli("consumers", "forget", "a", "b")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "forgot a, which was at ledger entry 1,234",
        "forgot b, which was at ledger entry 1,234",
    ]
    assert cli.json("consumers", "forget", "a")["forgotten"][0]["cursor"] == 1234
    assert cli("consumers", "forget", "../jobs").exit_code != 0
    api.refuse["/v1/consumers/a/forget"] = (409, "consumer a is running: stop it first")
    refused = cli("consumers", "forget", "a")
    assert refused.exit_code == 4 and "stop it first" in refused.stderr


def test_watch_shows_it_and_marks_what_waits_for_one_that_ended(held, make):
    moment = Moment("http://api", NOW, held, jobs=(make("job"),), shards=(make("entry", 30),))

    def drawn(at: Moment, *, colours: bool = False) -> str:
        console = Console(file=io.StringIO(), width=160, force_terminal=colours)
        console.print(watch_view(at, 160, 50))
        return console.file.getvalue()

    assert "unconsumed 12 shards, 3.2 GB of 3.0 GB, for old" in drawn(moment)
    assert "consumer old acknowledged 2 of 30" in drawn(moment)
    assert "unconsumed 12 shards" in watch_line(moment)
    assert "\x1b[1;33m12 shards" in drawn(moment, colours=True)
    calm = held.model_copy(
        update={
            "unconsumed": Unconsumed(shards=1, bytes=5, bound_bytes=1, slowest=["old"]),
            "retention": None,
        }
    )
    quiet = Moment("http://api", NOW, calm)
    assert "\x1b[1;33m1 shard," not in drawn(quiet, colours=True), "one shard is never too much"
