"""`make demo`: the main job, end to end, on the real engine.

A live vLLM server answers chat requests all the while. Its hidden states are extracted through a Redis
queue, land as shards and train a draft, which vLLM then serves. `story.py` tells it step by step.

Exit status: 0 all well; 1 a step failed (its name and the end of the right log are printed) or something
happened that must not (a production request failed, a shard did not verify); 2 wrong usage; 130 Ctrl-C.
"""

import argparse
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import FrameType

import httpx
from commands import print_commands
from model import make as make_model
from processes import Processes, ProcessFailed
from profiles import ROOT, Profile, ProfileError, load
from rich.console import Console
from screen import Screen
from story import Demo, StepFailed, of_profile

from taphouse.errors import TaphouseError
from taphouse_tap.__main__ import launch_args

_ERROR = re.compile(r"\b\w+(Error|Exception|Refused): .+")


def main() -> int:
    """Command line: `demo.py [--profile NAME] [--keep | --stop]`."""
    parser = argparse.ArgumentParser(description="The main job, end to end")
    parser.add_argument("--profile", default="demo", help="a file of deploy/profiles: demo, smoke, kimi-k2.5")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--keep", action="store_true", help="leave everything running at the end")
    what.add_argument("--stop", action="store_true", help="stop what --keep left running")
    options = parser.parse_args()
    os.chdir(ROOT)  # paths of a profile are relative to it
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        profile = _load(options.profile, move_ports=False)
        if profile.settings.mode == "print":
            print_commands(profile, console)
            return 0
        running = Processes(profile.settings.run, profile.environment(os.environ))
        if options.stop:
            return _stop(running, profile, console)
        if running.answers():
            stop = f"make demo STOP=1{of_profile(options.profile)}"
            console.print(f"[red]This profile runs already.[/] `{stop}` stops it.")
            return 2
        profile = _load(options.profile, move_ports=True)
    except ProfileError as error:
        console.print(f"[red]{error}[/]")
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    return _run(profile, Screen(console), keep=options.keep)


def _load(name: str, *, move_ports: bool) -> Profile:
    """The profile, with what follows from it and from this environment filled in."""
    settings = load(name, os.environ, {}, move_ports=False).settings
    layers = [int(layer) for layer in settings.layers.split(",")]
    flags = launch_args(layers, tensor_parallel_size=settings.tensor_parallel_size)
    derived = {"TAPHOUSE_DEMO_TAP_FLAGS": shlex.join(flags)}
    if settings.mode == "run":
        derived["TAPHOUSE_DEMO_BIN"] = os.path.relpath(Path(sys.prefix) / "bin")
        derived["TAPHOUSE_TRAINER_DTYPE"] = os.environ.get("TAPHOUSE_TRAINER_DTYPE", _training_dtype())
    return load(name, os.environ, derived, move_ports=move_ports)


def _training_dtype() -> str:
    """bfloat16 where the processor computes in it: training is twice as fast there, and slower elsewhere."""
    with suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text().split()
        if "avx512_bf16" in flags or "amx_bf16" in flags:
            return "bfloat16"
    return "float32"


def _run(profile: Profile, screen: Screen, *, keep: bool) -> int:
    processes = Processes(profile.settings.run, profile.environment(os.environ))
    demo: Demo | None = None
    status = 1
    began = time.monotonic()
    try:
        with screen.step("Preparing: model, directories, keys"):
            _prepare(profile)
        demo = Demo(profile, processes, screen, keep=keep)
        found = demo.run()
        found.seconds = round(time.monotonic() - began, 1)
        found.save(profile.settings.run / "report.json")
        found.show(screen.console)
        for problem in found.problems:
            screen.say(f"[red]{problem}[/]")
        screen.say(f"{found.seconds / 60:.1f} minutes; the same in {profile.settings.run / 'report.json'}")
        status = 1 if found.problems else 0
    except (StepFailed, ProcessFailed) as error:
        _failed(screen, str(error), processes.log(error.program))
    except (TaphouseError, httpx.HTTPError) as error:
        _failed(screen, str(error), processes.log("api" if isinstance(error, TaphouseError) else "engine"))
    except KeyboardInterrupt:
        screen.say("[yellow]interrupted[/]")
        status = 130
    finally:
        _end(demo, processes, profile, screen, keep=keep and status == 0)
    return status


def _prepare(profile: Profile) -> None:
    """A fresh run directory with new keys; the model, if it is not there yet."""
    run = profile.settings.run
    shutil.rmtree(run, ignore_errors=True)
    for name in ("logs", "redis", "store"):
        (run / name).mkdir(parents=True)
    for name in ("TAPHOUSE_TAP_API_KEY_FILE", "TAPHOUSE_EXTRACTOR_TOKEN_FILE"):
        file = Path(profile.values[name])
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(24))
    make_model(Path(profile.settings.model))


def _end(demo: Demo | None, processes: Processes, profile: Profile, screen: Screen, *, keep: bool) -> None:
    """Stops everything, or says where it is; a second Ctrl-C doesn't get in the way."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if demo is not None:
        demo.stop_traffic()
    if keep and demo is not None:
        screen.say("left running:")
        for line in demo.urls():
            screen.say(f"  {line}")
        return
    left = processes.stop()
    for process in left:
        screen.say(f"[yellow]had to be killed:[/] {process}")
    shutil.rmtree(profile.values["TAPHOUSE_TAP_SLICE_DIR"], ignore_errors=True)
    screen.say("everything that was started has stopped")


def _stop(running: Processes, profile: Profile, console: Console) -> int:
    """`--stop`: ends what `--keep` left."""
    if not running.answers():
        console.print(
            f"nothing of profile {profile.path.stem} runs; another profile is stopped with PROFILE=its name"
        )
        return 0
    running.stop()
    shutil.rmtree(profile.values["TAPHOUSE_TAP_SLICE_DIR"], ignore_errors=True)
    console.print("stopped")
    return 0


def _failed(screen: Screen, message: str, log: Path) -> None:
    screen.say(f"[red bold]failed:[/] {screen.current}")
    screen.console.print(message, style="red", markup=False)
    with suppress(OSError), log.open(errors="replace") as lines:
        last: deque[str] = deque(maxlen=25)
        errors: dict[str, None] = {}
        for line in lines:
            last.append(line)
            if match := _ERROR.search(line):
                errors[match[0].strip()] = None
        for error in list(errors)[:3]:
            screen.console.print(f"in {log}: {error}", markup=False)
        screen.console.print(f"--- the end of {log}", markup=False)
        screen.console.out("".join(last), highlight=False)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
