"""Enqueueing the same twice: by key, by content, after failures and crashes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.unit.extractor.conftest import TOKEN
from tests.unit.extractor.test_api import Serve

from taphouse.client import Taphouse
from taphouse.errors import ApiError, BadRequest, TooBusy
from taphouse.wire import JobOptions
from taphouse_extractor.errors import Conflict
from taphouse_extractor.records import BatchRef, JobRecord
from taphouse_extractor.repeats import Repeats
from taphouse_extractor.spool import Limits, Spool


def lines(*rows: Any) -> list[bytes]:
    return [json.dumps(row).encode() + b"\n" for row in rows]


A, B = lines({"prompt": "a"}), lines({"prompt": "b"})


def test_the_same_rows_and_options_are_refused_until_it_is_said_again(serve: Serve) -> None:
    service = serve()
    first = service.client.enqueue(A)
    with pytest.raises(ApiError, match=rf"enqueued .* before, as job {first.id}") as caught:
        service.client.enqueue(A)
    assert (caught.value.status, caught.value.param) == (409, "again") and "=true" not in str(caught.value)
    assert [job.id for job in service.client.jobs()] == [first.id]
    others = [service.client.enqueue(B), service.client.enqueue(A, JobOptions(max_tokens=2))]
    second = service.client.enqueue(A, again=True)
    assert len({first.id, second.id, *(job.id for job in others)}) == 4
    with pytest.raises(ApiError, match=second.id):
        service.client.enqueue(A)


def test_a_cancelled_job_does_not_stand_in_the_way(serve: Serve) -> None:
    service = serve()
    service.client.cancel(service.client.enqueue(A).id)
    assert service.client.enqueue(A).state.value == "queued"


def test_a_key_makes_one_job_whatever_it_is_called_with(serve: Serve) -> None:
    service = serve()
    first = service.client.enqueue(A, key="mine")
    assert service.client.enqueue(A, key="mine").id == first.id
    with pytest.raises(BadRequest, match=f"made job {first.id} of other rows"):
        service.client.enqueue(B, key="mine")
    with pytest.raises(BadRequest, match=f"made job {first.id} of other rows"):
        service.client.enqueue(A, JobOptions(batch_size=7), key="mine")
    assert len(service.client.jobs()) == 1
    path = service.datasets / "b.jsonl"
    path.write_bytes(B[0])
    second = service.client.enqueue_path(str(path), key="other")
    assert service.client.enqueue_path(str(path), key="other").id == second.id != first.id


def test_a_key_whose_request_failed_is_free_again(serve: Serve) -> None:
    service = serve()
    with pytest.raises(BadRequest, match="not JSON"):
        service.client.enqueue([b"nope\n"], key="mine")
    assert service.client.enqueue(A, key="mine").rows == 1


def test_a_request_that_died_gives_its_key_to_the_next(serve: Serve) -> None:
    service = serve()
    records = service.bench.records
    limits = Limits(1000, 100, 100)
    dead = Spool(records, limits, JobOptions(), None)
    with Repeats(records, "token", "mine", again=False) as repeats:
        repeats.begin(dead.job.id)
        with Repeats(records, "token", "mine", again=False) as other, pytest.raises(Conflict):
            other.begin("j20260101000000-00000000")
    job = service.client.enqueue(A, key="mine")
    assert [found.id for found in service.client.jobs()] == [job.id] and job.id != dead.job.id


def test_an_upload_that_died_before_its_job_was_made_blocks_nobody(serve: Serve) -> None:
    service = serve()
    records = service.bench.records
    dead = Spool(records, Limits(1000, 100, 100), JobOptions(), None)
    dead.feed(A[0])

    def die(job: JobRecord) -> None:
        with Repeats(records, "token", None, again=False) as repeats:
            repeats.check(job)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        dead.finish(die)
    assert service.client.enqueue(A).id != dead.job.id


def test_a_key_is_answered_although_its_token_may_have_no_more_jobs(serve: Serve) -> None:
    service = serve(max_jobs=1)
    first = service.client.enqueue(A, key="mine")
    assert service.client.enqueue(A, key="mine").id == first.id
    with pytest.raises(ApiError, match="unfinished jobs already"):
        service.client.enqueue(B, key="other")


def test_failures_are_listed_and_tried_again(serve: Serve) -> None:
    service = serve()
    rows = [b'{"prompt":"p%d"}\n' % n if n % 3 else b'{"nothing":%d}\n' % n for n in range(7)]
    job = service.client.enqueue(rows, JobOptions(batch_size=3, output_prefix="run7"))
    service.bench.run_all(service.bench.records.job(job.id))
    listed = list(service.client.failures(job.id))
    assert [failure.row for failure in listed] == [0, 3, 6] and all(f.reason for f in listed)
    pages = [[f.row for f in service.client.failures(job.id, skip=skip, limit=2)] for skip in (0, 2, 4)]
    assert pages == [[0, 3], [6], []]
    assert all(shard.shard.startswith("run7-") for shard in service.client.shards().shards)
    again = service.client.retry(job.id)
    assert (again.state.value, again.failed, again.batches.pending) == ("running", 0, 1)
    assert list(service.client.failures(job.id)) == []
    service.bench.pipeline.run(BatchRef(job_id=job.id, batch=3))
    done = service.client.job(job.id)
    assert (done.state.value, done.succeeded, done.failed) == ("done", 4, 3)
    assert [failure.row for failure in service.client.failures(job.id)] == [0, 3, 6]


def test_what_a_state_does_not_allow_is_refused_by_name(serve: Serve) -> None:
    service = serve()
    job = service.client.enqueue(A)
    assert service.client.pause(job.id).state.value == "paused"
    assert service.client.pause(job.id).state.value == "paused"
    assert service.client.resume(job.id).state.value == "queued"
    for act, why in ((service.client.retry, "nothing to retry"),):
        with pytest.raises(ApiError, match=why) as caught:
            act(job.id)
        assert caught.value.status == 409
    service.bench.run_all(service.bench.records.job(job.id))
    for act in (service.client.pause, service.client.resume, service.client.cancel):
        with pytest.raises(ApiError, match="it is done"):
            act(job.id)
    with pytest.raises(ApiError, match="no job") as caught:
        list(service.client.failures("j20260101000000-00000000"))
    assert caught.value.status == 404


def test_requests_at_once_are_counted_one_by_one(serve: Serve) -> None:
    service = serve(max_jobs=2)

    def enqueue(number: int) -> str | None:
        with Taphouse(service.url, token=TOKEN) as client:
            try:
                return client.enqueue(lines({"prompt": f"p{number}"})).id
            except TooBusy:
                return None

    with ThreadPoolExecutor(12) as pool:
        made = [job_id for job_id in pool.map(enqueue, range(12)) if job_id is not None]
    assert sorted(made) == sorted(job.id for job in service.client.jobs()) and len(made) == 2
