"""What every row would be refused for is refused at once; what isn't known is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import httpx
import pytest
from tests.unit.extractor.conftest import TOKEN, Service

from taphouse.errors import BadRequest, Unavailable
from taphouse.wire import Engine, Job, JobOptions
from taphouse_extractor import spool as spool_module
from taphouse_extractor.fitting import Refusal, longest_prompt, refusal, refused_by_all

Serve = Callable[..., Service]


@pytest.fixture
def looked(serve: Serve) -> Service:
    """A service that has looked at its engine, which taps 1, 2 and 4, takes 100 tokens and no seeds."""
    service = serve()
    service.bench.tap.max_model_len, service.bench.tap.seeds = 100, False
    service.bench.monitors.look()
    return service


def enqueue(service: Service, *rows: Any, key: str | None = None, **options: Any) -> Job:
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows or ({"prompt": "p"},))
    return service.client.enqueue([lines], JobOptions(**options), key=key, again=True)


WRONG = [
    ({"layers": [1, 3]}, "layers", "taps 1, 2, 4, not 3"),
    ({"seed": 1, "temperature": 0.5}, "seed", "set temperature to 0"),
    ({"max_tokens": 100}, "max_tokens", "room for 100 tokens"),
]


@pytest.mark.parametrize(("options", "name", "says"), WRONG)
def test_options_that_no_row_can_have(looked: Service, options: dict[str, Any], name: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as refused:
        enqueue(looked, **options)
    assert (refused.value.status, refused.value.param) == (422, f"options.{name}")
    with pytest.raises(BadRequest, match=says) as refused:
        looked.client.extract(
            [{"prompt": "p"}], JobOptions(**options).model_copy(update={"max_length": None})
        )
    assert looked.bench.records.job_ids() == []
    assert looked.bench.tap.requests == [], "no engine was asked"


@pytest.mark.parametrize("options", [{"layers": [4, 1]}, {"seed": 1}, {"max_tokens": 99}])
def test_options_that_rows_can_have(looked: Service, options: dict[str, Any]) -> None:
    assert enqueue(looked, **options).rows == 1


@pytest.mark.parametrize("options", [options for options, _, _ in WRONG])
def test_before_the_first_look_nothing_is_known(serve: Serve, options: dict[str, Any]) -> None:
    assert enqueue(serve(), **options).rows == 1


def test_a_key_that_made_a_job_gives_it_whatever_the_engine_is_now(looked: Service) -> None:
    job = enqueue(looked, layers=[1], key="k")
    looked.bench.tap.layers = (2, 4)
    looked.bench.monitors.look()
    assert enqueue(looked, layers=[1], key="k").id == job.id
    with pytest.raises(BadRequest, match="taps 2, 4"):
        enqueue(looked, layers=[1], key="other")


LONG = {"prompt": list(range(99))}


def test_a_row_that_is_sure_to_fail_refuses_a_job_that_it_would_end(looked: Service) -> None:
    fits = {"prompt": list(range(98))}
    assert enqueue(looked, fits, LONG, max_tokens=2).rows == 2, "one bad row costs one row"
    assert enqueue(looked, fits, max_tokens=2, on_error="fail").rows == 1
    with pytest.raises(BadRequest, match="line 2: 99 tokens") as refused:
        enqueue(looked, fits, LONG, max_tokens=2, on_error="fail")
    assert refused.value.param == "line 2"
    with pytest.raises(BadRequest, match="line 3: the prompt is empty"):
        enqueue(looked, fits, fits, {"prompt": ""}, on_error="fail")
    looked.bench.tap.requests.clear()
    skipped = enqueue(looked, fits, LONG, max_tokens=2, max_length=98, on_error="fail")
    assert skipped.rows == 2, "a row over max_length is skipped, which ends nothing"
    looked.bench.run_all(looked.bench.records.job(skipped.id))
    done = looked.client.job(skipped.id)
    assert (done.succeeded, done.skipped, done.state.value) == (1, 1, "done")
    assert len(looked.bench.tap.requests) == 1, "the engine is not asked for what is skipped"
    assert len(looked.client.jobs()) == 3


def test_one_engine_of_several_is_enough() -> None:
    small = Engine(url="small", capture="on", layers=[1], max_model_len=10)
    large = Engine(url="large", capture="off", layers=[1, 2], max_model_len=100)
    unknown = Engine(url="unknown", capture="unreachable")
    options = JobOptions(layers=[2], max_tokens=20)
    assert [refusal(engine, options) is None for engine in (small, large, unknown)] == [False, True, True]
    assert longest_prompt([small, large], options) == 80
    assert longest_prompt([small, large, unknown], options) is None
    assert longest_prompt([small], options) is None


def test_a_refusal_by_all_engines_says_each_ones_reason() -> None:
    first = Engine(url="a", capture="on", layers=[1, 2])
    second = Engine(url="b", capture="off", layers=[2], seeds=False)
    options = JobOptions(layers=[3])
    assert refused_by_all([first, second], options) == Refusal(
        "options.layers", "engine a taps 1, 2, not 3; engine b taps 2, not 3"
    )
    seeded = JobOptions(layers=[1, 2], seed=1, temperature=0.5)
    assert refused_by_all([first, second], seeded) is None, "the first takes it"
    strict = first.model_copy(update={"seeds": False})
    refused = refused_by_all([strict, second], seeded)
    assert refused is not None and refused.param == "options"
    assert "engine a refuses seeded" in refused.why and "engine b taps 2, not 1" in refused.why
    assert refused_by_all([], options) is None


@pytest.mark.parametrize("number", ["NaN", "1e400", "-Infinity"])
def test_a_number_that_json_has_not_is_refused_by_name(serve: Callable[..., Service], number: str) -> None:
    service = serve()
    options = f'{{"chat_template_kwargs": {{"a": [{{"b": {number}}}]}}}}'
    auth = {"Authorization": f"Bearer {TOKEN}"}
    asked = httpx.post(
        service.url + "/v1/jobs",
        params={"options": options},
        content=b'{"prompt":"x"}\n',
        headers={**auth, "Content-Type": "application/x-ndjson"},
    )
    direct = httpx.post(
        service.url + "/v1/extract",
        content=f'{{"rows": [{{"prompt": "x"}}], "options": {options}}}',
        headers={**auth, "Content-Type": "application/json"},
    )
    for answer in (asked, direct):
        assert answer.status_code == 422 and "chat_template_kwargs" in answer.json()["error"]["message"]
    assert service.client.jobs() == []


def test_an_upload_ends_where_the_disk_passes_its_floor(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve(min_free_bytes=1000)
    monkeypatch.setattr(spool_module, "ADMIT_BYTES", 4000)
    free = chain([5000], repeat(500))  # as it begins, and afterwards
    monkeypatch.setattr(service.bench.store, "free_bytes", lambda: next(free))
    rows = (json.dumps({"prompt": "x" * 1000}).encode() + b"\n" for _ in range(90))
    with pytest.raises(Unavailable, match="500 bytes free, under the floor of 1000"):
        service.client.enqueue(rows, JobOptions(), again=True)
    assert service.client.jobs() == []
    assert not list((service.bench.store.root / "jobs").iterdir())
