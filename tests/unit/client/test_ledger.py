"""The ledger among many writers and readers, and after SIGKILL at any system call."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
from pathlib import Path

import pytest
from tests.unit.client.making import make_meta, make_sample

from taphouse.errors import LedgerError
from taphouse.ledger import Ledger, LedgerEntry, Reconciliation
from taphouse.shards import ShardFacts, describe_shard, shard_name, write_shard
from taphouse.store import LocalStore


def make_facts(number: int, job_id: str = "job") -> ShardFacts:
    name = shard_name(job_id, number)
    return ShardFacts(
        shard=name,
        path=f"shards/{name}",
        bytes=1000 + number,
        raw_bytes=2000,
        sha256=f"{number:064x}",
        samples=3,
        tokens=300,
        layers=(2, 15, 30),
        num_layers=30,
        hidden_size=576,
        dtype="bfloat16",
        fingerprint_id="0" * 32,
        job_id=job_id,
        batch=number,
    )


def check_whole(store: LocalStore, shards: set[str] | None = None) -> list[LedgerEntry]:
    """No gaps, no doubles, every entry under both names; returns the entries."""
    entries = list(Ledger(store).entries())
    names = [entry.shard for entry in entries]
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    assert len(set(names)) == len(names)
    if shards is not None:
        assert set(names) == shards
    for entry in entries:
        number = store.local_path(f"ledger/{entry.seq:012d}.json")
        assert number.samefile(store.local_path(f"ledger/by-shard/{entry.shard}.json"))
    assert len(store.list("ledger/by-shard")) == len(entries)
    return entries


def test_entries_are_numbered_from_one_and_come_back(tmp_path: Path) -> None:
    ledger = Ledger(LocalStore(tmp_path))
    assert ledger.head() == 0
    assert list(ledger.entries()) == []
    first = ledger.append(make_facts(0), created_at=5.0)
    second = ledger.append(make_facts(1))
    assert (first.seq, first.created_at, second.seq) == (1, 5.0, 2)
    assert list(ledger.entries()) == [first, second]
    assert list(ledger.entries(after=1)) == [second]
    assert list(ledger.entries(after=2)) == []
    assert ledger.find(first.shard) == ledger.entry(1) == first
    assert ledger.find("other.safetensors") is ledger.entry(3) is None
    assert ledger.head() == Ledger(LocalStore(tmp_path)).head() == 2


def test_a_shard_has_one_entry_however_often_it_is_appended(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    first = Ledger(store).append(make_facts(0))
    Ledger(store).append(make_facts(1))
    changed = make_facts(0).model_copy(update={"bytes": 1})
    assert Ledger(store).append(changed) == first
    check_whole(store, {shard_name("job", 0), shard_name("job", 1)})


def test_an_entry_lies_in_the_store_as_format_md_says(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    Ledger(store).append(make_facts(7), created_at=12.5)
    assert json.loads(store.read("ledger/000000000001.json")) == {
        "version": 1,
        "seq": 1,
        "shard": "job-000007.safetensors",
        "path": "shards/job-000007.safetensors",
        "bytes": 1007,
        "raw_bytes": 2000,
        "sha256": f"{7:064x}",
        "samples": 3,
        "tokens": 300,
        "layers": [2, 15, 30],
        "num_layers": 30,
        "hidden_size": 576,
        "dtype": "bfloat16",
        "fingerprint_id": "0" * 32,
        "job_id": "job",
        "batch": 7,
        "created_at": 12.5,
    }


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 31, 100])
def test_the_head_is_found_by_a_ledger_that_is_new_to_the_store(count: int, tmp_path: Path) -> None:
    ledger = Ledger(LocalStore(tmp_path))
    for number in range(count):
        ledger.append(make_facts(number))
    assert Ledger(LocalStore(tmp_path)).head() == count


def test_a_cursor_of_another_store_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(LocalStore(tmp_path))
    ledger.append(make_facts(0))
    with pytest.raises(LedgerError, match=r"cursor 2 is past the ledger's head 1.*begin again at cursor 0"):
        list(ledger.entries(after=2))


def test_a_damaged_or_missing_entry_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    ledger = Ledger(store)
    for number in range(4):
        ledger.append(make_facts(number))
    middle = store.read("ledger/000000000003.json")
    for damage in (b"", middle[:-20], middle.replace(b'"version":1', b'"version":2'), b'{"seq":3}'):
        store.put("ledger/000000000003.json", damage)
        with pytest.raises(LedgerError, match=r"ledger entry 3 can't be read.*Restore"):
            list(ledger.entries())
    store.put("ledger/000000000003.json", store.read("ledger/000000000002.json"))
    with pytest.raises(LedgerError, match="entry 3 calls itself 2"):
        list(ledger.entries())
    store.delete("ledger/000000000003.json")
    with pytest.raises(LedgerError, match="entry 3 is missing and 4 is there"):
        list(ledger.entries())


def test_a_ledger_directory_that_lost_its_numbers_is_noticed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    Ledger(store).append(make_facts(0))
    store.delete("ledger/000000000001.json")
    with pytest.raises(LedgerError, match="which is not in the ledger"):
        Ledger(store).append(make_facts(0))


@pytest.mark.parametrize("removed", [1, 3, 6])
def test_the_number_of_a_removed_entry_is_not_given_again(removed: int, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for number in range(6):
        Ledger(store).append(make_facts(number))
    store.delete(f"ledger/{removed:012d}.json")
    with pytest.raises(LedgerError, match="numbers up to 6 were given"):
        Ledger(store).append(make_facts(6))
    assert not store.exists(f"ledger/{removed:012d}.json")


@pytest.mark.parametrize("left", [b"", b"1", b"\xff"])
def test_a_last_number_that_a_power_cut_damaged_is_no_number(left: bytes, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for number in range(12):
        Ledger(store).append(make_facts(number))
    store.put("ledger/last", left)
    assert Ledger(store).append(make_facts(12)).seq == 13
    assert store.read("ledger/last") == b"13"


def test_the_newest_entrys_second_name_is_repaired_by_the_next_append(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    Ledger(store).append(make_facts(0))
    store.delete("ledger/by-shard/job-000000.safetensors.json")
    assert Ledger(store).append(make_facts(0)).seq == 1
    store.delete("ledger/by-shard/job-000000.safetensors.json")
    assert Ledger(store).append(make_facts(1)).seq == 2
    check_whole(store, {shard_name("job", 0), shard_name("job", 1)})


def _append_some(root: str, numbers: list[int]) -> None:
    ledger = Ledger(LocalStore(root))
    for number in numbers:
        ledger.append(make_facts(number))


def test_many_processes_append_the_same_and_different_shards(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    random.seed(3)
    context = multiprocessing.get_context("fork")
    processes = []
    for worker in range(6):
        numbers = [*range(10), *range(100 + 10 * worker, 110 + 10 * worker)]
        random.shuffle(numbers)
        processes.append(context.Process(target=_append_some, args=(str(tmp_path), numbers)))
    for process in processes:
        process.start()
    followed = _follow(store, 70)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    entries = check_whole(store, {shard_name("job", n) for n in [*range(10), *range(100, 160)]})
    assert followed == entries


def _follow(store: LocalStore, count: int) -> list[LedgerEntry]:
    """What a reader that polls with its cursor while the ledger grows sees, until it has `count` entries."""
    ledger, seen = Ledger(store), list[LedgerEntry]()
    while len(seen) < count:
        seen.extend(ledger.entries(after=seen[-1].seq if seen else 0))
    return seen


def test_threads_share_a_ledger(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    ledger = Ledger(store)
    threads = [
        threading.Thread(target=lambda n=n: [ledger.append(make_facts(i)) for i in (n, 99, 10 + n)])
        for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_whole(store, {shard_name("job", n) for n in [*range(6), *range(10, 16), 99]})


CALLS = ("open", "link", "fsync", "unlink", "mkdir", "close")


def _fork_writer(root: Path, numbers: list[int], due: int, when: str, told: Path) -> int:
    """Fork a process that appends shards and kills itself before or after its `due`-th system call.

    It counts the calls named in `CALLS`. What it was told is durable it writes to the file `told`, a line an
    entry. Returns its pid.
    """
    pid = os.fork()
    if pid:
        return pid
    made = 0

    def wrap(function):  # type: ignore[no-untyped-def]
        def call(*arguments, **options):  # type: ignore[no-untyped-def]
            nonlocal made
            made += 1
            if made == due and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*arguments, **options)
            if made == due:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    status = 1
    try:
        acknowledge = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for name in CALLS:
            setattr(os, name, wrap(getattr(os, name)))
        ledger = Ledger(LocalStore(root))
        for number in numbers:
            entry = ledger.append(make_facts(number))
            os.write(acknowledge, f"{entry.seq} {entry.shard}\n".encode())
        status = 0
    finally:
        os._exit(status)


def _was_killed(pid: int) -> bool:
    """Wait for a forked writer; it either ended well or killed itself."""
    status = os.waitpid(pid, 0)[1]
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
    return status != 0


def test_a_kill_at_any_step_of_an_append_leaves_the_ledger_whole(tmp_path: Path) -> None:
    killed = 0
    for when in ("before", "after"):
        for due in range(1, 200):
            root = tmp_path / f"{when}-{due}"
            store = LocalStore(root)
            Ledger(store).append(make_facts(0))
            if not _was_killed(_fork_writer(root, [1], due, when, tmp_path / "told")):
                break
            killed += 1
            assert Ledger(store).append(make_facts(1)).seq == 2
            assert Ledger(store).append(make_facts(2)).seq == 3
            check_whole(store, {shard_name("job", n) for n in range(3)})
    assert killed >= 20  # at least ten calls make an append


@pytest.mark.parametrize("seed", range(6))
def test_writers_killed_at_random_lose_nothing_they_acknowledged(seed: int, tmp_path: Path) -> None:
    """Three writers at a time, each killed somewhere; an entry one was given keeps its number for ever."""
    rng = random.Random(seed)
    store = LocalStore(tmp_path / "store")
    told = tmp_path / "told"
    killed = 0
    for _ in range(8):
        writers = [
            _fork_writer(
                store.root,
                rng.sample(range(20), 5),
                rng.randrange(1, 60),
                rng.choice(["before", "after"]),
                told,
            )
            for _ in range(3)
        ]
        killed += sum([_was_killed(pid) for pid in writers])
    assert killed
    for number in range(20):
        Ledger(store).append(make_facts(number))
    entries = {
        entry.shard: entry.seq for entry in check_whole(store, {make_facts(n).shard for n in range(20)})
    }
    acknowledged = [line.split() for line in told.read_text().splitlines()]
    assert acknowledged
    for seq, shard in acknowledged:
        assert entries[shard] == int(seq)


@pytest.mark.parametrize("cut_short", [False, True])
def test_a_shard_that_was_lost_and_made_again_keeps_its_number(cut_short: bool, tmp_path: Path) -> None:
    store, name = LocalStore(tmp_path), shard_name("job", 0)
    ledger = Ledger(store)
    first = ledger.append(write_shard(store, name, [make_sample(0)], make_meta(batch=0)))
    ledger.append(write_shard(store, shard_name("job", 1), [make_sample(1)], make_meta(batch=1)))
    before = store.read(f"ledger/by-shard/{name}.json")
    store.delete(f"shards/{name}")
    facts = write_shard(store, name, [make_sample(0), make_sample(2)], make_meta(batch=0))
    assert facts.sha256 != first.sha256
    again = ledger.append(facts)
    if cut_short:  # between the two names of the entry
        store.put(f"ledger/by-shard/{name}.json", before)
        assert ledger.append(facts) == again
    assert (again.seq, again.created_at, again.sha256) == (1, first.created_at, facts.sha256)
    assert ledger.find(name) == ledger.entry(1) == Ledger(store).append(facts) == again
    assert ledger.reconcile() == Reconciliation((), (), ())
    assert [entry.shard for entry in ledger.entries()] == [name, shard_name("job", 1)]


def test_reconcile_adds_what_was_sealed_and_names_what_is_gone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    ledger = Ledger(store)
    for batch in (2, 0, 1, 3):
        meta = make_meta(batch=batch)
        facts = write_shard(store, shard_name("job", batch), [make_sample(batch)], meta)
        if batch in (1, 3):
            ledger.append(facts)
    store.delete(f"shards/{shard_name('job', 3)}")
    store.put(f"shards/{shard_name('job', 4)}", b"no shard")
    store.put("shards/notes.txt", b"not ours")
    long = "a" * 187 + ".safetensors"
    store.put(f"shards/{long}", b"a name that takes no .json")
    result = ledger.reconcile()
    assert [(entry.seq, entry.batch) for entry in result.added] == [(3, 0), (4, 2)]
    assert [entry.batch for entry in result.missing] == [3]
    assert [name for name, _ in result.refused] == [long, shard_name("job", 4)]
    path = f"shards/{shard_name('job', 2)}"
    facts = ShardFacts(
        **result.added[1].model_dump(exclude={"version", "seq", "created_at", "gone", "replaces"})
    )
    assert facts == describe_shard(store.local_path(path), path=path)
    again = ledger.reconcile()
    assert (again.added, again.missing, again.refused) == ((), result.missing, result.refused)
    check_whole(store)


def test_reconcile_after_a_kill_between_the_two_names_adds_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    ledger = Ledger(store)
    ledger.append(write_shard(store, shard_name("job", 0), [make_sample()], make_meta()))
    store.delete(f"ledger/by-shard/{shard_name('job', 0)}.json")
    assert ledger.reconcile().added == ()
    check_whole(store, {shard_name("job", 0)})


def test_a_lost_ledger_is_rebuilt_from_the_shards(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for batch in range(3):
        write_shard(store, shard_name("job", batch), [make_sample(batch)], make_meta(batch=batch))
    added = Ledger(store).reconcile().added
    assert [(entry.seq, entry.batch) for entry in added] == [(1, 0), (2, 1), (3, 2)]
    check_whole(store)
