"""docs/configuration.md says what the settings classes say."""

import pytest
from tests.unit.docs import settings_tables


def test_page_is_the_settings_classes() -> None:
    assert settings_tables.PAGE.read_text() == settings_tables.render(), (
        "run `python -m tests.unit.docs.settings_tables`"
    )


@pytest.mark.parametrize("settings", [p[2] for p in settings_tables.PROCESSES])
def test_every_setting_says_what_it_is(settings: type) -> None:
    silent = [name for name, field in settings.model_fields.items() if not field.description]
    assert silent == []
