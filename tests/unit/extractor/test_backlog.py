"""Feeding pauses while consumers are too far behind, and goes on by itself."""

from __future__ import annotations

import threading

import pytest
from tests.unit.extractor.conftest import Bench

from taphouse.ledger import LedgerEntry
from taphouse.store import put_json
from taphouse_extractor import backlog as backlog_module
from taphouse_extractor.backlog import Backlog
from taphouse_extractor.gate import Gate


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def consumer(bench: Bench, cursor: int, name: str = "t", **more: object) -> None:
    put_json(bench.store, f"consumers/{name}.json", {"name": name, "cursor": cursor, **more})


def sealed(bench: Bench, count: int) -> list[int]:
    """Seal so many shards; bytes of all there are."""
    bench.run_all(bench.job([{"prompt": f"p{n}"} for n in range(count)], batch_size=1))
    return [entry.bytes for entry in bench.ledger.entries()]


def backlog(bench: Bench, max_bytes: int, clock: Clock | None = None) -> Backlog:
    return Backlog(bench.store, bench.ledger, max_bytes, clock or Clock())


def test_the_slowest_consumer_counts_and_the_gate_says_why(bench: Bench) -> None:
    sizes = sealed(bench, 4)
    bound = backlog(bench, sizes[2] + sizes[3])
    gate = Gate(bench.store, bench.monitors, 0, backlog=bound.problem)
    consumer(bench, 4, "fast")
    consumer(bench, 1, "slow")
    said = gate.paused()
    assert said is not None and "consumer slow has not reached" in said and f"{sum(sizes[1:])} bytes" in said
    consumer(bench, 2, "slow")
    assert gate.paused() is not None, "at the bound"
    consumer(bench, 3, "slow")
    assert gate.paused() is None
    sizes = sealed(bench, 2)
    assert gate.paused() is not None, "what landed since is counted"
    consumer(bench, 0, "fast")
    consumer(bench, 6, "slow")
    assert f"6 shards of {sum(sizes)} bytes" in (gate.paused() or ""), "a cursor that went back"


def test_without_a_consumer_all_is_unconsumed_and_one_shard_is_never_too_much(bench: Bench) -> None:
    assert backlog(bench, 1).problem() is None
    sealed(bench, 1)
    bound = backlog(bench, 1)
    assert bound.problem() is None
    sealed(bench, 1)
    assert "no consumer is registered" in (bound.problem() or "")
    assert backlog(bench, 0).problem() is None, "no bound"


def test_shards_that_are_taken_away_count_no_more(bench: Bench) -> None:
    clock = Clock()
    sizes = sealed(bench, 3)
    bound = backlog(bench, sum(sizes), clock)
    assert bound.problem() is not None
    bench.ledger.remove(2, "pruned")
    clock.now += backlog_module.RECOUNT_OVER_S
    assert bound.problem() is None


def test_a_long_ledger_is_counted_piece_by_piece(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_module, "COUNTED_AT_ONCE", 2)
    sizes = sealed(bench, 5)
    bound = backlog(bench, sum(sizes) + 1)
    assert "2 so far" in (bound.problem() or "")
    assert "4 so far" in (bound.problem() or "")
    assert bound.problem() is None


def test_a_record_that_can_not_be_read_pauses(bench: Bench) -> None:
    bench.store.put("consumers/t.json", b"not json")
    assert "t.json" in (backlog(bench, 1).problem() or "")


def test_threads_that_look_at_once_count_nothing_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reads how far the ledger is; before it counts, another counts what landed since."""
    sealed(bench, 3)
    bound, head, entry = backlog(bench, 0), bench.ledger.head, bench.ledger.entry
    assert bound.look().shards == 3
    landing = bench.job([{"prompt": "p"}])
    other, read, begun = threading.Thread(target=bound.look), list[int](), list[bool]()

    def heads() -> int:
        found = head()
        if not begun:
            begun.append(True)
            bench.run_all(landing)
            other.start()
            other.join(0.3)
        return found

    def entries(seq: int) -> LedgerEntry | None:
        read.append(seq)
        return entry(seq)

    monkeypatch.setattr(bench.ledger, "head", heads)
    monkeypatch.setattr(bench.ledger, "entry", entries)
    bound.look()
    other.join(10)
    assert [seq for seq in read if seq <= 3] == []
    assert bound.look().shards == 4
