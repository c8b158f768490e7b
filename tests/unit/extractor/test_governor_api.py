"""The governor over HTTP: look, order, queue, metrics, doctor; and production's own latency in the queue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.queue.fake_tap import FakeTap
from tests.unit.extractor.conftest import TOKEN, Bench, Service, engine_of
from tests.unit.extractor.governing import SCALE, FakeRedis, bucket

from taphouse.errors import Conflict, Unavailable
from taphouse.wire import GovernorMode
from taphouse_extractor.governor.loop import Governor
from taphouse_extractor.governor.memory import Memory
from taphouse_extractor.governor.verdicts import Bounds
from taphouse_extractor.monitor import EngineMonitor

Serve = Callable[..., Service]


def governor_of(bench: Bench) -> Governor:
    return Governor(
        engines=[bench.engine],
        memory=bench.memory,
        bounds=Bounds(),
        ttl_s=10.0,
        order=bench.orders.now,
        name="one",
    )


def latency(itl_s: float, count: int, running: int = 3) -> dict[str, object]:
    return {
        "bucket_ratio": SCALE.ratio,
        "first_bound_s": SCALE.first_s,
        "production": {"itl": {"1": {str(bucket(itl_s)): count}}, "ttft": {}, "running": running},
        "extraction": {},
    }


def test_before_anything_governs_it_says_so(serve: Serve) -> None:
    service = serve()
    view = service.client.governor()
    assert (view.mode, view.busy_ms, view.stopped) == (GovernorMode.AUTO, None, False)
    assert "no governor leads" in view.reason
    assert service.client.queue().governor is None


def test_orders_are_kept_and_followed(serve: Serve) -> None:
    service = serve()
    governor = governor_of(service.bench)
    governor.step()
    assert service.client.govern(GovernorMode.PINNED, 5.0).mode is GovernorMode.PINNED
    governor.step()
    view = service.client.governor()
    assert view.busy_ms == 5.0 and view.reason.startswith("pinned at 5 ms by the operator; ")
    assert "no latency of production" in view.reason
    assert service.bench.tap.quota()["busy_ms"] == 5.0
    queue = service.client.queue()
    assert queue.governor == service.client.governor() and queue.paused is None

    service.client.govern(GovernorMode.STOPPED)
    governor.step()
    assert service.bench.tap.quota()["stopped"]
    stopped = service.client.queue()
    assert stopped.governor is not None and stopped.governor.stopped
    assert "stopped by the operator" in (stopped.paused or "")
    again = governor_of(service.bench)  # another process, later
    service.bench.memory.resign("one")
    again.step()
    assert service.client.governor().mode is GovernorMode.STOPPED
    service.client.govern(GovernorMode.AUTO)
    again.step()
    view = service.client.governor()
    assert not view.stopped and view.busy_ms == Bounds().start_ms


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"mode": "fast"},
        {"mode": "pinned"},
        {"mode": "auto", "busy_ms": 3},
        {"mode": "pinned", "busy_ms": -1},
        {"mode": "pinned", "busy_ms": "NaN"},
        {"mode": "pinned", "busy_ms": 1e9},
        {"mode": "auto", "typo": 1},
    ],
)
def test_wrong_orders_are_refused(serve: Serve, body: dict[str, object]) -> None:
    service = serve()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(service.url + "/v1/governor", json=body, headers=headers)
    assert answer.status_code == 422
    assert service.bench.orders.look().mode is GovernorMode.AUTO
    with pytest.raises(ValueError, match="busy_ms"):
        service.client.govern(GovernorMode.PINNED)


def test_one_that_is_switched_off_takes_no_orders(serve: Serve) -> None:
    service = serve(governor=False)
    assert "switched off" in service.client.governor().reason
    assert service.client.queue().governor is None
    with pytest.raises(Conflict, match="TAPHOUSE_EXTRACTOR_GOVERNOR"):
        service.client.govern(GovernorMode.STOPPED)
    [check] = [check for check in service.client.doctor() if check.check == "governor"]
    assert check.ok and "switched off" in check.detail


def test_without_redis_it_is_503_and_the_queue_still_answers(serve: Serve) -> None:
    service = serve()
    fake = service.bench.memory._redis
    assert isinstance(fake, FakeRedis)
    fake.away = True
    with pytest.raises(Unavailable, match="Redis"):
        service.client.governor()
    with pytest.raises(Unavailable, match="the order is kept, and no governor can follow it yet: Redis"):
        service.client.govern(GovernorMode.STOPPED)
    assert service.client.queue().governor is None
    [check] = [check for check in service.client.doctor() if check.check == "governor"]
    assert not check.ok and check.advice
    fake.away = False
    fake.values.clear()  # it comes back empty
    governor_of(service.bench).step()
    assert service.bench.tap.quota()["stopped"] and service.client.governor().mode is GovernorMode.STOPPED


def test_an_order_that_the_store_can_not_keep_is_an_error_and_the_last_one_stays(serve: Serve) -> None:
    service = serve()
    governor = governor_of(service.bench)
    service.client.govern(GovernorMode.STOPPED)
    path = service.bench.store.root / "governor"
    path.rename(path.with_name("moved"))
    path.write_text("a file where the directory was")
    with pytest.raises(Unavailable, match=r"can't be kept, and 'stopped' stays in force: .*governor/order"):
        service.client.govern(GovernorMode.AUTO)
    service.bench.orders.look()
    governor.step()
    assert service.bench.tap.quota()["stopped"] and "stopped by" in (service.client.queue().paused or "")
    path.unlink()
    service.client.govern(GovernorMode.AUTO)
    governor.step()
    assert not service.bench.tap.quota()["stopped"]


def test_metrics(serve: Serve) -> None:
    service = serve()
    bench = service.bench
    bench.tap.latency = latency(0.02, 100)
    bench.monitors.look()
    bench.tap.latency = latency(0.02, 300)
    bench.monitors.look()
    service.client.govern(GovernorMode.PINNED, 5.0)
    governor_of(bench).step()
    families = list(text_string_to_metric_families(httpx.get(service.url + "/metrics").text))
    samples = [sample for family in families for sample in family.samples]
    values = {sample.name: sample for sample in samples}
    assert values["taphouse_governor_limit_seconds"].value == 0.005
    assert values["taphouse_governor_stopped"].value == 0
    assert values["taphouse_governor_info"].labels == {
        "mode": "pinned",
        "reason": "pinned at # ms by the operator",
    }
    assert "taphouse_governor_slowdown_ratio" not in values
    assert values["taphouse_engine_latency_seconds"].labels["requests"] == "production"


def test_the_queue_shows_productions_own_latency(tap: FakeTap) -> None:
    monitor = EngineMonitor(engine_of(tap))
    tap.latency = latency(0.5, 1000)  # of the hours before
    first = monitor.look().latency
    assert first is not None and (first.requests, first.itl_p95) == ("production", None)
    tap.latency["production"]["itl"]["1"][str(bucket(0.02))] = 200
    seen = monitor.look().latency
    assert seen is not None and seen.itl_p95 == pytest.approx(0.02, rel=0.05)
    assert (seen.requests_running, seen.ttft_p95) == (3.0, None)
    tap.latency = latency(0.1, 3)  # restarted
    again = monitor.look().latency
    assert again is not None and again.itl_p95 is None


def test_a_latency_section_that_can_not_be_read_falls_back(tap: FakeTap) -> None:
    monitor = EngineMonitor(engine_of(tap))
    tap.latency = {"production": "fast"}
    view = monitor.look()
    assert view.capture == "on" and (view.latency is None or view.latency.requests == "all")


def test_a_stopped_engine_is_full_for_a_row(tap: FakeTap, tmp_path: Path) -> None:
    engine = engine_of(tap)
    engine.set_quota({"busy_ms": 0.0, "stopped": True, "ttl_s": 60.0})
    assert engine.status()["isolation"]["quota"]["stopped"]
    engine.set_quota({"busy_ms": 1.0, "stopped": False, "ttl_s": 60.0})
    assert engine.capture({"prompt": "x", "max_tokens": 1}).rows == 1


def test_the_doctor_says_which_engine_lacks_the_scheduler(serve: Serve) -> None:
    service = serve()

    def found() -> dict[str, bool]:
        return {check.check: check.ok for check in service.client.doctor()}

    governor = governor_of(service.bench)
    assert not found()["governor"]
    governor.step()
    assert found()["governor"] and found()["scheduler"]
    service.bench.tap.isolation = None
    assert not found()["scheduler"]


def test_memory_keeps_a_mode_for_every_process() -> None:
    fake = FakeRedis()
    one, other = (Memory(fake, prefix="p", ttl_s=5.0) for _ in range(2))
    assert one.lead("a") and not other.lead("b") and other.leader() == "a"
    one.resign("b")
    assert one.leader() == "a"
    one.resign("a")
    assert other.lead("b")
