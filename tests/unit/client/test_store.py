"""The store on a directory: safe paths, exclusive and replacing writes, full and read-only file systems."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from tests.unit.client.making import make_meta, make_sample

from taphouse.errors import NotInStore, StoreBusy, StoreDenied, StoreError, StoreFull, UnsafePath
from taphouse.shards import ShardWriter
from taphouse.store import LocalStore, put_json, put_json_new, read_json

REPOSITORY = Path(__file__).parents[3]


def everything(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_objects_come_back(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "a" / "store")
    store.put("jobs/j1/job.json", b"one")
    store.put("jobs/j1/job.json", b"two")
    store.put("jobs/j1/quick", b"three", durable=False)
    assert store.read("jobs/j1/job.json") == b"two"
    with store.open("jobs/j1/quick") as file:
        assert file.read() == b"three"
    assert store.list("jobs") == ["j1"]
    assert store.list("jobs/j1") == ["job.json", "quick"]
    assert store.list("nothing") == []
    assert store.size("jobs/j1/quick") == 5
    assert abs(store.modified("jobs/j1/quick") - time.time()) < 60
    assert store.exists("jobs/j1")
    assert store.delete("jobs/j1/quick")
    assert not store.delete("jobs/j1/quick")
    assert not store.exists("jobs/j1/quick")
    assert store.free_bytes() > 0
    assert everything(store.root) == ["jobs/j1/job.json"]


def test_what_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for use in (store.read, store.open, store.size, store.modified, store.flush):
        with pytest.raises(NotInStore, match="jobs/x"):
            use("jobs/x")
    with pytest.raises(NotInStore):
        store.link("jobs/x", "jobs/y")
    with pytest.raises(NotInStore, match="no store at"):
        LocalStore(tmp_path / "none", create=False)


def test_a_store_that_was_removed_or_unmounted_is_not_made_anew(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.root.rmdir()
    for use in (
        lambda: store.put("a/b", b""),
        lambda: store.put_new("a/b", b""),
        lambda: store.create("a/b"),
        lambda: store.link("a/b", "a/c"),
        lambda: store.lock("lock").__enter__(),
    ):
        with pytest.raises(NotInStore, match=r"is gone\. Was it removed or unmounted"):
            use()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "..",
        "../x",
        "a/../../x",
        "a/./b",
        "a//b",
        "a/",
        "./a",
        ".hidden",
        "a/.tmp-1",
        "a\\b",
        "a\0b",
        "a\nb",
        "a b",
        "-x",
        "~root",
        "größe",
        "x" * 201,
        "a\n",
    ],
)
def test_a_path_that_is_not_plain_is_refused_by_every_method(path: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    uses: list[Callable[[], object]] = [
        lambda: store.read(path),
        lambda: store.open(path),
        lambda: store.put(path, b""),
        lambda: store.put_new(path, b""),
        lambda: store.create(path),
        lambda: store.link("a", path),
        lambda: store.link(path, "a"),
        lambda: store.exists(path),
        lambda: store.list(path),
        lambda: store.delete(path),
        lambda: store.drop(path),
        lambda: store.lock(path).__enter__(),
        lambda: store.local_path(path),
    ]
    for use in uses:
        with pytest.raises(UnsafePath):
            use()
    assert everything(tmp_path) == []


def test_an_exclusive_put_has_one_winner(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    start = threading.Barrier(8)
    won: list[int] = []

    def put(number: int) -> None:
        start.wait()
        if store.put_new("a/b", bytes([number]) * 1000):
            won.append(number)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read("a/b") == bytes(won) * 1000
    assert everything(tmp_path) == ["a/b"]


def test_readers_see_old_or_new_never_half(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("x", b"a" * 100_000)
    stop = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not stop.is_set():
            seen.add(store.read("x"))

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(100):
        store.put("x", (b"b", b"a")[number % 2] * 100_000, durable=False)
    stop.set()
    thread.join()
    assert seen <= {b"a" * 100_000, b"b" * 100_000}


def test_a_link_is_a_second_name_of_the_same_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"x")
    assert store.link("a", "names/b")
    assert not store.link("a", "names/b")
    assert store.local_path("a").samefile(store.local_path("names/b"))


def test_a_staged_file_is_invisible_until_it_is_sealed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with store.create("d/a") as staged:
        staged.write(b"12")
        staged.write(memoryview(b"34"))
        assert store.list("d") == []
        assert staged.seal()
        with pytest.raises(StoreError, match="sealed or dropped"):
            staged.seal()
    with store.create("d/a") as second:
        second.write(b"other")
        assert not second.seal()
    with store.create("d/b") as dropped:
        dropped.write(b"x")
    assert store.read("d/a") == b"1234"
    assert everything(tmp_path) == ["d/a"]


def test_a_lock_excludes_threads_and_processes(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    child = textwrap.dedent(f"""
        from taphouse.store import LocalStore
        store = LocalStore({str(tmp_path)!r})
        for _ in range(50):
            with store.lock("lock"):
                count = int(store.read("count"))
                store.put("count", str(count + 1).encode(), durable=False)
    """)
    store.put("count", b"0")

    def work() -> None:
        for _ in range(50):
            with store.lock("lock"):
                count = int(store.read("count"))
                store.put("count", str(count + 1).encode(), durable=False)

    children = [subprocess.Popen([sys.executable, "-c", child]) for _ in range(2)]
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait() for process in children] == [0, 0]
    assert store.read("count") == b"200"


def test_a_lock_that_is_not_waited_for_is_refused_until_its_holder_is_killed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    holder = f"""
import time
from taphouse.store import LocalStore
with LocalStore({str(tmp_path)!r}).lock("d/lock", wait=False):
    print("held", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(StoreBusy, match="d/lock"), store.lock("d/lock", wait=False):
            pass
        process.kill()
    for _ in range(2):
        with store.lock("d/lock", wait=False):
            pass


def test_temporaries_of_killed_writers_are_swept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("jobs/a", b"x")
    stale, fresh = tmp_path / "jobs" / ".tmp-1-dead", tmp_path / "jobs" / ".tmp-2-alive"
    stale.write_bytes(b"x")
    fresh.write_bytes(b"x")
    os.utime(stale, (1, 1))
    assert store.list("jobs") == ["a"]
    assert store.sweep_temporaries() == 1
    assert everything(tmp_path) == ["jobs/.tmp-2-alive", "jobs/a"]


def test_a_directory_is_dropped_with_what_killed_writers_left_and_nothing_else(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b/c", b"")
    (tmp_path / "a/b/.tmp-1").write_bytes(b"half")
    assert not store.drop("a") and not store.drop("a/b") and not store.drop("none")
    assert everything(tmp_path) == ["a/b/.tmp-1", "a/b/c"]
    store.delete("a/b/c")
    assert store.drop("a/b") and store.drop("a")
    assert list(tmp_path.iterdir()) == []


def test_json_lies_in_one_form(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    put_json(store, "a.json", {"b": 1, "a": [None, "ü"]})
    assert store.read("a.json") == b'{"a":[null,"\\u00fc"],"b":1}\n'
    assert read_json(store, "a.json") == {"b": 1, "a": [None, "ü"]}
    assert not put_json_new(store, "a.json", {})
    store.put("b.json", b"{")
    with pytest.raises(StoreError, match=r"b\.json is no JSON"):
        read_json(store, "b.json")
    with pytest.raises(ValueError, match="Out of range float"):
        put_json(store, "c.json", float("nan"))


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A directory that other users can enter; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


WRITES: dict[str, Callable[[LocalStore], object]] = {
    "put": lambda store: store.put("new/a", b"x" * 100_000),
    "put_new": lambda store: store.put_new("new/a", b"x" * 100_000),
    "replace": lambda store: store.put("old", b"x" * 100_000),
    "shard": lambda store: write_one_shard(store),
}


def write_one_shard(store: LocalStore) -> None:
    with store.create("new/a") as staged, ShardWriter(staged, make_meta()) as writer:
        writer.add(make_sample(0, 2000))
        writer.seal()


@pytest.mark.parametrize("write", WRITES)
def test_a_file_size_limit_is_a_clear_error_and_leaves_nothing(write: str, tmp_path: Path) -> None:
    """The kernel refuses the write for real (RLIMIT_FSIZE), in a process of its own."""
    store = LocalStore(tmp_path)
    store.put("old", b"old")
    child = textwrap.dedent(f"""
        import resource
        from taphouse.errors import StoreFull
        from taphouse.store import LocalStore
        from tests.unit.client.test_store import WRITES
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            WRITES[{write!r}](LocalStore({str(tmp_path)!r}))
        except StoreFull as error:
            print(error)
    """)
    done = subprocess.run(
        [sys.executable, "-c", child],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
    )
    assert "can't be written: File too large. Free some space" in done.stdout
    assert everything(tmp_path) == ["old"]
    assert store.read("old") == b"old"


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("function", ["fsync", "open"])
def test_a_full_disk_that_shows_late_is_a_clear_error_too(
    write: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems say "no space" when flushing, or when a directory has to grow."""
    store = LocalStore(tmp_path)
    store.put("old", b"old")
    (tmp_path / "new").mkdir()

    def no_space(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        if function == "fsync":
            patched.setattr(os, "fsync", no_space)
        else:
            patched.setattr(Path, "open", no_space)
        with pytest.raises(StoreFull, match="No space left"):
            WRITES[write](store)
    assert everything(tmp_path) == ["old"]
    assert store.read("old") == b"old"


def test_a_real_full_file_system(tmp_path: Path) -> None:
    """On a tmpfs of 256 KB, where the machine lets us mount one."""
    child = textwrap.dedent(f"""
        import subprocess, sys
        from taphouse.errors import StoreFull
        from taphouse.store import LocalStore
        from tests.unit.client.test_store import WRITES, everything
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", {str(tmp_path)!r}])
        if mounted.returncode:
            sys.exit(77)
        store = LocalStore({str(tmp_path)!r})
        store.put("old", b"old")
        store.put("filler", b"x" * 200_000)
        for write in WRITES.values():
            try:
                write(store)
            except StoreFull as error:
                print(error)
        assert everything(store.root) == ["filler", "old"], everything(store.root)
        assert store.read("old") == b"old"
    """)
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", sys.executable, "-c", child],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("No space left on device. Free some space") == len(WRITES)


@pytest.mark.parametrize("write", WRITES)
def test_a_directory_that_may_not_be_written_is_a_clear_error(write: str, public_path: Path) -> None:
    """As a user who is not root: modes mean nothing to root."""
    store = LocalStore(public_path / "store")
    store.put("old", b"old")
    store.root.chmod(0o555)
    child = textwrap.dedent(f"""
        import os
        from taphouse.errors import StoreDenied
        from taphouse.store import LocalStore
        from tests.unit.client.test_store import WRITES
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            WRITES[{write!r}](LocalStore({str(store.root)!r}))
        except StoreDenied as error:
            print(error)
    """)
    done = subprocess.run(
        [sys.executable, "-c", child],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
    )
    store.root.chmod(0o755)
    assert "Permission denied. Check owner, mode and mount of the store" in done.stdout
    assert everything(store.root) == ["old"]


def test_a_file_system_without_hard_links_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)

    def no_links(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StoreError, match=r"no hard links .*Put the store on a file system that has them"):
        store.put_new("a", b"x")
    assert everything(tmp_path) == []


def test_a_read_only_file_system_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)

    def read_only(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(StoreDenied, match="Read-only"):
        store.put("a", b"x")
    assert everything(tmp_path) == []
