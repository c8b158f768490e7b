"""Latency is published: files that servers of one engine sum up, the status, and ``/metrics``."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from tests.unit.tap.endpoint_fakes import make_bench
from tests.unit.tap.latency_fakes import Clock, samples

from taphouse import slices
from taphouse_tap.api import latency_reports
from taphouse_tap.api.latency import ABORTED, BOUNDS, FAILED, FINISHED, LatencyByClass
from taphouse_tap.api.latency_reports import STALE_S, LatencyReports
from taphouse_tap.api.metrics import LatencyMetrics


def make_reports(start: slices.Start | None, clock: Clock | None = None) -> LatencyReports:
    reports = LatencyReports(LatencyByClass(), LatencyMetrics(publish=False), clock or Clock())
    if start is not None:
        reports.connect(start)
    return reports


def one_request(latency: LatencyByClass, name: str = "a", tokens: int = 3) -> None:
    """0.1 s to the first token, 0.01 s to each other."""
    latency.arrived(name, None, 1.0)
    for index in range(tokens):
        latency.tokens(name, 1, 1.1 + index / 100)
    latency.ended(name, FINISHED, 2.0)


def another_server(start: slices.Start, pid: int, body: dict[str, Any]) -> Path:
    path = start.directory / f"latency-{pid}.json"
    path.write_text(json.dumps(body))
    return path


@pytest.fixture
def start(tmp_path: Path) -> slices.Start:
    return slices.open_start(tmp_path / "slices", "1")


def test_without_a_start_a_server_tells_its_own() -> None:
    reports = make_reports(None)
    one_request(reports.latency)
    section = reports.section()
    assert section["bucket_ratio"] == pytest.approx(1.0443, abs=1e-4) and section["first_bound_s"] == 0.00025
    assert samples(section["production"]["itl"]) == 2 and section["problem"] is None


def test_two_servers_sum_up_and_the_dead_still_count(start: slices.Start) -> None:
    clock = Clock(1000.0)
    mine, other = make_reports(start, clock), LatencyByClass()
    one_request(mine.latency)
    one_request(other)
    other.arrived("b", None, 3.0)
    path = another_server(start, 1, {"pid": 1, "updated_at": clock.now, **other.report()})
    section = mine.section()
    assert samples(section["production"]["itl"]) == 4
    assert (section["production"]["finished"], section["production"]["running"]) == (2, 1)
    assert mine.latency.elsewhere == 1
    clock.now += STALE_S + 1
    section = mine.section()
    assert (section["production"]["finished"], section["production"]["running"]) == (2, 0)
    assert mine.latency.elsewhere == 0
    other.turn_off("broke")
    path.unlink()
    another_server(start, 1, {"pid": 1, "updated_at": clock.now, **other.report()})
    assert mine.section()["problem"] == "broke"


def test_a_server_writes_what_changed_and_renews_what_runs(start: slices.Start) -> None:
    clock = Clock(1000.0)
    reports = make_reports(start, clock)
    path = start.directory / f"latency-{os.getpid()}.json"

    def written() -> Any:
        return json.loads(path.read_text())["updated_at"]

    reports.publish()
    clock.now += 100
    reports.publish()
    assert written() == 1000.0
    reports.latency.arrived("a", None, 1.0)
    reports.publish()
    assert written() == 1100.0
    clock.now += 1
    reports.publish()
    assert written() == 1100.0
    clock.now += 1
    reports.publish()
    assert written() == 1102.0


def test_every_server_answers_no_less_than_another_did(start: slices.Start, monkeypatch: Any) -> None:
    """The governor takes differences: a sum that shrinks would be another engine's."""
    first, second = make_reports(start), make_reports(start)
    one_request(first.latency)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert samples(first.section()["production"]["itl"]) == 2
    monkeypatch.setattr(os, "getpid", lambda: 2)
    assert samples(second.section()["production"]["itl"]) == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"updated_at": 1}', '{"production": [], "problem": 1}']
)
def test_a_file_that_is_none_is_passed_over(start: slices.Start, text: str) -> None:
    reports = make_reports(start)
    one_request(reports.latency)
    (start.directory / "latency-1.json").write_text(text)
    assert samples(reports.section()["production"]["itl"]) == 2


def test_a_full_file_system_is_no_problem_of_timing(start: slices.Start, monkeypatch: Any) -> None:
    def full(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(slices, "write_atomically", full)
    reports = make_reports(start)
    one_request(reports.latency)
    assert samples(reports.section()["production"]["itl"]) == 2 and reports.latency.problem is None


def test_publishing_goes_on_in_the_background(start: slices.Start, monkeypatch: Any) -> None:
    monkeypatch.setattr(latency_reports, "PUBLISH_S", 0.005)
    reports = make_reports(start)
    path = start.directory / f"latency-{os.getpid()}.json"

    async def go() -> None:
        reports.begin()
        while not path.exists():
            await asyncio.sleep(0.005)
        one_request(reports.latency)
        while json.loads(path.read_text())["production"]["finished"] != 1:
            await asyncio.sleep(0.005)
        await reports.close()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_the_status_has_the_section(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    one_request(bench.service.latency.latency)

    async def go() -> Any:
        await bench.ready()
        async with bench.client() as client:
            body = (await client.get("/v1/hidden_states/status")).json()
        await bench.service.close()
        return body

    section = asyncio.run(go())["latency"]
    assert {"bucket_ratio", "first_bound_s", "problem", "production", "extraction"} == set(section)
    assert samples(section["production"]["ttft"]) == 1
    assert bench.service.latency.latency.secret == bench.start.secret


def test_metrics_are_the_same_counts_in_coarser_buckets() -> None:
    registry = prometheus_client.CollectorRegistry()
    latency, metrics = LatencyByClass(), LatencyMetrics(registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"taphouse_{name}", {"class": "production", **labels})

    assert value("request_itl_seconds_count") == 0
    for name in ("a", "b"):
        one_request(latency, name)
        metrics.update(latency)
    metrics.update(latency)
    assert value("request_itl_seconds_count") == 4
    assert value("request_itl_seconds_sum") == pytest.approx(0.04)
    assert value("request_itl_seconds_bucket", le="0.008") == 0
    assert value("request_itl_seconds_bucket", le="0.016") == 4
    assert value("request_ttft_seconds_bucket", le="+Inf") == 2
    assert value("requests_finished_total", outcome="finished") == 2
    for outcome in (FAILED, ABORTED):
        latency.arrived("c", None, 1.0)
        latency.ended("c", outcome, 2.0)
    latency.arrived("d", None, 0.0)
    latency.tokens("d", 1, BOUNDS[-1] + 1)
    metrics.update(latency)
    assert value("requests_finished_total", outcome="failed") == 1
    assert value("requests_finished_total", outcome="aborted") == 1
    assert value("request_ttft_seconds_bucket", le="+Inf") == 3
    assert value("request_ttft_seconds_bucket", le="4194.304") == 2


def test_metrics_that_cannot_be_registered_or_filled_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    registry = prometheus_client.CollectorRegistry()
    latency = LatencyByClass()
    one_request(latency)
    first, second = LatencyMetrics(registry), LatencyMetrics(registry)
    second.update(latency)
    first._published["production", "ttft"] = None
    first.update(latency)
    first.update(latency)
    assert [record.message.split(":")[1] for record in caplog.records] == [
        " no latency on /metrics",
        " latency on /metrics stands still",
    ]
