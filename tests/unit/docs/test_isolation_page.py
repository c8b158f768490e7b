"""docs/isolation.md names the quota's fields, the settings behind them, and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

from taphouse_extractor.settings import Settings
from taphouse_tap.quota import Quota
from taphouse_tap.settings import TapSettings

PAGE = (Path(__file__).parents[3] / "docs" / "isolation.md").read_text()


def test_every_field_of_the_quota_is_named_with_its_setting() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`TAPHOUSE_TAP_(\w+)`)? ?\|", PAGE, re.MULTILINE))
    assert set(rows) | {"expires_at"} == set(Quota.__dataclass_fields__)
    for field, setting in rows.items():
        if setting:
            assert setting.lower() == field
            assert TapSettings.model_fields[field].description


def test_the_governors_switch_exists() -> None:
    assert "TAPHOUSE_EXTRACTOR_GOVERNOR=false" in PAGE
    assert Settings.model_fields["governor"].default is True
