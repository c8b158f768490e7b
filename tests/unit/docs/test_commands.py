"""Command lines and settings in the documents are ones that the programs take."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings
from typer.main import get_command

from taphouse.cli.app import app
from taphouse.cli.settings import Settings as CommandSettings
from taphouse_extractor.settings import Settings as ExtractorSettings
from taphouse_tap.settings import TapSettings
from taphouse_trainer.settings import Settings as TrainerSettings
from taphouse_trainer.settings import load_settings

ROOT = Path(__file__).parents[3]
PAGES = [
    "README.md",
    "ARCHITECTURE.md",
    "deploy/README.md",
    *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
]
SETTINGS = [CommandSettings, ExtractorSettings, TapSettings, TrainerSettings]
KNOWN = {s.model_config["env_prefix"] + name.upper() for s in SETTINGS for name in s.model_fields}


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def lines(page: str) -> Iterator[list[str]]:
    """The words of each line of the page's blocks that a shell would take, without its comment."""
    for block in re.findall(r"^```\n(.*?)^```", read(page), flags=re.M | re.S):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # an answer, or a picture
                continue
            yield words


def typed(program: str) -> list[object]:
    """Each use of a program, with its page; the words after its name."""
    read_by_shells = [page for page in PAGES if page != "ARCHITECTURE.md"]
    found = [(page, words[1:]) for page in read_by_shells for words in lines(page) if words[:1] == [program]]
    assert found
    return [pytest.param(words, id=f"{page}: {' '.join(words)[:60]}") for page, words in found]


@pytest.mark.parametrize("words", typed("taphouse"))
def test_the_command_takes_them(words: list[str]) -> None:
    command, context = get_command(app), None
    while True:
        context = command.make_context("taphouse", list(words), parent=context)
        words = [*getattr(context, "_protected_args", ()), *context.args]
        if not words:
            return
        _, command, words = command.resolve_command(context, words)


@pytest.mark.parametrize("words", typed("taphouse-extractor"))
def test_the_service_takes_them(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPHOUSE_EXTRACTOR_STORE", "/store")
    monkeypatch.setenv("TAPHOUSE_EXTRACTOR_TOKEN", "a token")
    assert words[0] in ("api", "worker")
    ExtractorSettings(_cli_parse_args=words[1:])  # type: ignore[call-arg]


@pytest.mark.parametrize("words", typed("taphouse-trainer"))
def test_the_trainer_takes_them(words: list[str]) -> None:
    assert load_settings(words).target.is_absolute()


@pytest.mark.parametrize("words", typed("vllm"))
def test_a_draft_is_served_from_where_the_trainer_puts_it(words: list[str]) -> None:
    if "--speculative-config" in words:
        draft = json.loads(words[words.index("--speculative-config") + 1])
        assert draft["num_speculative_tokens"] == TrainerSettings.model_fields["ttt_steps"].default
        assert (draft["method"], Path(draft["model"]).name in ("latest", "kimi-draft")) == ("eagle3", True)


@pytest.mark.parametrize("words", typed("redis-server"))
def test_redis_is_told_what_compose_tells_it(words: list[str]) -> None:
    assert json.dumps(["redis-server", *words]) in read("deploy/compose.yml")


@pytest.mark.parametrize("words", typed("make"))
def test_the_targets_exist(words: list[str]) -> None:
    assert re.search(rf"^{words[0]}: ", read("Makefile"), flags=re.M)


@pytest.mark.parametrize("page", PAGES)
def test_settings_exist_and_take_what_is_given(page: str) -> None:
    named = set(re.findall(r"(?<![\w/])TAPHOUSE_(?:EXTRACTOR|TRAINER|TAP)_[A-Z_]*[A-Z]", read(page)))
    assert named <= KNOWN
    given = {
        name: value
        for words in lines(page)
        for name, equals, value in (word.partition("=") for word in words if word.startswith("TAPHOUSE_"))
        if equals and "…" not in value
    }
    ExtractorSettings(
        **{"store": "/store"} | {n: v for n, v in part(given, ExtractorSettings).items() if "_file" not in n}
    )
    TapSettings(**part(given, TapSettings))


def part(given: dict[str, str], settings: type[BaseSettings]) -> dict[str, str]:
    prefix = settings.model_config["env_prefix"]
    return {n.removeprefix(prefix).lower(): v for n, v in given.items() if n.startswith(prefix)}
