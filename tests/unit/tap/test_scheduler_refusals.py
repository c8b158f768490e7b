"""Where two classes can't be right: the reason is published, and vLLM's own scheduler goes on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.tap.worker_fakes import opened

from taphouse_tap import compat_scheduler
from taphouse_tap.core.assemble import Classes, EngineCore, assemble
from taphouse_tap.errors import CaptureRefused
from taphouse_tap.scheduler import two_class_scheduler


@pytest.fixture
def slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAPHOUSE_TAP_SLICE_DIR", str(tmp_path / "slices"))
    return opened(tmp_path).directory


def build(refused: str | None = None, *, unknown: bool = False) -> Classes:
    scheduler: Any = SimpleNamespace()
    return assemble(scheduler, EngineCore("unit", 0, "9.9.9", refused, unknown))


def published(directory: Path) -> tuple[str, str | None]:
    record = json.loads((directory / "scheduler-d0.json").read_text())
    return record["scheduler"], record["reason"]


def test_an_unknown_version_is_refused_and_the_record_says_so(slices: Path) -> None:
    with pytest.raises(CaptureRefused, match=r"never ran on vLLM 9\.9\.9"):
        build(unknown=True)
    state, reason = published(slices)
    assert state == "off" and "TAPHOUSE_TAP_ALLOW_UNKNOWN_VERSION" in str(reason)


def test_an_unknown_version_that_the_operator_allows_has_two_classes(
    slices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAPHOUSE_TAP_ALLOW_UNKNOWN_VERSION", "true")
    classes = build(unknown=True)
    assert published(slices) == ("on", None)
    assert not classes.is_extraction({"tag": "0" * 32})


def test_an_engine_that_cant_have_two_classes_says_why(slices: Path) -> None:
    with pytest.raises(CaptureRefused, match="a KV connector"):
        build("a KV connector holds blocks of its own")
    assert published(slices) == ("off", "a KV connector holds blocks of its own")


def test_vllms_own_scheduler_goes_on_where_ours_cant_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stock:
        def __init__(self, **given: Any) -> None:
            self.given = given

    def broken(*_: Any) -> Any:
        raise ImportError("vLLM moved it")

    monkeypatch.setattr("taphouse_tap.scheduler.stock_scheduler", lambda _: Stock)
    monkeypatch.setattr(compat_scheduler, "with_two_classes", broken)
    found = two_class_scheduler("config", log_stats=True)
    assert type(found) is Stock and found.given == {"vllm_config": "config", "log_stats": True}
    assert "vLLM's own goes on" in caplog.text
