"""The config's part of the fingerprint is of the file itself: the trainer finds the same in its copy."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from taphouse_tap import compat

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds the config of `org/model` at `main`."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--org--model"
    file = repo / "snapshots" / COMMIT / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return file


def test_directory_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert compat.config_file(str(tmp_path), None) == tmp_path / "config.json"


def test_hub_name_is_found_in_the_cache(cached: Path) -> None:
    assert compat.config_file("org/model", None) == cached
    assert compat.config_file("org/model", COMMIT) == cached


@pytest.mark.parametrize("model", ["org/other", "/no/such/directory", "not a name at all"])
def test_anything_else_has_none(cached: Path, model: str) -> None:
    assert compat.config_file(model, None) is None
