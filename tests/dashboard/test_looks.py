"""How the dashboard looks in a real browser: light, dark, on a phone, on a small laptop."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.dashboard.conftest import Page, enqueue
from tests.queue.conftest import Cluster


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1440), ("dark", 1440), ("dark", 390), ("light", 360)]
)
def test_it_is_readable_in_light_and_dark_and_on_a_phone(
    page: Page, service: Cluster, scheme: str, width: int
) -> None:
    enqueue(service, 2, f"seen {scheme}, {width} wide")
    page.media(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
    page.size(width, 900)
    page.open()
    page.sees("#jobs-table", f"seen {scheme}, {width} wide")
    dark = page.script("return getComputedStyle(document.documentElement).colorScheme")
    assert dark == scheme
    assert page.script("return document.documentElement.scrollWidth") <= width
    page.sees("#shards-table", "ago")
    wide = "filter(one => one.scrollWidth > one.clientWidth).map(one => one.textContent)"
    assert page.script(f"return [...document.querySelectorAll('#main .card')].{wide}") == []
    assert (
        page.script("return getComputedStyle(document.querySelector('.meter i')).transitionDuration") == "0s"
    )
    assert page.violations() == []


def test_nothing_is_cut_or_left_over_on_a_small_laptop(page: Page, service: Cluster) -> None:
    page.size(1280, 900)
    page.open()
    job = enqueue(service, 1, "a long name of a job, " * 8)
    page.sees(page.row(job.id), "done")
    page.sees("#shards-table tbody tr:first-child", job.id)
    assert min(Counter(tile.rect["y"] for tile in page.all(".tile")).values()) > 1
    bar, number = (page.one(f"#shards-table .share {part}").rect for part in (".meter", "span"))
    assert number["x"] > bar["x"] + bar["width"] and abs(number["y"] - bar["y"]) < number["height"]
    shards, card = page.one("#shards-table").rect, page.one('section[aria-labelledby="shards"]').rect
    assert shards["x"] + shards["width"] < card["x"] + card["width"] - 10
    page.one(f"{page.row(job.id)} .link").click()
    page.sees("#job", "1 succeeded")
    title, close = page.one("#job-title").rect, page.one("#job-close").rect
    assert close["x"] > title["x"] + title["width"] and close["y"] < title["y"] + title["height"]


def test_the_theme_can_be_chosen_and_is_kept(page: Page) -> None:
    page.open()
    page.one("#theme").click()
    page.one("#theme").click()
    page.sees("#theme", "Theme: dark")
    page.driver.refresh()
    page.sees("#theme", "Theme: dark")
    page.sees("#link", "Live")  # and so is the token, in this tab
    assert page.script("return getComputedStyle(document.documentElement).colorScheme") == "dark"
