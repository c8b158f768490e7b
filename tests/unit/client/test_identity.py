"""What a store is, by the one file at its root."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from taphouse.errors import StoreError, WrongStore
from taphouse.store import LocalStore
from taphouse.store.identity import PATH, USED, begin, begun, identity


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_an_empty_directory_becomes_a_store_once(store: LocalStore) -> None:
    (store.root / "lost+found").mkdir()  # a new file system has one
    assert identity(store) is None
    first = begin(store)
    assert begin(store) == identity(store) == begun(store) == first
    assert json.loads((store.root / PATH).read_text()) == {
        "format": "taphouse-store",
        "version": 3,
        "id": first.id,
    }
    assert begin(LocalStore(store.root.parent / "another")).id != first.id


def test_of_many_that_begin_at_once_all_are_told_the_same(store: LocalStore) -> None:
    together, told = threading.Barrier(8), []

    def one() -> None:
        together.wait()
        told.append(begin(store).id)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(told) == 8 and len(set(told)) == 1


def test_one_that_is_begun_and_used_while_it_is_looked_at_is_no_older_one(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists, told = store.exists, list[str]()

    def exists_later(path: str) -> bool:
        if not told:
            told.append(begin(LocalStore(store.root)).id)
            (store.root / "jobs").mkdir()
        return exists(path)

    monkeypatch.setattr(store, "exists", exists_later)
    assert begin(store).id == told[0]


def test_who_only_reads_makes_no_store(store: LocalStore) -> None:
    with pytest.raises(WrongStore, match=r"no store at .*store yet.*disk mounted"):
        begun(store)
    assert list(store.root.iterdir()) == []


@pytest.mark.parametrize("name", USED)
def test_one_that_was_used_and_has_no_file_is_refused(store: LocalStore, name: str) -> None:
    (store.root / name).mkdir()
    for look in (identity, begin, begun):
        with pytest.raises(WrongStore, match=r"no store\.json says of which version.*empty directory"):
            look(store)
    assert [path.name for path in store.root.iterdir()] == [name]


@pytest.mark.parametrize(
    ("left", "why"),
    [
        (
            {"format": "taphouse-store", "version": 4, "id": "0" * 32},
            "version 4; this program reads version 3",
        ),
        ({"format": "taphouse-store", "id": "0" * 32}, "version None"),
        ({"format": "other", "version": 3, "id": "0" * 32}, "can't be read"),
        ({"format": "taphouse-store", "version": 3, "id": "../x"}, "can't be read"),
        ([], "version None"),
        ("3", "version None"),
    ],
)
def test_another_version_or_a_broken_file_is_refused_and_left_as_it_is(
    store: LocalStore, left: object, why: str
) -> None:
    (store.root / PATH).write_text(json.dumps(left))
    for look in (identity, begin, begun):
        with pytest.raises(WrongStore, match=why):
            look(store)
    assert json.loads((store.root / PATH).read_text()) == left


def test_a_file_that_is_no_json_is_refused(store: LocalStore) -> None:
    (store.root / PATH).write_text("{")
    with pytest.raises(StoreError, match="no JSON"):
        begin(store)
