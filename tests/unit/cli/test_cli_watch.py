"""`watch`: its loop against the fake API, and its drawing from several states."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from taphouse.cli.render_consumers import heard
from taphouse.cli.render_jobs import job_details, jobs_table
from taphouse.cli.render_panels import jobs_panel
from taphouse.cli.render_queue import queue_view
from taphouse.cli.render_watch import HISTORY, SHARDS_SHOWN, Moment, follow, watch_line, watch_view
from taphouse.wire import Batches, Engine, JobOptions, JobState, QueueStatus, ShardInfo

NOW = 1_790_000_000.0
EMPTY = {
    "depth": Batches(),
    "jobs": {},
    "rows_left": 0,
    "rates": [],
    "eta_s": None,
    "consumers": [],
    "ledger_head": 0,
}
DRAWN = """extraction running|2.5/s|1,280/s|1/2 busy|3.217|45.7%|2 shards behind
21.0 ms / 48.3 ms|110 ms / 420 ms|latency: all requests of the engine|humaneval
43/100|1 failed|job-a-000030|0.70×|▂▄█"""
STOPS = JobOptions(on_error="fail")
NUMBERS = {
    "pending": "2",
    "queued": "4",
    "retrying": "1",
    "running": "2",
    "finished": "30",
    "rows left": "57",
    "eta": "23s",
}
IN_A_LINE = """extraction running|2 pending 4 queued|eta 23s|shards 30 (+1)|loss 3.217|lag 2
all requests: itl p50 21.0 ms p95 48.3 ms"""


def words(text: str) -> list[str]:
    return text.replace("\n", "|").split("|")


def draw(moment: Moment, width: int = 100, height: int = 50) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(watch_view(moment, width, height))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


def drawn(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()


@pytest.fixture
def moment(make):
    """A service at work."""
    shards = tuple(make("entry", seq) for seq in (29, 30))
    return Moment("http://api", NOW, make("status"), None, (make("job"),), shards, 1, (1.0, 2.0, 4.0))


def test_a_service_at_work(moment):
    text = draw(moment)
    for word in words(DRAWN):
        assert word in text, word
    for name, number in NUMBERS.items():
        assert re.search(rf"{name} +{number} ", text), name
    line = watch_line(moment)
    assert "\n" not in line
    for word in words(IN_A_LINE):
        assert word in line, word


def test_nothing_to_do(moment, make):
    idle = replace(moment, status=make("status", **EMPTY), jobs=(), shards=(), rates=(), new_shards=0)
    text = draw(idle)
    assert "extraction idle" in text and "none yet" in text and "jobs" not in text
    assert "extraction idle" in watch_line(idle) and "no trainer" in watch_line(idle)


@pytest.mark.parametrize("capture", ["off", "unreachable"])
def test_the_engine_is_down(moment, make, capture):
    engine = Engine(url="http://engine:8000", capture=capture, detail="canary [pending]")
    down = replace(moment, status=make("status", engines=[engine]))
    assert "extraction stalled" in draw(down) and "canary [pending]" in draw(down)
    assert capture in watch_line(down) and "canary [pending]" in watch_line(down)


def test_one_engine_of_two_keeps_extraction_running(moment, make):
    engines = [*make("status").engines, Engine(url="http://b", capture="unreachable", detail="refused")]
    text = draw(replace(moment, status=make("status", engines=engines)))
    assert "extraction running" in text and "refused" in text


def test_each_engine_shows_its_load_and_whether_others_go_first(moment, make):
    busy = Engine(url="http://b", capture="on", in_flight=5, held=2, set_aside="it [hung]")
    two = replace(moment, status=make("status", engines=[*make("status").engines, busy]))
    for word in ("engines", "http://b", "on, 5 in flight + 2 held", "it [hung]"):
        assert word in draw(two), word
    assert "http://b: engine on (set aside), 5 in flight + 2 held" in watch_line(two)
    console = Console(file=io.StringIO(), width=200)
    console.print(queue_view(two.status, NOW))
    assert "5 + 2 held" in console.file.getvalue() and "set aside: it [hung]" in console.file.getvalue()

    off = [engine.model_copy(update={"capture": "off", "detail": "asleep"}) for engine in two.status.engines]
    assert "asleep (and 1 more)" in watch_line(replace(moment, status=make("status", engines=off)))


def test_what_an_engine_that_is_away_says_is_said_once_in_a_line(moment, make):
    why = "[Errno 111] refused"
    away = [Engine(url=f"http://{name}", capture="unreachable", detail=why) for name in "ab"]
    governor = make("governor", reason=f"the limit stands; {why}; {why}")
    for engines in (away, away[:1], [*make("status").engines, away[0]]):
        line = watch_line(replace(moment, status=make("status", engines=engines, governor=governor)))
        assert line.count(why) == 1 and "engine unreachable" in line and "(the limit stands)" in line
    other = away[1].model_copy(update={"detail": "no route"})
    both = watch_line(replace(moment, status=make("status", engines=[away[0], other])))
    assert both.count(why) == 1 and "http://b: engine unreachable: no route" in both


def test_what_is_paused_has_no_rate_and_no_end(moment, make):
    paused = make("job", state="paused", rate=2.5, eta_s=3600.0)
    for text in (
        drawn(jobs_table([paused], NOW)),
        drawn(job_details(paused, NOW)),
        drawn(jobs_panel([paused], False)),
    ):
        assert "paused" in text and "2.5" not in text and "1h" not in text
    held = make("status", jobs={JobState.PAUSED: 1}, depth=Batches(pending=3), eta_s=3600.0)
    for text in (
        draw(replace(moment, status=held)),
        watch_line(replace(moment, status=held)),
        drawn(queue_view(held, NOW)),
    ):
        assert "57" in text and "1h" not in text
    runs = make("status", eta_s=3600.0)
    assert "57, about 1h" in drawn(queue_view(runs, NOW)) and "eta 1h" in watch_line(
        replace(moment, status=runs)
    )


@pytest.mark.parametrize(
    ("changed", "percent", "reached"),
    [
        ({"state": "cancelled", "succeeded": 28, "failed": 0, "skipped": 32}, "46%", "28 of 60 rows"),
        ({"state": "failed", "succeeded": 20, "failed": 1, "skipped": 39, "options": STOPS}, "35%",
         "21 of 60 rows"),
        ({"state": "failed", "succeeded": 0, "failed": 50, "skipped": 10}, "100%", None),
        ({"state": "done", "succeeded": 50, "failed": 0, "skipped": 10}, "100%", None),
    ],
)  # fmt: skip
def test_a_job_that_was_cut_short_shows_how_far_it_came(make, changed, percent, reached):
    job = make("job", rows=60, **changed)
    assert f" {percent} " in drawn(jobs_table([job], NOW))
    details = drawn(job_details(job, NOW))
    assert ("reached" in details) == (reached is not None) and (reached or "") in details
    assert f"60 = {job.succeeded} succeeded" in details


def test_jobs_that_no_engine_fits_are_what_it_waits_for(moment, make):
    facts = {"unfit_jobs": 2, "unfit": "no engine fits: engine http://a: fingerprint_id is [1]"}
    waits = replace(moment, status=make("status", **facts, depth=Batches(pending=3)))
    said = "extraction waiting (2 jobs for an engine: no engine fits: engine http://a: fingerprint_id is [1])"
    assert said in watch_line(waits)
    runs = replace(moment, status=make("status", **facts, depth=Batches(running=1, pending=3)))
    assert "extraction running" in watch_line(runs)


@pytest.mark.parametrize(
    ("jobs", "running", "said"),
    [
        ({JobState.PAUSED: 2, JobState.DONE: 1}, 0, "extraction paused (every unfinished job is"),
        ({JobState.PAUSED: 2, JobState.DONE: 1}, 1, "extraction running"),
        ({JobState.PAUSED: 2, JobState.QUEUED: 1}, 0, "extraction waiting (for a worker"),
        ({JobState.PAUSED: 0, JobState.QUEUED: 1}, 0, "extraction waiting (for a worker"),
    ],
)
def test_batches_of_paused_jobs_wait_for_nobody(moment, make, jobs, running, said):
    status = make("status", jobs=jobs, depth=Batches(pending=3, running=running))
    assert said in watch_line(replace(moment, status=status))


def test_no_trainer_no_worker_paused(moment, make):
    assert "taphouse-trainer" in draw(replace(moment, status=make("status", consumers=[])))
    no_worker = replace(moment, status=make("status", workers=[]))
    assert "extraction stalled" in draw(no_worker) and "taphouse-extractor worker" in draw(no_worker)
    paused = replace(moment, status=make("status", paused="the disk is full"))
    assert "extraction paused" in draw(paused) and "the disk is full" in watch_line(paused)


def test_a_trainer_that_fell_silent_is_marked(moment, make):
    [consumer] = make("status").consumers
    silent = make("status", consumers=[consumer.model_copy(update={"updated_at": NOW - 600})])
    assert "10m ago" in draw(replace(moment, status=silent))


def test_what_a_trainer_does_and_refused_is_shown(moment, make):
    [consumer] = make("status").consumers
    at_it = consumer.model_copy(update={"phase": "counting tokens", "refused": 85, "updated_at": NOW - 5})
    assert heard(at_it, NOW) == "5s ago: counting tokens, 85 shards refused"
    assert heard(at_it.model_copy(update={"phase": "training", "refused": 0}), NOW) == "5s ago"
    assert "counting tokens" in draw(replace(moment, status=make("status", consumers=[at_it])))


def test_a_trainer_that_ended_is_no_alarm(moment, make):
    def styles(status: QueueStatus) -> str:
        console = Console(file=io.StringIO(), width=100, force_terminal=True)
        console.print(watch_view(replace(moment, status=status), 100, 50))
        return console.file.getvalue()

    [consumer] = make("status").consumers
    old = {"updated_at": NOW - 600}
    silent = make("status", consumers=[consumer.model_copy(update=old)])
    ended = make("status", consumers=[consumer.model_copy(update={**old, "ended": "data ended"})])
    assert "\x1b[31m" in styles(silent) and "\x1b[31m" not in styles(ended)
    assert "10m ago: data ended" in draw(replace(moment, status=ended))
    assert "ended (data ended)" in watch_line(replace(moment, status=ended))


def test_the_api_went_away(moment):
    gone = replace(moment, now=NOW + 42, problem="can't reach http://api")
    text = draw(gone)
    assert "can't reach http://api" in text and "42s old" in text and "humaneval" in text
    assert "can't reach http://api" in watch_line(gone)
    never = Moment("http://api", NOW, problem="can't reach http://api")
    assert "can't reach http://api" in draw(never) and "can't reach" in watch_line(never)


def test_the_governor_is_shown_with_productions_p95_beside_its_baseline(moment, make):
    governed = replace(moment, status=make("status", governor=make("governor")))
    for text in (draw(governed), watch_line(governed)):
        assert "2.5 ms a step beside production" in text and "1.03 of its baseline: raised" in text
        assert "itl 24.2 ms / 23.5 ms, ttft 118 ms / 117 ms" in text
    assert "governor" not in draw(moment) + watch_line(moment)
    held = make("governor", busy_ms=0.0, stopped=True, reason="2 production requests failed")
    stopped = replace(moment, status=make("status", governor=held))
    assert "extraction stopped" in draw(stopped) and "2 production requests failed" in watch_line(stopped)
    assert "nothing beside production" in draw(
        replace(moment, status=make("status", governor=make("governor", busy_ms=0.0)))
    )


def test_whose_latency_it_is_is_said(moment, make):
    [engine] = make("status").engines
    assert re.search("all requests +4 running, 1 waiting", draw(moment)) and "on, 3 in flight" in draw(moment)
    own = engine.latency.model_copy(update={"requests": "production", "requests_waiting": None})
    status = make("status", engines=[engine.model_copy(update={"latency": own})])
    assert "latency: production of the engine" in draw(replace(moment, status=status))
    assert re.search("production +4 running  ", draw(replace(moment, status=status)))
    assert "engine on, 3 in flight, production: itl" in watch_line(replace(moment, status=status))


@pytest.mark.parametrize("width", [40, 75, 80, 200])
def test_every_width_shows_all_numbers(moment, width):
    text = draw(moment, width)
    for word in ("3.217", "45.7%", "21.0 ms", "48.3 ms"):
        assert word in text


def test_it_fits_an_ordinary_terminal(moment, make):
    shards = tuple(
        make("entry", seq).model_copy(update={"shard": f"j20261129193446-65971d41-{seq:06d}.safetensors"})
        for seq in range(25, 31)
    )
    governed = make("status", governor=make("governor"))
    for height in (24, 28, 40):
        text = draw(replace(moment, shards=shards, status=governed), 80, height)
        assert len(text.splitlines()) < height and "2.5 ms a step" in text
    full = draw(replace(moment, shards=shards), 80, 24)
    assert len(full.splitlines()) <= 23 and "j20261129193446-6" in full
    assert " 25 " not in full and " 25 " in draw(replace(moment, shards=shards), 80, 50)


def test_follow_keeps_the_newest_shards_and_a_bounded_history(make):
    moment = Moment("http://api", NOW)
    moment = follow(moment, NOW, make("status"), [make("job"), make("job", state="done")], [make("entry", 1)])
    assert moment.new_shards == 0 and len(moment.jobs) == 1
    for seq in range(2, HISTORY + 10):
        moment = follow(moment, NOW + seq, make("status"), [], [make("entry", seq)])
    assert moment.new_shards == 1 and len(moment.rates) == HISTORY
    assert [s.seq for s in moment.shards] == list(range(HISTORY + 10 - SHARDS_SHOWN, HISTORY + 10))


def test_once_prints_one_line_in_a_pipe_and_one_document_as_json(cli, api):
    result = cli("watch", "--once")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 1
    document = cli.json("watch", "--once")
    assert QueueStatus.model_validate(document["status"]) == api.status
    assert [ShardInfo.model_validate(s).seq for s in document["shards"]] == [25, 26, 27, 28, 29, 30]


def test_in_a_pipe_it_is_a_line_an_update_through_outages(cli, api, make, monkeypatch):
    updates = 0

    def sleep(seconds: float) -> None:
        nonlocal updates
        assert seconds == 0.5
        updates += 1
        api.down = updates == 2
        if updates == 1:
            api.entries.append(make("entry", 31))
            api.status = make("status", ledger_head=31)
        if updates == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    result = cli("watch", "--interval", "0.5")
    assert result.exit_code == 130
    lines = result.stdout.splitlines()
    assert (
        len(lines) == 4
        and "shards 31 (+1)" in lines[1]
        and "can't reach" in lines[2]
        and "(+" not in lines[3]
    )
    updates, api.entries, api.status = 0, [], make("status", ledger_head=0)
    documents = [
        json.loads(line) for line in cli("watch", "--interval", "0.5", "-o", "json").stdout.splitlines()
    ]
    assert [d["problem"] is None for d in documents] == [True, True, False, True]


def test_a_wrong_token_ends_it(cli):
    assert cli("watch", token=False).exit_code == 4


def test_on_a_terminal_it_is_redrawn(cli, monkeypatch, no_sleep):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "90")

    def sleep(seconds: float) -> None:
        no_sleep.append(seconds)
        if len(no_sleep) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    result = cli("watch")
    assert result.exit_code == 130 and "trainer" in result.stdout and "3.217" in result.stdout
