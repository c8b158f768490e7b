"""Profiles: every name is known to the process that reads it, every value is one it takes."""

import configparser
import re
import socket
from pathlib import Path

import commands
import profiles
import pytest
from pydantic import ValidationError

from taphouse_extractor.settings import Settings as ExtractorSettings
from taphouse_tap.settings import TapSettings
from taphouse_trainer.settings import Settings as TrainerSettings

ROOT = Path(__file__).resolve().parents[3]
NAMES = sorted(path.stem for path in (ROOT / "deploy" / "profiles").glob("*.env"))


def part(values: dict[str, str], prefix: str) -> dict[str, str]:
    return {k.removeprefix(prefix).lower(): v for k, v in values.items() if k.startswith(prefix)}


def test_the_three_profiles_are_here() -> None:
    assert NAMES == ["demo", "kimi-k2.5", "smoke"]


@pytest.mark.parametrize("name", NAMES)
def test_every_process_takes_its_part(name: str) -> None:
    values = profiles.load(name, {}, {}, move_ports=False).values
    TapSettings(**part(values, "TAPHOUSE_TAP_"))
    extractor = part(values, "TAPHOUSE_EXTRACTOR_")
    for secret in ("token_file", "engine_key_file"):
        assert extractor.pop(secret)
    ExtractorSettings(**extractor)
    TrainerSettings(_cli_parse_args=[], **part(values, "TAPHOUSE_TRAINER_"))
    assert {name.split("_")[0] for name in values} <= {"TAPHOUSE", "VLLM", "HF"}


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_a_profile_fit_each_other(name: str) -> None:
    values = profiles.load(name, {}, {}, move_ports=False).values
    assert values["TAPHOUSE_EXTRACTOR_SLICE_DIR"] == values["TAPHOUSE_TAP_SLICE_DIR"]
    assert values["TAPHOUSE_TRAINER_TARGET"] == values["TAPHOUSE_DEMO_MODEL"]
    assert values["TAPHOUSE_TRAINER_STORE"] == values["TAPHOUSE_EXTRACTOR_STORE"]
    assert values["TAPHOUSE_EXTRACTOR_ENGINE_URL"].endswith(values["TAPHOUSE_DEMO_ENGINE_PORT"])
    assert values["TAPHOUSE_DEMO_REDIS_PORT"] in values["TAPHOUSE_EXTRACTOR_REDIS_URL"]
    assert "--scheduling-policy priority" in values["TAPHOUSE_DEMO_ENGINE_FLAGS"]
    assert values["TAPHOUSE_DEMO_DRAFT_TOKENS"] == values["TAPHOUSE_TRAINER_TTT_STEPS"]


@pytest.mark.parametrize("name", ["demo", "smoke"])
def test_engines_are_given_the_time_to_clean_up(name: str) -> None:
    """Less than supervisord's, which kills the whole group when it is over."""
    parser = configparser.RawConfigParser(inline_comment_prefixes=(" ;",))
    parser.read(ROOT / "deploy" / "local" / "supervisord.conf")
    values = profiles.load(name, {}, {}, move_ports=False).values
    for part, program in (("ENGINE", "engine"), ("DRAFT", "draft-trained"), ("DRAFT", "draft-ngram")):
        words = values[f"TAPHOUSE_DEMO_{part}_FLAGS"].split()
        given = int(words[words.index("--shutdown-timeout") + 1])
        section = parser[f"program:{program}"]
        assert 0 < given <= section.getint("stopwaitsecs") - 10 and not section.getboolean("stopasgroup")


def test_kimi_has_the_real_numbers_and_runs_nothing() -> None:
    values = profiles.load("kimi-k2.5", {}, {}, move_ports=False).values
    assert values["TAPHOUSE_DEMO_MODE"] == "print"
    assert values["TAPHOUSE_DEMO_LAYERS"] == "2,30,58"
    assert values["TAPHOUSE_DEMO_WORKERS"] == values["TAPHOUSE_DEMO_TENSOR_PARALLEL_SIZE"] == "8"
    assert values["TAPHOUSE_TRAINER_DRAFT_VOCAB_SIZE"] == "32000"
    assert "--tensor-parallel-size 8" in values["TAPHOUSE_DEMO_ENGINE_FLAGS"]
    assert "--max-num-batched-tokens 8192" in values["TAPHOUSE_DEMO_ENGINE_FLAGS"]


def test_the_environment_wins_and_later_lines_follow() -> None:
    loaded = profiles.load("smoke", {"TAPHOUSE_DEMO_RUN": "elsewhere"}, {}, move_ports=False)
    assert loaded.values["TAPHOUSE_EXTRACTOR_STORE"] == "elsewhere/store"


def test_taken_ports_are_moved_and_all_differ() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        loaded = profiles.load("demo", {"TAPHOUSE_DEMO_ENGINE_PORT": port}, {}, move_ports=True)
    assert loaded.values["TAPHOUSE_DEMO_ENGINE_PORT"] != port
    assert loaded.values["TAPHOUSE_EXTRACTOR_ENGINE_URL"].endswith(loaded.values["TAPHOUSE_DEMO_ENGINE_PORT"])
    ports = [value for key, value in loaded.values.items() if key.endswith("_PORT")]
    assert len(set(ports)) == len(ports)


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "profiles" / "demo.env").read_text() + "TAPHOUSE_DEMO_TRAFIC_RATE=1\n"
    path = tmp_path / "wrong.env"
    path.write_text(text)
    with pytest.raises(ValidationError, match="trafic_rate"):
        profiles.Profile(path, {})


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.env"
    path.write_text("A=1\nB=${C}\n")
    with pytest.raises(profiles.ProfileError, match="line 2"):
        profiles.Profile(path, {})


def test_the_process_manager_needs_nothing_that_a_profile_lacks() -> None:
    needed = set(re.findall(r"%\(ENV_(\w+)\)s", (ROOT / "deploy" / "local" / "supervisord.conf").read_text()))
    for name in NAMES:
        assert needed <= set(profiles.load(name, {}, {}, move_ports=False).values)


def test_a_profile_that_is_printed_names_its_real_commands() -> None:
    printed = dict(commands.commands(profiles.load("kimi-k2.5", {}, {}, move_ports=False)))
    assert list(printed) == ["redis", "engine", "api", "worker", "trainer", "draft-trained"]
    assert "--tensor-parallel-size 8" in printed["engine"]
    assert '"model":"/mnt/taphouse/draft/latest"' in printed["draft-trained"]
    assert not [line for line in printed.values() if "%(" in line]
