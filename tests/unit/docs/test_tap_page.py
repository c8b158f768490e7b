"""The launch lines in the documents are the ones that the tap asks for, and the settings they name exist."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import prometheus_client
import pytest

from taphouse_tap.__main__ import launch_args
from taphouse_tap.api.latency import CLASSES, OUTCOMES, LatencyByClass
from taphouse_tap.api.metrics import LatencyMetrics
from taphouse_tap.settings import TapSettings

ROOT = Path(__file__).parents[3]
PAGES = ["docs/tap.md", "README.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_launch_line_has_the_taps_flags(page: str) -> None:
    text = (ROOT / page).read_text()
    (line,) = re.findall(r"^vllm serve (?:.*\\\n)*.*$", text, re.MULTILINE)
    words = shlex.split(line.replace("\\\n", " "))
    given = set(pairwise(words))
    flags = launch_args([2, 30, 58], tensor_parallel_size=8)
    assert set(zip(flags[::2], flags[1::2], strict=True)) <= given
    assert ("--middleware", "taphouse_tap.middleware.HiddenStatesMiddleware") in given


@pytest.mark.parametrize("page", [*PAGES, "docs/hidden-states.md", "docs/isolation.md"])
def test_the_settings_named_exist(page: str) -> None:
    named = set(re.findall(r"TAPHOUSE_TAP_([A-Z_]+)", (ROOT / page).read_text()))
    assert named and named <= {name.upper() for name in TapSettings.model_fields}


def test_the_metrics_named_are_those_of_latency_and_no_other() -> None:
    registry = prometheus_client.CollectorRegistry()
    LatencyMetrics(registry).update(LatencyByClass())
    text = (ROOT / "docs/tap.md").read_text()
    rows = re.findall(r"^\| `(taphouse_\w+)` \| (.+?) \|", text, re.MULTILINE)
    named = {name.removesuffix("_total"): set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    published = {
        family.name: {label for sample in family.samples for label in sample.labels} - {"le"}
        for family in registry.collect()
    }
    assert named == published
    assert {word for word in (*CLASSES, *OUTCOMES) if f"`{word}`" not in text} == set()
