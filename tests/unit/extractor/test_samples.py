"""Samples of a person or a tenant: found, deleted, and nothing else lost; also when it is cut short."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.queue.fake_tap import FakeTap
from tests.unit.extractor.conftest import Bench, Service, engine_of, engines_of

from taphouse.errors import BadRequest, Conflict, NotFound
from taphouse.ledger import Ledger
from taphouse.shards import open_shard, verify_shard
from taphouse.store import LocalStore
from taphouse.wire import JobOptions, SampleQuery
from taphouse_extractor.blanked import blank_rows, numbered_rows
from taphouse_extractor.errors import Conflict as Busy
from taphouse_extractor.errors import JobCancelled
from taphouse_extractor.pipeline import Pipeline
from taphouse_extractor.records import BatchRef, Records
from taphouse_extractor.samples import Samples
from taphouse_extractor.spool import Limits, Spool
from taphouse_extractor.tokens import Caller, Role

Serve = Callable[..., Service]
ROWS = [
    {"id": "a1", "user": "ann", "prompt": "SECRET-ONE"},
    {"id": "b1", "user": "bob", "prompt": "of bob"},
    {"id": "a2", "user": "ann", "prompt": "SECRET-TWO"},
    {"user": "ann", "prompt": "SECRET-THREE"},
    {"id": "a3", "user": "ann", "prompt": "SECRET REFUSE"},
    {"id": 7, "user": "bob", "prompt": "also of bob"},
]


def samples_of(bench: Bench) -> Samples:
    return Samples(bench.records, bench.ledger, lambda _: True, bench.pipeline.close)


def held(bench: Bench) -> dict[int, list[str]]:
    """Sample ids by ledger entry, of shards that are as their entries say."""
    found = {}
    for entry in Ledger(bench.store).entries():
        if entry.gone is None:
            with open_shard(bench.store.local_path(entry.path), sha256=entry.sha256) as shard:
                found[entry.seq] = [sample.id for sample in shard]
                assert len(found[entry.seq]) == entry.samples
    return found


def everything(root: Path) -> bytes:
    return b"".join(file.read_bytes() for file in root.rglob("*") if file.is_file())


def test_a_persons_samples_are_found_and_deleted(bench: Bench) -> None:
    job = bench.job(ROWS, batch_size=2)
    bench.run_all(job)
    samples = samples_of(bench)
    third = f"{job.id}/3"
    assert held(bench) == {1: ["a1", "b1"], 2: ["a2", third], 3: ["7"]}
    found = samples.find(SampleQuery(user="ann"))
    shards = [entry.shard for entry in bench.ledger.entries()]
    assert [(s.row, s.id, s.shard, s.seq) for s in found.samples] == [
        (0, "a1", shards[0], 1),
        (2, "a2", shards[1], 2),
        (3, third, shards[1], 2),
        (4, "a3", None, None),
    ]
    before = bench.ledger.entry(1)
    deleted = samples.delete(SampleQuery(user="ann"))
    assert (deleted.rows, deleted.samples, len(deleted.rewritten), deleted.removed) == (4, 3, 1, [shards[1]])
    assert held(bench) == {1: ["b1"], 3: ["7"]}
    after = bench.ledger.entry(1)
    assert before is not None and after is not None
    assert (after.replaces, after.created_at, after.seq) == (before.shard, before.created_at, 1)
    assert verify_shard(bench.store.local_path(after.path)).ok
    gone = bench.ledger.entry(2)
    assert gone is not None and gone.gone == "samples were deleted"
    assert bench.ledger.head() == 3
    left = everything(bench.store.root)
    assert b"SECRET" not in left and b'"a1"' not in left and b'"a3"' not in left
    assert samples.find(SampleQuery(user="ann")).rows == 0
    assert samples.find(SampleQuery(user="bob")).rows == 2
    done = bench.overview.job(job.id)
    assert (done.succeeded, done.failed, done.rows) == (5, 1, 6)


def test_a_store_that_lost_samples_is_reconciled_and_appended_to_as_ever(bench: Bench) -> None:
    job = bench.job(ROWS, batch_size=2)
    bench.run_all(job)
    samples_of(bench).delete(SampleQuery(ids=["a1", "a2", f"{job.id}/3"]))
    result = Ledger(bench.store).reconcile()
    assert (result.added, result.missing, result.refused) == ((), (), ())
    for batch in range(job.batches):  # a batch that a worker runs twice, after all
        bench.pipeline.run(BatchRef(job_id=job.id, batch=batch))
    more = bench.job([{"prompt": "more"}])
    bench.run_all(more)
    assert bench.ledger.head() == 4
    assert held(bench)[1] == ["b1"] and 2 not in held(bench)


class Cut(Exception):
    """The process ends here."""


def cut_after(patch: pytest.MonkeyPatch, store: LocalStore, writes: int) -> None:
    """Let so many changes of the store through, then end."""
    left = [writes]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Cut
            return real(*arguments, **named)

        return call

    for name in ("put", "link", "delete", "create"):
        patch.setattr(store, name, counted(getattr(store, name)))


@given(st.lists(st.integers(0, 24), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_deletion_that_is_cut_short_is_finished_by_the_next(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    root = tmp_path_factory.mktemp("cut")
    store = LocalStore(root / "store")
    records, ledger = Records(store), Ledger(store)
    spool = Spool(records, Limits(1 << 20, 100, 1000), JobOptions(batch_size=2), None)
    for row in ROWS:
        spool.feed(json.dumps(row).encode() + b"\n")
    job = spool.finish()
    pipeline = Pipeline(records, ledger, engines_of(engine_of(FakeTap(root / "slices"))), 2)
    for batch in range(job.batches):
        pipeline.run(BatchRef(job_id=job.id, batch=batch))

    for cut in cuts:
        with pytest.MonkeyPatch.context() as patch, suppress(Cut):
            cut_after(patch, store, cut)
            Samples(records, ledger, lambda _: True, pipeline.close).delete(SampleQuery(user="ann"))
        assert Ledger(store).reconcile().added == ()
    Samples(records, ledger, lambda _: True, pipeline.close).delete(SampleQuery(user="ann"))
    assert b"SECRET" not in everything(store.root)
    kept = []
    for entry in Ledger(store).entries():
        if entry.gone is None:
            with open_shard(store.local_path(entry.path), sha256=entry.sha256) as shard:
                kept += [sample.id for sample in shard]
    assert kept == ["b1", "7"]
    names = {entry.shard for entry in Ledger(store).entries() if entry.gone is None}
    assert {name for name in store.list("shards") if name.endswith(".safetensors")} == names


def test_deletions_that_were_cut_short_leave_no_shard_in_between(bench: Bench, serve: Serve) -> None:
    """Each ended once the ledger named the new shard: what is named no more goes with the next."""
    job = bench.job([{"id": f"u{n}-id", "user": f"u{n}", "prompt": f"SECRET {n}"} for n in range(5)])
    other = bench.job([{"id": "x", "user": "other", "prompt": "p"}])
    bench.run_all(job)
    bench.run_all(other)
    samples_of(bench).delete(SampleQuery(user="u0"))
    names = [entry.shard for entry in bench.ledger.entries(0)][:1]
    for user in ("u1", "u2"):
        with pytest.MonkeyPatch.context() as patch, suppress(Cut):
            cut_after(patch, bench.store, 10_000)
            patch.setattr(bench.store, "delete", lambda _: (_ for _ in ()).throw(Cut()))
            samples_of(bench).delete(SampleQuery(user=user))
        entry = bench.ledger.entry(1)
        assert entry is not None
        names.append(entry.shard)
    assert len(set(names)) == 3 and set(names) < set(bench.store.list("shards"))
    client = serve().client
    with pytest.raises(NotFound):
        client._send("GET", f"/v1/shards/{names[0]}")
    samples_of(bench).delete(SampleQuery(user="other"))
    assert bench.store.list("shards") == names[2:]
    for user in ("u1", "u2"):
        assert samples_of(bench).delete(SampleQuery(user=user)).rows == 1
    assert held(bench) == {1: ["u3-id", "u4-id"]}
    assert bench.store.list("shards") == names[2:]


def test_samples_of_moved_rows_and_named_shards_are_found_too(bench: Bench) -> None:
    job = bench.job(ROWS[:4], batch_size=4, output_prefix="pre")
    bench.pipeline.give_up(job, BatchRef(job_id=job.id, batch=0), "it crashed")
    for half in (1, 2):
        bench.pipeline.run(BatchRef(job_id=job.id, batch=half))
    assert sorted(chain(*held(bench).values())) == sorted(["a1", "b1", "a2", f"{job.id}/3"])
    found = samples_of(bench).find(SampleQuery(user="ann"))
    assert found.rows == 3 and all(sample.shard for sample in found.samples)
    deleted = samples_of(bench).delete(SampleQuery(user="ann"))
    assert (deleted.rows, deleted.samples) == (3, 3)
    assert list(chain(*held(bench).values())) == ["b1"]
    assert b"SECRET" not in everything(bench.store.root)


def test_rows_of_one_id_go_together_and_none_is_left_under_another(bench: Bench) -> None:
    job = bench.job(
        [{"id": "x", "user": "u", "prompt": "1"}, {"id": "x", "user": "v", "prompt": "2"}, {"prompt": "3"}]
    )
    bench.run_all(job)
    assert held(bench) == {1: ["x", "x#1", f"{job.id}/2"]}
    assert samples_of(bench).delete(SampleQuery(user="u")).samples == 2
    assert held(bench) == {1: [f"{job.id}/2"]}


def test_ids_stay_when_rows_that_they_follow_from_are_deleted(bench: Bench) -> None:
    rows = [("dup", "u1"), ("dup#2", "u2"), ("dup", "u1"), ("dup#5", "u3"), ("keep", "k"), ("dup", "u1")]
    job = bench.job([{"id": name, "user": user, "prompt": "SECRET"} for name, user in rows])
    bench.run_all(job)
    assert held(bench) == {1: ["dup", "dup#2", "dup#2#2", "dup#5", "keep", "dup#5#5"]}
    for user, left in (
        ("u2", ["dup", "dup#2#2", "dup#5", "keep", "dup#5#5"]),
        ("u3", ["dup", "dup#2#2", "keep", "dup#5#5"]),
        ("u1", ["keep"]),
    ):
        found = samples_of(bench).find(SampleQuery(user=user)).samples
        assert all(sample.shard for sample in found)
        assert samples_of(bench).delete(SampleQuery(user=user)).samples == len(found)
        assert held(bench) == {1: left}
    assert samples_of(bench).delete(SampleQuery(user="k")).samples == 1
    assert b"SECRET" not in everything(bench.store.root) and b"dup" not in everything(bench.store.root)


@given(
    st.lists(st.sampled_from(["a", "b", "a#1", "a#2", "a#2#3", "b#3", None]), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), max_size=3),
)
@example(["a", "a#2", "a"], [1])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_of_rows_left_never_change(
    tmp_path_factory: pytest.TempPathFactory, ids: list[str | None], blanked: list[int]
) -> None:
    records = Records(LocalStore(tmp_path_factory.mktemp("ids")))
    spool = Spool(records, Limits(1 << 20, 100, 1000), JobOptions(batch_size=8), None)
    for own in ids:
        spool.feed(json.dumps({"prompt": "p"} if own is None else {"id": own}).encode() + b"\n")
    job = spool.finish()
    names = {row.row: row.id for row in numbered_rows(records, job, 0)}
    for row in (row % len(ids) for row in blanked):
        same = {at for at, own in enumerate(ids) if at == row or (own is not None and own == ids[row])}
        blank_rows(records, job, same)
        names = {at: name for at, name in names.items() if at not in same}
        assert names.items() <= {row.row: row.id for row in numbered_rows(records, job, 0)}.items()


def test_what_is_damaged_is_named_and_keeps_nothing_else(bench: Bench) -> None:
    """Rows cut, a definition cut, a shard cut, a shard away. Once they are mended the rest is deleted."""
    jobs = sorted((bench.job(ROWS[:4], batch_size=2) for _ in range(5)), key=lambda job: job.id)
    for job in jobs:
        bench.run_all(job)
    undefined, cut, damaged, away, _ = jobs
    root, ann = bench.store.root, SampleQuery(user="ann")
    broken = {
        f"job {undefined.id}": root / "jobs" / undefined.id / "job.json",
        f"job {cut.id}": root / "jobs" / cut.id / "rows.jsonl",
        f"shard {damaged.shard_of(1)}": root / "shards" / damaged.shard_of(1),
        f"shard {away.shard_of(1)}": root / "shards" / away.shard_of(1),
    }
    before = {path: path.read_bytes() for path in broken.values()}
    for path, data in before.items():
        path.unlink()
        if path.name != away.shard_of(1):
            path.write_bytes(data[:-40])
    found = samples_of(bench).find(ann)
    assert [problem.split(":")[0] for problem in found.problems] == list(broken)
    assert found.rows == 1 + 3 * 3
    deleted = samples_of(bench).delete(ann)
    assert [problem.split(":")[0] for problem in deleted.problems] == list(broken)
    assert f"restore shards/{away.shard_of(1)}" in deleted.problems[-1]
    assert (deleted.rows, deleted.samples) == (1 + 1 + 3, 1 + 1 + 1 + 3)
    for path, data in before.items():
        path.unlink(missing_ok=True)
        path.write_bytes(data)
    again = samples_of(bench).delete(ann)
    assert (again.rows, again.samples, again.problems) == (3 + 3 + 2 + 2, 3 + 2 + 2 + 2, [])
    assert samples_of(bench).find(ann).rows == 0
    assert b"SECRET" not in everything(root)
    assert list(chain(*held(bench).values())) == ["b1"] * 5


def test_a_sealed_shard_that_no_entry_names_is_not_passed_over(bench: Bench) -> None:
    """One was damaged before its outcome, its batch given up: it goes whole. One lost its entry: named."""
    given_up, unnamed = bench.job(ROWS[:2]), bench.job(ROWS[:2])
    ref = BatchRef(job_id=given_up.id, batch=0)
    kill_after_sealing(bench, ref, "append")
    path = bench.store.root / "shards" / given_up.shard_of(0)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-40])
    assert "can't be used" in bench.pipeline.give_up(given_up, ref, "it crashed").failures[0].reason
    bench.run_all(unnamed)
    (bench.store.root / "ledger" / "by-shard" / f"{unnamed.shard_of(0)}.json").unlink()
    deleted = samples_of(bench).delete(SampleQuery(user="ann"))
    assert deleted.rows == 1 and not path.exists()
    assert [problem.partition(":")[0] for problem in deleted.problems] == [f"shard {unnamed.shard_of(0)}"]
    Ledger(bench.store).reconcile()
    assert samples_of(bench).delete(SampleQuery(user="ann")).samples == 1


def test_of_a_tenant_all_goes_whatever_state_it_is_in(bench: Bench) -> None:
    """A shard cut, one away, one sealed without an entry and cut. Rows that still come in are waited for."""
    job = bench.job(ROWS, batch_size=2)
    bench.records.put_job(job.model_copy(update={"tenant": "acme"}))
    kill_after_sealing(bench, BatchRef(job_id=job.id, batch=2), "append")
    for batch in (0, 1):
        bench.pipeline.run(BatchRef(job_id=job.id, batch=batch))
    bench.records.cancel(job.id)
    for batch in (0, 2):
        path = bench.store.root / "shards" / job.shard_of(batch)
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-40])
    data = (away := bench.store.root / "shards" / job.shard_of(1)).read_bytes()
    away.unlink()
    by = Caller(name="a", role=Role.SUBMIT, tenant="acme")
    spool = Spool(bench.records, Limits(1 << 20, 100, 1000), JobOptions(), None, by=by)
    samples, acme = samples_of(bench), SampleQuery(tenant="acme")
    with pytest.raises(Busy, match="still comes in"):
        samples.delete(acme)
    assert f"job {spool.job.id}: its rows still come in" in samples.find(acme).problems
    spool.abort()
    deleted = samples.delete(acme)
    assert (deleted.rows, deleted.samples, deleted.problems) == (6, 4, [])
    assert [entry.gone for entry in bench.ledger.entries()] == ["samples were deleted"] * 2
    away.write_bytes(data)  # restored from a backup: its entry doesn't give it back
    assert Ledger(bench.store).reconcile().added == ()
    assert [name for name in bench.store.list("shards") if name != away.name] == []


def kill_after_sealing(bench: Bench, ref: BatchRef, at: str) -> None:
    """Run a batch whose worker dies once its shard is sealed: before its entry (`append`), or its outcome."""

    def die(*_: Any) -> None:
        raise Cut

    owner = bench.ledger if at == "append" else bench.records
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Cut):
        patch.setattr(owner, at, die)
        bench.pipeline.run(ref)


@pytest.mark.parametrize("at", ["append", "put_outcome"])
@pytest.mark.parametrize("ended", ["cancelled", "stopped"])
def test_what_was_sealed_without_entry_or_outcome_is_deleted_too(bench: Bench, at: str, ended: str) -> None:
    rows = [*ROWS[:4], {"id": "c", "prompt": "ok"}, {"id": "bad", "prompt": "REFUSE"}]
    job = bench.job(rows, batch_size=2)
    job = job.model_copy(update={"options": JobOptions(batch_size=2, on_error="fail")})
    bench.records.put_job(job)
    first, second, third = (BatchRef(job_id=job.id, batch=batch) for batch in range(3))
    kill_after_sealing(bench, first, at)
    if ended == "cancelled":
        bench.records.cancel(job.id)
    else:
        assert bench.pipeline.run(third).failures
    deleted = samples_of(bench).delete(SampleQuery(user="ann"))
    assert (deleted.rows, deleted.samples) == (3, 1)
    assert bench.records.cancelled(job.id)
    Ledger(bench.store).reconcile()
    bench.feeder().step()
    with pytest.raises(JobCancelled):  # a worker that lives on
        bench.pipeline.run(second)
    assert held(bench) == {1: ["b1"]} if ended == "cancelled" else {1: ["b1"], 2: ["c"]}
    assert b"SECRET" not in everything(bench.store.root)
    state = bench.overview.job(job.id)
    assert state.state.value == ("cancelled" if ended == "cancelled" else "failed")
    assert state.succeeded + state.failed + state.skipped == state.rows


@pytest.mark.parametrize("ended", ["cancelled", "stopped"])
def test_a_worker_that_thaws_after_the_deletion_seals_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    job = bench.job([*ROWS[:2], {"prompt": "REFUSE"}], batch_size=2)
    job = job.model_copy(update={"options": JobOptions(batch_size=2, on_error="fail")})
    bench.records.put_job(job)
    bench.pipeline.run(BatchRef(job_id=job.id, batch=1))
    lock = bench.store.lock

    def frozen(path: str, *, wait: bool = True) -> Any:
        """It is frozen as it is about to take the lock to seal."""
        if "/locks/" in path:
            monkeypatch.undo()
            if ended == "cancelled":
                bench.records.cancel(job.id)
            assert samples_of(bench).delete(SampleQuery(user="ann")).rows == 1
        return lock(path, wait=wait)

    monkeypatch.setattr(bench.store, "lock", frozen)
    with pytest.raises(JobCancelled):
        bench.pipeline.run(BatchRef(job_id=job.id, batch=0))
    assert held(bench) == {} and b"SECRET" not in everything(bench.store.root)


def test_a_deletion_waits_for_no_worker_that_seals(bench: Bench) -> None:
    job = bench.job(ROWS[:2])
    bench.records.cancel(job.id)
    with bench.store.lock(f"jobs/{job.id}/locks/0.lock"), pytest.raises(Busy, match="seals a shard of job"):
        samples_of(bench).delete(SampleQuery(user="ann"))
    assert samples_of(bench).delete(SampleQuery(user="ann")).rows == 1


def test_over_http_with_tenants_and_jobs_that_run(serve: Serve, bench: Bench) -> None:
    service = serve()
    job = service.client.enqueue([json.dumps(row).encode() + b"\n" for row in ROWS])
    query = SampleQuery(ids=["7"])
    with pytest.raises(Conflict, match="may still run"):
        service.client.delete_samples(query)
    bench.run_all(bench.records.job(job.id))
    assert [sample.row for sample in service.client.find_samples(query).samples] == [5]
    assert service.client.delete_samples(query).samples == 1
    assert service.client.delete_samples(query).rows == 0
    record = bench.records.job(job.id)
    bench.records.put_job(record.model_copy(update={"tenant": "acme"}))
    assert service.client.find_samples(SampleQuery(tenant="other")).rows == 0
    deleted = service.client.delete_samples(SampleQuery(tenant="acme"))
    assert (deleted.rows, deleted.samples, len(deleted.removed)) == (5, 4, 1)
    page = service.client.shards()
    assert [info.gone for info in page.shards] == ["samples were deleted"]
    with pytest.raises(BadRequest):
        service.client._send("POST", "/v1/samples/find", json={"ids": ["a"], "user": "b"})


@pytest.mark.parametrize("given", [{}, {"ids": []}, {"user": "a", "tenant": "b"}, {"user": ""}])
def test_a_query_names_one_thing(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        SampleQuery(**given)
