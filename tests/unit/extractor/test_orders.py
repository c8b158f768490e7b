"""The operator's order is the store's: it outlives processes, and an unreadable store changes nothing."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path

import pytest
from tests.unit.extractor.governing import FakeRedis

from taphouse.errors import StoreError
from taphouse.store import LocalStore
from taphouse.wire import GovernorMode, GovernorOrder
from taphouse_extractor.governor.orders import PATH, Orders
from taphouse_extractor.governor.state import AUTO, Order
from taphouse_extractor.home import Home

STOP = GovernorOrder(mode=GovernorMode.STOPPED)
PIN = GovernorOrder(mode=GovernorMode.PINNED, busy_ms=1.5)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_it_is_auto_until_one_is_given_which_every_process_finds(store: LocalStore) -> None:
    mine = Orders(store)
    assert mine.now() == AUTO
    theirs = Orders(store)
    mine.give(PIN)
    assert mine.now() == Order(GovernorMode.PINNED, 1.5) == Orders(store).now()
    assert theirs.now() == AUTO and theirs.look() == Order(GovernorMode.PINNED, 1.5) == theirs.now()


def test_a_thread_finds_what_another_process_was_told(store: LocalStore) -> None:
    orders, stop = Orders(store), threading.Event()
    thread = threading.Thread(target=orders.run, args=(stop,))
    thread.start()
    Orders(store).give(STOP)
    deadline = time.monotonic() + 10
    while orders.now().mode is not GovernorMode.STOPPED and time.monotonic() < deadline:
        time.sleep(0.02)
    stop.set()
    thread.join(5)
    assert orders.now() == Order(GovernorMode.STOPPED) and not thread.is_alive()


@pytest.mark.parametrize("left", ["[]", '{"mode":"fast"}', '{"mode":"pinned"}', "", "{"])
def test_one_that_can_not_be_read_leaves_the_last_one_in_force(
    store: LocalStore, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    orders = Orders(store)
    orders.give(PIN)
    store.put(PATH, left.encode())
    with caplog.at_level(logging.ERROR):
        assert [orders.look().busy_ms for _ in range(3)] == [1.5] * 3
        anew = Orders(store)  # a process that never knew: it may have been a stop
    assert (anew.now().mode, anew.now().why[:46]) == (
        GovernorMode.STOPPED,
        "stopped, since the operator's order can't be r",
    )
    assert [record.message[:56] for record in caplog.records] == [
        "the operator's order can't be read, pinned stays in forc",
        "the operator's order can't be read, nothing is extracted",
    ]
    anew.give(GovernorOrder(mode=GovernorMode.AUTO))
    assert anew.now() == AUTO == orders.look()


def test_a_store_that_goes_away_leaves_a_stop_in_force(store: LocalStore) -> None:
    orders = Orders(store)
    orders.give(STOP)
    shutil.rmtree(store.root)
    assert orders.look() == Order(GovernorMode.STOPPED)
    with pytest.raises(StoreError, match="gone"):
        orders.give(GovernorOrder(mode=GovernorMode.AUTO))
    store.root.mkdir()  # an empty mount point
    assert orders.look() == Order(GovernorMode.STOPPED) == orders.now()


def test_an_order_is_not_kept_in_a_mount_point_without_its_disk(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    home = Home(store, FakeRedis(), prefix="p")
    home.enter()
    orders = Orders(store, home.problem)
    disk = store.root.rename(tmp_path / "disk")
    store.root.mkdir()
    with pytest.raises(StoreError, match="unmounted"):
        orders.give(STOP)
    assert orders.now() == AUTO and list(store.root.iterdir()) == []
    store.root.rmdir()
    disk.rename(store.root)
    orders.give(STOP)
    assert Orders(store).now() == Order(GovernorMode.STOPPED)
