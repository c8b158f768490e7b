"""vLLM servers as forks of one process that has imported vLLM already.

Two thirds of a server's start on a CPU are imports, those of its three processes one after the other: vLLM
0.32.0 starts each of them anew there, whatever it is told. Here each is a fork.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

WARM = [
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
]
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(WARM)


class Server(Protocol):
    """What a test does with a server's process: `subprocess.Popen` has it too."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Forked:
    """A server that runs, in a session of its own. The kernel ends it when the test run is killed."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], work: Path, log: Path
    ) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported
        given = (list(arguments), dict(environment), str(work), str(log))
        self._process = _FORKS.Process(target=_serve, args=given)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("vllm", timeout or 0.0)
        return self._process.exitcode


def end_with_parent() -> None:
    """Have the kernel end this process when its parent is killed: see PR_SET_PDEATHSIG in prctl(2)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _serve(arguments: list[str], environment: dict[str, str], work: str, log: str) -> None:
    """Become the server."""
    end_with_parent()
    os.setsid()
    os.chdir(work)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    for name in [name for name in os.environ if name.startswith("TAPHOUSE_")]:
        del os.environ[name]
    os.environ.update(environment)
    paths = environment["PYTHONPATH"].split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    sys.argv = ["vllm", *arguments]

    import torch
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.utils import system_utils
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    for module in (system_utils, coordinator, utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    entry.main()
