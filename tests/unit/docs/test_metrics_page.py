"""docs/metrics.md names the metrics that the API has."""

import re
from dataclasses import replace

from prometheus_client import CollectorRegistry
from tests.unit.docs.settings_tables import PAGE
from tests.unit.extractor.test_metrics_parts import moment

from taphouse.wire import Engine, Latency, Unconsumed
from taphouse_extractor.metrics import Snapshot


def test_page_names_what_there_is() -> None:
    page = PAGE.with_name("metrics.md").read_text()
    told = {name.removesuffix("_total") for name in re.findall(r"`(taphouse_[a-z_]+)`", page)}
    full = moment("pinned")
    engine = Engine(url="e", capture="on", latency=Latency(window_s=1.0, itl_p50=0.1))
    governor = full.figures.queue.governor
    assert governor is not None
    governor = governor.model_copy(update={"slowdown": 1.0})
    queue = full.figures.queue.model_copy(
        update={"engines": [engine], "governor": governor, "unconsumed": Unconsumed(bound_bytes=1)}
    )
    registry = CollectorRegistry()
    registry.register(Snapshot(replace(full, figures=replace(full.figures, queue=queue))))
    families = {family.name: family for family in registry.collect()}
    names = {f"{name}_info" if family.type == "info" else name for name, family in families.items()}
    assert names == told
    for family in families.values():
        assert family.documentation
