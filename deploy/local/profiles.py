"""A profile: one file of `NAME=value` lines that says everything about a run.

The same names reach every process as environment variables, so a profile file alone, sourced by a shell,
is enough for `supervisord -c deploy/local/supervisord.conf` too.
"""

import shlex
import socket
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "TAPHOUSE_DEMO_"
_PORTS = (
    "TAPHOUSE_DEMO_ENGINE_PORT",
    "TAPHOUSE_DEMO_DRAFT_PORT",
    "TAPHOUSE_DEMO_REDIS_PORT",
    "TAPHOUSE_EXTRACTOR_PORT",
    "TAPHOUSE_TRAINER_PORT",
)


class ProfileError(Exception):
    """A profile file can't be used; the message names the file and line."""


class Settings(BaseModel):
    """What the demo itself reads of a profile: the `TAPHOUSE_DEMO_*` names, lower case, no others.

    Paths are relative to the repository's root. Durations are seconds; `train_from` is a share of the rows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["run", "print"]
    run: Path
    bin: Path
    redis_server: str
    rows: int
    max_tokens: int
    batch_size: int
    held_out_prompts: int
    traffic_rate: float
    traffic_tokens: int
    alone_s: float
    train_from: float
    train_s: float
    model: str
    model_name: str
    layers: str
    tensor_parallel_size: int
    priority: int
    engine_port: int
    engine_flags: str
    tap_flags: str
    draft_port: int
    draft_tokens: int
    draft_flags: str
    redis_port: int
    workers: int


class Profile:
    """A profile's names and values, with `${NAME}` filled in.

    `overrides` win over the file, whatever the file says, and count for later lines' references.
    """

    def __init__(self, path: Path, overrides: Mapping[str, str]) -> None:
        self.path = path
        self.values = _read(path, overrides)
        own = {k.removeprefix(PREFIX).lower(): v for k, v in self.values.items() if k.startswith(PREFIX)}
        self.settings = Settings.model_validate(own)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` without Taphouse's own variables, and this profile."""
        return {k: v for k, v in base.items() if not k.startswith("TAPHOUSE_")} | self.values


def load(name: str, environ: Mapping[str, str], derived: Mapping[str, str], *, move_ports: bool) -> Profile:
    """The profile of that name: `derived` > `environ` > file.

    With `move_ports`, a port on which somebody listens already is replaced by a free one.

    Raises:
        ProfileError: there is no such profile, or a line of it can't be read.
    """
    path = ROOT / "deploy" / "profiles" / f"{name}.env"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.env")))
        raise ProfileError(f"there is no profile {name!r}; there are: {known}")
    overrides = {**environ, **derived}
    if move_ports:
        values = Profile(path, overrides).values
        overrides |= _free_ports([(key, int(values[key])) for key in _PORTS])
    return Profile(path, overrides)


def _read(path: Path, overrides: Mapping[str, str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, raw = line.partition("=")
        if not equals or not name.isidentifier():
            raise ProfileError(f"{path}, line {number}: not NAME=value")
        if name in overrides:
            values[name] = overrides[name]
            continue
        try:
            values[name] = string.Template(" ".join(shlex.split(raw))).substitute(values)
        except (KeyError, ValueError) as error:
            raise ProfileError(f"{path}, line {number}: {error}") from error
    return values


def _free_ports(wanted: list[tuple[str, int]]) -> dict[str, str]:
    """The same ports where they are free, others where not; all different."""
    taken: set[int] = set()
    ports = {}
    for name, port in wanted:
        chosen = port if port not in taken and _is_free(port) else _any_free(taken)
        taken.add(chosen)
        ports[name] = str(chosen)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _any_free(taken: set[int]) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port
