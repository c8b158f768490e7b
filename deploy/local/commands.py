"""Prints a profile as shell commands, which is all that a profile with `TAPHOUSE_DEMO_MODE=print` does."""

import configparser
import shlex
from collections.abc import Iterator

from processes import CONF
from profiles import Profile
from rich.console import Console

_ENVIRONMENT = {
    "redis": (),
    "engine": ("VLLM_", "HF_", "TAPHOUSE_TAP_"),
    "api": ("TAPHOUSE_EXTRACTOR_",),
    "worker": ("TAPHOUSE_EXTRACTOR_",),
    "trainer": ("TAPHOUSE_TRAINER_",),
    "draft-trained": ("VLLM_", "HF_"),
}


def print_commands(profile: Profile, console: Console) -> None:
    """The commands of deploy/local/supervisord.conf with the profile's values in them."""
    console.out(
        f"# Profile {profile.path.stem}: nothing is run. Notes stand in deploy/profiles/{profile.path.name}:"
    )
    console.out("# the trainer and an engine for the draft belong on other GPUs or hosts than production's.")
    for program, command in commands(profile):
        copies = f", {profile.settings.workers} times" if program == "worker" else ""
        console.out(f"\n# {program}{copies}")
        prefixes = _ENVIRONMENT[program]
        for name, value in profile.values.items():
            if prefixes and name.startswith(prefixes):
                console.out(f"export {name}={shlex.quote(value)}", highlight=False)
        console.out(_folded(command), highlight=False)
    settings = profile.settings
    options = f"--max-tokens {settings.max_tokens} --batch-size {settings.batch_size}"
    options += f" --priority {settings.priority} --wait"
    console.out(f"\n# a job\ntaphouse enqueue dataset.jsonl {options}\ntaphouse watch", highlight=False)


def commands(profile: Profile) -> Iterator[tuple[str, str]]:
    """Each program of the process manager's file with its command line, the drafts compared with left out."""
    parser = configparser.RawConfigParser(inline_comment_prefixes=(" ;",))
    parser.read(CONF)
    for section in parser.sections():
        program = section.removeprefix("program:")
        if program in _ENVIRONMENT:
            yield program, parser.get(section, "command") % _Expansions(profile.values)


class _Expansions(dict[str, str]):
    """supervisord's `%(ENV_NAME)s`."""

    def __missing__(self, key: str) -> str:
        if not key.startswith("ENV_"):
            raise KeyError(key)
        return self[key.removeprefix("ENV_")]


def _folded(command: str) -> str:
    """One flag a line."""
    words = [shlex.quote(word) for word in shlex.split(command)]
    text = words[0]
    for word in words[1:]:
        text += f" \\\n  {word}" if word.startswith("--") else f" {word}"
    return text
