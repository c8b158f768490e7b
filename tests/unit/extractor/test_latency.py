from __future__ import annotations

import math
from pathlib import Path

import httpx
import pytest
from tests.unit.extractor.conftest import engines_of

from taphouse_extractor.engine import Engine
from taphouse_extractor.latency import LatencyWindow, parse_metrics, quantile
from taphouse_extractor.monitor import Monitors

HEAD = "# TYPE vllm:inter_token_latency_seconds histogram\n"


def itl(*counts: int, engine: str = "0") -> str:
    bounds = ("0.01", "0.02", "0.04", "+Inf")
    return "".join(
        f'vllm:inter_token_latency_seconds_bucket{{engine="{engine}",le="{bound}"}} {count}\n'
        for bound, count in zip(bounds, counts, strict=True)
    )


def test_quantiles_as_prometheus_computes_them() -> None:
    counts = {0.01: 10.0, 0.02: 30.0, 0.04: 40.0, math.inf: 40.0}
    assert quantile(counts, 0.5) == pytest.approx(0.015)
    assert quantile(counts, 0.25) == pytest.approx(0.01)
    assert quantile(counts, 0.95) == pytest.approx(0.036)
    assert quantile({0.01: 0.0, math.inf: 4.0}, 0.95) == 0.01
    assert quantile({0.01: 0.0, math.inf: 0.0}, 0.5) is None
    assert quantile({}, 0.5) is None


def test_engines_are_summed_and_other_metrics_left_alone() -> None:
    text = HEAD + itl(1, 2, 3, 4) + itl(10, 20, 30, 40, engine="1") + "other_total 3\n"
    text += "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting 2\n"
    scrape = parse_metrics(text, 5.0)
    assert scrape.itl == {0.01: 11.0, 0.02: 22.0, 0.04: 33.0, math.inf: 44.0}
    assert (scrape.ttft, scrape.waiting, scrape.running) == ({}, 2.0, None)


def test_only_what_came_since_the_window_began_counts() -> None:
    window = LatencyWindow()
    assert window.add(HEAD + itl(100, 100, 100, 100)).itl_p50 is None
    assert window.add(HEAD + itl(100, 100, 110, 110)).itl_p50 == pytest.approx(0.03)
    after_restart = window.add(HEAD + itl(4, 4, 4, 4))
    assert after_restart.itl_p50 is None or after_restart.itl_p50 >= 0


def test_the_monitor_never_raises(tmp_path: Path) -> None:
    answers = {"/v1/hidden_states/status": httpx.Response(200, json={"capture": "on", "layers": [1, 2]})}

    def answer(request: httpx.Request) -> httpx.Response:
        return answers.get(request.url.path, httpx.Response(404))

    engine = Engine("http://engine", slice_dir=tmp_path, transport=httpx.MockTransport(answer))
    monitors = Monitors(engines_of(engine))
    [monitor] = monitors.each
    assert monitors.problem() is None
    seen = monitor.look()
    assert (seen.capture, seen.layers, seen.latency, monitors.problem()) == ("on", [1, 2], None, None)
    answers["/metrics"] = httpx.Response(200, text=HEAD + itl(1, 1, 1, 1))
    assert monitor.look().latency is not None
    answers["/v1/hidden_states/status"] = httpx.Response(
        200, json={"capture": "off", "reason": "canary pending"}
    )
    assert monitor.look().capture == "off"
    assert "canary pending" in (monitors.problem() or "")
    answers["/v1/hidden_states/status"] = httpx.Response(200, text="not JSON")
    assert monitor.look().capture == "unreachable"
    answers.clear()
    assert monitor.look().capture == "unreachable"
