"""The start directory: who may use it, how starts live and die, how space is claimed and released."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from taphouse.slices import (
    BadOptIn,
    Claim,
    DirectoryFull,
    OptIn,
    UnsafeDirectory,
    fingerprint_id,
    new_tag,
    open_start,
    read_records,
    release,
    start_id_of,
    sweep_dead_starts,
    verify_opt_in,
)


def claim(nbytes: int = 10, tag: str | None = None) -> Claim:
    return Claim(tag or new_tag(), nbytes, time.time(), 4, 8)


def test_every_process_gets_the_same_directory_and_secret(tmp_path: Path) -> None:
    one = open_start(tmp_path / "s", "ab123")
    two = open_start(tmp_path / "s", "ab123_dp1")
    assert one.directory == two.directory == tmp_path / "s" / "start-ab123"
    assert one.secret == two.secret and len(one.secret) == 32
    assert (one.directory.stat().st_mode & 0o777, (one.directory / "secret").stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )
    one.close()
    assert two.directory.exists()
    two.close()
    assert not two.directory.exists()


def test_claims_that_cannot_be_written_leave_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, written = open_start(tmp_path / "s", "ab123"), []

    def write(path: Path, text: str) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_text(text)
        written.append(path)

    monkeypatch.setattr("taphouse.slices.start.write_atomically", write)
    with pytest.raises(DirectoryFull, match="No space left"):
        start.reserve_all([claim() for _ in range(5)], 1000)
    assert written and start.claims() == []


def _open_and_tell(path: Path, pipe: multiprocessing.connection.Connection) -> None:  # type: ignore[name-defined]
    start = open_start(path, "race")
    pipe.send(start.secret)
    pipe.recv()


def test_processes_that_race_agree_on_the_secret(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for _ in range(8):
        mine, theirs = context.Pipe()
        process = context.Process(target=_open_and_tell, args=(tmp_path / "s", theirs))
        process.start()
        pipes.append(mine)
        processes.append(process)
    secrets = {pipe.recv() for pipe in pipes}
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    assert len(secrets) == 1
    assert sweep_dead_starts(tmp_path / "s") == ["race"]


def test_dead_starts_are_swept_and_living_ones_are_not(tmp_path: Path) -> None:
    living = open_start(tmp_path, "living")
    dead = tmp_path / "start-dead"
    dead.mkdir(mode=0o700)
    (dead / "lock").touch()
    (dead / "x.slice").write_bytes(b"left over")
    newborn = tmp_path / "start-newborn"
    newborn.mkdir(mode=0o700)
    other = open_start(tmp_path, "other")
    assert not dead.exists()
    assert newborn.exists()
    assert living.directory.exists() and other.directory.exists()
    os.utime(newborn, (0, 0))
    assert sweep_dead_starts(tmp_path) == ["newborn"]


def test_a_restart_with_the_id_of_a_dead_start_finds_nothing_of_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=_open_and_tell, args=(tmp_path, theirs))
    process.start()
    secret = mine.recv()
    (tmp_path / "start-race" / f"{new_tag()}.claim").write_text("{}")
    process.kill()
    process.join()
    start = open_start(tmp_path, "race")
    assert start.secret != secret
    assert start.claims() == []


def test_directories_of_others_links_and_open_modes_are_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(real)
    with pytest.raises(UnsafeDirectory, match="symbolic link"):
        open_start(link, "a")
    (real / "start-b").symlink_to(tmp_path)
    with pytest.raises(UnsafeDirectory, match="symbolic link"):
        open_start(real, "b")
    wide = tmp_path / "wide"
    wide.mkdir()
    wide.chmod(0o755)
    with pytest.raises(UnsafeDirectory, match="open to others"):
        open_start(wide, "a")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UnsafeDirectory, match="not a directory"):
        open_start(file, "a")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, 12345)
    with pytest.raises(UnsafeDirectory, match="belongs to user 12345"):
        open_start(theirs, "a")


@pytest.mark.parametrize("bad", ["", "../x", "a/b", ".hidden", "a" * 65, "a b"])
def test_an_instance_id_that_is_no_file_name_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="instance id"):
        start_id_of(bad)


def test_claims_are_bounded_and_released(tmp_path: Path) -> None:
    start = open_start(tmp_path, "a")
    first, second = claim(60), claim(40)
    start.reserve(first, 100)
    start.reserve(second, 100)
    with pytest.raises(DirectoryFull, match="100 of 100"):
        start.reserve(claim(1), 100)
    assert {c.tag for c in start.claims()} == {first.tag, second.tag}
    (start.directory / f"{first.tag}.t0.slice").write_bytes(b"x")
    (start.directory / f"{first.tag}.t1.part").write_bytes(b"x")
    start.release(first.tag)
    release(start.directory, first.tag)
    assert [c.tag for c in start.claims()] == [second.tag]
    assert not list(start.directory.glob(f"{first.tag}*"))
    with pytest.raises(DirectoryFull, match="file system"):
        start.reserve(claim(1 << 60), 1 << 62)


@pytest.mark.parametrize("bad", ["*", "../../etc/passwd", "A" * 32, "", "0" * 31])
def test_release_takes_tags_only(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ValueError, match="not a tag"):
        release(tmp_path, bad)


def test_old_captures_expire_and_touched_ones_stay(tmp_path: Path) -> None:
    start = open_start(tmp_path, "a")
    old, touched, writing = claim(), claim(), claim()
    for c in (old, touched, writing):
        start.reserve(c, 100)
        os.utime(start.directory / f"{c.tag}.claim", (1000, 1000))
    start.touch(touched.tag)
    (start.directory / f"{writing.tag}.t0.part").touch()
    orphan = new_tag()
    (start.directory / f"{orphan}.t0.slice").touch()
    os.utime(start.directory / f"{orphan}.t0.slice", (1000, 1000))
    assert set(start.expire(60)) == {old.tag, orphan}
    assert {c.tag for c in start.claims()} == {touched.tag, writing.tag}
    assert (start.directory / "secret").exists()


def test_records_come_back_by_rank(tmp_path: Path) -> None:
    start = open_start(tmp_path, "a")
    for rank in (10, 2, 0):
        start.write_record({"dp_rank": 0, "tp_rank": rank, "capture": "on"})
    (start.directory / "d0-t3.json").write_text("{ torn")
    assert [r["tp_rank"] for r in read_records(start.directory)] == [0, 2, 10]
    assert not list(start.directory.glob(".*"))


def test_a_signed_opt_in_verifies() -> None:
    opt_in = OptIn(new_tag(), 4, 9)
    assert verify_opt_in(b"k" * 32, opt_in.signed(b"k" * 32)) == opt_in


@pytest.mark.parametrize(
    "change",
    [
        {"tag": "0" * 32},
        {"tag": "../../x"},
        {"tag": 5},
        {"prompt_len": 5},
        {"prompt_len": True},
        {"prompt_len": 0},
        {"max_rows": 10**9},
        {"max_rows": 3},
        {"sig": ""},
        {"sig": None},
        {"sig": "\ud800"},
        {"sig": "0" * 64},
    ],
)
def test_a_forged_opt_in_is_refused(change: dict[str, object]) -> None:
    signed = OptIn(new_tag(), 4, 9).signed(b"k" * 32)
    with pytest.raises(BadOptIn):
        verify_opt_in(b"k" * 32, {**signed, **change})


@pytest.mark.parametrize("value", [None, "x", 3, [], {}])
def test_an_opt_in_that_is_no_mapping_is_refused(value: object) -> None:
    with pytest.raises(BadOptIn):
        verify_opt_in(b"k" * 32, value)


def test_another_starts_signature_is_refused() -> None:
    with pytest.raises(BadOptIn, match="not signed"):
        verify_opt_in(b"b" * 32, OptIn(new_tag(), 4, 9).signed(b"a" * 32))


def test_a_fingerprint_id_ignores_key_order() -> None:
    one = {"config": "a", "weights": "b"}
    assert fingerprint_id(one) == fingerprint_id(dict(reversed(one.items())))
    assert fingerprint_id(one) != fingerprint_id({**one, "weights": "c"})
    assert len(fingerprint_id(one)) == 32
