"""The quota between an API server and the engine cores, and what their schedulers say of themselves."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from taphouse_tap.api.isolation import Isolation
from taphouse_tap.api.refusals import Busy, InvalidField, MalformedBody
from taphouse_tap.core.board import Board
from taphouse_tap.quota import FILE, Quota, read_quota, write_quota

DEFAULT = Quota(busy_ms=2.0, quiet_ms=100.0, slots=16, kv_share=0.25, note="the engine's settings")


def put(isolation: Isolation, **fields: Any) -> Quota:
    return isolation.set(json.dumps(fields).encode())


def record(directory: Path, dp_rank: int = 0, **fields: Any) -> None:
    body = {
        "dp_rank": dp_rank,
        "scheduler": "on",
        "reason": None,
        "updated_at": time.time(),
        "steps": {"steps": 5, "extraction_tokens": 7},
        "running": 1,
        "held": 2,
        "quiet": True,
        **fields,
    }
    (directory / f"scheduler-d{dp_rank}.json").write_text(json.dumps(body))


def test_what_is_set_is_in_force_until_it_expires(tmp_path: Path) -> None:
    isolation = Isolation(tmp_path, DEFAULT)
    assert isolation.quota() == DEFAULT
    quota = put(isolation, busy_ms=0, note="governor", ttl_s=10)
    assert (quota.busy_ms, quota.quiet_ms, quota.note) == (0, 100.0, "governor")
    now = time.time()
    assert read_quota(tmp_path, DEFAULT, now) == quota
    assert read_quota(tmp_path, DEFAULT, now + 11) == DEFAULT
    forever = put(isolation, slots=3, ttl_s=None)
    assert read_quota(tmp_path, DEFAULT, now + 1e8) == forever


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        (b"{", MalformedBody, "no JSON"),
        (b"[]", MalformedBody, "not a JSON object"),
        (b'{"busy_ms": NaN}', InvalidField, "busy_ms"),
        (b'{"busy_ms": true}', InvalidField, "busy_ms"),
        (b'{"quiet_ms": "1"}', InvalidField, "quiet_ms"),
        (b'{"slots": -1}', InvalidField, "slots"),
        (b'{"kv_share": 1.01}', InvalidField, "kv_share"),
        (b'{"stopped": 1}', InvalidField, "stopped"),
        (b'{"expires_at": 1}', InvalidField, "no such field"),
        (b'{"ttl_s": true}', InvalidField, "ttl_s"),
    ],
)
def test_what_is_no_quota_is_refused_and_changes_nothing(
    tmp_path: Path, body: bytes, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        Isolation(tmp_path, DEFAULT).set(body)
    assert not (tmp_path / FILE).exists()


def test_stopped_says_why(tmp_path: Path) -> None:
    isolation = Isolation(tmp_path, DEFAULT)
    isolation.check()
    put(isolation, stopped=True, note="production failed")
    with pytest.raises(Busy, match="production failed"):
        isolation.check()


def test_the_status_sums_the_engines(tmp_path: Path) -> None:
    isolation = Isolation(tmp_path, DEFAULT, engines=2)
    assert isolation.status()["scheduler"] == "absent"
    record(tmp_path)
    assert isolation.status()["scheduler"] == "off"
    assert "1 of 2 engines" in isolation.status()["reason"]
    record(tmp_path, 1, quiet=False)
    (tmp_path / "scheduler-d2.json").write_text("{half")
    said = isolation.status()
    assert (said["scheduler"], said["reason"], said["quiet"]) == ("on", None, False)
    assert said["steps"] == {"steps": 10, "extraction_tokens": 14}
    assert (said["running"], said["held"]) == (2, 4)
    record(tmp_path, 1, scheduler="off", reason="broken")
    assert isolation.status()["reason"] == "broken"
    record(tmp_path, 1, updated_at=time.time() - 60)
    assert "has not reported" in isolation.status()["reason"]


def test_an_engine_core_follows_the_file_and_says_what_it_holds(tmp_path: Path) -> None:
    said: dict[str, Any] = {"scheduler": "on", "reason": None}
    board = Board(tmp_path, 3, DEFAULT, lambda: said)
    board.publish()
    write_quota(tmp_path, Quota(1.0, 50.0, 2, 0.5, note="set"))
    board.read()
    assert (board.quota.slots, board.quota.note) == (2, "set")
    board.publish()
    published = json.loads((tmp_path / "scheduler-d3.json").read_text())
    assert published["quota"]["note"] == "set" and published["dp_rank"] == 3
    for damage in ("", "[]", '{"slots": "all"}', '{"expires_at": "never"}', "null"):
        (tmp_path / FILE).write_text(damage)
        board.read()
        assert board.quota == DEFAULT


def test_the_thread_publishes_by_itself(tmp_path: Path) -> None:
    count = {"steps": 0}
    board = Board(tmp_path, 0, DEFAULT, lambda: {"steps": dict(count)})
    board.start()
    count["steps"] = 1
    deadline = time.monotonic() + 30
    while json.loads((tmp_path / "scheduler-d0.json").read_text())["steps"] != {"steps": 1}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
