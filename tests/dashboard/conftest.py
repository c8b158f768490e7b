"""A real service with the stand-in engine, and one headless Chromium for all tests."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from tests.queue.conftest import TOKEN, Cluster, free_port, wait_for
from tests.unit.extractor.test_tokens import write_tokens

from taphouse.wire import Job, JobOptions

AXE = Path(__file__).parent / "vendor/axe.min.js"


def browser_paths() -> tuple[str, str]:
    """Chromium and its driver; fails, saying how to get them."""
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in found:
        pytest.fail("these tests need Chromium and its driver; Debian: apt install chromium chromium-driver")
    return str(found[0]), str(found[1])


@dataclass
class Page:
    """The dashboard in the browser, as a person sees it."""

    driver: webdriver.Chrome
    url: str

    def open(self, token: str | None = TOKEN) -> None:
        """A fresh tab's start: nothing is remembered, then the token is typed in."""
        self.driver.get(self.url)
        self.driver.execute_script("sessionStorage.clear(); localStorage.clear()")
        self.driver.get(self.url)
        if token is not None:
            self.sees("#door", "asks for a token")
            self.one("#token").send_keys(token)
            self.one("#door button").click()
            self.sees("#link", "Live")

    def all(self, css: str) -> list[WebElement]:
        return [found for found in self.driver.find_elements(By.CSS_SELECTOR, css) if found.is_displayed()]

    def one(self, css: str) -> WebElement:
        """The first that is shown, once there is one."""
        found: WebElement = wait_for(css, lambda: next(iter(self.all(css)), None))
        return found

    def text(self, css: str) -> str:
        try:
            return "\n".join(found.text for found in self.all(css))
        except StaleElementReferenceException:
            return ""

    def sees(self, css: str, *words: str) -> None:
        wait_for(f"{css} says {words}", lambda: all(word in self.text(css) for word in words))

    def focus(self) -> list[str | None]:
        """Where the keyboard is: the job of the row, and the action's name or the element's id or class."""
        found: list[str | None] = self.script(
            "const at = document.activeElement; return [at.closest('tr')?.dataset.key ?? null, "
            "at.dataset.action || at.id || at.className || at.tagName]"
        )
        return found

    def press(self, key: str) -> None:
        """A key, wherever the focus is."""
        self.driver.switch_to.active_element.send_keys(key)

    def row(self, job_id: str) -> str:
        """The selector of a job's row."""
        return f'#jobs-table tr[data-key="{job_id}"]'

    def media(self, **features: str) -> None:
        said = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": said})

    def size(self, width: int, height: int) -> None:
        facts = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", facts)

    def script(self, text: str) -> Any:
        return self.driver.execute_script(text)

    def violations(self) -> list[str]:
        """What axe-core finds wrong, as lines. It is run past the page's own policy, by the driver."""
        self.driver.execute_script(AXE.read_text())
        found = self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1]; axe.run({resultTypes: ['violations']}).then(r => "
            "done(r.violations.map(v => v.id + ': ' + v.nodes.map(n => n.target.join(' ') + ' ' + "
            "n.failureSummary).join(' | '))))"
        )
        return list(found)


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A service that runs, with two engines and one worker."""
    cluster = Cluster(tmp_path_factory.mktemp("dashboard"), second_port=free_port())
    tokens = write_tokens(
        cluster.directory / "tokens.json",
        ("reader", "reader-token", "read", None),
        ("acme", "acme-token", "read", "acme"),
    )
    cluster.settings["TAPHOUSE_EXTRACTOR_TOKENS_FILE"] = str(tokens)
    try:
        cluster.start(workers=1, delay_s=0.05)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="package")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium, chromedriver = browser_paths()
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.add_argument("--headless=new")
    options.add_argument("--disable-dev-shm-usage")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    try:
        yield made
    finally:
        made.quit()


@pytest.fixture
def page(driver: webdriver.Chrome, service: Cluster) -> Iterator[Page]:
    """The page, opened with the service's token; nothing may be wrong in the browser's log at the end."""
    shown = Page(driver, f"http://127.0.0.1:{service.api_port}")
    shown.media(prefers_color_scheme="light")
    shown.size(1440, 1000)
    yield shown
    wrong = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    expected = ("401", "403", "409", "ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY", "ERR_ABORTED")
    assert [message for message in wrong if not any(word in message for word in expected)] == []


def write_trainer(cluster: Cluster, **facts: Any) -> None:
    """What a trainer says of itself."""
    said = {"name": "eagle", "cursor": 0, "updated_at": time.time(), **facts}
    folder = cluster.store.root / "consumers"
    folder.mkdir(exist_ok=True)
    (folder / "eagle.json").write_text(json.dumps(said))


def enqueue(cluster: Cluster, rows: int, name: str, **options: int) -> Job:
    """A job whose rows no job of another name has."""
    lines = (json.dumps({"id": f"r{i}", "prompt": f"{name}: {i}"}).encode() + b"\n" for i in range(rows))
    return cluster.client.enqueue(lines, JobOptions(**options), name)
