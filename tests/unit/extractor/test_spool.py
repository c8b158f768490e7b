from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taphouse.errors import StoreError
from taphouse.store import LocalStore
from taphouse.wire import JobOptions
from taphouse_extractor import spool as spool_module
from taphouse_extractor.errors import InvalidRequest, NotFound, TooLarge
from taphouse_extractor.progress import Progress
from taphouse_extractor.records import BatchRef, Records
from taphouse_extractor.spool import Limits, Spool, open_dataset, spool_file
from taphouse_extractor.spooling import drop_abandoned


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(LocalStore(tmp_path / "store"))


def spool(records: Records, limits: Limits | None = None, **options: Any) -> Spool:
    return Spool(records, limits or Limits(10_000, 100, 200), JobOptions(**options), None)


def rows_of(records: Records, job_id: str) -> list[list[Any]]:
    job = records.job(job_id)
    return [
        [json.loads(line) for line in records.row_lines(BatchRef(job_id=job_id, batch=batch))]
        for batch in range(job.batches)
    ]


def test_rows_are_cut_into_batches(records: Records) -> None:
    taking = spool(records, batch_size=2)
    taking.feed(b'{"prompt":"0"}\r\n\n  \n{"prompt":"1"}\n{"prom')
    taking.feed(b'pt":"2"}')
    job = taking.finish()
    assert (job.rows, job.batches, job.spooled) == (3, 2, True)
    assert rows_of(records, job.id) == [[{"prompt": "0"}, {"prompt": "1"}], [{"prompt": "2"}]]
    assert records.job(job.id) == job
    assert list(job.rows_of(1)) == [2]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=6), max_size=3), min_size=1, max_size=20),
    st.integers(1, 7),
    st.integers(1, 5),
)
def test_however_it_is_cut_the_rows_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], chunk: int, batch_size: int
) -> None:
    records = Records(LocalStore(tmp_path_factory.mktemp("store")))
    data = "\n".join(json.dumps(row) for row in rows).encode()
    taking = spool(records, Limits(100_000, 100, 10_000), batch_size=batch_size)
    for at in range(0, len(data), chunk):
        taking.feed(data[at : at + chunk])
    job = taking.finish()
    batches = rows_of(records, job.id)
    assert [row for batch in batches for row in batch] == rows
    assert all(len(batch) == batch_size for batch in batches[:-1])


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b'{"a":1}\n\n{"a":\n', InvalidRequest, "line 3 is not JSON"),
        (b'{"a":1}\n[1]\n', InvalidRequest, "line 2 is not a JSON object"),
        (b'"text"', InvalidRequest, "line 1 is not a JSON object"),
        (b'{"a":"\xff"}\n', InvalidRequest, "line 1 is not JSON"),
        (b'{"a":1}\n{"a":"' + b"x" * 300 + b'"}\n', TooLarge, "line 2 is over 200 bytes"),
        (b'{"a":1}\n' + b"x" * 300, TooLarge, "line 2 is over 200 bytes"),
        (b'{"a":1}\n' * 101, TooLarge, "line 101: over 100 rows"),
        (b" " * 100 + b"\n" * 9_901, TooLarge, "over 10000 bytes"),
        (b"\n\n", InvalidRequest, "no rows"),
        (b"[" * 199, InvalidRequest, "line 1 is not JSON"),
    ],
)
def test_a_dataset_over_a_limit_or_no_dataset_is_refused_by_line(
    records: Records, data: bytes, error: type[Exception], message: str
) -> None:
    taking = spool(records, batch_size=3)
    with pytest.raises(error, match=message):
        taking.feed(data)
        taking.finish()
    taking.abort()
    with pytest.raises(NotFound):
        records.job(taking.job.id)
    assert list(records.store.local_path("jobs").iterdir()) == []


def test_a_line_is_refused_before_it_is_whole(records: Records) -> None:
    """A body without a line end must not be gathered in memory up to the dataset's limit."""
    taking = spool(records, Limits(1 << 30, 100, 1000))
    with pytest.raises(TooLarge, match="line 1"):
        for _ in range(12):
            taking.feed(b"x" * 100)


def test_datasets_by_path(records: Records, tmp_path: Path) -> None:
    root = tmp_path / "datasets"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "a b.jsonl").write_text('{"prompt":"x"}\n')
    outside = tmp_path / "outside.jsonl"
    outside.write_text('{"prompt":"secret"}\n')
    (root / "link.jsonl").symlink_to(outside)
    (root / "inner.jsonl").symlink_to(root / "sub" / "a b.jsonl")
    (root / "loop.jsonl").symlink_to(root / "loop.jsonl")
    os.mkfifo(root / "fifo.jsonl")
    for path in (f"{root}/sub/a b.jsonl", f"file://{root}/sub/a%20b.jsonl", f"{root}/inner.jsonl"):
        with open_dataset(path, (root,)) as file:
            assert spool_file(file, spool(records)).rows == 1
    for path in (
        str(outside),
        f"{root}/../outside.jsonl",
        f"{root}/link.jsonl",
        f"{root}/sub",
        f"{root}/fifo.jsonl",
        f"{root}/loop.jsonl",
        f"{root}/absent.jsonl",
        "sub/a b.jsonl",
        "file://elsewhere/x",
        "file://[",
        f"file://{root}/%2e%2e/outside.jsonl",
        "a\0b",
        "s3://bucket/x",
    ):
        with pytest.raises(InvalidRequest, match="dataset roots"):
            open_dataset(path, (root,))
    with pytest.raises(InvalidRequest, match="upload it"):
        open_dataset(str(outside), ())


def test_a_byte_order_mark_is_no_part_of_the_first_row(records: Records) -> None:
    taking = spool(records)
    taking.feed(b'\xef\xbb\xbf{"prompt":"0"}\r\n{"prompt":"1"}\r\n')
    job = taking.finish()
    first, _ = records.row_lines(BatchRef(job_id=job.id, batch=0))
    assert first == b'{"prompt":"0"}'


def test_a_dataset_in_utf_16_is_refused(records: Records) -> None:
    with pytest.raises(InvalidRequest, match="line 1 is not JSON"):
        spool(records).feed('{"prompt":"0"}\n{"prompt":"1"}\n'.encode("utf-16"))


def test_one_that_goes_on_is_never_taken_for_abandoned(records: Records) -> None:
    taking = spool(records)
    taking.feed(b'{"prompt":"0"}\n')
    assert not drop_abandoned(records, taking.job.id)
    job = taking.finish()
    assert not drop_abandoned(records, job.id)
    assert records.job(job.id) == job
    assert "spooling.lock" not in records.store.list(f"jobs/{job.id}")


def test_the_same_job_id_twice_is_two_jobs(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter([f"j20260101000000-{n:08x}" for n in (1, 1, 2, 1, 2, 3)])
    monkeypatch.setattr(spool_module, "new_job_id", lambda _: next(made))
    first, second = spool(records), spool(records)
    first.feed(b'{"prompt":"first"}\n')
    second.feed(b'{"prompt":"second"}\n')
    first.finish()
    second.finish()
    third = spool(records)
    third.feed(b'{"prompt":"third"}\n')
    assert third.finish().id == "j20260101000000-00000003"
    kept = [rows_of(records, job_id)[0][0]["prompt"] for job_id in records.job_ids()]
    assert kept == ["first", "second", "third"]


def test_of_a_dataset_that_was_refused_nothing_is_left(records: Records) -> None:
    """However many are refused, neither the store nor a look at the jobs grows."""
    progress = Progress(records)
    for _ in range(3):
        taking = spool(records)
        taking.feed(b'{"prompt":"0"}\n')
        assert [job.record.id for job in progress.refresh()] == [taking.job.id]
        records.cancel(taking.job.id)
        taking.abort()
    assert progress.refresh() == [] and not progress._open
    assert list(records.store.local_path("jobs").iterdir()) == []


def test_a_spooling_that_a_feeder_dropped_makes_no_job(records: Records) -> None:
    taking = spool(records, batch_size=1)
    taking.feed(b'{"prompt":"0"}\n{"prompt":"1"}\n')
    records.drop_unspooled(taking.job.id)
    with pytest.raises(NotFound):
        taking.finish()


def test_a_job_is_flushed_to_disk_before_it_exists_and_not_once_a_batch(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written when, by the names of the files flushed."""
    flushed: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    taking = spool(records, Limits(1 << 20, 1000, 200), batch_size=1)
    begun = len(flushed)
    taking.feed(b'{"prompt":"0"}\n' * 500)
    assert len(flushed) == begun
    seen: list[tuple[bool, list[str]]] = []
    put_job = records.put_job
    monkeypatch.setattr(
        records, "put_job", lambda job: (seen.append((job.spooled, flushed[begun:])), put_job(job))
    )
    job = taking.finish()
    [(spooled, before)] = seen
    assert spooled and sum(name.startswith(".tmp-") for name in before) == 2
    assert before.count(job.id) == 2  # the directory that holds their names
    assert len(flushed) - begun <= 8 and job.batches == 500
    assert rows_of(records, job.id) == [[{"prompt": "0"}]] * 500


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.index"])
def test_rows_that_were_cut_are_said(records: Records, name: str) -> None:
    taking = spool(records, batch_size=1)
    taking.feed(b'{"prompt":"0"}\n{"prompt":"1"}\n')
    job = taking.finish()
    file = records.store.local_path(f"jobs/{job.id}/{name}")
    os.truncate(file, file.stat().st_size - 3)
    assert len(list(records.row_lines(BatchRef(job_id=job.id, batch=0)))) == 1
    with pytest.raises(StoreError, match=r"rows\.index"):
        list(records.row_lines(BatchRef(job_id=job.id, batch=1)))


def test_a_spooling_that_was_killed_leaves_no_job_and_no_rows(tmp_path: Path) -> None:
    code = f"""
import os, signal
from taphouse.store import LocalStore
from taphouse.wire import JobOptions
from taphouse_extractor.records import Records
from taphouse_extractor.spool import Limits, Spool
spool = Spool(Records(LocalStore({str(tmp_path)!r})), Limits(1 << 20, 1000, 200), JobOptions(), None)
spool.feed(b'{{"prompt":"' + b"x" * 100 + b'"}}\\n')
spool._flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    records = Records(LocalStore(tmp_path))
    [job_id] = records.job_ids()
    assert not records.job(job_id).spooled
    assert records.store.list(f"jobs/{job_id}") == ["job.json", "spooling.lock"]
    assert drop_abandoned(records, job_id)
    assert not drop_abandoned(records, job_id)
    assert list((tmp_path / "jobs").iterdir()) == []


def test_a_directory_that_becomes_a_link_while_it_is_opened_is_not_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for directory in (root / "in", outside):
        directory.mkdir(parents=True)
        (directory / "rows.jsonl").write_text(f"{directory.name}\n")
    real_open, swapped = os.open, []

    def swap_first(path: Any, *arguments: Any, **named: Any) -> int:
        if not swapped:
            swapped.append((root / "in").rename(root / "was"))
            (root / "in").symlink_to(outside)
        return real_open(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", swap_first)
        with pytest.raises(InvalidRequest, match="dataset roots"):
            open_dataset(str(root / "in" / "rows.jsonl"), (root,))
    assert swapped
    with open_dataset(str(root / "was" / "rows.jsonl"), (root,)) as file:
        assert file.read() == b"in\n"
