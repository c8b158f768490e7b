"""The demo's processes, held by supervisord. Nothing that was started here outlives `stop`."""

import http.client
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
from profiles import ROOT
from supervisor.xmlrpc import SupervisorTransport  # type: ignore[import-untyped]

CONF = ROOT / "deploy" / "local" / "supervisord.conf"
_UP = ("STARTING", "RUNNING")
_SHUTDOWN_S = 150.0  # longer than any stopwaitsecs of the file
_LEFT_BEHIND_S = 5.0
_NO_ANSWER = (OSError, http.client.HTTPException, xmlrpc.client.Error)


class ProcessFailed(Exception):
    """A process ended, or did not get ready in time. `program` says which one's log to read."""

    def __init__(self, message: str, program: str) -> None:
        super().__init__(message)
        self.program = program


class Processes:
    """A supervisord of our own, in a session of its own, with its files in the directory `run`.

    `run` is relative to the repository's root, as everywhere in a profile; that also keeps the socket's
    path short enough for the kernel.
    """

    def __init__(self, run: Path, environment: Mapping[str, str]) -> None:
        self._run = run
        self._environment = dict(environment)
        self._daemon: subprocess.Popen[bytes] | None = None
        self._expected: set[str] = set()
        self._descendants: set[psutil.Process] = set()

    def answers(self) -> bool:
        """Whether a supervisord listens on this run's socket."""
        try:
            self._call("getState")
        except _NO_ANSWER:
            return False
        return True

    def start(self) -> None:
        """Starts supervisord; no program runs yet."""
        command = [sys.executable, "-m", "supervisor.supervisord", "-c", str(CONF)]
        with (self._run / "logs" / "supervisord.out").open("wb") as out:
            self._daemon = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdout=out, stderr=out, start_new_session=True
            )
        deadline = time.monotonic() + 20
        while not self.answers():
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                raise ProcessFailed("supervisord did not start", "supervisord.out")
            time.sleep(0.1)

    def up(self, *programs: str) -> None:
        """Starts programs (`worker` stands for all workers) and watches them from now on."""
        for program in programs:
            if program == "worker":
                self._call("startProcessGroup", program, False)
            else:
                self._call("startProcess", program, False)
            self._expected.add(program)

    def down(self, program: str) -> None:
        """Stops a program and waits for its end."""
        self._expected.discard(program)
        self._remember()
        with suppress(xmlrpc.client.Fault):  # it had ended
            self._call("stopProcess", program, True)

    def ended(self, program: str) -> bool:
        """True when a program that may end has ended well; watched no longer then.

        Raises:
            ProcessFailed: it ended badly.
        """
        info = self._call("getProcessInfo", program)
        if info["statename"] == "EXITED" and info["exitstatus"] == 0:
            self._expected.discard(program)
            return True
        self._check(info)
        return False

    def check(self) -> None:
        """Raises ProcessFailed when a program that should run does not."""
        if self._daemon is not None and self._daemon.poll() is not None:
            raise ProcessFailed("supervisord has gone", "supervisord")
        for info in self._call("getAllProcessInfo"):
            if info["group"] in self._expected:
                self._check(info)

    def wait_for(self, program: str, url: str, seconds: float, tick: Callable[[], None]) -> None:
        """Waits until `url` answers 200; `tick` is called about three times a second.

        Raises:
            ProcessFailed: a process ended meanwhile, or the time is over.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            with suppress(httpx.HTTPError):
                if httpx.get(url, timeout=2, trust_env=False).status_code == 200:
                    return
            tick()
            time.sleep(0.3)
        raise ProcessFailed(f"{program} was not ready after {seconds:.0f} s ({url})", program)

    def log(self, program: str) -> Path:
        """The log file of a program."""
        name = program if "." in program else f"{program}.log"
        return self._run / "logs" / name

    def stop(self) -> list[str]:
        """Stops everything, waits, and ends what was left behind; returns what that was.

        Also what another `Processes` started: killed too early, an engine leaves its shared memory.
        """
        daemon = self._remember()
        with suppress(*_NO_ANSWER):
            self._call("shutdown")
        psutil.wait_procs(daemon, timeout=_SHUTDOWN_S)
        _, alive = psutil.wait_procs(self._descendants, timeout=_LEFT_BEHIND_S)
        left = [_describe(process) for process in alive]
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5)
        self._daemon = None
        return left

    def _call(self, method: str, *arguments: object) -> Any:
        """Calls supervisord's XML-RPC, by a new connection: its transport can't mend one."""
        transport = SupervisorTransport(serverurl=f"unix://{self._run}/supervisor.sock")
        with xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport) as proxy:
            return getattr(proxy.supervisor, method)(*arguments)

    def _check(self, info: dict[str, Any]) -> None:
        if info["statename"] not in _UP:
            ended = info["statename"] == "EXITED"
            status = f"it ended with exit status {info['exitstatus']}"
            what = info["spawnerr"] or (status if ended else info["description"])
            raise ProcessFailed(f"{info['name']} is not running: {what}", info["name"])

    def _remember(self) -> list[psutil.Process]:
        """Notes all descendants of supervisord: a worker's job has a process group of its own.

        Returns supervisord itself, or nothing where it doesn't answer.
        """
        with suppress(psutil.Error, *_NO_ANSWER):
            daemon = psutil.Process(int(self._call("getPID")))
            self._descendants.update([daemon, *daemon.children(recursive=True)])
            return [daemon]
        return []


def _describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[:80]}"
    return str(process.pid)
