"""A disk that goes away under the service: nobody is told that what lies on it isn't there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.extractor.conftest import Bench, Service
from tests.unit.extractor.governing import FakeRedis

from taphouse.client import Taphouse
from taphouse.errors import Unavailable, WrongStore
from taphouse.wire import PruneRequest, SampleQuery
from taphouse_extractor.home import Home
from taphouse_extractor.retention import Retention, RetentionPolicy

ANN = SampleQuery(user="ann")
ASKED: list[Callable[[Taphouse], object]] = [
    lambda client: client.find_samples(ANN),
    lambda client: client.delete_samples(ANN),
    lambda client: client.shards(),
    lambda client: client.prune_shards(PruneRequest(force=True)),
    lambda client: client.forget_consumer("a-trainer"),
    lambda client: client.jobs(),
    lambda client: list(client.failures("j20260101000000-0a1b2c3d")),
    lambda client: client.enqueue([b'{"prompt":"a"}']),
]


@pytest.fixture
def home(bench: Bench) -> Home:
    home = Home(bench.store, FakeRedis(), prefix="p")
    home.enter()
    return home


def unmount(bench: Bench) -> None:
    bench.store.root.rename(bench.store.root.with_name("disk"))
    bench.store.root.mkdir()


@pytest.mark.parametrize("ask", ASKED)
def test_samples_and_shards_are_not_said_to_be_none(
    serve: Callable[..., Service], bench: Bench, home: Home, ask: Callable[[Taphouse], object]
) -> None:
    service = serve(home=home.problem)
    bench.run_all(bench.job([{"prompt": "a", "user": "ann"}]))
    assert service.client.find_samples(ANN).rows == 1
    unmount(bench)
    with pytest.raises(Unavailable, match="is empty, and this process began with store"):
        ask(service.client)
    assert list(bench.store.root.iterdir()) == []


def test_retention_leaves_it_alone(bench: Bench, home: Home) -> None:
    retention = Retention(bench.records, bench.ledger, RetentionPolicy("consumed"), wrong=home.problem)
    assert retention.step().shards == 0
    unmount(bench)
    with pytest.raises(WrongStore, match="unmounted"):
        retention.step()
    assert list(bench.store.root.iterdir()) == []
