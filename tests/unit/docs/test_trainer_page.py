"""docs/trainer.md names the trainer's metrics and what a resumed run can't change."""

import re

from tests.unit.docs.settings_tables import PAGE

from taphouse_trainer.health import Metrics
from taphouse_trainer.settings import Settings

TEXT = PAGE.with_name("trainer.md").read_text()


def test_the_metrics_named_are_those_there_are_with_their_labels() -> None:
    rows = re.findall(r"^\| (`taphouse_trainer_.+?) \| (.*?) \|", TEXT, re.MULTILINE)
    told = {
        name.removesuffix("_total"): set(re.findall(r"`(\w+)`", labels))
        for names, labels in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    metrics = Metrics()
    for each in vars(metrics).values():
        labels = getattr(each, "_labelnames", ())
        if labels:
            each.labels(*labels)
    published = {
        family.name: {label for sample in family.samples for label in sample.labels}
        for family in metrics.registry.collect()
    }
    assert told == published


def test_what_a_resumed_run_can_not_change() -> None:
    pinned = Settings(store="s", target="t", output="o", _cli_parse_args=[]).pinned()  # type: ignore[arg-type,call-arg]
    (sentence,) = re.findall(r"ledger are those of that step.*?must be the same", TEXT, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", sentence)) == set(pinned)
