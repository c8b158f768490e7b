"""Installing the tap in a worker: on where it can be right, off with a reason where not, never an error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.tap.worker_fakes import Decoder
from torch import nn

from taphouse_tap import __version__, compat, compat_model, worker
from taphouse_tap.errors import CaptureRefused
from taphouse_tap.rank.tap import WorkerTap
from taphouse_tap.rank.taps import faults
from taphouse_tap.rank.weights import corner_checksum

HIDDEN = 8


class Model(nn.Module):
    """A decoder with a parameter, as a loaded model has."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder(5)
        self.embedding = nn.Embedding(3, HIDDEN)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Model]:
    """A model in an engine that captures; `compat` answers for the engine."""
    model = Model()
    monkeypatch.setenv("TAPHOUSE_TAP_SLICE_DIR", str(tmp_path / "slices"))
    for name, answer in {
        "ranks": compat.Ranks(0, 2, 0),
        "instance_id": "start_dp0",
        "model_facts": compat.ModelFacts(HIDDEN, torch.float32, 16, 64),
        "mode": {"runner": "V1"},
        "tap_config": {"version": __version__, "layers": [1, 3]},
        "check_mode": None,
        "model": model,
        "identity": {"config": "c"},
    }.items():
        monkeypatch.setattr(compat, name, lambda *_, answer=answer, **__: answer)
    yield model
    faults.report = None
    while _taps:
        if (link := _taps.pop()._link) is not None:
            link.close()


_taps: list[WorkerTap] = []


def installed() -> WorkerTap:
    additional = {"taphouse": {"version": __version__, "layers": [1, 3]}}
    tap = WorkerTap(SimpleNamespace(vllm_config=SimpleNamespace(additional_config=additional)))
    tap.install()
    _taps.append(tap)
    assert additional["taphouse"].get("untapped") is (True if tap.steps is None else None)
    return tap


def hooked(model: Model) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def test_a_tapped_worker_says_what_it_captures(model: Model) -> None:
    tap = installed()
    assert tap.steps is not None and tap.start is not None and not tap.breaker.tripped
    (record,) = tap.start.records()
    expected = {
        "capture": "on",
        "reason": None,
        "breaker": None,
        "start_id": "start",
        "layers": [1, 3, 5],
        "num_layers": 5,
        "hidden_size": HIDDEN,
        "width": HIDDEN // 2,
        "dtype": "float32",
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "in_flight": 0,
        "tp_rank": 0,
        "tp_size": 2,
        "dp_rank": 0,
        "mode": {"runner": "V1"},
    }
    assert {key: record[key] for key in expected} == expected
    assert set(record["counters"]) >= {"steps", "rows", "bytes", "sealed", "failed", "forged", "host_s"}
    assert record["memory"]["buffer_bytes"] == 16 * (3 * 4 * 4 + 16)
    assert set(record["model_fingerprint"]) == {"config", "dtype", "weights", "final_norm"}
    assert hooked(model) == 5
    summary = tap.summary()
    assert (summary["start_id"], summary["capture"]) == ("start", "on")
    assert summary["start_dir"] == str(tap.start.directory)


@pytest.mark.parametrize("config", [{}, {"version": "0.0.0", "layers": [1]}])
def test_another_version_in_the_compile_cache_key_keeps_capture_off(
    model: Model, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    monkeypatch.setattr(compat, "tap_config", lambda _: config)
    tap = installed()
    assert tap.steps is None and hooked(model) == 0
    assert "launch-args" in str(tap.breaker.reason) and tap.breaker.trip_record is None
    assert tap.start is not None and tap.start.records()[0]["capture"] == "off"


@pytest.mark.parametrize(
    "function",
    ["tap_config", "check_mode", "find_stack", "model", "identity", "stream_arguments", "model_facts"],
)
def test_an_error_on_the_way_leaves_the_model_untouched(
    model: Model, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(compat if hasattr(compat, function) else compat_model, function, broken)
    tap = installed()
    assert tap.steps is None and hooked(model) == 0
    assert tap.breaker.reason == "error in load_model: ZeroDivisionError: ours"
    assert tap.start is not None
    (record,) = tap.start.records()
    assert (record["capture"], record["breaker"]["where"]) == ("off", "load_model")


def test_a_writer_process_that_does_not_start_keeps_capture_off(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    tap = installed()
    assert tap.steps is None and hooked(model) == 0
    assert "exit status 1" in str(tap.breaker.reason)


def test_a_writer_process_that_is_gone_turns_capture_off(model: Model) -> None:
    tap = installed()
    assert tap._link is not None and tap.start is not None
    tap._link.process.kill()
    deadline = time.monotonic() + 20
    while tap.start.records()[0]["capture"] == "on":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "the writer process is gone (signal 9)" in tap.start.records()[0]["reason"]
    assert hooked(model) == 5  # the compiled graph keeps its taps


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("SLICE_DIR", "/proc/nowhere", "load_model"),
        ("SLICE_TTL_S", "soon", "slice_ttl_s"),
        ("PINNED_LIMIT_BYTES", "100", "TAPHOUSE_TAP_PINNED_LIMIT_BYTES"),
    ],
)
def test_settings_that_cannot_be_keep_capture_off(
    model: Model, monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(f"TAPHOUSE_TAP_{name}", value)
    tap = installed()
    assert tap.steps is None and hooked(model) == 0
    assert says in str(tap.summary()["reason"])


def test_a_second_load_turns_capture_off(model: Model) -> None:
    process = SimpleNamespace()
    worker._load_model(process)
    tap = process._taphouse_tap
    _taps.append(tap)
    assert not tap.breaker.tripped
    worker._load_model(process)
    assert process._taphouse_tap is tap and "second time" in str(tap.breaker.reason)


def test_changed_weights_begin_a_new_epoch_with_a_fingerprint_of_their_own(model: Model) -> None:
    tap = installed()
    assert tap.start is not None
    before = tap.start.records()[0]
    tap.weights_changing("reload_weights")
    (changing,) = tap.start.records()
    assert changing["capture"] == "off" and "reload_weights" in changing["reason"]
    with torch.no_grad():
        model.embedding.weight += 1
    tap.weights_changed("reload_weights")
    (after,) = tap.start.records()
    assert (before["weights_epoch"], after["weights_epoch"]) == (0, 1)
    assert (after["capture"], after["reason"]) == ("on", None)
    assert before["model_fingerprint"]["weights"] != after["model_fingerprint"]["weights"]


def test_weights_that_nobody_announced_are_noticed(model: Model) -> None:
    tap = installed()
    assert tap._epoch_now() == 0
    with torch.no_grad():
        model.embedding.weight += 1
    assert tap._epoch_now() == 1 and tap.start is not None
    assert tap.start.records()[0]["weights_epoch"] == 1


def test_a_record_never_names_a_new_epoch_with_an_old_fingerprint(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record's thread may publish at any moment of a change."""
    tap = installed()
    old, published = tap._state(), []

    def watched(parameter: torch.Tensor) -> str:
        published.append(tap._state())
        return corner_checksum(parameter)

    monkeypatch.setattr("taphouse_tap.rank.weights.corner_checksum", watched)
    with torch.no_grad():
        model.embedding.weight += 1
    tap.weights_changing("reload_weights")
    tap.weights_changed("reload_weights")
    assert published and tap._state()["weights_epoch"] == 1
    for record in published:
        assert record["weights_epoch"] == 0 and record["paused"]
        assert record["model_fingerprint"] == old["model_fingerprint"]


def test_while_weights_are_away_nothing_reads_them(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that comes after `sleep` would read memory that is gone."""
    tap = installed()
    tap.weights_changing("sleep")
    monkeypatch.setattr("taphouse_tap.rank.weights.corner_checksum", lambda _: pytest.fail("read"))
    with pytest.raises(CaptureRefused, match="put away"):
        tap._epoch_now()


def test_weights_that_arrive_layer_by_layer_are_away_until_all_are_there(model: Model) -> None:
    """vLLM's weight updates begin with parameters that have no memory."""
    tap, loaded = installed(), model.embedding.weight
    model.embedding.weight = nn.Parameter(torch.empty_like(loaded, device="meta"))
    tap.weights_changing("start_weight_update")
    tap.weights_changed("start_weight_update")
    assert "start_weight_update" in tap._state()["paused"] and not tap.breaker.tripped
    model.embedding.weight = loaded
    tap.weights_changing("finish_weight_update")
    tap.weights_changed("finish_weight_update")
    assert (tap._state()["weights_epoch"], tap._state()["paused"]) == (1, None)


@pytest.mark.parametrize(
    ("method", "raises", "active", "told"),
    [
        ("reload_weights", False, False, ["changing", "changed"]),
        ("reload_weights", True, False, ["changing", "changed"]),
        ("sleep", False, False, ["changing"]),
        ("wake_up", False, False, ["changed"]),
        ("start_weight_update", False, True, ["changing"]),
        ("start_weight_update", True, False, ["changing", "changed"]),
        ("start_weight_update", True, True, ["changing"]),
        ("finish_weight_update", False, False, ["changed"]),
    ],
)
def test_what_the_tap_is_told_around_vllms_methods(
    method: str, raises: bool, active: bool, told: list[str]
) -> None:
    """A start that vLLM refuses changes nothing, unless a session is open: that has an end of its own."""
    heard: list[str] = []

    def original(engine_worker: Any) -> str:
        engine_worker._weight_update_active = active
        if raises:
            raise RuntimeError("refused")
        return "done"

    hooks = SimpleNamespace(
        weights_changing=lambda *_: heard.append("changing"),
        weights_changed=lambda *_: heard.append("changed"),
    )
    call = compat._around_weights(method, original, hooks)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) if raises else nullcontext():
        assert call(SimpleNamespace()) == "done"
    assert heard == told


def test_an_error_while_weights_change_trips_the_breaker(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("ours")

    tap = installed()
    monkeypatch.setattr("taphouse_tap.rank.weights.corner_checksum", broken)
    tap.weights_changed("reload_weights")
    assert tap.breaker.reason == "error in reload_weights (after): ZeroDivisionError: ours"


def test_the_rpcs_answer_without_a_tap() -> None:
    extension = worker.HiddenStatesExtension()
    assert extension.taphouse_start()["capture"] == "off"
    answer = extension.taphouse_check("0" * 32, [1], 1)
    assert not answer["ok"] and "not installed" in answer["reason"]
