"""The health thread, over a real socket."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from taphouse_trainer.health import HealthServer, Metrics


class Service:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.answer: dict[str, Any] = {"status": "ok", "step": 3}
        self.server = HealthServer("127.0.0.1", 0, self.metrics, lambda: self.answer)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.server.port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    made.server.start()
    yield made
    made.server.close()


def test_health(service: Service) -> None:
    status, body = service.get("/health")
    assert (status, json.loads(body)) == (200, {"status": "ok", "step": 3})
    service.answer = {"status": "failing"}
    assert service.get("/health")[0] == 503
    assert service.get("/elsewhere")[0] == 404


def test_metrics(service: Service) -> None:
    service.metrics.loss.set(2.5)
    service.metrics.refused.labels("checksum").inc()
    service.metrics.accuracy.labels("held_out", "1").set(0.25)
    body = service.get("/metrics")[1]
    assert "taphouse_trainer_loss 2.5" in body
    assert 'taphouse_trainer_shards_refused_total{reason="checksum"} 1.0' in body
    assert 'taphouse_trainer_accuracy{position="1",set="held_out"} 0.25' in body


def test_registries_are_separate(service: Service) -> None:
    Metrics().loss.set(9.0)
    assert "taphouse_trainer_loss 0.0" in service.get("/metrics")[1]
