"""A directory that is listed again only when it may have changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from taphouse.store import Listing, LocalStore
from taphouse.store import listing as listing_module


class Clock:
    """`time` as listings see it."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


class CountingStore(LocalStore):
    """Counts how often it lists."""

    listed = 0

    def list(self, directory: str) -> list[str]:
        self.listed += 1
        return super().list(directory)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(listing_module, "time", clock)
    return clock


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path)


def test_names_are_news_until_they_have_settled(store: CountingStore, clock: Clock) -> None:
    listing = Listing(store, "things")
    assert listing.news() == []
    store.put("things/b", b"")
    assert listing.news() == ["b"]
    clock.now += 1.0
    assert listing.news() == ["b"]
    assert not listing.quiet()
    clock.now += 1.0
    assert listing.news() == ["b"]
    clock.now += 100.0
    listed = store.listed
    assert listing.news() is None and listing.quiet() and store.listed == listed
    store.put("things/a", b"")
    assert not listing.quiet(), "and it is still news"
    assert listing.news() == ["a", "b"]
    store.delete("things/b")
    assert listing.news() == ["a"]


def test_a_change_in_the_same_tick_is_seen(store: CountingStore, clock: Clock) -> None:
    """The file system's clock stood still between the two."""
    store.put("things/a", b"")
    listing = Listing(store, "things")
    stamp = store.stamp("things")
    assert stamp is not None and listing.news() == ["a"]
    store.put("things/b", b"")
    os.utime(store.local_path("things"), ns=(stamp[0], stamp[0]))
    assert store.stamp("things") == stamp
    clock.now += 0.5
    assert listing.news() == ["a", "b"]


def test_a_directory_made_anew_is_news_whatever_its_time(store: CountingStore, clock: Clock) -> None:
    store.put("things/a", b"")
    listing = Listing(store, "things")
    for _ in range(2):
        assert listing.news() == ["a"]
        clock.now += 10.0
    assert listing.news() is None
    directory = store.local_path("things")
    moved = directory.rename(directory.with_name("old"))
    assert listing.news() == [] and listing.news() == []
    store.put("things/c", b"")
    os.utime(directory, ns=(0, moved.stat().st_mtime_ns))
    assert listing.news() == ["c"]
