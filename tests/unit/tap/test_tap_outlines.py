"""The breaker, the record, the settings, the launch flags and the canary's verdict."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.tap.worker_fakes import Decoder, opened, weights_of
from torch import nn

from taphouse_tap import __version__
from taphouse_tap.__main__ import launch_args, main
from taphouse_tap.rank.breaker import Breaker
from taphouse_tap.rank.check import _tolerance as check_tolerance
from taphouse_tap.rank.record import RecordThread
from taphouse_tap.rank.weights import final_norm_checksum
from taphouse_tap.settings import load_settings
from taphouse_tap.verdict import combine


def test_the_breaker_keeps_the_first_reason_and_tells_everyone() -> None:
    breaker, told = Breaker(), []

    def broken() -> None:
        raise RuntimeError

    breaker.on_trip(broken)
    breaker.on_trip(lambda: told.append(breaker.reason))
    breaker.trip("writer", ValueError("first"))
    breaker.trip("record", ValueError("second"))
    breaker.refuse("third")
    assert told == ["error in writer: ValueError: first"]
    assert breaker.trip_record is not None and breaker.trip_record["error"] == "ValueError: first"


def test_a_refusal_is_no_error() -> None:
    breaker = Breaker()
    breaker.refuse("pipeline parallelism")
    assert (breaker.tripped, breaker.reason, breaker.trip_record) == (True, "pipeline parallelism", None)


def test_a_trip_is_published_at_once(tmp_path: Path) -> None:
    start, breaker = opened(tmp_path), Breaker()
    RecordThread(start, breaker, lambda: {"dp_rank": 0, "tp_rank": 3}, None).start()
    assert start.records()[0]["capture"] == "on"
    breaker.trip("writer", ValueError("x"))
    (record,) = start.records()
    assert (record["capture"], record["breaker"]["where"]) == ("off", "writer")


def test_a_record_that_cannot_be_made_trips_the_breaker(tmp_path: Path) -> None:
    start, breaker = opened(tmp_path), Breaker()
    facts: dict[str, Any] = {"dp_rank": 0, "tp_rank": 0}
    thread = RecordThread(start, breaker, lambda: facts, None)
    thread.start()
    del facts["tp_rank"]
    thread.changed()
    deadline = time.monotonic() + 10
    while not breaker.tripped:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert breaker.reason is not None and "error in record" in breaker.reason


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    monkeypatch.setenv("TAPHOUSE_TAP_SLICE_DIR", str(tmp_path))
    monkeypatch.setenv("TAPHOUSE_TAP_API_KEY_FILE", str(key))
    settings = load_settings()
    assert (settings.slice_dir, settings.key(), settings.max_in_flight) == (tmp_path, "secret", 256)
    key.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        settings.key()


@pytest.mark.parametrize(
    ("name", "value"),
    [("SLICE_DIRR", "/x"), ("PINNED_LIMIT_BYTES", "0"), ("SLICE_TTL_S", "soon"), ("MAX_IN_FLIGHT", "-1")],
)
def test_settings_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TAPHOUSE_TAP_{name}", value)
    with pytest.raises(ValueError, match=name if name == "SLICE_DIRR" else name.lower()):
        load_settings()


def test_launch_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch-args", "--layers", "58,3", "--tensor-parallel-size", "8"]) == 0
    flags = shlex.split(capsys.readouterr().out)
    assert flags == launch_args([3, 58], tensor_parallel_size=8)
    values = dict(zip(flags[::2], flags[1::2], strict=True))
    assert values["--worker-extension-cls"] == "taphouse_tap.worker.HiddenStatesExtension"
    tap = json.loads(values["--additional-config"])["taphouse"]
    assert tap == {"version": __version__, "layers": [3, 58]}
    assert "fuse_allreduce_rms" in values["--compilation-config"]
    assert values["--scheduler-cls"] == "taphouse_tap.scheduler.two_class_scheduler"
    assert len(launch_args(None)) == 6
    assert len(launch_args(None, two_classes=False)) == 4


def answer(best: list[float], chosen: list[float | None], **more: Any) -> dict[str, Any]:
    return {
        "ok": True,
        "reason": None,
        "checked": 1,
        "best": best,
        "chosen": chosen,
        "tolerance": 0.1,
        **more,
    }


@pytest.mark.parametrize(
    ("answers", "ok", "says"),
    [
        ([answer([3.0, 2.0], [3.0, None]), answer([1.0, 5.0], [None, 4.95])], True, None),
        ([answer([3.0, 2.0], [3.0, None]), answer([4.0, 5.0], [None, 5.0])], False, "1 of 2"),
        ([answer([3.0, 2.0], [3.0, None]), answer([1.0, 5.0], [None, None])], False, "no rank's part"),
        ([answer([3.0], [3.0]), {"ok": False, "reason": "broken"}], False, "rank 1: broken"),
        ([answer([float("nan")], [float("nan")])], False, "1 of 1"),
        ([None], False, "rank 0"),
        ([], False, "no rank"),
    ],
)
def test_the_verdict_compares_over_all_ranks(answers: list[Any], ok: bool, says: str | None) -> None:
    verdict = combine(answers)
    assert verdict["ok"] is ok
    assert says is None or says in verdict["reason"]


def test_the_checksum_follows_the_weights() -> None:
    model = nn.Sequential(nn.Linear(70, 9), nn.Linear(9, 3)).to(torch.bfloat16)
    weights = weights_of(model)
    before = weights.fingerprint
    with torch.no_grad():
        model[0].weight[8, 65] += 1  # outside the corner that is read
        assert weights.look_again()
        model[1].bias[2] += 1
    assert not weights.look_again() and weights.fingerprint == before
    weights.renew()
    assert weights.epoch == 1 and weights.look_again()
    assert {k for k, v in weights.fingerprint.items() if v != before[k]} == {"weights"}
    assert final_norm_checksum(Decoder(1).norm) is None
    assert final_norm_checksum(nn.LayerNorm(4)) == final_norm_checksum(nn.LayerNorm(4).to(torch.bfloat16))


def test_looks_go_round_all_tensors() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    weights = weights_of(model)
    with torch.no_grad():
        model[39].weight[0, 0] += 1
    assert [weights.look_again() for _ in range(5)].count(False) == 1


@pytest.mark.parametrize("scale", [1e-5, 1.0, 30.0])
def test_the_tolerance_takes_roundings_and_nothing_more(scale: float) -> None:
    """Ties that bfloat16 can't tell apart pass at any scale; the tokens of other rows don't."""
    torch.manual_seed(0)
    logits = torch.randn(64, 4096) * scale
    engine = logits.to(torch.bfloat16).float() * (1 + (torch.rand_like(logits) - 0.5) * 2**-7)
    tolerance = check_tolerance(logits, "bfloat16")
    best = logits.max(dim=1).values
    right = logits.gather(1, engine.argmax(dim=1, keepdim=True))[:, 0]
    wrong = logits.gather(1, engine.roll(1, 0).argmax(dim=1, keepdim=True))[:, 0]
    assert (best - right <= tolerance).all()
    assert (best - wrong > tolerance).all()
