"""When capture is on and why it is not: ranks, heartbeats, canary; and what the status says of it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from tests.unit.tap.endpoint_fakes import PASSED, Bench, make_bench

from taphouse import slices
from taphouse_tap.api import canary as canary_module
from taphouse_tap.api import service as service_module
from taphouse_tap.api.metrics import Metrics
from taphouse_tap.api.service import why_ranks_off

URL = "/v1/hidden_states"


async def settled(bench: Bench) -> None:
    """Wait until the service has connected and its canary has ended, or it gave up."""
    while bench.service.tap is None or bench.service.tap.canary.result.state in ("pending", "running"):
        if "starting" not in (bench.service.why_off() or "starting") and bench.service.tap is None:
            return
        await asyncio.sleep(0.005)


async def get_status(bench: Bench) -> Any:
    async with bench.client() as client:
        answer = await client.get(f"{URL}/status")
    assert answer.status_code == 200
    return answer.json()


async def capture(bench: Bench) -> tuple[int, str]:
    async with bench.client() as client:
        answer = await client.post(URL, json={"prompt": [10, 11]})
    return answer.status_code, answer.json().get("error", {}).get("message", "")


def test_before_the_ranks_answer_capture_is_off(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)

    async def go() -> None:
        status, reason = await capture(bench)
        assert (status, "have not answered yet" in reason) == (503, True)
        body = await get_status(bench)
        assert (body["capture"], body["ranks"]) == ("off", [])
        assert body["plugins"] == {"allowed": ["taphouse"], "left_out": ["other"]}

    asyncio.run(go())


def test_a_server_without_the_worker_extension_says_so(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    bench.server.carries_tap = False

    async def go() -> None:
        bench.service.begin()
        await settled(bench)
        assert await capture(bench) == (503, "capture is off: the engine's ranks do not carry the tap")
        await bench.service.close()

    asyncio.run(go())


def test_ranks_that_refused_to_tap_are_in_the_status_with_their_reason(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    for rank in range(2):
        bench.server.publish(rank, capture="off", reason="tap version None", layers=None)

    async def go() -> None:
        bench.service.begin()
        await settled(bench)
        assert await capture(bench) == (503, "capture is off: rank dp0 tp0: tap version None")
        body = await get_status(bench)
        assert (body["start_id"], len(body["ranks"]), body["layers"]) == ("abc12", 2, None)
        await bench.service.close()

    asyncio.run(go())


def test_counters_of_ranks_are_summed_and_of_the_longest_holds_the_longest_is_told(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    for rank, longest in enumerate((0.02, 0.01)):
        bench.server.publish(rank, counters={"host_s": 1.5, "host_max_s": longest, "sealed": 2, "odd": "x"})

    async def go() -> None:
        bench.service.begin()
        await settled(bench)
        body = await get_status(bench)
        assert body["counters"]["ranks"] == {"host_s": 3.0, "host_max_s": 0.02, "sealed": 4}
        await bench.service.close()

    asyncio.run(go())


def test_a_rank_that_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "TIDY_S", 0.05)
    bench = make_bench(tmp_path)
    bench.server.publish(0)
    bench.server.publish(1, age_s=100)

    async def go() -> None:
        bench.service.begin()
        await settled(bench)
        assert "rank dp0 tp1 has not reported" in (await capture(bench))[1]
        bench.server.publish(1)
        while (await capture(bench))[0] != 200:
            await asyncio.sleep(0.02)
        await bench.service.close()

    asyncio.run(go())


def test_the_canary_opens_capture_and_leaves_nothing(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)

    async def go() -> None:
        await bench.ready()
        body = await get_status(bench)
        assert body["canary"]["state"] == "passed" and body["canary"]["checked"] == 4
        assert bench.leftovers() == []
        assert (await capture(bench))[0] == 200
        await bench.service.close()

    asyncio.run(go())


@pytest.mark.parametrize(("interval_s", "ranked"), [(60.0, 5), (0.0, 0)])
def test_the_canary_asks_the_engine_for_what_proofs_will(
    tmp_path: Path, interval_s: float, ranked: int
) -> None:
    """vLLM compiles that when it is first asked for, and production waits."""
    bench = make_bench(tmp_path, proof_interval_s=interval_s)

    async def go() -> None:
        await bench.ready()
        assert bench.engine.ranked == [ranked]
        await bench.service.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"ok": False, "reason": "token 2 is 7, the engine chose 9", "checked": 4}, "rank 0: token 2 is 7"),
        ({**PASSED, "chosen": [9.0, 9.0, None, 9.0]}, "1 tokens are in no rank's part"),
        ({**PASSED, "chosen": [9.0, 8.0, 9.0, 9.0]}, "1 of 4 tokens"),
        ({**PASSED, "best": [], "chosen": []}, "no rank checked a token"),
        ("broken", "'broken'"),
    ],
)
def test_a_failed_canary_closes_capture_until_one_passes(tmp_path: Path, answer: Any, says: str) -> None:
    bench = make_bench(tmp_path)
    bench.server.canary_answer = answer
    for rank in range(2):
        bench.server.publish(rank)

    async def go() -> None:
        bench.service.begin()
        await settled(bench)
        status, reason = await capture(bench)
        assert (status, "canary failed" in reason, says in reason) == (503, True, True)
        async with bench.client() as client:
            again = await client.post(f"{URL}/canary")
            assert (again.status_code, again.json()["state"]) == (503, "failed")
            bench.server.canary_answer = PASSED
            passed = await client.post(f"{URL}/canary")
            assert (passed.status_code, passed.json()["state"]) == (200, "passed")
        assert (await capture(bench))[0] == 200
        await bench.service.close()

    asyncio.run(go())


def test_a_canary_whose_capture_fails_closes_capture(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    bench.engine.error_rank = 0
    for rank in range(2):
        bench.server.publish(rank)

    async def go() -> None:
        bench.service.begin()
        await settled(bench)
        assert "row 3 was never written" in (bench.service.why_off() or "")
        assert bench.leftovers() == []
        await bench.service.close()

    asyncio.run(go())


def test_a_later_canary_that_fails_takes_capture_away(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)

    async def go() -> None:
        await bench.ready()
        bench.server.canary_answer = {"ok": False, "reason": "zeros", "checked": 0}
        async with bench.client() as client:
            assert (await client.post(f"{URL}/canary")).status_code == 503
        assert await capture(bench) == (503, "capture is off: canary failed: rank 0: zeros")
        await bench.service.close()

    asyncio.run(go())


def test_a_canary_that_finds_no_room_is_run_again_once_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "TIDY_S", 0.02)
    monkeypatch.setattr(service_module, "RETRIES", 0)
    bench = make_bench(tmp_path, slice_dir_limit_bytes=600_000)

    async def go() -> None:
        await bench.ready()
        taken = slices.Claim(slices.new_tag(), 590_000, time.time(), 2, 2)
        bench.start.reserve(taken, 600_000)
        bench.engine.wrong = {"weights_epoch": 1}
        for rank in range(2):
            bench.server.publish(rank, weights_epoch=1)
        while bench.service.tap is None or bench.service.tap.weights_epoch == 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert (await capture(bench))[0] == 503
        bench.start.release(taken.tag)
        async with asyncio.timeout(5):
            while (await capture(bench))[0] != 200:
                await asyncio.sleep(0.02)
        await bench.service.close()

    asyncio.run(go())


def test_a_canary_that_a_busy_engine_keeps_waiting_says_nothing_of_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "TIDY_S", 0.02)
    bench = make_bench(tmp_path)

    async def go() -> None:
        await bench.ready()
        monkeypatch.setattr(canary_module, "TIMEOUT_S", 0.1)
        bench.engine.delay_s = 0.5
        async with bench.client() as client:
            answer = await client.post(f"{URL}/canary")
        assert (answer.status_code, answer.json()["state"]) == (503, "pending")
        assert "did not answer within 0.1 s" in (await capture(bench))[1]
        bench.engine.delay_s = 0
        async with asyncio.timeout(5):
            while (await capture(bench))[0] != 200:
                await asyncio.sleep(0.02)
        await bench.service.close()

    asyncio.run(go())


def test_a_canary_does_not_wait_for_the_bound_of_bytes_a_second(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, max_bytes_per_s=1)

    async def go() -> None:
        await bench.ready()
        async with bench.client() as client:
            assert (await client.post(URL, json={"prompt": [10]})).status_code == 429
            assert (await client.post(f"{URL}/canary")).status_code == 200
        await bench.service.close()

    asyncio.run(go())


def test_records_that_cannot_be_read_for_a_while_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a server that has run out of file descriptors."""
    monkeypatch.setattr(service_module, "TIDY_S", 0.02)
    monkeypatch.setattr(service_module, "RECORDS_AGE_S", 0.0)
    bench = make_bench(tmp_path)

    def broken(_: slices.Start) -> list[dict[str, Any]]:
        raise OSError(24, "Too many open files")

    async def go() -> None:
        await bench.ready()
        with monkeypatch.context() as patch:
            patch.setattr(slices.Start, "records", broken)
            await asyncio.sleep(0.1)
        bench.engine.wrong = {"weights_epoch": 1}
        for rank in range(2):
            bench.server.publish(rank, weights_epoch=1)
        async with asyncio.timeout(5):
            while (await capture(bench))[0] != 200:
                await asyncio.sleep(0.02)
        await bench.service.close()

    asyncio.run(go())


def test_many_doubts_are_one_canary(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)

    async def go() -> None:
        await bench.ready()
        while bench.service._opening is not None and not bench.service._opening.done():
            await asyncio.sleep(0.005)
        bench.engine.seen.clear()
        for _ in range(20):
            bench.service.doubt()
        status, message = await capture(bench)
        assert (status, "a capture was disproved" in message) == (503, True)
        while bench.service.why_off() is not None:
            await asyncio.sleep(0.005)
        assert len(bench.engine.seen) == 1
        assert (await capture(bench))[0] == 200
        await bench.service.close()

    asyncio.run(go())


def test_another_api_servers_canary_counts_here_too(tmp_path: Path) -> None:
    one, other = make_bench(tmp_path), make_bench(tmp_path)

    async def go() -> None:
        await one.ready()
        await other.ready()
        while not all(bench.service.tap and bench.service.tap.canary._own.ended for bench in (one, other)):
            await asyncio.sleep(0.005)
        one.server.canary_answer = {"ok": False, "reason": "zeros", "checked": 0}
        async with one.client() as client:
            assert (await client.post(f"{URL}/canary")).status_code == 503
        assert await capture(other) == (503, "capture is off: canary failed: rank 0: zeros")
        async with other.client() as client:
            assert (await client.post(f"{URL}/canary")).status_code == 200
        assert (await capture(one))[0] == 200
        await one.service.close()
        await other.service.close()

    asyncio.run(go())


def test_a_tripped_breaker_on_one_rank_turns_capture_off_and_is_in_the_status(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    breaker = {"where": "writer", "error": "disk gone", "at": 1.0}

    async def go() -> None:
        await bench.ready()
        bench.server.publish(1, capture="off", reason="breaker: disk gone", breaker=breaker)
        await asyncio.sleep(service_module.RECORDS_AGE_S + 0.05)
        assert await capture(bench) == (503, "capture is off: rank dp0 tp1: breaker: disk gone")
        body = await get_status(bench)
        assert body["breaker"] == {**breaker, "dp_rank": 0, "tp_rank": 1}
        await bench.service.close()

    asyncio.run(go())


def test_a_rank_that_goes_silent_turns_capture_off(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)

    async def go() -> None:
        await bench.ready()
        bench.server.publish(0, age_s=100)
        await asyncio.sleep(service_module.RECORDS_AGE_S + 0.05)
        status, reason = await capture(bench)
        assert (status, "rank dp0 tp0 has not reported for 100 s" in reason) == (503, True)
        await bench.service.close()

    asyncio.run(go())


def test_a_breaker_that_trips_while_a_capture_waits_ends_the_wait(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)

    async def go() -> None:
        await bench.ready()
        bench.engine.silent_rank = 1
        waiting = asyncio.create_task(capture(bench))
        await asyncio.sleep(0.1)
        bench.server.publish(1, capture="off", reason="breaker: no")
        assert await waiting == (500, "rank 1 sealed nothing: rank dp0 tp1: breaker: no")
        assert bench.leftovers() == []
        await bench.service.close()

    asyncio.run(go())


def test_other_weights_close_capture_until_a_canary_passed_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then answers carry the new fingerprint; a capture that began on the old ones is no sample."""
    monkeypatch.setattr(service_module, "TIDY_S", 0.05)
    monkeypatch.setattr(service_module, "RECORDS_AGE_S", 0.0)
    bench = make_bench(tmp_path)

    async def go() -> None:
        await bench.ready()
        old = (await get_status(bench))["fingerprint_id"]
        bench.engine.wrong = {"weights_epoch": 1}
        status, message = await capture(bench)
        assert (status, "weights changed while it ran" in message) == (500, True)
        bench.server.publish(0, weights_epoch=1, model_fingerprint={"config": "m1"})
        await asyncio.sleep(0.2)
        status, message = await capture(bench)
        assert (status, "weights changed" in message) == (503, True), "rank 1 has not followed yet"
        bench.server.publish(1, weights_epoch=1, model_fingerprint={"config": "m1"})
        while bench.service.why_off() is not None:
            await asyncio.sleep(0.01)
        new = await get_status(bench)
        assert new["fingerprint"]["config"] == "m1" and new["fingerprint_id"] != old
        assert new["canary"]["weights_epoch"] == 1
        assert (await capture(bench))[0] == 200
        await bench.service.close()

    asyncio.run(go())


def test_missing_ranks_are_named() -> None:
    def record(dp: int, tp: int) -> dict[str, Any]:
        return {"dp_rank": dp, "tp_rank": tp, "tp_size": 2, "capture": "on", "updated_at": 100.0}

    assert why_ranks_off([], 100.0) == "no record of any rank"
    assert why_ranks_off([record(0, 0), record(0, 1), record(1, 1)], 100.0) == "no record of rank dp1 tp0"
    assert why_ranks_off([record(0, 0), record(0, 1)], 101.0) is None
    missing = why_ranks_off([record(0, 0), record(0, 1)], 101.0, dp_here=2)
    assert missing == "no record of 1 of 2 data-parallel engines"


def test_every_data_parallel_engine_gets_a_canary(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    bench.server.dp_size = 2
    for rank in range(2):
        bench.server.publish(rank)

    async def go() -> None:
        bench.service.begin()
        await settled(bench)
        assert [dp_rank for _, _, dp_rank in bench.engine.seen] == [0, 1]
        await bench.service.close()

    asyncio.run(go())


def test_the_status_says_what_there_is(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, max_prompts=7)

    async def go() -> Any:
        await bench.ready()
        assert (await capture(bench))[0] == 200
        body = await get_status(bench)
        await bench.service.close()
        return body

    body = asyncio.run(go())
    assert (body["capture"], body["reason"], body["key"]) == ("on", None, "open")
    assert body["layers"] == [0, 2, 4] and body["start_id"] == "abc12"
    assert body["counters"]["ranks"] == {"rows": 10, "sealed": 2}
    counts = body["counters"]["endpoint"]
    assert (counts["requests"], counts["captures"], counts["rows"], counts["bytes"]) == (
        1,
        1,
        2,
        2 * 3 * 8 * 4,
    )
    assert body["limits"]["prompts"] == 7
    assert body["in_flight"]["claims"] == 1 and body["in_flight"]["here"] == 0
    assert body["fingerprint_id"] == slices.fingerprint_id(body["fingerprint"])
    assert {record["tp_rank"] for record in body["ranks"]} == {0, 1}


def test_counters_are_published_and_a_second_set_of_them_does_no_harm() -> None:
    registry = prometheus_client.CollectorRegistry()
    first, second = Metrics(registry), Metrics(registry)
    first.add("rows", 5)
    second.add("rows", 1)
    assert registry.get_sample_value("taphouse_rows_total") == 5
    assert (first.counts["rows"], second.counts["rows"]) == (5, 1)
