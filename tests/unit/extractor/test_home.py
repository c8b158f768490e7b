"""A process and its store belong together: by the store's id, which Redis knows."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from tests.unit.extractor.conftest import Bench
from tests.unit.extractor.governed import Clock
from tests.unit.extractor.governing import FakeRedis

from taphouse.errors import WrongStore
from taphouse.store import LocalStore
from taphouse.store.identity import PATH, identity
from taphouse_extractor.errors import NotAccepting
from taphouse_extractor.gate import Gate
from taphouse_extractor.home import CHECK_EVERY_S, Home

KEY = "p:store"


@pytest.fixture
def fake() -> FakeRedis:
    return FakeRedis()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def unmount(store: LocalStore) -> Path:
    """The store's directory is an empty mount point; its disk is what is returned."""
    disk = store.root.rename(store.root.with_name("disk"))
    store.root.mkdir()
    return disk


def mount(store: LocalStore, disk: Path) -> None:
    store.root.rmdir()
    disk.rename(store.root)


def test_a_new_store_is_made_known_and_known_again_after_a_wipe(store: LocalStore, fake: FakeRedis) -> None:
    home = Home(store, fake, prefix="p")
    home.enter()
    found = identity(store)
    assert found is not None and fake.values[KEY] == found.id
    Home(store, fake, prefix="p").enter()
    fake.values.clear()
    home.check()
    assert fake.values[KEY] == found.id and home.problem() is None


def test_a_mount_point_without_its_disk_is_refused_and_left_empty(store: LocalStore, fake: FakeRedis) -> None:
    Home(store, fake, prefix="p").enter()
    disk = unmount(store)
    with pytest.raises(WrongStore, match=r"is empty, and Redis holds .*Is its disk mounted.*DEL p:store"):
        Home(store, fake, prefix="p").enter()
    assert list(store.root.iterdir()) == []
    mount(store, disk)
    Home(store, fake, prefix="p").enter()


def test_another_store_needs_a_queue_of_its_own_or_a_word(tmp_path: Path, fake: FakeRedis) -> None:
    one, other = LocalStore(tmp_path / "one"), LocalStore(tmp_path / "other")
    Home(one, fake, prefix="p").enter()
    Home(other, fake, prefix="q").enter()
    with pytest.raises(WrongStore, match=r"is store \w{32}, and Redis holds the queue of store \w{32}"):
        Home(other, fake, prefix="p").enter()
    del fake.values[KEY]
    Home(other, fake, prefix="p").enter()
    with pytest.raises(WrongStore):
        Home(one, fake, prefix="p").enter()


def test_without_redis_a_store_is_known_and_a_new_one_is_not_begun(
    store: LocalStore, fake: FakeRedis
) -> None:
    fake.away = True
    home = Home(store, fake, prefix="p")
    with pytest.raises(redis.ConnectionError):
        home.enter()
    with pytest.raises(WrongStore, match="Redis can't be asked if it knows another: away"):
        home.enter_if_known()
    assert list(store.root.iterdir()) == []
    fake.away = False
    home.enter()
    fake.away = True
    later = Home(store, fake, prefix="p")
    later.enter_if_known()
    assert later.problem() is None
    fake.away = False
    later.check()


def test_one_that_began_without_redis_is_stopped_by_it(tmp_path: Path, fake: FakeRedis) -> None:
    store, clock = LocalStore(tmp_path / "one"), Clock()
    Home(store, fake, prefix="q").enter()
    home = Home(store, fake, prefix="p", clock=clock)
    fake.away = True
    home.enter_if_known()
    fake.away = False
    fake.values[KEY] = "f" * 32
    assert "Redis holds the queue of store " + "f" * 32 in (home.problem() or "")
    del fake.values[KEY]
    clock.now += CHECK_EVERY_S
    assert home.problem() is None


def test_what_redis_said_stands_while_it_is_away(store: LocalStore, fake: FakeRedis) -> None:
    clock = Clock()
    home = Home(store, fake, prefix="p", clock=clock)
    home.enter()
    fake.values[KEY] = "f" * 32
    clock.now += CHECK_EVERY_S
    said = home.problem()
    assert "Redis holds the queue of store " + "f" * 32 in (said or "")
    fake.away = True
    clock.now += CHECK_EVERY_S
    assert home.problem() == said


def test_a_disk_that_goes_away_under_a_service_without_jobs(bench: Bench, fake: FakeRedis) -> None:
    clock = Clock()
    home = Home(bench.store, fake, prefix="p", clock=clock)
    home.enter()
    gate = Gate(bench.store, bench.monitors, 0, home=home.problem)
    assert gate.disk_problem() is None
    disk = unmount(bench.store)
    with pytest.raises(NotAccepting, match="is empty, and this process began with store"):
        gate.admit()
    assert list(bench.store.root.iterdir()) == [], "not even the probe is written there"
    with pytest.raises(WrongStore, match="unmounted"):
        home.check()
    mount(bench.store, disk)
    gate.admit()


def test_another_store_under_a_running_process(store: LocalStore, fake: FakeRedis) -> None:
    home = Home(store, fake, prefix="p")
    home.enter()
    (store.root / PATH).write_text('{"format":"taphouse-store","id":"%s","version":3}' % ("0" * 32))
    with pytest.raises(WrongStore, match=f"is store {'0' * 32}, and this process began with"):
        home.check()
