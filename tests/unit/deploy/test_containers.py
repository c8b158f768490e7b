"""Dockerfiles and compose.yml: what can be checked of them without a container engine."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings

from taphouse_extractor.settings import Settings as ExtractorSettings
from taphouse_tap import __version__ as tap_version
from taphouse_tap.settings import TapSettings
from taphouse_trainer.settings import Settings as TrainerSettings

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SETTINGS: dict[str, type[BaseSettings]] = {
    "TAPHOUSE_TAP_": TapSettings,
    "TAPHOUSE_EXTRACTOR_": ExtractorSettings,
    "TAPHOUSE_TRAINER_": TrainerSettings,
}


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Instruction and argument, continued lines joined, comments left out."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(m[1], m[2].strip()) for m in re.finditer(r"^([A-Z]+) (.+)$", text, re.M)]


def unknown_settings(names: dict[str, Any]) -> list[str]:
    """Names with a prefix of ours that no settings class knows."""
    unknown = []
    for name in names:
        for prefix, settings in SETTINGS.items():
            if name.startswith(prefix) and name.removeprefix(prefix).lower() not in settings.model_fields:
                unknown.append(name)
    return unknown


def test_all_three_images_are_here() -> None:
    assert [d.stem for d in DOCKERFILES] == ["engine", "extractor", "trainer"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda d: d.stem)
def test_an_image_is_pinned_not_root_and_watched(dockerfile: Path) -> None:
    found = instructions(dockerfile)
    by_name: dict[str, list[str]] = {}
    for name, argument in found:
        by_name.setdefault(name, []).append(argument)
    assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+\S*", by_name["FROM"][0])
    assert by_name["USER"] == ["10001"]
    assert [name for name, _ in found].index("USER") > max(i for i, (n, _) in enumerate(found) if n == "RUN")
    assert "HEALTHCHECK" in by_name
    json.loads(by_name["ENTRYPOINT"][0])


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda d: d.stem)
def test_what_an_image_copies_exists(dockerfile: Path) -> None:
    sources = [word for name, arg in instructions(dockerfile) if name == "COPY" for word in arg.split()[:-1]]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda d: d.stem)
def test_settings_that_an_image_bakes_in_exist(dockerfile: Path) -> None:
    names = {
        name: ""
        for kind, argument in instructions(dockerfile)
        if kind == "ENV"
        for name in re.findall(r"(\w+)=", argument)
    }
    assert unknown_settings(names) == []


@pytest.mark.parametrize("service", SERVICES)
def test_a_services_settings_exist(service: str) -> None:
    assert unknown_settings(SERVICES[service].get("environment", {})) == []


def test_a_misspelt_setting_is_found() -> None:
    assert unknown_settings({"TAPHOUSE_EXTRACTOR_REDIS_URI": "x", "TAPHOUSE_TAP_SLICE_DIR": "x"}) == [
        "TAPHOUSE_EXTRACTOR_REDIS_URI"
    ]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_comes_from_an_image_that_is_pinned_and_volumes_that_are_declared(service: str) -> None:
    described = SERVICES[service]
    assert re.fullmatch(r"\S+:\d+\.\d+\.\d+\S*", described["image"])
    if "build" in described:
        assert (ROOT / described["build"]["dockerfile"]).is_file()
    named = [volume.split(":")[0] for volume in described.get("volumes", []) if volume[0].isalpha()]
    assert [name for name in named if name not in COMPOSE["volumes"]] == []
    assert [name for name in described.get("secrets", []) if name not in COMPOSE["secrets"]] == []


def test_engine_and_workers_share_the_slices_as_one_user() -> None:
    for service in ("engine", "api", "worker"):
        assert "slices:/slices" in SERVICES[service]["volumes"]
    tap, worker = SERVICES["engine"]["environment"], SERVICES["worker"]["environment"]
    assert tap["TAPHOUSE_TAP_SLICE_DIR"] == worker["TAPHOUSE_EXTRACTOR_SLICE_DIR"] == "/slices"
    options = COMPOSE["volumes"]["slices"]["driver_opts"]["o"].split(",")
    assert {"uid=10001", "gid=10001", "mode=0700"} <= set(options)
    size = next(option.removeprefix("size=") for option in options if option.startswith("size="))
    assert int(size.removesuffix("g")) << 30 > int(tap["TAPHOUSE_TAP_SLICE_DIR_LIMIT_BYTES"])


def test_redis_keeps_what_it_acknowledged() -> None:
    command = SERVICES["redis"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"


def test_workers_can_be_scaled() -> None:
    assert "container_name" not in SERVICES["worker"]
    assert "ports" not in SERVICES["worker"]


def test_the_engine_names_the_tap_it_carries() -> None:
    config = next(
        json.loads(flag.partition("=")[2])
        for flag in SERVICES["engine"]["command"]
        if flag.startswith("--additional-config=")
    )
    assert config["taphouse"]["version"] == tap_version
