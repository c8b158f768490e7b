"""`taphouse shards prune`: what it sends and what it prints."""

from __future__ import annotations

import json

import httpx
import pytest

from taphouse.wire import Pruned


@pytest.fixture
def service(api, monkeypatch):
    """The stand-in of the API, which also prunes."""
    ordinary = api._authorized

    def answer(request: httpx.Request, path: str) -> httpx.Response:
        if path == "/v1/shards/prune" and request.method == "POST":
            dry = json.loads(request.content)["dry_run"]
            pruned = Pruned(shards=1200, bytes=57344, dry_run=dry, held="consumer [t] acknowledged 3 of 9")
            return httpx.Response(200, json=pruned.model_dump(mode="json"))
        return ordinary(request, path)

    monkeypatch.setattr(api, "_authorized", answer)
    return api


def test_without_yes_it_only_says(cli, service):
    result = cli("shards", "prune", "--older-than", "24")
    assert result.exit_code == 0, result.output
    assert json.loads(service.bodies[-1]) == {"older_than_s": 86400.0, "force": False, "dry_run": True}
    assert "1,200 (57.3 kB) would be deleted" in result.stdout and "[t] acknowledged 3" in result.stdout


def test_with_yes_it_does(cli, service):
    result = cli("shards", "prune", "--force", "--yes")
    assert json.loads(service.bodies[-1]) == {"force": True, "dry_run": False}
    assert "1,200 (57.3 kB) deleted" in result.stdout
    assert cli.json("shards", "prune", "--yes")["shards"] == 1200
