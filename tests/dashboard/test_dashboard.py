"""The dashboard in a real browser, with a real service behind it: what is shown, and what clicks do."""

from __future__ import annotations

import signal

import pytest
from selenium.webdriver.common.keys import Keys
from tests.dashboard.conftest import Page, enqueue, write_trainer
from tests.queue.conftest import Cluster, wait_for

from taphouse.wire import GovernorMode, JobOptions
from taphouse_extractor.records import Pin, Records


def test_the_page_is_empty_and_says_what_to_do(page: Page) -> None:
    page.open()
    page.sees("#jobs-empty", "No jobs yet", "taphouse enqueue")
    page.sees("#shards-empty", "Nothing is sealed yet")
    page.sees("#trainer-list", "None has written yet")
    page.sees("#engine-list", "capturing")
    page.sees("#worker-list", "idle")
    page.sees("#headline", "Nothing to extract")
    assert page.violations() == []


def test_a_wrong_token_is_refused_in_words_and_can_be_forgotten(page: Page) -> None:
    page.open(token=None)
    page.one("#token").send_keys("wrong" + Keys.ENTER)
    page.sees("#door-error", "none of the service's tokens")
    assert page.text("#main") == ""
    assert page.violations() == []
    page.open()
    page.one("#leave").click()
    page.sees("#door", "asks for a token")
    assert page.script("return sessionStorage.length") == 0
    assert page.script("return document.querySelectorAll('#jobs-table tbody tr').length") == 0


def test_a_job_runs_before_ones_eyes(page: Page, service: Cluster) -> None:
    page.open()
    job = enqueue(service, 24, "nightly", batch_size=4)
    page.sees(page.row(job.id), "nightly", "done", "24 of 24 rows", "of raw")
    head = service.ledger.head()
    assert head == 6
    page.sees("#shards-count", "6 in the ledger")
    firsts = (
        "return [...document.querySelectorAll('#shards-table tbody tr')].map(r => r.children[0].textContent)"
    )
    wait_for("all are listed", lambda: page.script(firsts) == ["6", "5", "4", "3", "2", "1"])
    assert page.text(f"{page.row(job.id)} .actions") == ""
    page.sees("#charts .chart:first-child .legend", "samples a second", "tokens a second")
    drawn = page.script("return document.querySelectorAll('#charts canvas').length")
    assert drawn == 7


def test_names_are_text(page: Page, service: Cluster) -> None:
    name = '<img src=x onerror="document.title=1"><b>bold</b>'
    page.open()
    job = enqueue(service, 1, name)
    page.sees(page.row(job.id), name)
    assert page.script("return document.title") == "Taphouse"
    assert page.script("return document.querySelectorAll('#jobs-table img, #jobs-table b').length") == 0


def test_each_engine_is_shown_and_why_a_job_waits_for_one(page: Page, service: Cluster) -> None:
    page.open()
    urls = [f"http://127.0.0.1:{port}" for port in (service.engine_port, service.second_port)]
    page.sees("#engine-list", *urls, "0 in flight")
    second = next(p for p in service.processes if str(service.second_port) in p.args)
    service.stop(second)
    page.sees("#engine-list", "capturing", "unreachable", "can't reach the engine")
    assert page.text("#notice") == "" and page.violations() == []
    service.start_engine(delay_s=0.05, port=service.second_port)

    service.client.govern(GovernorMode.STOPPED)
    job = enqueue(service, 4, "of a model that is gone")
    gone = Pin(fingerprint_id="0123", layers=(1, 2, 4), num_layers=4, dtype="float32")
    Records(service.store).pin(job.id, gone)
    service.client.govern(GovernorMode.AUTO)
    page.sees("#notice", "A job waits for an engine", "the job began with 0123")
    page.sees(page.row(job.id), "it waits: no engine fits", *urls)
    assert page.violations() == []
    service.client.cancel(job.id)
    wait_for("the notice is gone", lambda: page.text("#notice") == "")


def test_failures_of_a_job_are_a_click_away(page: Page, service: Cluster) -> None:
    lines = [b'{"id":"good","prompt":"fine"}\n', b'{"id":"refused","prompt":"REFUSE"}\n', b'{"id":"none"}\n']
    job = service.client.enqueue(lines, name="with failures")
    page.open()
    page.sees(page.row(job.id), "done", "3 of 3 rows, 2 failed")
    page.one(f"{page.row(job.id)} .link").send_keys(Keys.ENTER)
    page.sees("#job", "1 succeeded, 2 failed, 0 skipped", "refused", "too long", "none", "failed")
    assert page.violations() == []
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait_for("the dialog is closed", lambda: not page.all("#job"))


def test_all_failures_of_a_job_can_be_paged_through(page: Page, service: Cluster) -> None:
    lines = (b'{"id":"f%03d","prompt":"REFUSE %d"}\n' % (i, i) for i in range(120))
    job = service.client.enqueue(lines, JobOptions(batch_size=30), name="only failures")
    page.open()
    page.sees(page.row(job.id), "failed", "120 failed")
    page.one(f"{page.row(job.id)} .link").click()
    seen = list[str]()
    for told, shown in (("1–50 of 120", 50), ("51–100 of 120", 50), ("101–120 of 120", 20)):
        page.sees("#job .pager", told)
        ids = page.script(
            "return [...document.querySelectorAll('#job tbody tr')].map(r => r.children[1].textContent)"
        )
        assert len(ids) == shown
        seen += ids
        if len(seen) < 120:
            page.one('#job [aria-label="Next failures"]').click()
    assert seen == [f"f{n:03d}" for n in range(120)]
    assert not page.one('#job [aria-label="Next failures"]').is_enabled()
    assert page.driver.switch_to.active_element.text == "Previous"
    assert page.violations() == []
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.sees("#job .pager", "51–100 of 120")


def test_pause_and_resume(page: Page, service: Cluster) -> None:
    page.open()
    service.trouble(delay_s=1.0)  # so that it isn't over before the click
    job = enqueue(service, 80, "in two parts", batch_size=4)
    row = page.row(job.id)
    page.sees(row, "running", "Pause")
    page.one(f'{row} [data-action="pause"]').click()
    page.sees(row, "paused", "Resume")
    service.trouble(delay_s=0.05)
    held = service.wait_idle(job.id)
    assert held.state.value == "paused" and 0 < held.succeeded < 80 and held.rate > 0
    page.sees(row, f"{held.succeeded} of 80 rows")
    assert page.text(f"{row} .rate") == page.text(f"{row} .left") == "–"
    page.one(f'{row} [data-action="resume"]').send_keys(Keys.ENTER)
    page.sees(row, "done", "80 of 80 rows")
    assert service.client.job(job.id).succeeded == 80


def test_retry_tries_failed_rows_again(page: Page, service: Cluster) -> None:
    lines = [b'{"id":"a","prompt":"fine"}\n', b'{"id":"b","prompt":"REFUSE one"}\n', b'{"prompt":""}\n']
    job = service.client.enqueue(lines, name="half well")
    page.open()
    row = page.row(job.id)
    page.sees(row, "done", "3 of 3 rows, 2 failed", "Retry failed")
    service.trouble(refusing=False)
    try:
        page.one(f'{row} [data-action="retry"]').send_keys(Keys.ENTER)
        page.sees(row, "done", "3 of 3 rows, 1 failed")
        assert page.focus() == [job.id, "retry"]
    finally:
        service.trouble(refusing=True)
    done = service.client.job(job.id)
    assert (done.succeeded, done.failed, done.shards) == (2, 1, 2)
    assert [failure.row for failure in service.client.failures(job.id)] == [2]


def test_cancel_asks_first_and_then_cancels(page: Page, service: Cluster) -> None:
    page.open()
    job = enqueue(service, 4000, "too much", batch_size=4)
    row = page.row(job.id)
    page.sees(row, "running", "Cancel")
    wait_for("some rows are over", lambda: service.client.job(job.id).succeeded)
    page.one(f'{row} [data-action="cancel"]').click()
    page.sees("#ask", "Cancel too much?")
    page.one('#ask [value="no"]').click()
    assert not service.client.job(job.id).state.final
    page.one(f'{row} [data-action="cancel"]').send_keys(Keys.ENTER)
    page.one("#ask-yes").click()
    page.sees(row, "cancelled")
    cancelled = service.wait_idle(job.id)
    assert cancelled.state.value == "cancelled"
    wait_for("no action is left", lambda: page.text(f"{row} .actions") == "")
    assert (cancelled.succeeded + cancelled.skipped, cancelled.failed) == (4000, 0)
    page.sees(row, f"{cancelled.succeeded:,} of 4,000 rows, cancelled")
    bars = f"return [...document.querySelectorAll('{row} .meter i')].map(bar => parseFloat(bar.style.width))"
    assert page.script(bars) == pytest.approx([cancelled.succeeded / 40, 0, 0], abs=0.01)
    page.one(f"{row} .link").click()
    page.sees("#job", f"{cancelled.skipped:,} not extracted")


def test_the_focus_stays_with_a_jobs_row(page: Page, service: Cluster) -> None:
    page.open()
    service.trouble(delay_s=1.0)  # so that nothing is over before the keys
    job = enqueue(service, 80, "by keyboard", batch_size=4)
    row = page.row(job.id)
    page.one(f'{row} [data-action="pause"]').send_keys(Keys.ENTER)
    page.sees(row, "paused", "Resume")
    assert page.focus() == [job.id, "resume"]
    page.press(Keys.ENTER)
    page.sees(row, "Pause")
    assert page.focus() == [job.id, "pause"]

    later = enqueue(service, 80, "came later", batch_size=4)
    page.sees(page.row(later.id), "came later")
    service.client.pause(job.id)
    page.sees(row, "paused", "Resume")
    assert page.focus() == [job.id, "resume"]
    page.press(Keys.TAB)
    service.client.resume(job.id)
    page.sees(row, "Pause")
    assert page.focus() == [job.id, "cancel"]

    page.press(Keys.ENTER)
    page.sees("#ask", "Cancel by keyboard?")
    page.press(Keys.TAB)
    page.press(Keys.ENTER)
    page.sees(row, "cancelled")
    assert page.focus() == [job.id, "link"]

    page.one(f'{page.row(later.id)} [data-action="cancel"]').send_keys(Keys.ENTER)
    page.sees("#ask", "Cancel came later?")
    service.client.cancel(later.id)
    wait_for("the button is gone", lambda: page.text(f"{page.row(later.id)} .actions") == "")
    page.press(Keys.ESCAPE)
    wait_for("it is back in the row", lambda: page.focus() == [later.id, "link"])
    service.trouble(delay_s=0.05)


def test_the_governor_takes_orders(page: Page, service: Cluster) -> None:
    page.open()
    pin = page.one("#pin")
    pin.clear()
    pin.send_keys("3.5" + Keys.ENTER)
    page.sees("#governor-mode", "pinned")
    wait_for("pinned", lambda: service.client.governor().mode is GovernorMode.PINNED)
    page.one('#governor-form [data-mode="stopped"]').click()
    page.one("#ask-yes").click()
    page.sees("#governor-mode", "stopped")
    page.sees("#notice", "Paused", "stopped by the operator", "lets extraction run again")
    assert "by itself" not in page.text("#notice")
    assert page.violations() == []
    page.one('#governor-form [data-mode="auto"]').click()
    page.sees("#governor-mode", "auto")
    wait_for("auto", lambda: service.client.governor().mode is GovernorMode.AUTO)
    wait_for("the notice is gone", lambda: page.text("#notice") == "")


def test_the_trainer_is_shown_as_it_learns(page: Page, service: Cluster) -> None:
    write_trainer(service, step=120, loss=7.552, accuracy=0.413, cursor=service.ledger.head())
    page.open()
    page.sees("#trainer-list", "eagle", "step 120", "loss 7.552", "41.3 %", "up with the ledger")
    page.sees("#charts .chart:last-child", "7.552", "41.3 %", "eagle")
    page.sees("#trainer-list .pill", "training")
    write_trainer(service, phase="counting tokens", refused=2)
    page.sees("#trainer-list .pill", "counting tokens")
    page.sees("#trainer-list", "2 shards refused")
    write_trainer(service, step=180, loss=5.1, accuracy=0.5, ended="no more entries")
    page.sees("#trainer-list", "ended", "no more entries", "loss 5.1")


def test_a_trainer_that_ended_is_forgotten(page: Page, service: Cluster) -> None:
    write_trainer(service, cursor=0, ended="stopped")
    page.open()
    page.sees("#trainer-list", "eagle", "ended", "Forget")
    page.sees("#tiles", "Unconsumed", "for eagle")
    page.sees("#retention", "All shards are kept")
    page.one('#trainer-list [aria-label="Forget eagle"]').click()
    page.sees("#ask", "Forget eagle?")
    assert page.violations() == []
    page.one("#ask-yes").click()
    page.sees("#trainer-list", "None has written yet")
    assert page.focus() == [None, "trainers"]
    page.sees("#tiles", "no consumer yet")
    assert not service.store.exists("consumers/eagle.json")


def test_a_service_that_goes_away_is_said_and_comes_back(page: Page, service: Cluster) -> None:
    """SIGTERM ends the API although a stream is open; the page finds the next one by itself."""
    page.open()
    api = next(p for p in service.processes if p.args[-1] == "api" and p.poll() is None)
    service.stop(api, signal.SIGTERM)
    page.sees("#link", "Disconnected")
    page.sees("#notice", "can't be reached", "Shown is what was at")
    assert page.violations() == []
    page.size(360, 800)
    assert page.script("return document.documentElement.scrollWidth") <= 360
    service.start_api()
    page.sees("#link", "Live")
    wait_for("the notice is gone", lambda: page.text("#notice") == "")


def test_a_reader_is_offered_no_action(page: Page, service: Cluster) -> None:
    service.client.govern(GovernorMode.STOPPED)
    job = enqueue(service, 8, "for a reader")
    try:
        page.open("reader-token")
        page.sees(page.row(job.id), "queued")
        page.sees("#who", "reader (read)")
        page.sees("#governor-mode", "stopped")
        page.sees("#tiles .tile:nth-child(2)", "Rows left", "paused")
        assert page.text(f"{page.row(job.id)} .actions") == ""
        assert page.all("#governor-form") == []
        page.open()
        page.sees(page.row(job.id), "Cancel")
        assert page.all("#governor-form") != []
    finally:
        service.client.cancel(job.id)
        service.client.govern(GovernorMode.AUTO)


def test_a_tenants_token_is_told_why_it_sees_nothing(page: Page) -> None:
    page.open(token=None)
    page.one("#token").send_keys("acme-token" + Keys.ENTER)
    page.sees("#door-error", "all tenants")
