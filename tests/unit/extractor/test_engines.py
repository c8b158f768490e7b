"""Which of several engines serves an extraction, with two taps and no network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.queue.fake_tap import FakeTap, two_classes
from tests.unit.extractor.conftest import Bench, Service, engine_of
from tests.unit.extractor.governing import FakeRedis

from taphouse.errors import WrongStore
from taphouse.wire import Engine as EngineView
from taphouse.wire import JobOptions
from taphouse_extractor.aside import Aside
from taphouse_extractor.engines import Engines
from taphouse_extractor.errors import EngineChanged, EngineTimeout, EngineUnavailable, NoEngine
from taphouse_extractor.feeder import FeederLimits
from taphouse_extractor.fitting import Needs, load_of, misfit, none_fits
from taphouse_extractor.leases import Tries
from taphouse_extractor.monitor import Monitors
from taphouse_extractor.records import BatchRef, Pin
from taphouse_extractor.worker import WRONG_STORE_S, Backoff, BatchRunner, Links

A, B = "http://a", "http://b"


@pytest.fixture
def taps(tmp_path: Path) -> tuple[FakeTap, FakeTap]:
    return FakeTap(tmp_path / "a"), FakeTap(tmp_path / "b")


@pytest.fixture
def tap(taps: tuple[FakeTap, FakeTap]) -> FakeTap:
    return taps[0]


@pytest.fixture
def redis() -> FakeRedis:
    return FakeRedis()


@pytest.fixture
def engines(taps: tuple[FakeTap, FakeTap], redis: FakeRedis) -> Engines:
    pair = [engine_of(tap, url=url) for tap, url in zip(taps, (A, B), strict=True)]
    return Engines(pair, Aside(redis, prefix="t"))


def chosen(engines: Engines, needs: Needs | None = None) -> str:
    with engines.using(needs or Needs()) as engine:
        return engine.url


def asking(*layers: int) -> Needs:
    return Needs(JobOptions(layers=list(layers)))


def loaded(held: int) -> dict[str, Any]:
    return {**two_classes(), "held": held}


def test_the_least_loaded_first(engines: Engines, taps: tuple[FakeTap, FakeTap]) -> None:
    taps[0].isolation = loaded(3)
    assert {chosen(engines) for _ in range(8)} == {B}
    taps[1].isolation = loaded(4)
    assert {chosen(engines) for _ in range(8)} == {A}


def test_captures_in_flight_are_load(engines: Engines, taps: tuple[FakeTap, FakeTap]) -> None:
    taps[0].delay_s = 30.0
    row = {"prompt": "x", "max_tokens": 1}
    threading.Thread(target=taps[0].capture, args=(row,), daemon=True).start()
    while not taps[0].status()["in_flight"]["claims"]:
        pass
    assert {chosen(engines) for _ in range(8)} == {B}


def test_equals_share_the_work(engines: Engines) -> None:
    assert {chosen(engines) for _ in range(64)} == {A, B}


def test_a_sick_engine_is_left_out_and_comes_back_by_itself(
    engines: Engines, taps: tuple[FakeTap, FakeTap]
) -> None:
    taps[0].off, taps[1].isolation = "the breaker tripped", loaded(100)
    assert chosen(engines) == B
    taps[1].off = "starting"
    with pytest.raises(NoEngine, match=r"http://a .*breaker tripped; engine http://b .*starting"):
        chosen(engines)
    taps[0].off = None
    assert chosen(engines) == A


@pytest.mark.parametrize("error", [EngineUnavailable("gone"), EngineTimeout("hangs")])
def test_one_that_fails_a_batch_comes_last_until_it_is_started_anew(
    engines: Engines, taps: tuple[FakeTap, FakeTap], redis: FakeRedis, error: Exception, tmp_path: Path
) -> None:
    taps[1].isolation = loaded(100)  # by its load alone it would never be chosen
    with pytest.raises(type(error)), engines.using(Needs()) as engine:
        assert engine.url == A
        raise error
    assert chosen(engines) == B
    views = Monitors(engines).look()
    assert [view.set_aside for view in views] == [str(error), None]

    taps[1].off = "away"
    taps[0].off = "asleep"
    assert Monitors(engines).look()[0].set_aside is None  # it is worse than that
    taps[0].off = None
    assert chosen(engines) == A  # better than none
    taps[1].off = None
    redis.away = True
    assert chosen(engines) == A  # without Redis nothing is known of it
    redis.away = False
    assert chosen(engines) == B
    [aside] = redis.lives
    redis.lives[aside] += 3_600_000  # Redis' clock was set back by an hour
    assert chosen(engines) == A
    redis.lives[aside] -= 3_600_000
    assert chosen(engines) == B
    taps[0].start = FakeTap(tmp_path / "a").start
    assert chosen(engines) == A


def test_an_only_engine_is_never_set_aside(engines: Engines, redis: FakeRedis) -> None:
    alone = Engines(engines.each[:1], engines.aside)
    with pytest.raises(EngineUnavailable), alone.using(Needs()):
        raise EngineUnavailable("gone")
    assert redis.values == {} and chosen(alone) == A


def test_what_is_not_the_engines_fault_sets_nothing_aside(engines: Engines, redis: FakeRedis) -> None:
    for error in (EngineChanged("other weights"), OSError("disk full")):
        with pytest.raises(type(error)), engines.using(Needs()):
            raise error
    assert redis.values == {}


def test_only_what_fits_is_chosen(engines: Engines, taps: tuple[FakeTap, FakeTap]) -> None:
    taps[0].isolation = loaded(100)
    taps[0].layers = (1, 2, 3, 4)
    assert chosen(engines, asking(3)) == A
    with pytest.raises(NoEngine, match=r"http://a taps 1, 2, 3, 4, not 9; .*http://b taps 1, 2, 4, not 3, 9"):
        chosen(engines, asking(3, 9))
    taps[0].isolation, taps[1].isolation = None, loaded(100)
    assert chosen(engines, Needs(JobOptions(seed=1, temperature=1.0))) == A
    taps[0].seeds = False
    assert chosen(engines, Needs(JobOptions(seed=1, temperature=1.0))) == B


def test_one_that_hangs_is_not_waited_for(
    engines: Engines, taps: tuple[FakeTap, FakeTap], monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, said = threading.Event(), taps[0].status()

    def never() -> dict[str, Any]:
        hangs.wait(30)
        return said

    monkeypatch.setattr(taps[0], "status", never)
    taps[1].isolation = loaded(100)
    try:
        assert chosen(engines) == B
    finally:
        hangs.set()


LAYERS = st.sets(st.integers(0, 5), min_size=1).map(lambda layers: tuple(sorted(layers)))
PINS = st.builds(
    Pin,
    fingerprint_id=st.sampled_from("fg"),
    layers=LAYERS,
    num_layers=st.integers(5, 6),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)


@given(began=PINS, here=PINS, asked=st.none() | LAYERS, on=st.booleans())
def test_an_engine_fits_what_it_would_give_again(
    began: Pin, here: Pin, asked: tuple[int, ...] | None, on: bool
) -> None:
    view = EngineView(
        url=A,
        capture="on" if on else "off",
        layers=list(here.layers),
        fingerprint_id=here.fingerprint_id,
        num_layers=here.num_layers,
        dtype=here.dtype,
    )
    taps_them = asked is None or set(asked) <= set(here.layers)
    gives = here if asked is None else here.model_copy(update={"layers": began.layers})
    options = JobOptions(layers=None if asked is None else list(asked))
    assert (misfit(view, Needs(options)) is None) == (on and taps_them)
    fits = misfit(view, Needs(options, began)) is None
    assert fits == (on and taps_them and gives.differs(began) is None)
    away = EngineView(url=B, capture="unreachable")
    assert (none_fits([view, away], Needs(options, began)) is None) == fits


def test_what_a_status_leaves_open_is_no_load_and_no_reason() -> None:
    bare = EngineView(url=A, capture="on")
    pin = Pin(fingerprint_id="f", layers=(1,), num_layers=2, dtype="float32")
    assert load_of(bare) == 0 and misfit(bare, replace(asking(1), pin=pin)) is None


def test_batches_go_where_the_job_began_and_say_so(bench: Bench, taps: tuple[FakeTap, FakeTap]) -> None:
    taps[1].weights, taps[1].isolation = "second", loaded(1)
    job = bench.job([{"prompt": f"row {n}"} for n in range(4)], batch_size=1)
    refs = [BatchRef(job_id=job.id, batch=batch) for batch in range(4)]
    assert bench.pipeline.run(refs[0]).engine == A
    taps[0].isolation = loaded(100)
    assert bench.pipeline.run(refs[1]).engine == A
    taps[0].off = "sleeping"
    with pytest.raises(NoEngine, match="sleeping; engine http://b: fingerprint_id"):
        bench.pipeline.run(refs[2])
    taps[0].off = None
    assert {bench.pipeline.run(ref).engine for ref in refs[2:]} == {A}
    assert taps[1].requests == []
    assert bench.progress.refresh_one(job.id).succeeded == 4
    assert dict(bench.progress.tally.engines) == {A: 4}


def test_a_job_that_no_engine_fits_waits_in_the_store_and_says_why(
    bench: Bench, taps: tuple[FakeTap, FakeTap]
) -> None:
    job, other = bench.job([{"prompt": "a"}, {"prompt": "b"}], batch_size=1), bench.job([{"prompt": "c"}])
    feeder = bench.feeder(FeederLimits(8, 8, 5.0), unfit=bench.monitors.unfit)
    bench.pipeline.run(BatchRef(job_id=job.id, batch=0))
    assert bench.monitors.problem() is None and bench.monitors.unfit(asking(9)) is None  # none looked at
    for tap in taps:
        tap.weights = "second"
    bench.monitors.look()
    assert feeder.step() == 1 and list(bench.queue.queued.values()) == [BatchRef(job_id=other.id, batch=0)]
    shown = bench.overview.job(job.id)
    assert shown.state.value == "running"
    assert (shown.reason or "").startswith("it waits: no engine fits: engine http://a: fingerprint_id is ")
    assert bench.overview.job(other.id).reason is None
    status = bench.overview.queue(None)
    assert status.unfit_jobs == 1 and shown.reason == f"it waits: {status.unfit}"

    taps[1].weights = "first"
    bench.monitors.look()
    assert feeder.step() == 1
    assert bench.overview.job(job.id).reason is None


def test_direct_extraction_takes_the_same_choice(
    serve: Callable[..., Service], taps: tuple[FakeTap, FakeTap]
) -> None:
    service = serve()
    taps[0].layers = (1, 3, 4)
    for n, layers in enumerate(([3, 1], [2])):
        service.client.extract([{"prompt": "x"}], JobOptions(layers=layers))
        assert [len(tap.requests) for tap in taps] == [1, n]
    taps[1].off = "sleeping"
    assert service.client.extract([{"prompt": "x"}])
    assert [len(tap.requests) for tap in taps] == [2, 1]


def test_queue_metrics_and_doctor_name_each(
    serve: Callable[..., Service], taps: tuple[FakeTap, FakeTap]
) -> None:
    service = serve()
    taps[0].off, taps[1].isolation = "sleeping", loaded(2)
    service.bench.engines.aside.put(B, None, "it hung")
    service.bench.monitors.look()
    first, second = service.client.queue().engines
    assert (first.url, first.capture, first.detail) == (A, "off", "sleeping")
    assert (second.url, second.held, second.set_aside, second.in_flight) == (B, 2, "it hung", 0)
    text = httpx.get(service.url + "/metrics").text
    assert 'taphouse_engine_capture{engine="http://a"} 0.0' in text
    assert 'taphouse_engine_held{engine="http://b"} 2.0' in text
    assert 'taphouse_engine_set_aside{engine="http://b"} 1.0' in text
    checks = {check.check: check for check in service.client.doctor()}
    names = ("engine", "canary", "slices", "scheduler")
    assert {f"{name} of {url}" for name in names for url in (A, B)} <= set(checks)
    assert not checks[f"engine of {A}"].ok and checks[f"engine of {B}"].ok
    assert checks["engines"].ok and "all alike: 2 of fingerprint" in checks["engines"].detail
    taps[1].weights = "second"
    [check] = [check for check in service.client.doctor() if check.check == "engines"]
    assert "not alike" in check.detail


@dataclass
class Noted:
    """The leases' face to a run: what is counted of it."""

    waits: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    @contextmanager
    def hold(self, ref: BatchRef, holder: str, *, deadline_s: float) -> Iterator[None]:
        yield

    def tries_of(self, ref: BatchRef) -> Tries:
        return Tries()

    def count_wait(self, ref: BatchRef, reason: str, *, delay_s: float) -> None:
        self.waits.append(reason)

    def count_bad(self, ref: BatchRef, reason: str, *, delay_s: float) -> None:
        self.bad.append(reason)


def test_a_run_that_meets_another_engine_than_the_jobs_is_no_bad_run(
    bench: Bench, taps: tuple[FakeTap, FakeTap], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, the batch is not given up: it waits for the engine that its job began with."""
    job, noted = bench.job([{"prompt": "a"}, {"prompt": "b"}], batch_size=1), Noted()
    bench.pipeline.run(BatchRef(job_id=job.id, batch=0))
    began = taps[0].status()["fingerprint_id"]
    links = Links(noted, bench.pipeline)  # type: ignore[arg-type]
    runner = BatchRunner("w", lambda: nullcontext(links), Backoff(1.0, 15.0), 60.0)
    for tap in taps:
        tap.weights = "second"
    runner(BatchRef(job_id=job.id, batch=1))
    for tap in taps:  # whose weights change between their status and the capture
        said = {**tap.status(), "fingerprint_id": began}
        monkeypatch.setattr(tap, "status", lambda said=said: said)
    runner(BatchRef(job_id=job.id, batch=1))
    assert noted.bad == [] and len(noted.waits) == 2
    assert "no engine fits" in noted.waits[0] and "is not the job's any more" in noted.waits[1]
    assert list(bench.records.finished(job.id)) == [0]


def test_a_batch_waits_for_its_store(bench: Bench) -> None:
    """A worker whose disk was unmounted finds no job: that is not the batch's fault."""
    job, noted = bench.job([{"prompt": "a"}]), Noted()

    def check() -> None:
        raise WrongStore("the store's directory is empty")

    links = Links(noted, bench.pipeline, check=check)  # type: ignore[arg-type]
    slept: list[float] = []
    runner = BatchRunner("w", lambda: nullcontext(links), Backoff(1.0, 15.0), 60.0, slept.append)
    runner(BatchRef(job_id=job.id, batch=0))
    assert (noted.waits, noted.bad) == (["the store's directory is empty"], [])
    assert slept == [WRONG_STORE_S], "the next batch is for a worker that has its store"
    assert list(bench.records.finished(job.id)) == []


@pytest.fixture
def logged(
    bench: Bench,
    taps: tuple[FakeTap, FakeTap],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Callable[[int], tuple[Noted, str]]:
    """A batch whose rows every engine answers with a status, in the rows' own words: what is said of it."""

    def run(status: int) -> tuple[Noted, str]:
        for tap in taps:
            monkeypatch.setattr(tap, "handle", partial(echoing, tap.handle, status))
        for engine in bench.engines.each:
            monkeypatch.setattr(engine, "_patience_s", 0.0)
        job, noted = bench.job([{"prompt": "SECRET-A"}, {"prompt": "SECRET-B"}]), Noted()
        links = Links(noted, bench.pipeline)  # type: ignore[arg-type]
        runner = BatchRunner("w", lambda: nullcontext(links), Backoff(1.0, 15.0), 60.0)
        with caplog.at_level("DEBUG"):
            runner(BatchRef(job_id=job.id, batch=0))
        return noted, caplog.text

    return run


def test_what_an_engine_says_of_a_row_is_in_no_log(logged: Callable[[int], tuple[Noted, str]]) -> None:
    noted, log = logged(500)
    assert "none of 2 rows was captured" in log and "SECRET" not in log
    assert noted.waits == [] and len(noted.bad) == 1
    assert noted.bad[0].startswith("EngineFailing: none of 2 rows was captured: ")
    assert "SECRET" in noted.bad[0]


@pytest.mark.parametrize("status", [403, 429, 502, 503])
def test_what_is_answered_for_an_engine_is_in_no_log_and_no_reason(
    logged: Callable[[int], tuple[Noted, str]], status: int
) -> None:
    noted, log = logged(status)
    assert "it waits" in log and "SECRET" not in log
    [reason] = noted.waits
    assert reason.startswith(f"engine answered {status}: no explanation") and noted.bad == []


def echoing(
    handle: Callable[..., Any], refused_with: int, method: str, *rest: Any
) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Answer a status to every capture, in the row's own words."""
    if method == "POST":
        *_, body = rest
        return refused_with, {}, {"error": {"message": f"can't do {body['prompt']}"}}
    answer: tuple[int, dict[str, str], dict[str, Any]] = handle(method, *rest)
    return answer
